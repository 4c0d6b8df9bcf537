"""A plan in the words of each framework: a writer for each, without rules of its own, as
its text is read back.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote

from madmax_lib.base import require_int
from madmax_lib.catalog import Transformer
from madmax_lib.plan.layout import predictions
from madmax_lib.plan.plan import DEFAULTS, Plan
from madmax_lib.plan_flags.deepspeed import ONE_BUCKET
from madmax_lib.plan_flags.keys import FRAMEWORKS, WORDS, rows_of
from madmax_lib.plan_flags.megatron import layout_letters
from madmax_lib.plan_flags.sizes import (
    MADE_UP,
    bridge_sizes,
    megatron_sizes,
    named_sizes,
    titan_config,
    without_off,
)
from madmax_lib.plan_flags.torchtitan import SCHEDULES

# where a field changes nothing
_MOOT: dict[str, Callable[[Plan], bool]] = {
    "reduce_fp32": lambda p: p.replicas == 1,
    "overlap_gather": lambda p: p.replicas == 1,
    "zero": lambda p: p.replicas == 1 and not p.offload,
    "shard": lambda p: p.shard == p.replicas,
    "bucket_bytes": lambda p: p.replicas == 1 or p.zero == 3,
    "prefetch": lambda p: p.zero < 3 or p.replicas == 1,
    "context": lambda p: p.cp == 1,
    "etp": lambda p: p.ep == 1 or (p.etp or p.tp) == p.tp,
    "capacity": lambda p: p.ep == 1,
    "schedule": lambda p: p.pp == 1,
    "embedding_as_layer": lambda p: p.pp == 1,
    "head_as_layer": lambda p: p.pp == 1,
}


@dataclass(frozen=True)
class StatedRun:
    """The run that a configuration states beside the plan."""

    global_batch: int | None  # samples of a step
    sequence: int | None  # tokens of a sample
    dtype: str  # of the products
    layers: int | None  # of the model, where it is known
    devices_per_node: int
    model: Transformer | None

    def sizes(self) -> dict:
        """Sizes of the model, by the names that a script knows."""
        return named_sizes(self.model) if self.model else {}

    def passes(self, plan: Plan, default: int = 1) -> int:
        """Micro-batches of a step."""
        if self.global_batch is None:
            return default
        each = plan.dp * plan.micro_batch
        batch = require_int("global_batch", self.global_batch, 1)
        if batch % each:
            near = max(round(batch / each), 1) * each
            raise ValueError(
                f"global_batch={batch} is not a multiple of dp x micro_batch = "
                f"{plan.dp} x {plan.micro_batch}; the nearest is {near}"
            )
        return batch // each

    def launch(self, plan: Plan) -> dict[str, int]:
        """torchrun's nodes and processes: whole nodes, else one node of all devices."""
        each = self.devices_per_node
        if plan.world_size % each:
            each = plan.world_size
        return {"nnodes": plan.world_size // each, "nproc-per-node": each}


def is_moot(field: str, plan: Plan) -> bool:
    """Whether a field changes nothing in a plan."""
    return field in _MOOT and _MOOT[field](plan)


def _shards(plan):
    """Copies and shards of the data of FSDP, which shards over cp too."""
    # DDP copies all
    if not plan.zero:
        return plan.dp, 1
    shards, rest = divmod(plan.shard or plan.replicas, plan.cp)
    if rest or not shards:
        raise ValueError(
            f"shard={plan.shard} must be a multiple of cp={plan.cp}, over which FSDP "
            "shards too"
        )
    return plan.dp // shards, shards


def _megatron_flags(plan, run):
    """Flags with their values, True for those without."""
    flags = {
        "tensor-model-parallel-size": plan.tp,
        "micro-batch-size": plan.micro_batch,
        **_by_rows("megatron-lm", plan),
        "global-batch-size": run.global_batch,
        "seq-length": run.sequence,
        "num-layers": run.layers,
        "expert-tensor-parallel-size": plan.etp or None,
        "sequence-parallel": plan.sequence_parallel,
        "account-for-embedding-in-pipeline-split": plan.embedding_as_layer,
        "account-for-loss-in-pipeline-split": plan.head_as_layer,
        "use-distributed-optimizer": plan.zero > 0,
        "overlap-param-gather": plan.overlap_gather,
    }
    if plan.zero > 1:  # which Megatron's own FSDP has alone
        flags |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": _STRATEGIES[plan.zero],
            "ckpt-format": "fsdp_dtensor",
        }
    if plan.layout:  # which says how many chunks there are
        flags.pop("num-virtual-stages-per-pipeline-rank", None)
        flags["pipeline-model-parallel-layout"] = layout_letters(plan.layout)
        flags["mtp-num-layers"] = predictions(plan.layout) or None
    if plan.shard:
        flags["num-distributed-optimizer-instances"] = plan.replicas // plan.shard
    is_full = plan.recompute == "full"
    granularity = plan.recompute if plan.recompute != "none" else None
    if plan.recomputes_modules:
        granularity = "selective"
        flags["recompute-modules"] = plan.recompute.split("+")
    flags |= {
        "recompute-granularity": granularity,
        "recompute-method": "uniform" if is_full else None,
        "recompute-num-layers": 1 if is_full else None,
        "attention-backend": "unfused" if plan.attention == "unfused" else None,
        "optimizer-cpu-offload": plan.offload == "optimizer",
        run.dtype: run.dtype != "fp32",
        "grad-reduce-in-bf16": run.dtype == "bf16" and not plan.reduce_fp32,
        "accumulate-allreduce-grads-in-fp32": plan.reduce_fp32,
    }
    if not math.isinf(plan.bucket_bytes):
        flags |= {"overlap-grad-reduce": True, "ddp-bucket-size": _elements(plan)}
    elif plan.overlap_gather:
        raise ValueError(
            "bucket_bytes=inf: --overlap-param-gather of overlap_gather needs "
            "--overlap-grad-reduce"
        )
    return without_off(flags)


_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def _by_rows(framework, plan):
    """Keys of the fields that stand for themselves, from the rows that readers use."""
    flags = {}
    for row in rows_of(framework):
        field = row["means"]
        # rows of other keys have no field of that name
        value = getattr(plan, field, None)
        # the default is left out, as Megatron has the same
        is_stated = field in DEFAULTS and value not in (None, False, DEFAULTS[field])
        if is_stated and not is_moot(field, plan):
            pairs = [pair.split("=") for pair in row["values"].split() if "=" in pair]
            words = {meaning: word for word, meaning in pairs}
            flags[row["key"]] = words.get(value, value)
    return flags


def _megatron(plan, run):
    """A command line; with a model it trains on made up data."""
    flags = _megatron_flags(plan, run)
    program = "pretrain_gpt.py"
    if run.model:
        flags |= megatron_sizes(run.model, run.sequence) | MADE_UP
        if run.model.image:
            program = "pretrain_vision_classify.py"
    return " \\\n    ".join([f"{_torchrun(plan, run)} {program}", *_words(flags)])


def _torchrun(plan, run):
    return " ".join(["torchrun", *(f"--{k} {v}" for k, v in run.launch(plan).items())])


def _words(flags):
    words = {
        name: " ".join(value) if isinstance(value, list) else quote(str(value))
        for name, value in flags.items()
    }
    # a flag without a value is on
    return [f"--{k}" if flags[k] is True else f"--{k} {v}" for k, v in words.items()]


# what a recipe of Bridge could have set otherwise
_RECIPE = WORDS["bridge_recipe"]
# classes of sections that are objects
_TARGETS = WORDS["bridge_targets"]


def _bridge(plan, run):
    """Overrides, which name what a recipe could have set otherwise, too."""
    flags = _RECIPE | _megatron_flags(plan, run)
    flags |= {
        "bf16": run.dtype == "bf16",
        "fp16": run.dtype == "fp16",
        "accumulate-allreduce-grads-in-fp32": plan.reduce_fp32,
    }
    if plan.offload:
        flags["optimizer-offload-fraction"] = 1.0
    # the last row of a flag: what is in effect
    names = {row["means"][1:]: row["key"] for row in rows_of("megatron-bridge")}
    sections = {"model": {}, "ddp": {}, "train": {}}
    if run.model:
        sections["model"] = bridge_sizes(run.model, run.sequence)
    for name in flags.keys() - {"grad-reduce-in-bf16", "ckpt-format"}:
        dotted = names.get(name, f"model.{name.replace('-', '_')}")
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = flags[name]
    for section in _TARGETS.keys() & sections.keys():
        sections[section]["_target_"] = _TARGETS[section]
    launch = {name.replace("-", "_"): n for name, n in run.launch(plan).items()}
    return _script(launch) + _yaml(sections)


def _yaml(values):
    import yaml

    return yaml.safe_dump(values)


def _script(words, before="# ", after="\n"):
    """A comment of what the training script does, empty if that is nothing."""
    stated = [f"{name}={value}" for name, value in words.items() if value is not None]
    return f"{before}script: {' '.join(stated)}{after}" if stated else ""


def _torchtitan(plan, run):
    copies, shards = _shards(plan)
    has_pipeline = plan.pp > 1
    etp = plan.tp if plan.ep > 1 and plan.tp > 1 and plan.etp != 1 else None
    reshard = "always" if plan.zero == 3 else "never"
    parallelism = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": reshard if plan.zero else None,
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
        "expert_tensor_parallel_degree": etp,
        "no_enable_sequence_parallel": plan.tp > 1 and not plan.sequence_parallel,
    }
    local = plan.micro_batch
    if has_pipeline:
        parallelism["pipeline_parallel_microbatch_size"] = plan.micro_batch
        parallelism |= _titan_stages(plan, run.layers)
        local *= run.passes(plan, plan.pp)
    # names of torch
    dtypes = {"bf16": "bfloat16", "fp32": "float32"}
    training = {
        "local_batch_size": local,
        "global_batch_size": run.global_batch,
        "seq_len": run.sequence,
        "enable_cpu_offload": plan.offload == "all",
        "mixed_precision_param": dtypes.get(run.dtype, run.dtype),
    }
    # dotted names: a section and a key
    flags = {f"parallelism.{k}": v for k, v in without_off(parallelism).items()}
    flags |= {f"training.{k}": v for k, v in without_off(training).items()}
    if plan.overlap_tp and plan.tp > 1:
        flags |= {"compile.enable": True, "compile.enable_async_tensor_parallel": True}
    checkpoint = plan.recompute
    if plan.budget < 1:
        checkpoint = (
            f"memory-budget --activation-checkpoint.memory-budget {plan.budget}"
        )
        flags["compile.enable"] = True
    words = [*_words(flags), f"activation-checkpoint:{checkpoint}"]
    if run.model is None:
        return " \\\n".join(words)
    config = titan_config(run.model)
    program = f"{_torchrun(plan, run)} -m torchtitan.train"
    script = _script({} if config else run.sizes())
    return script + " \\\n    ".join([program, *_words(config), *words])


def _titan_stages(plan, layers):
    names = {tuple(means): name for name, means in SCHEDULES.items()}
    name = names.get((plan.schedule, min(plan.interleave, 2)))
    if name is None:
        raise ValueError(
            f"torchtitan cannot state schedule={plan.schedule}: it has two chunks per stage"
        )
    flags = {
        "pipeline_parallel_first_stage_less_layers": int(plan.embedding_as_layer),
        "pipeline_parallel_last_stage_less_layers": int(plan.head_as_layer),
        "pipeline_parallel_schedule": name,
    }
    if plan.interleave > 2:  # two chunks are its default
        if layers is None:
            raise ValueError(
                f"interleave={plan.interleave}: torchtitan counts layers of a stage; "
                "give layers="
            )
        chunks = plan.pp * plan.interleave
        counted = layers + plan.ends_as_layers
        each = -(-counted // chunks)  # rounded up, as torchtitan does
        if -(-counted // each) != chunks:
            raise ValueError(
                f"torchtitan cannot state interleave={plan.interleave}: stages of "
                f"{each} layers do not make {chunks} of {layers}"
            )
        flags["pipeline_parallel_layers_per_stage"] = each
    return flags


def _deepspeed(plan, run):
    # accumulation; of a pipeline its micro-batches
    steps = run.passes(plan)
    samples = plan.micro_batch * steps * plan.dp
    values = {
        # with tp it follows: see the reader's `_batch`
        "train_batch_size": samples if plan.tp == 1 else None,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": steps,
        run.dtype: {"enabled": True} if run.dtype != "fp32" else None,
        "communication_data_type": "fp32" if plan.reduce_fp32 else None,
        "zero_optimization": _deepspeed_zero(plan, run.devices_per_node),
        "tensor_parallel": {"autotp_size": plan.tp} if plan.tp > 1 else None,
    }
    if plan.cp > 1:
        values |= {"sequence_parallel_size": plan.cp, "data_parallel_size": plan.dp}
    if plan.ep > 1:
        experts = {"enabled": True, "autoep_size": plan.ep}
        if plan.etp:
            experts["expert_tensor_parallel_size"] = plan.etp
        values["expert_parallel"] = experts
    script = {
        "num_stages": plan.pp if plan.pp > 1 else None,
        "seq_length": run.sequence,
        "global_batch_size": samples if plan.tp > 1 else None,
        "gradient_checkpointing": True if plan.recompute == "full" else None,
    }
    comment = _script(script | run.sizes(), "", "")
    return json.dumps(without_off({"_comment": comment or None} | values), indent=2)


def _deepspeed_zero(plan, devices_per_node):
    """The section of ZeRO, in which what is not set is DeepSpeed's default."""
    zero = {"stage": plan.zero, "reduce_bucket_size": _elements(plan)}
    if plan.overlap_dp is not None:
        zero["overlap_comm"] = plan.overlap_dp
    if plan.zero == 3:
        zero |= without_off(
            {
                "mics_shard_size": plan.shard or None,
                "stage3_prefetch_bucket_size": 0 if plan.prefetch == 0 else None,
                "zero_quantized_weights": plan.qwz,
                "zero_hpz_partition_size": devices_per_node if plan.hpz else None,
                "zero_quantized_gradients": plan.qgz,
            }
        )
    if plan.offload in ("optimizer", "all", "nvme"):
        device = {"device": "nvme" if plan.offload == "nvme" else "cpu"}
        zero["offload_optimizer"] = device
        if plan.offload == "all":
            zero["offload_param"] = device
    return zero


def _elements(plan):
    """Elements of a bucket, which Megatron-LM and DeepSpeed reckon with."""
    if math.isinf(plan.bucket_bytes):
        return int(ONE_BUCKET)
    return round(plan.bucket_bytes / (4 if plan.reduce_fp32 else 2))


def _accelerate(plan, run):
    """FSDP 2 where there are shards, DeepSpeed where only the optimizer or gradients
    are, DDP without.
    """
    for name in ("pp", "ep"):
        if getattr(plan, name) > 1:
            raise ValueError(
                f"accelerate cannot state {name}={getattr(plan, name)}: FSDP has no "
                "such degree"
            )
    values = {
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "no" if run.dtype == "fp32" else run.dtype,
        "num_processes": plan.world_size,
        "num_machines": run.launch(plan)["nnodes"],
    }
    # FSDP 2 gathers before each pass, or keeps what it gathered (overlap_gather)
    gathers_late = plan.zero == 1 or (plan.zero == 2 and not plan.overlap_gather)
    repeats = plan.recompute == "full"
    if gathers_late and plan.tp * plan.cp == 1 and not plan.shard:
        offload = {"optimizer": "cpu", "nvme": "nvme"}.get(plan.offload, "none")
        section = {"zero_stage": plan.zero, "offload_optimizer_device": offload}
        values |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    elif plan.zero or plan.tp * plan.cp > 1 or plan.offload:
        copies, shards = _shards(plan)
        context = "sp" if plan.context == "ulysses" else "cp"
        # a mesh of replicate x shard x cp x tp
        degrees = {"dp_replicate": copies, "dp_shard": shards, "tp": plan.tp}
        degrees[context] = plan.cp
        values |= {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": plan.zero != 2,
                "fsdp_offload_params": plan.offload == "all",
                "fsdp_activation_checkpointing": repeats,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
            "parallelism_config": {
                f"parallelism_config_{axis}_size": n for axis, n in degrees.items()
            },
        }
        repeats = False  # it is said
    script = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": run.passes(plan),
        "seq_length": run.sequence,
        "gradient_checkpointing": repeats or None,
    }
    return _script(script | run.sizes()) + _yaml(values)


WRITERS = dict(
    zip(
        FRAMEWORKS,
        (_torchtitan, _megatron, _bridge, _deepspeed, _accelerate),
        strict=True,
    )
)
