"""Whose configuration is it, and which fields of a plan does it state?"""

from madmax_lib.base.fields import require_int
from madmax_lib.plan_flags.deepspeed import accelerate, deepspeed
from madmax_lib.plan_flags.keys import FRAMEWORKS, Keys, framework_named
from madmax_lib.plan_flags.megatron import bridge, megatron
from madmax_lib.plan_flags.text import Source, source_of
from madmax_lib.plan_flags.torchtitan import torchtitan

__all__ = ["fields_of", "plan_fields"]

_READERS = dict(
    zip(FRAMEWORKS, (torchtitan, megatron, bridge, deepspeed, accelerate), strict=True)
)
_SIGNS = {  # first keys, or their first parts, that tell a framework
    "megatron-lm": {
        "MODEL_ARGS",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "micro-batch-size",
    },
    "accelerate": {"distributed_type", "parallelism_config", "fsdp_config"},
    "deepspeed": {
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    },
    "torchtitan": {
        "parallelism",
        "model_spec",
        "training",
        "job",
        "activation_checkpoint",
    },
    "megatron-bridge": {"_target_", "model", "ddp", "train", "dist"},
}


def fields_of(
    source, framework: str | None, world_size: int | None, layers: int | None
) -> tuple[str, dict, Keys]:
    """The framework, the fields of the plan and of the run, and the keys of a
    configuration; as in `read`.
    """
    world_size = (
        None if world_size is None else require_int("world_size", world_size, 1)
    )
    layers = None if layers is None else require_int("layers", layers, 1)
    values = source_of(source)
    name = (
        framework_named(framework) if framework is not None else _framework_of(values)
    )
    fields, keys = _READERS[name](values, world_size, layers)
    keys.check_unused()
    return name, fields, keys


def plan_fields(
    source, framework: str, world_size: int | None = None, layers: int | None = None
) -> dict:
    """The fields of the plan alone."""
    _, fields, _ = fields_of(source, framework, world_size, layers)
    return {
        name: value
        for name, value in fields.items()
        if name not in ("global_batch", "sequence", "dtype")
    }


def _framework_of(source: Source) -> str:
    first = {key.split(".")[0] for key in source.values}
    first |= {key.lstrip("-").replace("_", "-") for key in first}
    for name, signs in _SIGNS.items():
        if first & signs:
            return name
    if source.form == "flags" and first:
        return "megatron-lm"
    keys = ", ".join(sorted(source.values)[:5]) or "no keys"
    raise ValueError(
        f"the configuration is of no known framework ({', '.join(FRAMEWORKS)}): it "
        f"has {keys}"
    )
