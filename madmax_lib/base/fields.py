"""What may a field or an argument hold? One check in one wording: a wrong value ends in
a line that names it.
"""

import math
import reprlib
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

__all__ = [
    "check_fields",
    "dataclass_repr",
    "is_number",
    "is_whole",
    "parse_fields",
    "require_int",
    "require_number",
    "require_type",
    "short_repr",
]

_TOO_LARGE = 2**62
_NOUNS = {str: "text", bool: "True or False"}
_WAYS_OUT = {
    "Timeline": "mm.read_trace reads one",
    "RunSpec": "such as mm.RunSpec(model='gpt-tiny', strategy='dp2')",
}
_WAYS_OUT |= {
    "Space": "such as mm.planner.Space.quick()",
    "Parameters": "mm.machine(directory).parameters holds some",
}


def is_whole(value, least: int = 0) -> bool:
    """Whether a value is a whole number of at least `least` that 64 bits hold; 8.0 is
    one, True is none.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    return (
        real
        and (isinstance(value, Integral) or float(value).is_integer())
        and least <= value < _TOO_LARGE
    )


def is_number(value, least: float = 0.0) -> bool:
    """Whether a value is a finite number of at least `least`."""
    return (
        isinstance(value, Real)
        and not isinstance(value, bool)
        and least <= value < math.inf
    )


def require_int(what: str, value, least: int = 0) -> int:
    """The value as an int. Raises ValueError unless it is a whole number of at least
    `least`.

    >>> require_int("nodes", 2.0)
    2
    """
    if not is_whole(value, least):
        rule = "above zero" if least == 1 else f"of at least {least}"
        raise ValueError(f"{what}={short_repr(value)} must be a whole number {rule}")
    return int(value)


def require_number(
    what: str, value, *, positive: bool = False, unknown: bool = False
) -> float:
    """The value. Raises ValueError unless it is finite and not negative; positive:
    above 0; unknown: or NaN.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{what}={short_repr(value)} must be a number")
    if not (
        (unknown and value != value) or (is_number(value) and (value or not positive))
    ):
        rule = "be positive and finite" if positive else "not be negative or infinite"
        raise ValueError(f"{what}={short_repr(value)} must {rule}")
    return value


def require_type(what: str, value, kind: type, default: Callable | None = None):
    """The value, or default() for None. Raises ValueError for a value of another kind."""
    if value is None and default is not None:
        return default()
    if not isinstance(value, kind):
        nouns = [
            _NOUNS.get(one, f"a {one.__name__}") for one in get_args(kind) or (kind,)
        ]
        ways = "".join(
            f"; {way}" for name, way in _WAYS_OUT.items() if name in nouns[0]
        )
        raise ValueError(
            f"{what}={short_repr(value)} must be {' or '.join(nouns)}{ways}"
        )
    return value


def check_fields(item, *positive: str) -> None:
    """Raises ValueError, in the field's words, for a field that does not hold what its
    annotation says.

    Numbers are finite and not negative, those of `positive` above 0, and NaN only where
    that is the default.
    """
    owner = f"{item.name}: " if isinstance(item.name, str) else ""
    for name, (hint, default) in _hints(type(item)).items():
        value = getattr(item, name)
        what = f"{owner}{name}"
        kinds = get_args(hint) or (hint,)
        if value is None and NoneType in kinds:
            continue
        if int in kinds:
            object.__setattr__(
                item, name, require_int(what, value, int(name in positive))
            )
        elif float in kinds:
            require_number(
                what, value, positive=name in positive, unknown=default != default
            )
        elif hint is bool and is_whole(value) and value <= 1:
            object.__setattr__(item, name, bool(value))
        else:
            require_type(what, value, hint)


@lru_cache(maxsize=32)
def _hints(kind: type) -> dict[str, tuple]:
    """Type and default of each field; of a generic type its origin."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    plain = {
        name: hint if get_origin(hint) in (None, UnionType) else get_origin(hint)
        for name, hint in hints.items()
    }
    return {name: (plain[name], default) for name, default in defaults.items()}


def short_repr(value) -> str:
    """A value in the line of an error, shortened."""
    return " ".join(_SHORT.repr(value).split())


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def dataclass_repr(item) -> str:
    """A dataclass in a few lines: the fields that its defaults do not give, and of its
    parts the names.
    """

    def text(value) -> str:  # with blanks at which no line ends
        if isinstance(value, Mapping):
            return (
                "{"
                + ", ".join(
                    f"{key!r}:\xa0{text(inner)}" for key, inner in value.items()
                )
                + "}"
            )
        value = value.name if is_dataclass(value) else value
        return (
            f"{value:g}"
            if isinstance(value, float)
            else repr(value).replace(" ", "\xa0")
        )

    given = [
        f"{f.name}={text(getattr(item, f.name))}"
        for f in fields(item)
        if _is_given(item, f)
    ]
    line = f"{type(item).__name__}({', '.join(given)})"
    return textwrap.fill(
        line,
        110,
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    ).replace("\xa0", " ")


def _is_given(item, of) -> bool:
    """Whether another value than the default stands in a field, which may have been
    worked out from the others.
    """
    value = getattr(item, of.name)
    if of.default is MISSING or value != value or value == of.default:
        return of.default is MISSING
    try:
        return getattr(replace(item, **{of.name: of.default}), of.name) != value
    except ValueError:  # the others need it
        return True


def parse_fields(kind: type, values: dict[str, str], what: str) -> dict:
    """Fields of a spec from their texts, each of the type of its default; those without
    one are whole numbers.
    """
    defaults = {f.name: 0 if f.default is MISSING else f.default for f in fields(kind)}
    if unknown := sorted(set(values) - set(defaults)):
        raise ValueError(f"{what}: {unknown[0]!r} is not a field of {kind.__name__}")
    return {
        name: _value(text, defaults[name], f"{what}: {name}")
        for name, text in values.items()
    }


def _value(text: str, like, what: str):
    if isinstance(like, tuple):
        return tuple(map(type(like[0]) if like else str, text.split()))
    try:
        return bool(int(text)) if isinstance(like, bool) else type(like)(text)
    except ValueError:
        raise ValueError(
            f"{what}={short_repr(text)} must be a {'whole ' * isinstance(like, int)}number"
        ) from None
