"""The framework of a configuration, and the fields of a plan that it states."""

from typing import NamedTuple

from madmax_lib import catalog
from madmax_lib.base.fields import require_int
from madmax_lib.plan_flags.deepspeed import accelerate, deepspeed
from madmax_lib.plan_flags.keys import FRAMEWORKS, Keys, framework_named
from madmax_lib.plan_flags.megatron import bridge, megatron
from madmax_lib.plan_flags.text import source_of
from madmax_lib.plan_flags.torchtitan import torchtitan

_READERS = dict(
    zip(FRAMEWORKS, (torchtitan, megatron, bridge, deepspeed, accelerate), strict=True)
)
# first keys, or their first parts, that tell a framework
_SIGNS = catalog.table("framework_signs").groupby("framework", sort=False)["key"]
_RUN = ("global_batch", "sequence", "dtype")  # fields that are not the plan's


class StatedFields(NamedTuple):
    """Fields by name that a configuration states."""

    framework: str
    plan: dict  # fields of a `Plan`
    run: dict  # global_batch, sequence and dtype, None where it does not say
    keys: Keys  # with the harmless ones and the notes


def fields_of(
    source, framework: str | None, world_size: int | None, layers: int | None
) -> StatedFields:
    """The fields of a configuration; arguments as of `read`."""
    if world_size is not None:
        world_size = require_int("world_size", world_size, 1)
    if layers is not None:
        layers = require_int("layers", layers, 1)
    values = source_of(source)
    name = framework_named(framework) if framework else _framework_of(values)
    fields, keys = _READERS[name](values, world_size, layers)
    keys.check_unused()
    run = {field: fields.pop(field, None) for field in _RUN}
    return StatedFields(name, fields, run, keys)


def _framework_of(source):
    first = {key.split(".")[0] for key in source.values}
    # a dictionary of arguments may have underscores, or the dashes of a command line
    first |= {key.lstrip("-").replace("_", "-") for key in first}
    # the first framework of which a key is there
    for name, signs in _SIGNS:
        if signs.isin(first).any():
            return name
    # torchtitan has dots in its flags, which _SIGNS knows
    if source.form == "flags" and first:
        return "megatron-lm"
    keys = ", ".join(sorted(source.values)[:5]) or "no keys"
    raise ValueError(
        f"the configuration is of no known framework ({', '.join(FRAMEWORKS)}): it "
        f"has {keys}"
    )
