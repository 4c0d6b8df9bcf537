"""Which unit is a number in? SI base units everywhere inside the library; this module converts and prints.

Only `Timeline` stores integers (nanoseconds), because profiler traces are exact there.
"""

from __future__ import annotations

__all__ = ["NS_PER_S", "format_s"]

NS_PER_S = 1_000_000_000


def format_s(duration_s: float) -> str:
    """Seconds as text with the prefix an engineer would choose.

    >>> format_s(0.0131), format_s(2.5e-7), format_s(0.0)
    ('13.1 ms', '250 ns', '0 ns')
    """
    prefixes = ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    factor, unit = next((p for p in prefixes if abs(duration_s) >= p[0]), prefixes[-1])
    return f"{duration_s / factor:.3g} {unit}"
