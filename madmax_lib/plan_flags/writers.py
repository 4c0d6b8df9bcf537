"""Which words of each framework say a plan? A writer for each, without rules of its
own: its text is read back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from madmax_lib.base.fields import require_int
from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.plan import DEFAULTS, Plan
from madmax_lib.plan_flags.deepspeed import ONE_BUCKET
from madmax_lib.plan_flags.keys import FRAMEWORKS, rows_of
from madmax_lib.plan_flags.sizes import (
    MADE_UP,
    bridge_sizes,
    megatron_sizes,
    named_sizes,
    titan_config,
)

__all__ = ["WRITERS", "StatedRun", "is_moot"]

_MOOT: dict[str, Callable[[Plan], bool]] = {  # where a field changes nothing
    "reduce_fp32": lambda p: p.dp * p.cp == 1,
    "overlap_gather": lambda p: p.dp * p.cp == 1,
    "zero": lambda p: p.dp * p.cp == 1 and not p.offload,
    "shard": lambda p: p.shard == p.dp * p.cp,
    "bucket_bytes": lambda p: p.dp * p.cp == 1 or p.zero == 3,
    "prefetch": lambda p: p.zero < 3 or p.dp * p.cp == 1,
    "context": lambda p: p.cp == 1,
    "etp": lambda p: p.ep == 1 or (p.etp or p.tp) == p.tp,
    "capacity": lambda p: p.ep == 1,
} | dict.fromkeys(
    ("schedule", "embedding_as_layer", "head_as_layer"), lambda p: p.pp == 1
)


@dataclass(frozen=True)
class StatedRun:
    """What a configuration says beside the plan; samples, tokens, devices."""

    global_batch: int | None
    sequence: int | None
    dtype: str
    layers: int | None
    devices_per_node: int
    model: Transformer | None

    def sizes(self) -> dict:
        """Of the model, by the names that a script knows."""
        return named_sizes(self.model) if self.model else {}

    def passes(self, plan: Plan, default: int = 1) -> int:
        """Micro-batches of a step."""
        if self.global_batch is None:
            return default
        each = plan.dp * plan.micro_batch
        batch = require_int("global_batch", self.global_batch, 1)
        if batch % each:
            near = max(round(batch / each), 1) * each
            rule = f"dp x micro_batch = {plan.dp} x {plan.micro_batch}"
            raise ValueError(
                f"global_batch={batch} is not a multiple of {rule}; the nearest is "
                f"{near}"
            )
        return batch // each

    def launch(self, plan: Plan) -> dict[str, int]:
        """torchrun's nodes and processes."""
        inside = (
            self.devices_per_node
            if plan.world_size % self.devices_per_node == 0
            else plan.world_size
        )
        return {"nnodes": plan.world_size // inside, "nproc-per-node": inside}


def is_moot(field: str, plan: Plan) -> bool:
    """Whether a field changes nothing in a plan."""
    return field in _MOOT and _MOOT[field](plan)


def _shards(plan: Plan) -> tuple[int, int]:
    """Copies and shards of the data of FSDP, which shards over cp too."""
    if not plan.zero:
        return plan.dp, 1
    shards, rest = divmod(plan.shard or plan.dp * plan.cp, plan.cp)
    if rest or not shards:
        raise ValueError(
            f"shard={plan.shard} must be a multiple of cp={plan.cp}, over which FSDP "
            "shards too"
        )
    return plan.dp // shards, shards


def _megatron_flags(plan: Plan, run: StatedRun) -> dict:
    """Flags with their values, True for those without."""
    flags: dict = {
        "tensor-model-parallel-size": plan.tp,
        "micro-batch-size": plan.micro_batch,
    }
    for row in rows_of("megatron-lm"):
        field = row["means"]
        value = getattr(plan, row["means"], None)
        if (
            field in DEFAULTS
            and value not in (None, False, DEFAULTS[field])
            and not is_moot(field, plan)
        ):
            words = dict(
                pair.split("=")[::-1] for pair in row["values"].split() if "=" in pair
            )
            flags[row["key"]] = words.get(value, value)
    flags |= {
        "global-batch-size": run.global_batch,
        "seq-length": run.sequence,
        "num-layers": run.layers,
    }
    flags |= {
        "expert-tensor-parallel-size": plan.etp or None,
        "sequence-parallel": plan.sequence_parallel,
    }
    flags |= {"account-for-embedding-in-pipeline-split": plan.embedding_as_layer}
    flags |= {"account-for-loss-in-pipeline-split": plan.head_as_layer}
    flags |= {
        "use-distributed-optimizer": plan.zero > 0,
        "overlap-param-gather": plan.overlap_gather,
    }
    if plan.zero > 1:
        strategy = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        flags |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": strategy,
            "ckpt-format": "fsdp_dtensor",
        }
    if plan.shard:
        flags["num-distributed-optimizer-instances"] = plan.dp * plan.cp // plan.shard
    if plan.recompute != "none":
        flags["recompute-granularity"] = plan.recompute
    if plan.recompute == "full":
        flags |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    flags |= {"attention-backend": "unfused"} if plan.attention == "unfused" else {}
    flags |= {"optimizer-cpu-offload": True} if plan.offload == "optimizer" else {}
    flags |= {run.dtype: True} if run.dtype != "fp32" else {}
    narrow = run.dtype == "bf16" and not plan.reduce_fp32
    flags |= {
        "grad-reduce-in-bf16": narrow,
        "accumulate-allreduce-grads-in-fp32": plan.reduce_fp32,
    }
    if math.isinf(plan.bucket_bytes):
        if plan.overlap_gather:
            raise ValueError(
                "bucket_bytes=inf: --overlap-param-gather of overlap_gather needs "
                "--overlap-grad-reduce"
            )
    else:
        size = plan.bucket_bytes / (4 if plan.reduce_fp32 else 2)
        flags |= {"overlap-grad-reduce": True, "ddp-bucket-size": round(size)}
    return {
        name: value
        for name, value in flags.items()
        if value is not None and value is not False
    }


def _megatron(plan: Plan, run: StatedRun) -> str:
    launch = " ".join(f"--{name} {value}" for name, value in run.launch(plan).items())
    flags = _megatron_flags(plan, run)
    program = "pretrain_gpt.py"
    if run.model:
        flags |= megatron_sizes(run.model, run.sequence) | MADE_UP
        program = "pretrain_vision_classify.py" if run.model.image else program
    return " \\\n    ".join([f"torchrun {launch} {program}", *_words(flags)])


def _words(flags: dict) -> list[str]:
    return [
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in flags.items()
    ]


_OFF = (
    "sequence-parallel",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "overlap-param-gather",
)
_OFF += ("use-megatron-fsdp",)
_NONE = (
    "num-virtual-stages-per-pipeline-rank",
    "pipeline-model-parallel-layout",
    "recompute-granularity",
)
_ONE = (
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
)


def _bridge(plan: Plan, run: StatedRun) -> str:
    """Overrides, which name what a recipe could have set otherwise, too."""
    flags = (
        dict.fromkeys(_ONE, 1)
        | dict.fromkeys(_OFF, False)
        | dict.fromkeys(_NONE)
        | _megatron_flags(plan, run)
    )
    flags |= {"bf16": run.dtype == "bf16", "fp16": run.dtype == "fp16"}
    flags |= {"accumulate-allreduce-grads-in-fp32": plan.reduce_fp32}
    flags |= {"optimizer-offload-fraction": 1.0} if plan.offload else {}
    names = {
        row["means"][1:]: row["key"] for row in rows_of("megatron-bridge")
    }  # the last one: effective
    sections: dict = {
        "model": bridge_sizes(run.model, run.sequence) if run.model else {},
        "ddp": {},
        "train": {},
    }
    for name in flags.keys() - {"grad-reduce-in-bf16", "ckpt-format"}:
        section, _, key = names.get(name, f"model.{name.replace('-', '_')}").partition(
            "."
        )
        sections.setdefault(section, {})[key] = flags[name]
    kinds = {
        "mixed_precision": "training.mixed_precision.MixedPrecisionConfig",
        "peft": "peft.lora.LoRA",
    }
    for section in kinds.keys() & sections.keys():
        sections[section] = {
            "_target_": f"megatron.bridge.{kinds[section]}"
        } | sections[section]
    return _script(
        {name.replace("-", "_"): n for name, n in run.launch(plan).items()}
    ) + _yaml(sections)


def _yaml(values: dict) -> str:
    import yaml

    return yaml.safe_dump(values)


def _script(words: dict, before: str = "# ", after: str = "\n") -> str:
    """What the training script does, as a comment."""
    words = {name: value for name, value in words.items() if value is not None}
    return (
        f"{before}script: "
        f"{' '.join(f'{name}={value}' for name, value in words.items())}{after}"
        if words
        else ""
    )


def _torchtitan(plan: Plan, run: StatedRun) -> str:
    copies, shards = _shards(plan)
    flags: dict = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": shards,
    }
    flags |= (
        {"fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never"}
        if plan.zero
        else {}
    )
    flags |= {"tensor_parallel_degree": plan.tp, "context_parallel_degree": plan.cp}
    flags |= {"pipeline_parallel_degree": plan.pp, "expert_parallel_degree": plan.ep}
    flags |= (
        {"expert_tensor_parallel_degree": plan.tp}
        if plan.ep > 1 and plan.tp > 1 and plan.etp != 1
        else {}
    )
    flags |= (
        {"no_enable_sequence_parallel": True}
        if plan.tp > 1 and not plan.sequence_parallel
        else {}
    )
    training: dict = {
        "local_batch_size": plan.micro_batch,
        "global_batch_size": run.global_batch,
    }
    if plan.pp > 1:
        flags |= {
            "pipeline_parallel_microbatch_size": plan.micro_batch
        } | _titan_stages(plan, run.layers)
        training["local_batch_size"] = plan.micro_batch * run.passes(plan, plan.pp)
    training |= {
        "seq_len": run.sequence,
        "enable_cpu_offload": True if plan.offload == "all" else None,
    }
    training["mixed_precision_param"] = {"bf16": "bfloat16", "fp32": "float32"}.get(
        run.dtype, run.dtype
    )
    named = {f"parallelism.{name}": value for name, value in flags.items()}
    named |= {
        f"training.{name}": value
        for name, value in training.items()
        if value is not None
    }
    if plan.overlap_tp and plan.tp > 1:
        named |= {"compile.enable": True, "compile.enable_async_tensor_parallel": True}
    words = [*_words(named), f"activation-checkpoint:{plan.recompute}"]
    if run.model is None:
        return " \\\n".join(words)
    launch = " ".join(f"--{name} {value}" for name, value in run.launch(plan).items())
    named = titan_config(run.model)
    return _script({} if named else run.sizes()) + " \\\n    ".join(
        [f"torchrun {launch} -m torchtitan.train", *_words(named), *words]
    )


def _titan_stages(plan: Plan, layers: int | None) -> dict:
    kind = {"gpipe": "GPipe", "1f1b": "1F1B"}.get(plan.schedule)
    if kind is None:
        raise ValueError(
            f"torchtitan cannot state schedule={plan.schedule}: its own have two "
            "chunks per stage"
        )
    ends = {"first": plan.embedding_as_layer, "last": plan.head_as_layer}
    flags = {
        f"pipeline_parallel_{end}_stage_less_layers": int(counts)
        for end, counts in ends.items()
    }
    flags["pipeline_parallel_schedule"] = (
        "Interleaved1F1B" if plan.interleave > 1 else kind
    )
    if plan.interleave > 2:
        if layers is None:
            raise ValueError(
                f"interleave={plan.interleave}: torchtitan counts layers of a stage; "
                "give layers="
            )
        each = -(-(layers + sum(ends.values())) // (plan.pp * plan.interleave))
        chunks = plan.pp * plan.interleave
        if -(-(layers + sum(ends.values())) // each) != chunks:
            rule = f"stages of {each} layers do not make {chunks} of {layers}"
            raise ValueError(
                f"torchtitan cannot state interleave={plan.interleave}: {rule}"
            )
        flags["pipeline_parallel_layers_per_stage"] = each
    return flags


def _deepspeed(plan: Plan, run: StatedRun) -> str:
    steps = run.passes(plan)
    samples = plan.micro_batch * steps * plan.dp
    values: dict = (
        {"train_batch_size": samples} if plan.tp == 1 else {}
    )  # else it follows: see the reader's `_batch`
    values |= {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": steps,
    }
    values |= {run.dtype: {"enabled": True}} if run.dtype != "fp32" else {}
    values |= {"communication_data_type": "fp32"} if plan.reduce_fp32 else {}
    zero: dict = {"stage": plan.zero, "reduce_bucket_size": _elements(plan)}
    zero |= {"overlap_comm": plan.overlap_dp} if plan.overlap_dp is not None else {}
    if plan.zero == 3:
        zero |= {"mics_shard_size": plan.shard} if plan.shard else {}
        zero |= {"stage3_prefetch_bucket_size": 0} if plan.prefetch == 0 else {}
        zero |= {"zero_quantized_weights": True} if plan.qwz else {}
        zero |= {"zero_hpz_partition_size": run.devices_per_node} if plan.hpz else {}
        zero |= {"zero_quantized_gradients": True} if plan.qgz else {}
    if plan.offload in ("optimizer", "all", "nvme"):
        device = {"device": "nvme" if plan.offload == "nvme" else "cpu"}
        zero |= {"offload_optimizer": device} | (
            {"offload_param": device} if plan.offload == "all" else {}
        )
    values["zero_optimization"] = zero
    values |= {"tensor_parallel": {"autotp_size": plan.tp}} if plan.tp > 1 else {}
    values |= (
        {"sequence_parallel_size": plan.cp, "data_parallel_size": plan.dp}
        if plan.cp > 1
        else {}
    )
    if plan.ep > 1:
        spread = {"expert_tensor_parallel_size": plan.etp} if plan.etp else {}
        values["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep} | spread
    script = {
        "num_stages": plan.pp if plan.pp > 1 else None,
        "seq_length": run.sequence,
    }
    script |= {"global_batch_size": samples if plan.tp > 1 else None}
    script |= (
        {"gradient_checkpointing": True} if plan.recompute == "full" else {}
    ) | run.sizes()
    comment = _script(script, "", "")
    return json.dumps(({"_comment": comment} if comment else {}) | values, indent=2)


def _elements(plan: Plan) -> int:
    """Elements of a bucket, which DeepSpeed reckons with."""
    if math.isinf(plan.bucket_bytes):
        return int(ONE_BUCKET)
    return round(plan.bucket_bytes / (4 if plan.reduce_fp32 else 2))


def _accelerate(plan: Plan, run: StatedRun) -> str:
    """FSDP 2 where there are shards, DeepSpeed where only the optimizer or gradients
    are, DDP without.
    """
    for name in ("pp", "ep"):
        if getattr(plan, name) > 1:
            raise ValueError(
                f"accelerate cannot state {name}={getattr(plan, name)}: FSDP has no "
                "such degree"
            )
    values: dict = {
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "no" if run.dtype == "fp32" else run.dtype,
    }
    values |= {
        "num_processes": plan.world_size,
        "num_machines": run.launch(plan)["nnodes"],
    }
    late = plan.zero == 1 or (plan.zero == 2 and not plan.overlap_gather)
    if late and plan.tp * plan.cp == 1 and not plan.shard:
        offload = {"optimizer": "cpu", "nvme": "nvme"}.get(plan.offload, "none")
        section = {"zero_stage": plan.zero, "offload_optimizer_device": offload}
        values |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    elif plan.zero or plan.tp * plan.cp > 1 or plan.offload:
        fsdp = {
            "version": 2,
            "reshard_after_forward": plan.zero != 2,
            "offload_params": plan.offload == "all",
        }
        fsdp |= {
            "activation_checkpointing": plan.recompute == "full",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
        values |= {
            "distributed_type": "FSDP",
            "fsdp_config": {f"fsdp_{name}": v for name, v in fsdp.items()},
        }
        copies, shards = _shards(plan)
        sizes = {"dp_replicate": copies, "dp_shard": shards, "tp": plan.tp}
        sizes["sp" if plan.context == "ulysses" else "cp"] = plan.cp
        values["parallelism_config"] = {
            f"parallelism_config_{axis}_size": size for axis, size in sizes.items()
        }
    script = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": run.passes(plan),
    }
    script |= {"seq_length": run.sequence}
    script |= (
        {"gradient_checkpointing": True}
        if plan.recompute == "full" and "fsdp_config" not in values
        else {}
    )
    script |= run.sizes()
    return _script(script) + _yaml(values)


WRITERS = dict(
    zip(
        FRAMEWORKS,
        (_torchtitan, _megatron, _bridge, _deepspeed, _accelerate),
        strict=True,
    )
)
