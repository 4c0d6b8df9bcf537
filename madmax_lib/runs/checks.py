"""Can this plan run this model here? Every refusal in one line, before a process starts
and without torch.
"""

import os
import time
from importlib.util import find_spec
from pathlib import Path

from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.layers import chunk_layers
from madmax_lib.plan.plan import Plan
from madmax_lib.runs.settings import Settings

__all__ = ["check", "check_deepspeed", "deepspeed_locks"]

_NOT_BUILT = (
    "blocks",
    "kv_lora_rank",
    "window",
    "shared_experts",
    "dense_layers",
    "moe_every",
    "router_bias",
    "sinks",
    "qk_norm",
)
_NOT_ON_DEEPSPEED = (
    "compile",
    "loss_parallel",
    "lora_rank",
    "weights_16bit",
    "adam_8bit",
    "fused_gelu",
)
_ZERO_PLUS = {
    "qwz": "8-bit gathers",
    "hpz": "a second shard in the node",
    "qgz": "4-bit gradients",
}
_OLD_S = 900.0  # a build of all of DeepSpeed's operators takes minutes


def check(
    plan: Plan, spec: Transformer, settings: Settings, engine: str = "torch"
) -> None:
    """Raises ValueError, in one line, if a run of this plan cannot work or would
    silently give other gradients.

    What no plan may do is said by `Plan.check`; the rest is what this room has not
    built. engine: torch or deepspeed. A plan with cp runs as Ulysses, whatever its
    `context` says: torch has no ring attention for CPUs.
    """
    sequence = settings.sequence or spec.sequence
    global_batch = settings.global_batch
    plan.check(spec, None, global_batch, sequence)
    if spec.positions == "learned" and not spec.image and sequence > spec.sequence:
        raise ValueError(
            f"sequence={sequence} exceeds the {spec.sequence} learned positions of "
            f"{spec.name}"
        )
    _check_model(plan, spec)
    if settings.fused_gelu and (
        spec.image or spec.gated or spec.experts or not spec.mlp_bias
    ):
        raise ValueError(
            f"fused_gelu joins a bias and the tanh form of GELU, which {spec.name} "
            "has not"
        )
    if engine == "deepspeed":
        _check_zero(plan, settings)
    else:
        _check_torch(plan, settings)
    _check_division(plan, spec, sequence)
    if plan.pp > 1 or engine == "deepspeed":
        _check_equal_batches(plan, global_batch)
    if plan.pp > 1:
        _check_pipeline(plan, spec, plan.micro_batches(global_batch))


def _check_model(plan: Plan, spec: Transformer) -> None:
    if missing := [name for name in _NOT_BUILT if getattr(spec, name)]:
        raise ValueError(
            f"{spec.name}: {missing[0]}={getattr(spec, missing[0])} is simulated "
            "only, not built here"
        )
    if spec.v_head_dim != spec.head_dim:
        raise ValueError(
            f"{spec.name}: v_head_dim={spec.v_head_dim} is simulated only, where "
            f"head_dim={spec.head_dim}"
        )
    if spec.positions == "rope" and spec.head_dim % 2:
        raise ValueError(
            f"{spec.name}: rotary positions turn pairs of channels, but "
            f"head_dim={spec.head_dim}"
        )
    if spec.image and (plan.cp > 1 or (plan.tp > 1 and plan.sequence_parallel)):
        instead = "cp1" if plan.cp > 1 else f"tp{plan.tp}.nosp"
        raise ValueError(
            f"{spec.name}: patches and class token are not split over ranks; write "
            f"{instead}"
        )
    if plan.overlap_gather or plan.capacity:
        raise ValueError(
            "overlap-gather and cap (dropped tokens) are simulated only, they do not "
            "run here"
        )
    if (
        plan.etp
        or plan.lora_rank
        or plan.overlap_tp
        or plan.overlap_ep
        or plan.overlap_dp is False
    ):
        raise ValueError(
            "etp, lora and the overlaps of a plan do not run here (lora_rank is a "
            "setting)"
        )


def _check_torch(plan: Plan, settings: Settings) -> None:
    for field, what in _ZERO_PLUS.items():
        if getattr(plan, field):
            raise ValueError(
                f"{field} ({what}) is ZeRO++, which only DeepSpeed runs: add "
                "@deepspeed to the plan"
            )
    if plan.offload not in (None, "all"):
        raise ValueError(
            f"offload={plan.offload!r} does not run here; FSDP2 offloads all states "
            "(offload-all)"
        )
    if settings.weights_16bit and settings.dtype != "bf16":
        raise ValueError(
            f"weights_16bit=True needs dtype='bf16', but dtype={settings.dtype!r}"
        )
    for field in ("offload", "shard"):
        if (value := getattr(plan, field)) and plan.zero < 2:
            raise ValueError(
                f"{field}={value!r} is FSDP2's here and needs zero of 2 or 3, but "
                f"zero={plan.zero}"
            )
    if settings.loss_parallel and (plan.tp == 1 or plan.pp > 1):
        raise ValueError(
            f"loss_parallel needs tp of at least 2 and pp=1, but tp={plan.tp} and "
            f"pp={plan.pp}"
        )
    if settings.lora_rank and plan.tp > 1:
        raise ValueError(f"lora_rank={settings.lora_rank} needs tp=1, but tp={plan.tp}")
    if (
        settings.compile and plan.tp > 1
    ):  # seen with torch 2.13: a DTensor's backward pass is given a plain gradient
        raise ValueError(
            "compile=True fails for layers that are split over tp ranks, and "
            f"tp={plan.tp}"
        )
    if settings.compile and plan.schedule == "zero-bubble" and plan.pp > 1:
        raise ValueError(
            "compile=True cannot split the backward pass, as a zero-bubble pipeline "
            "does"
        )


def _check_zero(plan: Plan, settings: Settings) -> None:
    if plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.shard:
        raise ValueError(
            f"{plan}@deepspeed: only dp, z, mb, zpp, recompute and offload run on "
            "DeepSpeed here"
        )
    if wanted := [name for name in _NOT_ON_DEEPSPEED if getattr(settings, name)]:
        raise ValueError(
            f"{plan}@deepspeed: {wanted[0]} does not run on DeepSpeed here"
        )
    if plan.offload not in (None, "optimizer", "all"):
        raise ValueError(
            f"offload={plan.offload!r} on DeepSpeed is not one of optimizer, all"
        )
    least = {None: 0, "optimizer": 1, "all": 3}[plan.offload]
    if plan.zero < least:
        raise ValueError(
            f"offload={plan.offload!r} on DeepSpeed needs zero of at least {least}, "
            f"but zero={plan.zero}"
        )


def _check_division(plan: Plan, spec: Transformer, sequence: int) -> None:
    """Every tensor is cut into equal parts: nothing is padded, and no key-value head is
    held twice.
    """
    rules = [
        ("tp", spec.kv_heads, "key-value heads"),
        (
            "tp",
            spec.expert_ffn if spec.experts else spec.ffn,
            "channels of the feed-forward block",
        ),
        ("cp", spec.heads // plan.tp, "attention heads of a tp rank (Ulysses)"),
        ("cp", spec.kv_heads // plan.tp, "key-value heads of a tp rank (Ulysses)"),
    ]
    if plan.sequence_parallel and plan.tp > 1:
        rules.append(
            ("tp", sequence // plan.cp, "tokens of a cp rank (.nosp leaves them whole)")
        )
    for field, count, what in rules:
        if count % getattr(plan, field):
            raise ValueError(
                f"{field}={getattr(plan, field)} does not divide {count} {what} of "
                f"{spec.name}"
            )


def _check_equal_batches(plan: Plan, global_batch: int) -> None:
    if global_batch % (plan.dp * plan.micro_batch):
        sizes = (
            f"dp x micro_batch = {plan.dp} x {plan.micro_batch} does not divide "
            f"global_batch={global_batch}"
        )
        raise ValueError(f"micro-batches must be equal here, but {sizes}")


def _check_pipeline(plan: Plan, spec: Transformer, micro_batches: int) -> None:
    if not all(part for stage in chunk_layers(spec.layers, plan) for part in stage):
        raise ValueError(f"a stage of {plan} would have no layer of {spec.name}")
    rounds = max(micro_batches // plan.pp, 1)
    if (plan.schedule, plan.interleave) == ("1f1b", 1) and micro_batches < plan.pp:
        raise ValueError(
            f"1f1b needs a micro-batch per stage, but there are {micro_batches} for "
            f"pp={plan.pp}"
        )
    if (
        plan.interleave > 1 or plan.schedule == "zero-bubble"
    ) and micro_batches % rounds:
        raise ValueError(
            f"{micro_batches} micro-batches do not make {rounds} equal rounds over "
            f"pp={plan.pp}"
        )
    if plan.schedule == "zero-bubble" and plan.zero == 3 and plan.dp * plan.cp > 1:
        # seen with torch 2.13: parameters are resharded between the two halves of the
        # backward pass
        raise ValueError(
            "a zero-bubble pipeline gives wrong gradients with zero=3 and dp x cp > "
            "1; use z2"
        )


def deepspeed_locks() -> list[Path]:
    """Locks of torch's extension builds that nobody has touched for a quarter of an
    hour, oldest first.

    Looked for where torch builds: TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions.
    """
    folder = Path(
        os.environ.get("TORCH_EXTENSIONS_DIR")
        or Path.home() / ".cache" / "torch_extensions"
    )
    since = {lock: lock.stat().st_mtime for lock in folder.glob("**/lock")}
    return sorted(
        (lock for lock in since if time.time() - since[lock] > _OLD_S),
        key=since.__getitem__,
    )


def check_deepspeed() -> None:
    """Raises, in one line, ModuleNotFoundError if DeepSpeed is not installed,
    FileExistsError for a stale lock.

    It compiles its operators when first used, behind a file named `lock`; a build that
    was killed leaves it, and every later start waits for it without a word.
    """
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "deepspeed is not installed; pip install deepspeed, or leave out @deepspeed"
        )
    if stale := deepspeed_locks():
        age_h = (time.time() - stale[0].stat().st_mtime) / 3600
        raise FileExistsError(
            f"{stale[0]}: {age_h:.1f} h old, left by a build that was killed; "
            "DeepSpeed would wait for it for ever. "
            "If no build is running, delete it"
        )
