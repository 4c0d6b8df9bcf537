"""Values of a trace: times in exact nanoseconds, numbers that may be text, names of
types.

Collectives say bfloat16, operators c10::BFloat16 and long int: here they are one.
"""

import contextlib
import math
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from functools import cache

import numpy as np

from madmax_lib import catalog
from madmax_lib.traces.read.events import EXACT, FAR_NS

# float64 has 53 bits: below 2**43 us its spacing is at most 2**-10 us, under 1 ns, so
# that three decimals can be recovered
_FLOAT_IS_EXACT_US = 2.0**43
FAR_US = FAR_NS // 1000


class NeedsDecimal(Exception):
    """Times too large for exact nanoseconds in float64."""


def nanoseconds(us: list, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Whole nanoseconds (n,) of decimal microseconds, and where they are numbers at
    all.

    Splitting off the whole microseconds first keeps the product below 2**53, so
    rounding gives back the decimals.
    """
    # types first: one text would make every item of an array as long as it is
    types = set(map(type, us))
    with contextlib.suppress(OverflowError):  # an integer of many digits
        if types <= {int}:
            values = np.fromiter(us, dtype="int64", count=len(us))
            if -FAR_US < values.min(initial=0) <= values.max(initial=0) < FAR_US:
                return values * 1000, np.ones(len(us), dtype=bool)
        elif types <= {int, float} and not exact:
            values = np.fromiter(us, dtype="float64", count=len(us))
            if np.abs(values).max() >= _FLOAT_IS_EXACT_US:
                raise NeedsDecimal
            whole_us = np.floor(values)
            decimals_ns = np.rint((values - whole_us) * 1000).astype("int64")
            ns = whole_us.astype("int64") * 1000 + decimals_ns
            return ns, np.ones(len(us), dtype=bool)
    if not exact and any(
        isinstance(value, float) and abs(value) >= _FLOAT_IS_EXACT_US for value in us
    ):
        raise NeedsDecimal
    # text or many digits: one by one, as decimals
    converted = [_decimal_ns(value) for value in us]
    sound = np.array([ns is not None for ns in converted], dtype=bool)
    return np.array([ns or 0 for ns in converted], dtype="int64"), sound


def _decimal_ns(us):
    """Nanoseconds of a number or its text; None for what is none, or out of bounds."""
    # not isinstance: True is no time
    if type(us) not in (int, float, str, Decimal):
        return None
    with contextlib.suppress(InvalidOperation):  # not a number
        ns = EXACT(us) * 1000
        if abs(ns) < FAR_NS:
            return int(ns.to_integral_value(ROUND_HALF_EVEN))
    return None


def integers(values: list, missing: int = -1) -> np.ndarray:
    """(n,) int64, `missing` where there is none or no integer."""
    numbers = None
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        plain = [missing if value is None else value for value in values]
        numbers = np.array(plain, dtype="int64")
    # lists among the values would make it (n, k)
    if numbers is None or numbers.shape != (len(values),):
        numbers = np.array([integer(value, missing) for value in values], "int64")
    return numbers


def integer(value, missing: int = -1) -> int:
    """A number that may be written as text; `missing` for what is none or does not fit
    into int64.
    """
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return missing
    return number if abs(number) < 2**63 else missing


@cache
def _dtypes():
    """`data/recorded_dtypes.csv` by name: the dtype as collectives record it, and bytes
    of an element, which other names of it have not.
    """
    table = catalog.table("recorded_dtypes", numbers=True)
    return table.set_index("name").to_dict()


def dtype_bytes(dtype: str) -> float:
    """Bytes of an element, by the name that collectives record; NaN for one we do not
    know.
    """
    dtype = dtype.lower()
    return 1 if dtype.startswith("float8") else _dtypes()["bytes"].get(dtype, math.nan)


def recorded_dtype(kind: str) -> str:
    """Type of an operator's input as collectives record it, "" for what is no tensor.

    >>> recorded_dtype("c10::BFloat16"), recorded_dtype("long int"), recorded_dtype("ScalarList")
    ('bfloat16', 'long', '')
    """
    name = kind.lower().removeprefix("c10::").removesuffix(" int")
    name = _dtypes()["dtype"].get(name, name)
    return "" if math.isnan(dtype_bytes(name)) else name


@cache
def recorded_codes(of: str) -> dict[int, str]:
    """Names by the numbers that recordings write for them: `data/recorded_codes.csv`.

    >>> recorded_codes("wait")[3]
    'Stream Sync'
    """
    table = catalog.table("recorded_codes", numbers=True)
    return table[table["of"] == of].set_index("code")["name"].to_dict()


class Codes(dict):
    """Numbers values in order of appearance."""

    def __missing__(self, key):
        code = self[key] = len(self)
        return code

    def of(self, values: list) -> np.ndarray:
        """Codes (n,) int32 of values; what cannot be a key counts as its text."""
        try:
            return np.fromiter(
                map(self.__getitem__, values), dtype="int32", count=len(values)
            )
        except TypeError:  # a name or thread that is a list
            return np.array([self[_key(value)] for value in values], dtype="int32")

    def number(self, value) -> int:
        """Code of a value that may not be there, then -1."""
        return self.get(_key(value), -1)


def _key(value):
    """A value that can be a key, or its text."""
    try:
        hash(value)
    except TypeError:
        return tuple(map(_key, value)) if isinstance(value, tuple) else str(value)
    return value
