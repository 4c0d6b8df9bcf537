"""Recompute of modules: ops of a layer, and collectives, that the backward pass repeats
where the plan names their module.

Names and extents are Megatron-Core's (`data/recompute_modules.csv`): what throws away
its output (moe_act, layernorm, mla_up_proj) repeats ops alone, as attention's core
does; what keeps its input (mlp, moe, shared_experts) repeats its collectives too.
"""

from dataclasses import replace

from madmax_lib.catalog import table
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.work import Work, any_nonzero

# of an op, of a norm in a kind of block, and of all of a block with its collectives
_MODULES_OF = table("recompute_ops").set_index("work")["modules"].str.split()


def with_repeats(blocks: list[Block], work: Work) -> list[Block]:
    """Blocks of a layer with what of them is computed again."""
    if not any_nonzero(work.plan.recomputes_modules):
        return blocks
    return [_with_repeats(block, work) for block in blocks]


def _with_repeats(block, work):
    def again(name):
        return 1.0 * work.plan.recomputes(*_MODULES_OF.get(name, ()))

    kind = block.name.split()[0]
    if any(op.name == "router" for op in block.ops):
        kind = "mixture"
    ops = []
    for op in block.ops:
        name = f"{kind} norm" if op.name == "norm" else op.name
        # Before attention without latents Transformer Engine has the norm in the
        # product that follows [Megatron-Core, gpt_layer_specs.py].
        before_core = name in ("attention norm", "qkv norm")
        alone = not before_core or work.shape.rope_head_dim > 0
        ops.append(replace(op, again=again(name) * alone))
    return replace(block, ops=tuple(ops), again=again(kind))
