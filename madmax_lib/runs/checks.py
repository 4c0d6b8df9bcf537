"""Refusals of a plan that cannot run this model here: each in one line, before a process
starts and without torch.

A table of rules has the sentence of a refusal and the condition that it is for; the
first that holds is raised.
"""

import os
import time
from importlib.util import find_spec
from pathlib import Path

from madmax_lib.catalog import Transformer
from madmax_lib.plan import Plan
from madmax_lib.plan.layers import chunk_layers
from madmax_lib.runs.settings import Settings

# Parts of a transformer that the simulator prices and `runs.model` has no code for.
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
    "attention_gate",
    "head_gate",
    "shared_norm",
    "output_rank",
    "shared_values",
    "expert_latent",
    "index_heads",
    "tower",
)
_NOT_ON_DEEPSPEED = (
    "compile",
    "lora_rank",
    "weights_16bit",
    "adam_8bit",
    "fused_gelu",
)
_ZERO_PLUS = {  # [arXiv 2306.10209]
    "qwz": "8-bit gathers",
    "hpz": "a second shard in the node",
    "qgz": "4-bit gradients",
}
_LEAST_ZERO = {None: 0, "optimizer": 1, "all": 3}  # stage that shards what is offloaded
_STALE_S = 900.0  # a build of all of DeepSpeed's operators takes minutes


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
    on_deepspeed = engine == "deepspeed"
    _refuse(_model_rules(plan, spec, settings))
    _refuse((_deepspeed_rules if on_deepspeed else _torch_rules)(plan, settings))
    _refuse(_division_rules(plan, spec, sequence))
    # A schedule and DeepSpeed's accumulation take micro-batches of one size only.
    together = plan.dp * plan.micro_batch
    if (plan.pp > 1 or on_deepspeed) and global_batch % together:
        sizes = f"dp x micro_batch = {plan.dp} x {plan.micro_batch} does not divide"
        raise ValueError(
            f"micro-batches must be equal here, but {sizes} global_batch={global_batch}"
        )
    if plan.pp > 1:
        _refuse(_pipeline_rules(plan, spec, plan.micro_batches(global_batch)))


def _refuse(rules):
    """Raise the first sentence of a table whose condition holds."""
    if sentence := next((text for text, broken in rules.items() if broken), ""):
        raise ValueError(sentence)


def _model_rules(plan, spec, settings):
    name = spec.name
    asked = settings.sequence
    # a table of positions has no row for tokens beyond it; patches of images are fixed
    has_table = spec.positions == "learned" and not spec.image
    splits_tokens = plan.cp > 1 or (plan.tp > 1 and plan.sequence_parallel)
    instead = "cp1" if plan.cp > 1 else f"tp{plan.tp}.nosp"
    overlaps = plan.overlap_tp or plan.overlap_ep or plan.overlap_dp is False
    other_mlp = spec.image or spec.gated or spec.experts or not spec.mlp_bias
    rules = {
        f"sequence={asked} exceeds the {spec.sequence} learned positions of {name}": (
            has_table and asked > spec.sequence
        )
    }
    for field in _NOT_BUILT:
        value = getattr(spec, field)
        rules[f"{name}: {field}={value} is simulated only, not built here"] = value
    v_head_dim = f"{name}: v_head_dim={spec.v_head_dim} is simulated only"
    turns = f"{name}: rotary positions turn pairs of channels"
    patches = f"{name}: patches and class token are not split over ranks"
    return rules | {
        f"{v_head_dim}, where head_dim={spec.head_dim}": spec.v_head_dim
        != spec.head_dim,
        f"{turns}, but head_dim={spec.head_dim}": (
            spec.positions == "rope" and spec.head_dim % 2
        ),
        f"{patches}; write {instead}": spec.image and splits_tokens,
        "overlap-gather and cap (dropped tokens) are simulated only, they do not run here": (
            plan.overlap_gather or plan.capacity
        ),
        f"recompute={plan.recompute}: none, selective and full run here, modules do not": (
            plan.recomputes_modules or plan.budget < 1
        ),
        "etp, lora and the overlaps of a plan do not run here (lora_rank is a setting)": (
            plan.etp or plan.lora_rank or overlaps
        ),
        f"fused_gelu fuses a bias with tanh GELU, which {name} does not have": (
            settings.fused_gelu and other_mlp
        ),
    }


def _torch_rules(plan, settings):
    zero_bubble = plan.defers_weights and plan.pp > 1
    plus = "is ZeRO++, which only DeepSpeed runs: add @deepspeed to the plan"
    rules = {
        f"{field} ({meaning}) {plus}": getattr(plan, field)
        for field, meaning in _ZERO_PLUS.items()
    }
    rules |= {
        f"offload={plan.offload!r} does not run here; FSDP2 offloads all states (offload-all)": (
            plan.offload not in (None, "all")
        ),
        f"weights_16bit=True needs dtype='bf16', but dtype={settings.dtype!r}": (
            settings.weights_16bit and settings.dtype != "bf16"
        ),
    }
    fsdp2 = f"is FSDP2's here and needs zero of 2 or 3, but zero={plan.zero}"
    for field in ("offload", "shard"):
        value = getattr(plan, field)
        rules[f"{field}={value!r} {fsdp2}"] = value and plan.zero < 2
    return rules | {
        f"lora_rank={settings.lora_rank} needs tp=1, but tp={plan.tp}": (
            settings.lora_rank and plan.tp > 1
        ),
        # seen with torch 2.13: a DTensor's backward pass is given a plain gradient
        f"compile=True fails for layers that are split over tp ranks, and tp={plan.tp}": (
            settings.compile and plan.tp > 1
        ),
        "compile=True cannot split the backward pass, as a zero-bubble pipeline does": (
            settings.compile and zero_bubble
        ),
    }


def _deepspeed_rules(plan, settings):
    offload = plan.offload
    least = _LEAST_ZERO.get(offload, 0)
    only = "only dp, z, mb, zpp, recompute and offload run on DeepSpeed here"
    rules = {
        f"{plan}@deepspeed: {only}": (
            plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.shard
        )
    }
    for field in _NOT_ON_DEEPSPEED:
        sentence = f"{plan}@deepspeed: {field} does not run on DeepSpeed here"
        rules[sentence] = getattr(settings, field)
    needs = f"needs zero of at least {least}, but zero={plan.zero}"
    return rules | {
        f"offload={offload!r} on DeepSpeed is not one of optimizer, all": (
            offload not in _LEAST_ZERO
        ),
        f"offload={offload!r} on DeepSpeed {needs}": plan.zero < least,
    }


def _division_rules(plan, spec, sequence):
    """Every tensor is cut into equal parts: nothing is padded, and no key-value head is
    copied to two ranks.
    """
    channels = spec.expert_ffn if spec.experts else spec.ffn
    cut = [
        ("tp", spec.kv_heads, "key-value heads"),
        ("tp", channels, "channels of the feed-forward block"),
        # Ulysses swaps sequence for heads among the cp ranks of a tp rank
        ("cp", spec.heads // plan.tp, "attention heads of a tp rank (Ulysses)"),
        ("cp", spec.kv_heads // plan.tp, "key-value heads of a tp rank (Ulysses)"),
    ]
    if plan.sequence_parallel and plan.tp > 1:
        tokens = sequence // plan.cp
        cut.append(("tp", tokens, "tokens of a cp rank (.nosp leaves them whole)"))
    rules = {}
    for field, count, noun in cut:
        ranks = getattr(plan, field)
        sentence = f"{field}={ranks} does not divide {count} {noun} of {spec.name}"
        rules[sentence] = count % ranks
    return rules


def _pipeline_rules(plan, spec, micro_batches):
    has_layers = all(map(all, chunk_layers(spec.layers, plan)))
    zero_bubble = plan.defers_weights
    plain_1f1b = plan.schedule == "1f1b" and plan.interleave == 1
    # torch's interleaved schedules issue pp micro-batches of a chunk at a time
    rounds = max(micro_batches // plan.pp, 1)
    there_are = f"there are {micro_batches} for pp={plan.pp}"
    uneven = f"{micro_batches} micro-batches do not make {rounds} equal rounds"
    return {
        f"a stage of {plan} would have no layer of {spec.name}": not has_layers,
        f"1f1b needs a micro-batch per stage, but {there_are}": (
            plain_1f1b and micro_batches < plan.pp
        ),
        f"{uneven} over pp={plan.pp}": (
            (plan.interleave > 1 or zero_bubble)
            and not plan.folds
            and micro_batches % rounds
        ),
        f"{plan.schedule}: the head of {spec.name} is its token table, which two chunks "
        "of one rank do not share here": plan.folds and spec.tied,
        # seen with torch 2.13: parameters are resharded between the two halves of the
        # backward pass
        "a zero-bubble pipeline gives wrong gradients with zero=3 and dp x cp > 1; use z2": (
            zero_bubble and plan.zero == 3 and plan.replicas > 1
        ),
    }


def deepspeed_locks() -> list[Path]:
    """Locks of torch's extension builds that nobody has touched for a quarter of an
    hour, oldest first.

    Looked for where torch builds: TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions.
    """
    default = Path.home() / ".cache" / "torch_extensions"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    touched_s = {lock: lock.stat().st_mtime for lock in folder.glob("**/lock")}
    stale = [lock for lock, at_s in touched_s.items() if time.time() - at_s > _STALE_S]
    return sorted(stale, key=touched_s.__getitem__)


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
            f"{stale[0]}: {age_h:.1f} h old, left by a build that was killed; DeepSpeed "
            "would wait for it forever. If no build is running, delete it"
        )


def check_wandb_key() -> None:
    """Raises ValueError where Weights & Biases would ask for a key after the start."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return
    path = Path.home() / ".netrc"
    logged_in = path.is_file() and "api.wandb.ai" in path.read_text()
    if not (logged_in or os.environ.get("WANDB_API_KEY")):
        raise ValueError(
            "wandb=True: no key found; set WANDB_API_KEY, run `wandb login`, or set "
            "WANDB_MODE=offline"
        )
