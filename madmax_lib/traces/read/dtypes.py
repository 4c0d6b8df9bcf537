"""Which type does a trace mean? Collectives say bfloat16, operators c10::BFloat16 and long int: here they are one."""

from __future__ import annotations

import math

__all__ = ["dtype_bytes", "recorded_dtype"]

_BYTES = {"float": 4, "int": 4, "double": 8, "long": 8, "half": 2, "bfloat16": 2, "short": 2, "byte": 1, "char": 1,
          "bool": 1, "complexfloat": 8, "complexdouble": 16}  # fmt: skip
_AS_COLLECTIVES = {"unsigned char": "byte", "signed char": "char", "int64_t": "long", "complex<float>": "complexfloat",
                   "complex<double>": "complexdouble"}  # fmt: skip


def dtype_bytes(dtype: str) -> float:
    """Bytes of an element, by the name that collectives record; NaN for one we do not know."""
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
