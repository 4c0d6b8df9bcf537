"""Recompute of parts of a layer: ops and collectives that the backward pass repeats
where the plan names their module, or has a memory budget.

Names and extents are Megatron-Core's (`data/recompute_modules.csv`): what throws away
its output (moe_act, layernorm, mla_up_proj) repeats ops alone, as attention's core
does; what keeps its input (mlp, moe, shared_experts) repeats its collectives too.
"""

from dataclasses import replace

import numpy as np

from madmax_lib.catalog import table
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.work import Work, any_nonzero

# of an op, of a norm in a kind of block, and of all of a block with its collectives
_MODULES_OF = table("recompute_ops").set_index("work")["modules"].str.split()


def with_repeats(blocks: list[Block], work: Work) -> list[Block]:
    """Blocks of a layer with what of them is computed again."""
    if any_nonzero(work.plan.budget < 1):
        blocks = _within_budget(blocks, work)
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
        ops.append(replace(op, again=op.again + again(name) * alone))
    return replace(block, ops=tuple(ops), again=block.again + again(kind))


def _within_budget(blocks, work):
    """Blocks with what torch's partitioner repeats to keep no more than the budget
    [torch/_functorch/partitioners.py, choose_saved_values_set].

    Below 1 all but products and attention is repeated; outputs of these are kept

        kept = min(budget x (others + products + attention), products + attention)

    and those with the most FLOPs a byte, by torch's count, the longest: 2 s of
    attention, h of a product. Nothing needs the output of a layer's last product again.
    """
    budget = work.plan.budget
    *ops, last = [op for block in blocks for op in block.ops]
    # rotary positions take the place of what they turn
    sizes = {"products": 0.0, "attention": 0.0, "others": 0.0}
    for op in ops:
        sizes[_tier(op)] = sizes[_tier(op)] + (op.name != "rotary") * op.written_bytes
    products, attention, others = sizes.values()
    dropped = products + attention - budget * (others + products + attention)
    dropped = np.maximum(dropped, 0.0)
    of_products = np.where(
        2 * work.sequence > work.shape.hidden,
        np.minimum(dropped, products),
        np.maximum(dropped - attention, 0.0),
    )
    shares = {
        "products": of_products / products,
        "attention": (dropped - of_products) / np.maximum(attention, 1.0),
        "others": 1.0 * (budget < 1),
    }
    return [
        replace(
            block,
            ops=tuple(
                replace(op, again=shares[_tier(op)] * (op is not last))
                for op in block.ops
            ),
            # what a product reads is gathered again
            again=1.0 * (of_products > 0),
        )
        for block in blocks
    ]


def _tier(op):
    if op.core:
        return "attention"
    return "products" if op.kind == "gemm" else "others"
