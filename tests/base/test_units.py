import pytest

from madmax_lib.base.units import format_s


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 ns"),
        (1e-9, "1 ns"),
        (2.5e-6, "2.5 µs"),
        (0.0131, "13.1 ms"),
        (94.42, "94.4 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_format_s(duration_s, text):
    assert format_s(duration_s) == text
