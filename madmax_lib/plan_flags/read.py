"""The plan that a configuration states, in a framework's words, and the keys that say
nothing about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from madmax_lib.plan import Plan
from madmax_lib.plan_flags.fields import fields_of


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
    stated = fields_of(source, framework, world_size, layers)
    return Configuration(
        stated.framework,
        Plan(**stated.plan),
        **stated.run,
        harmless=tuple(stated.keys.harmless),
        notes=tuple(stated.keys.notes),
    )
