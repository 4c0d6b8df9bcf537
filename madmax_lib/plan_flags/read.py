"""Which plan does a configuration state, in which framework's words, and what in it
says nothing about the plan?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from madmax_lib.plan.plan import Plan
from madmax_lib.plan_flags.fields import fields_of

__all__ = ["Configuration", "read"]


@dataclass(frozen=True)
class Configuration:
    """What a configuration of a framework states.

    framework: whose it is. plan: how the model is split.
    global_batch: samples per step, sequence: tokens per sample, dtype: of the products;
    None where it does not say.
    harmless: keys, as they stand there, that say nothing about the plan.
    notes: what a plan cannot say of it, and what was not stated.
    """

    framework: str
    plan: Plan
    global_batch: int | None
    sequence: int | None
    dtype: str | None
    harmless: tuple[str, ...]
    notes: tuple[str, ...]


def read(
    source: str | Path | Mapping | Sequence[str],
    framework: str | None = None,
    *,
    world_size: int | None = None,
    layers: int | None = None,
) -> Configuration:
    """What a configuration states: a file, its text, a command line, a log with the
    line of it, or a dictionary.

    framework: a name of `keys.FRAMEWORKS`; found from the keys if None. world_size:
    devices, needed where the configuration does not tell; it goes before what a script
    works out. layers: of the model, needed where a configuration counts the layers of a
    stage. Raises ValueError that names a key which changes what a plan cannot say,
    OSError for a file that cannot be read.

    >>> read("--tensor-model-parallel-size 2 --bf16 --overlap-grad-reduce --lr 1e-4", world_size=8).plan.tp
    2
    """
    name, fields, keys = fields_of(source, framework, world_size, layers)
    run = {
        what: fields.pop(what, None) for what in ("global_batch", "sequence", "dtype")
    }
    return Configuration(
        name,
        Plan(**fields),
        **run,
        harmless=tuple(keys.harmless),
        notes=tuple(keys.notes),
    )
