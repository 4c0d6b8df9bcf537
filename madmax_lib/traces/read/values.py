"""What do the values of a trace mean? Times in exact nanoseconds, numbers that may be
text, names of types.

Collectives say bfloat16, operators c10::BFloat16 and long int: here they are one.
"""

import contextlib
import math
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

import numpy as np

from madmax_lib.traces.read.events import EXACT, FAR_NS

__all__ = [
    "FAR_US",
    "NeedsDecimal",
    "dtype_bytes",
    "floats",
    "integer",
    "integers",
    "nanoseconds",
    "recorded_dtype",
]

_FLOAT_IS_EXACT_US = (
    2.0**43
)  # below, the spacing of float64 is under 1 ns, so three decimals can be recovered
FAR_US = FAR_NS // 1000
_BYTES = {
    "float": 4,
    "int": 4,
    "double": 8,
    "long": 8,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "complexfloat": 8,
    "complexdouble": 16,
}
_AS_COLLECTIVES = {
    "unsigned char": "byte",
    "signed char": "char",
    "unsigned short": "short",
    "int8": "char",
    "uint8": "byte",
    "int32": "int",
    "uint32": "int",
    "int64": "long",
    "uint64": "long",
    "int64_t": "long",
    "long long": "long",
    "__int64": "long",
    "complex<float>": "complexfloat",
    "complex<double>": "complexdouble",
}


class NeedsDecimal(Exception):
    """Times too large for exact nanoseconds in float64."""


def nanoseconds(us: list, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Whole nanoseconds (n,) of decimal microseconds, and where they are numbers at
    all.

    Splitting off the whole microseconds first keeps the product below 2**53, so
    rounding gives back the decimals.
    """
    types = set(
        map(type, us)
    )  # a text would make every item of an array as long as it is
    with contextlib.suppress(OverflowError):  # an integer of many digits
        if types <= {int}:
            values = np.fromiter(us, dtype=np.int64, count=len(us))
            if -FAR_US < values.min(initial=0) <= values.max(initial=0) < FAR_US:
                return values * 1000, np.ones(len(us), dtype=bool)
        elif types <= {int, float} and not exact:
            values = np.fromiter(us, dtype=np.float64, count=len(us))
            if np.abs(values).max() >= _FLOAT_IS_EXACT_US:
                raise NeedsDecimal
            whole = np.floor(values)
            ns = whole.astype(np.int64) * 1000 + np.rint(
                (values - whole) * 1000
            ).astype(np.int64)
            return ns, np.ones(len(us), dtype=bool)
    if not exact and any(
        isinstance(value, float) and abs(value) >= _FLOAT_IS_EXACT_US for value in us
    ):
        raise NeedsDecimal
    converted = [_decimal_ns(value) for value in us]
    sound = np.array([ns is not None for ns in converted], dtype=bool)
    return np.array([ns or 0 for ns in converted], dtype=np.int64), sound


def _decimal_ns(us) -> int | None:
    if type(us) not in (int, float, str, Decimal):
        return None
    with contextlib.suppress(InvalidOperation):  # not a number
        ns = EXACT(us) * 1000
        if abs(ns) < FAR_NS:
            return int(ns.to_integral_value(ROUND_HALF_EVEN))
    return None


def floats(us: list) -> np.ndarray:
    """(n,) float64 of numbers, some of which may be text."""
    plain = set(map(type, us)) <= {int, float}
    return np.fromiter(
        us if plain else (float(EXACT(v)) for v in us), dtype=np.float64, count=len(us)
    )


def integers(values: list, missing: int = -1) -> np.ndarray:
    """(n,) int64, `missing` where there is none or no integer."""
    try:
        numbers = np.array(
            [missing if v is None else v for v in values], dtype=np.int64
        )
    except (ValueError, TypeError, OverflowError):
        numbers = np.empty(0)
    return (
        numbers
        if numbers.shape == (len(values),)
        else np.array([integer(v, missing) for v in values], np.int64)
    )


def integer(value, missing: int = -1) -> int:
    """A number that may be written as text; `missing` for what is none or does not fit
    into int64.
    """
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return missing
    return number if abs(number) < 2**63 else missing


def dtype_bytes(dtype: str) -> float:
    """Bytes of an element, by the name that collectives record; NaN for one we do not
    know.
    """
    dtype = dtype.lower()
    return 1 if dtype.startswith("float8") else _BYTES.get(dtype, math.nan)


def recorded_dtype(kind: str) -> str:
    """Type of an operator's input as collectives record it, "" for what is no tensor.

    >>> recorded_dtype("c10::BFloat16"), recorded_dtype("long int"), recorded_dtype("ScalarList")
    ('bfloat16', 'long', '')
    """
    name = kind.lower().removeprefix("c10::").removesuffix(" int")
    name = _AS_COLLECTIVES.get(name, name)
    return "" if math.isnan(dtype_bytes(name)) else name
