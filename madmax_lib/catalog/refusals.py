"""The line in which a spec of the catalog refuses one of its fields."""

from typing import NoReturn

from madmax_lib.base.fields import short_repr


def refuse(spec, field: str, rule: str) -> NoReturn:
    """Raise ValueError with the spec's name, the field, its value and the rule.

    >>> from madmax_lib.catalog.hardware import Link
    >>> refuse(Link("nvlink", 3e11), "latency_s", "is too short")
    Traceback (most recent call last):
    ValueError: nvlink: latency_s=0.0 is too short
    """
    raise ValueError(f"{spec.name}: {field}={short_repr(getattr(spec, field))} {rule}")
