"""Checks of fields and arguments, in one wording: a wrong value ends in a line that
names it and the rule.
"""

import math
import reprlib
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import lru_cache
from numbers import Real
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

_TOO_LARGE = 2**62  # sums and differences of two smaller ones fit into int64
# types under the words that people use, and for some how to get a value of the type
_NOUNS = {str: "text", bool: "True or False"}
_WAYS_OUT = {
    "Timeline": "mm.read_trace reads one",
    "RunSpec": "such as mm.RunSpec(model='gpt-tiny', strategy='dp2')",
    "Space": "such as mm.planner.Space.quick()",
    "Parameters": "mm.machine(directory).parameters holds some",
}


def _is_real(value):
    # Python takes bool for a number, but no count or size is True
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value, least: int = 0) -> bool:
    """Whether a value is a whole number of at least `least` that 64 bits hold; 8.0 is
    one, True is none.
    """
    if not _is_real(value):
        return False
    return least <= value < _TOO_LARGE and value % 1 == 0


def is_number(value, least: float = 0.0) -> bool:
    """Whether a value is a finite number of at least `least`."""
    return _is_real(value) and least <= value < math.inf


def require_int(what: str, value, least: int = 0) -> int:
    """The value as an int. Raises ValueError unless it is a whole number of at least
    `least`.

    >>> require_int("nodes", 2.0)
    2
    """
    if not is_whole(value, least):
        rule = "above zero" if least == 1 else f"of at least {least}"
        if is_number(value, _TOO_LARGE):
            rule = "below 2^62"
        raise ValueError(f"{what}={short_repr(value)} must be a whole number {rule}")
    return int(value)


def require_number(
    what: str, value, *, positive: bool = False, unknown: bool = False
) -> float:
    """The value. Raises ValueError unless it is finite and not negative; positive:
    above 0; unknown: or NaN.
    """
    if not _is_real(value):
        raise ValueError(f"{what}={short_repr(value)} must be a number")
    if unknown and math.isnan(value):
        return value
    if not is_number(value) or (positive and value == 0):
        rule = "be positive and finite" if positive else "not be negative or infinite"
        raise ValueError(f"{what}={short_repr(value)} must {rule}")
    return value


def require_type(what: str, value, kind: type, default: Callable | None = None):
    """The value, or default() for None. Raises ValueError for a value of another kind."""
    if value is None and default is not None:
        return default()
    if isinstance(value, kind):
        return value
    kinds = get_args(kind) or (kind,)  # the members of a union such as str | Path
    nouns = [_NOUNS.get(each, f"a {each.__name__}") for each in kinds]
    ways = [f"; {way}" for name, way in _WAYS_OUT.items() if name in nouns[0]]
    rule = f"must be {' or '.join(nouns)}{''.join(ways)}"
    raise ValueError(f"{what}={short_repr(value)} {rule}")


def check_fields(item, *positive: str) -> None:
    """Raises ValueError, in the field's words, for a field that does not hold what its
    annotation says.

    Numbers are finite and not negative, those of `positive` above 0, and NaN only where
    that is the default.
    """
    noun = vars(item).get("name")
    owner = f"{noun}: " if isinstance(noun, str) else ""
    for name, (hint, default) in _hints(type(item)).items():
        value = getattr(item, name)
        what = f"{owner}{name}"
        kinds = get_args(hint) or (hint,)
        if value is None and NoneType in kinds:
            continue
        if int in kinds:
            # 8.0 from a table becomes 8; the dataclass is frozen, hence object's setter
            number = require_int(what, value, least=int(name in positive))
            object.__setattr__(item, name, number)
        elif float in kinds:
            may_be_nan = default != default
            require_number(what, value, positive=name in positive, unknown=may_be_nan)
        elif hint is bool and is_whole(value) and value <= 1:
            object.__setattr__(item, name, bool(value))
        else:
            require_type(what, value, hint)


@lru_cache(maxsize=32)  # types are resolved from text, which takes longer than a check
def _hints(kind):
    """Type and default of each field; of a generic type such as tuple[int, ...] its
    origin, which is all that is checked.
    """
    hints = {}
    for name, hint in get_type_hints(kind).items():
        is_generic = get_origin(hint) not in (None, UnionType)
        hints[name] = get_origin(hint) if is_generic else hint
    return {field.name: (hints[field.name], field.default) for field in fields(kind)}


def short_repr(value) -> str:
    """A value in the line of an error, shortened."""
    return " ".join(_SHORT.repr(value).split())


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def same_fields(item, other) -> bool:
    """Equality of dataclasses whose fields may be tables, and may be unknown (NaN)."""
    if type(item) is not type(other):
        return False
    for name, value in vars(item).items():
        theirs = getattr(other, name)
        if hasattr(value, "equals"):  # a table
            if not value.equals(theirs):
                return False
        # unknown ones (NaN) differ from themselves
        elif value != theirs and (value == value or theirs == theirs):
            return False
    return True


def dataclass_repr(item) -> str:
    """A dataclass in a few lines: the fields that its defaults do not give, and of its
    parts the names.
    """
    texts = [
        f"{field.name}={_field_text(getattr(item, field.name))}"
        for field in fields(item)
        if _differs_from_default(item, field)
    ]
    line = f"{type(item).__name__}({', '.join(texts)})"
    wrapped = textwrap.fill(
        line,
        width=110,
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapped.replace("\xa0", " ")


def _field_text(value):
    # blanks inside a value do not break the line: textwrap leaves \xa0 alone
    if isinstance(value, Mapping):
        items = [f"{key!r}:\xa0{_field_text(each)}" for key, each in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, float):
        return f"{value:g}"
    value = value.name if is_dataclass(value) else value
    return repr(value).replace(" ", "\xa0")


def _differs_from_default(item, field):
    """Whether a field holds another value than it gets when it is left out: its default,
    or what is worked out from the others.
    """
    value = getattr(item, field.name)
    if field.default is MISSING:
        return True
    if value != value or value == field.default:
        return False
    try:
        left_out = replace(item, **{field.name: field.default})
    except ValueError:  # the other fields need it
        return True
    return getattr(left_out, field.name) != value


def parse_fields(kind: type, values: dict[str, str], what: str) -> dict:
    """Fields of a spec from their texts, each of the type of its default; those without
    one are whole numbers.
    """
    defaults = {f.name: 0 if f.default is MISSING else f.default for f in fields(kind)}
    if unknown := sorted(set(values) - set(defaults)):
        raise ValueError(f"{what}: {unknown[0]!r} is not a field of {kind.__name__}")
    return {
        name: _parse(text, defaults[name], f"{what}: {name}")
        for name, text in values.items()
    }


def _parse(text, default, what):
    """Value of a text, of the type of a default; of a tuple the words."""
    if isinstance(default, tuple):
        item_type = type(default[0]) if default else str
        return tuple(map(item_type, text.split()))
    try:
        # bool("0") is True: tables write 0 and 1
        return bool(int(text)) if isinstance(default, bool) else type(default)(text)
    except ValueError:
        noun = "whole number" if isinstance(default, int) else "number"
        raise ValueError(f"{what}={short_repr(text)} must be a {noun}") from None
