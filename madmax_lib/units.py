"""Which unit is a number in? SI base units everywhere inside the library; this module converts and prints.

Only `Timeline` stores integers (nanoseconds), because profiler traces are exact there.
"""

from __future__ import annotations

__all__ = ["NS_PER_S", "format_bytes", "format_s"]

NS_PER_S = 1_000_000_000


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    for factor, unit in steps:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    factor, unit = steps[-1]
    return f"{value / factor:.3g} {unit}"


def format_s(duration_s: float) -> str:
    """Seconds as text with the prefix an engineer would choose.

    >>> format_s(0.0131), format_s(2.5e-7), format_s(0.0)
    ('13.1 ms', '250 ns', '0 ns')
    """
    return _scaled(duration_s, [(1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_bytes(size_bytes: float) -> str:
    """Bytes as text with decimal prefixes, as bandwidths use them.

    >>> format_bytes(2_622_640_000)
    '2.62 GB'
    """
    return _scaled(size_bytes, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])
