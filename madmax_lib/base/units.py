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


# decimal, as data sheets of memory bandwidth and links count
_DECIMAL = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
# what memory holds
_BINARY = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}


def bytes_unit(size_bytes: float, *, binary: bool = False) -> tuple[str, float]:
    """The unit an engineer would choose for a size, and its bytes; binary: of memory.

    >>> bytes_unit(2.5e6), bytes_unit(2.5e6, binary=True)
    (('MB', 1000000.0), ('MiB', 1048576.0))
    """
    units = (_BINARY if binary else _DECIMAL).items()
    return next((unit for unit in units if size_bytes >= unit[1]), ("B", 1.0))


def format_bytes(size_bytes: float, *, binary: bool = False) -> str:
    """A size as text.

    >>> format_bytes(25_557_032), format_bytes(12)
    ('25.6 MB', '12 B')
    """
    unit, factor = bytes_unit(size_bytes, binary=binary)
    return f"{size_bytes / factor:.3g} {unit}"
