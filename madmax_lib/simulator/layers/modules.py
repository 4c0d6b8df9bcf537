"""Recompute of modules: ops of a layer, and collectives, that the backward pass repeats
where the plan names their module.

Names and extents are Megatron-Core's (`data/recompute_modules.csv`): what throws away
its output (moe_act, layernorm, mla_up_proj) repeats ops alone, as attention's core
does; what keeps its input (mlp, moe, shared_experts) repeats its collectives too.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from madmax_lib.catalog import table
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.work import Work, any_nonzero

_MODULES_OF = table("recompute_ops").set_index("op")["modules"].str.split().to_dict()


def with_repeats(blocks: Sequence[Block], work: Work) -> list[Block]:
    """Blocks of a layer with what of them is computed again."""
    if not any_nonzero(work.plan.recomputes_modules):
        return [*blocks]
    return [_with_repeats(block, work) for block in blocks]


def _with_repeats(block, work):
    plan = work.plan
    kind = block.name.split()[0]
    routes = any(op.name == "router" for op in block.ops)
    # Norms stand alone before experts and latents; Transformer Engine has the others in
    # the product that follows [Megatron-Core, gpt_layer_specs.py].
    norm = 0.0
    if routes:
        norm = plan.recomputes("layernorm")
    elif kind == "feed-forward":
        norm = plan.recomputes("mlp")
    elif kind in ("attention", "qkv"):
        norm = plan.recomputes("layernorm") * (work.shape.rope_head_dim > 0)
    ops = []
    least = 1.0 * (kind != "core")  # exchanges of cp are not its core's
    for op in block.ops:
        again = 1.0 * norm
        if op.name != "norm":
            again = 1.0 * plan.recomputes(*_MODULES_OF.get(op.name, ()))
            least = np.minimum(least, again)
        ops.append(replace(op, again=again))
    return replace(block, ops=tuple(ops), again=least)
