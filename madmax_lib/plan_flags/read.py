"""The plan that a configuration states, in a framework's words, and the keys that say
nothing about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from madmax_lib import catalog
from madmax_lib.base import require_int
from madmax_lib.plan import Plan
from madmax_lib.plan_flags.deepspeed import accelerate, deepspeed
from madmax_lib.plan_flags.keys import FRAMEWORKS, framework_named
from madmax_lib.plan_flags.megatron import bridge, megatron
from madmax_lib.plan_flags.text import source_of
from madmax_lib.plan_flags.torchtitan import torchtitan

_READERS = dict(
    zip(FRAMEWORKS, (torchtitan, megatron, bridge, deepspeed, accelerate), strict=True)
)
# first keys, or their first parts, that tell a framework
_SIGNS = catalog.table("framework_signs").groupby("framework", sort=False)["key"]


@dataclass(frozen=True)
class Configuration:
    """The contents of a framework's configuration.

    >>> stated = read("--micro-batch-size 2 --bf16 --lr 1e-4", world_size=8)
    >>> str(stated.plan), stated.dtype, stated.harmless
    ('dp8.mb2.one-bucket.reduce-fp32', 'bf16', ('lr',))
    """

    framework: str  # whose it is
    plan: Plan  # how the model is split
    global_batch: int | None  # samples per step; None: it does not say
    sequence: int | None  # tokens per sample; None: it does not say
    dtype: str | None  # of the products; None: it does not say
    harmless: tuple[str, ...]  # keys, as they stand there, that say nothing of the plan
    notes: tuple[str, ...]  # what a plan cannot say of it, and what was not stated


def read(
    source: str | Path | Mapping | Sequence[str],
    framework: str | None = None,
    *,
    world_size: int | None = None,
    layers: int | None = None,
) -> Configuration:
    """The plan and run of a configuration: a file, its text, a command line, a log with
    the line of it, or a dictionary.

    framework: a name of `keys.FRAMEWORKS`; found from the keys if None. world_size:
    devices, needed where the configuration does not tell; it goes before what a script
    works out. layers: of the model, needed where a configuration counts the layers of a
    stage. Raises ValueError that names a key which changes what a plan cannot say,
    OSError for a file that cannot be read.

    >>> read("--tensor-model-parallel-size 2 --bf16 --lr 1e-4", world_size=8).plan.tp
    2
    """
    if world_size is not None:
        world_size = require_int("world_size", world_size, 1)
    if layers is not None:
        layers = require_int("layers", layers, 1)
    values = source_of(source)
    name = framework_named(framework) if framework else _framework_of(values)
    fields, keys = _READERS[name](values, world_size, layers)
    keys.check_unused()
    # fields that are not the plan's
    run = [fields.pop(field, None) for field in ("global_batch", "sequence", "dtype")]
    plan = Plan(**fields)
    return Configuration(name, plan, *run, tuple(keys.harmless), tuple(keys.notes))


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
