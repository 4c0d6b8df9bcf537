"""Units as text. Numbers are in SI base units everywhere inside the library; this
module chooses the prefix under which people read them.

Only `Timeline` stores integers (nanoseconds), because profiler traces are exact there.
"""

NS_PER_S = 1_000_000_000


def format_s(duration_s: float) -> str:
    """Seconds as text with the prefix an engineer would choose.

    >>> format_s(0.0131), format_s(2.5e-7), format_s(0.0)
    ('13.1 ms', '250 ns', '0 ns')
    """
    prefixes = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
    # the largest unit of which there is a whole one; below a nanosecond, nanoseconds
    fitting = (prefix for prefix in prefixes if abs(duration_s) >= prefix[0])
    factor, unit = next(fitting, prefixes[-1])
    return f"{duration_s / factor:.3g} {unit}"


def bytes_unit(size_bytes: float) -> tuple[str, float]:
    """The decimal unit an engineer would choose for a size, and its bytes.

    >>> bytes_unit(2.5e6)
    ('MB', 1000000.0)
    """
    # decimal, as data sheets of memory bandwidth and links count; not GiB
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((unit for unit in units if size_bytes >= unit[1]), ("B", 1.0))


def format_bytes(size_bytes: float) -> str:
    """A size as text.

    >>> format_bytes(25_557_032), format_bytes(12)
    ('25.6 MB', '12 B')
    """
    unit, factor = bytes_unit(size_bytes)
    return f"{size_bytes / factor:.3g} {unit}"
