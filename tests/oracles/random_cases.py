"""Cases that nobody chose: models, clusters, plans and batches of the catalog, drawn at
random and kept if legal.
"""

import numpy as np

from madmax_lib import catalog
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import enforce, rules_of

# fixed and in this order, so that a model more in the catalog leaves the draws as they
# are
_DRAWN = """
    bloom-176b deepseek-v2 deepseek-v2-lite deepseek-v3 gpt-oss-120b gpt2 gpt2-large gpt2-medium gpt2-xl
    gpt3-175b llama-13b llama-33b llama-65b llama-7b llama2-13b llama2-70b llama2-7b llama3-405b llama3-70b
    llama3-8b llm-moe megatron-1.7b megatron-145b megatron-18b megatron-1t megatron-22b megatron-3.6b
    megatron-310b megatron-39b megatron-530b megatron-7.5b megatron-76b mixtral-8x7b qwen2.5-3b qwen3-30b-a3b
    vit-10b vit-120b vit-25b vit-60b vit-base vit-huge vit-large
"""
MODELS = _DRAWN.split()
STACKS = [
    "t5-11b",
    "mamba2-2.7b",
    "jamba-1.5-large",
    "nemotron-h-8b",
    "kimi-linear-48b-a3b",
    "minimax-text-01",
]  # layers of several kinds
CLUSTERS = [
    "dgx-a100",
    "dgx-h100",
    "dgx-b200",
    "gb200-nvl72",
    "p4d",
    "dgx-2",
    "mi300x-8",
]
SOFTWARE = ["megatron-core", "megatron-2021", "megatron-bridge", "torchtitan", "torchtitan-compiled", "fsdp2",
            "deepspeed", "megatron-deepspeed", "nanotron", "hai-llm", "jax", "llm-foundry"]  # fmt: skip


def drawn_cases(
    kind: str, count: int, seed: int, *, most_passes: int = 6000, models=MODELS
) -> list[Case]:
    """Legal cases, each on up to 512 devices.

    kind: ordinary, plans as they are launched; random, any legal plan; software, those
    that one of the catalog runs.
    most_passes: of layers, over all micro-batches and both directions.
    """
    draw, cases = np.random.default_rng(seed), []
    while len(cases) < count:
        model, cluster = catalog.model(_one(draw, models)), _cluster(draw)
        try:
            plan, batch = (_ordinary if kind == "ordinary" else _random)(
                draw, model, cluster
            )
            software = _one(draw, SOFTWARE) if kind == "software" else None
            case = Case(
                model,
                cluster,
                plan,
                batch,
                None,
                cluster.device.nearest("bf16"),
                software,
            )
            enforce(rules_of(case), plan, case)
        except ValueError:
            continue
        if 2 * model.layers * plan.micro_batches(batch) <= most_passes:
            cases.append(case)
    return cases


def _cluster(draw):
    name, nodes = _one(draw, CLUSTERS), _power(draw, 6)
    return catalog.cluster(
        name, nodes=max(nodes // 8, 1) if name == "gb200-nvl72" else nodes
    )


def _ordinary(draw, model, cluster) -> tuple[Plan, int]:
    """tp inside a node, ZeRO-1 beside tp and pp or any ZeRO alone, equal micro-batches."""
    tp, pp = _power(draw, 3), _power(draw, 3) if draw.random() < 0.6 else 1
    dp, micro_batch, rounds = (
        cluster.world_size // (tp * pp),
        _power(draw, 2),
        _power(draw, 3),
    )
    if tp > cluster.devices_per_node:
        raise ValueError("tp across nodes is not ordinary")
    interleaved = pp > 1 and model.layers % (2 * pp) == 0 and draw.random() < 0.3
    plan = Plan(
        dp=dp, tp=tp, pp=pp, ep=_power(draw, 6) if model.experts else 1, micro_batch=micro_batch,
        zero=1 if tp * pp > 1 else _one(draw, [0, 1, 3]), recompute=_one(draw, ["none", "none", "selective", "full"]),
        interleave=2 if interleaved else 1,
    )  # fmt: skip
    return plan, dp * micro_batch * rounds * pp


def _random(draw, model, cluster) -> tuple[Plan, int]:
    """Degrees, schedules and every choice of sharding and overlap; the last micro-batch
    may be short.
    """
    tp, pp, cp = _power(draw, 4), _power(draw, 4) if draw.random() < 0.6 else 1, 1
    if draw.random() < 0.3:
        cp = _power(draw, 2)
    dp, micro_batch = cluster.world_size // (tp * pp * cp), _power(draw, 2)
    if not dp:
        raise ValueError("more stages than devices")
    choices = {
        "recompute": _one(draw, ["none", "selective", "full"]),
        "attention": _one(draw, ["flash", "flash", "unfused"]),
        "context": _one(draw, ["ring", "ulysses"]) if cp > 1 else "ring",
        "reduce_fp32": bool(draw.integers(2)),
        "bucket_bytes": _one(draw, [25 * 2.0**20, 1e8, 2.0**30, np.inf]),
    }
    if pp > 1:
        choices |= _one(draw, [{}, {}, {"schedule": "gpipe"}, {"schedule": "zero-bubble"}, {"interleave": 2},
                               {"interleave": 3}])  # fmt: skip
    if tp > 1 and not model.experts and draw.random() < 0.3:
        choices["sequence_parallel"] = False
    choices |= _sharding(draw, dp * cp)
    ep = _power(draw, 6) if model.experts else 1
    plan = Plan(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro_batch, **choices)
    return plan, dp * (
        micro_batch * int(draw.integers(1, 13)) + int(draw.integers(micro_batch))
    )


def _sharding(draw, replicas: int) -> dict:
    """A ZeRO stage and what goes with it: gathers beside the next pass, prefetch, HSDP
    or ZeRO++.
    """
    zero = int(draw.integers(4))
    if not zero:
        return {}
    choices = {"zero": zero} | (
        {"prefetch": int(draw.integers(2))} if zero == 3 else {}
    )
    if zero < 3:
        choices["overlap_gather"] = bool(draw.integers(2))
    elif draw.random() < 0.2:
        return choices | {
            name: bool(draw.integers(2)) for name in ("qwz", "hpz", "qgz")
        }
    return choices | (
        {"shard": _power(draw, int(np.log2(replicas)))} if draw.random() < 0.2 else {}
    )


def _one(draw, choices):
    return choices[draw.integers(len(choices))]


def _power(draw, most: int) -> int:
    """A power of two up to 2^most."""
    return int(2 ** draw.integers(most + 1))
