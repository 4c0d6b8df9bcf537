"""Modules that are computed again: what a layer keeps without them, and what its
backward pass repeats.
"""

import numpy as np
import pytest
from support import cells

import madmax_lib as mm
from madmax_lib.catalog.blocks import Blocks
from madmax_lib.plan.case import Case
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import layer_time
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.layers.transformer import layer_blocks
from madmax_lib.simulator.memory.activations import layer_bytes
from madmax_lib.simulator.rates.parameters import shipped


def case_of(model, plan, recompute):
    plan = f"{plan}.no-overlap-tp.no-overlap-ep"
    plan = f"{plan}.recompute-{recompute}" if recompute else plan
    where = mm.cluster("dgx-h100", nodes=2)
    return Case(model, where, mm.Plan.parse(plan), 32, 4096, software="megatron-core")


def kept(model, word, recompute):
    case = case_of(model, "dp16", recompute)
    return layer_bytes(case, word, case.software)


@pytest.mark.parametrize(
    ("model", "word", "module", "hidden", "inner", "others"),
    cells("""
    llama3-8b | *- | mlp | 1 | 3 | 0
    llama3-8b | *- | layernorm | 0 | 0 | 0
    mixtral-8x7b | *E | moe_act | 0 | 2 | 0
    mixtral-8x7b | *E | moe | 4 | 6 | 32
    mixtral-8x7b | *E | moe_act+moe | 4 | 6 | 32
    mixtral-8x7b | *E | layernorm | 1 | 0 | 0
    deepseek-v3 | *E | layernorm | 2 | 0 | 0
    deepseek-v3 | *- | layernorm | 1 | 0 | 0
    deepseek-v3 | *E | mla_up_proj | 0 | 0 | 67584
    deepseek-v3 | *E | shared_experts | 0 | 0 | 6144
    deepseek-v3 | *- | moe+moe_act+shared_experts | 0 | 0 | 0
    """),
)
def test_a_layer_does_not_keep_what_it_computes_again(
    model, word, module, hidden, inner, others
):
    """In 16-bit numbers of a token: outputs of gate, first product and activation, and
    inputs of products. Of a mixture 2 of 8 experts, tokens as they come and go, and the
    router's fp32 logits and probabilities; of latent attention queries, keys and values
    of 128 heads (192 + 192 + 128) and the normed latents (1536 + 512).
    """
    usual, again = (kept(model, word, name) for name in ("", module))
    spared = usual.stored - again.stored
    sizes = mm.model(model)
    elements = hidden * sizes.hidden + inner * sizes.ffn + others
    assert spared == pytest.approx(4096 * 2 * elements)
    # it is there while the backward pass computes it again
    assert 0 <= again.at_work - usual.at_work <= spared * 1.001


def test_halves_of_a_layer_are_computed_again_one_after_the_other():
    usual, moe, up, both = (
        kept("deepseek-v3", "*E", name)
        for name in ("", "moe", "mla_up_proj", "moe+mla_up_proj")
    )
    assert both.at_work == pytest.approx(max(moe.at_work, up.at_work))
    assert moe.stored + up.stored == pytest.approx(usual.stored + both.stored)


def layer_of(model, word, plan, recompute):
    prices = Prices(Steps.of(case_of(model, plan, recompute)), shipped())
    exchanged = "ep" in plan
    blocks = layer_blocks(prices.steps.work, 0, Blocks(word), exchanged=exchanged)
    return blocks, layer_time(blocks, prices)


@pytest.mark.parametrize(
    ("model", "plan", "word", "module"),
    cells("""
    llama3-8b | dp2.tp8 | - | mlp
    mixtral-8x7b | dp16.ep8 | E | layernorm+moe
    mixtral-8x7b | dp2.tp8 | E | layernorm+moe
    deepseek-v3 | dp4.tp4.ep16.etp1 | E | layernorm+moe
    """),
)
def test_a_whole_module_repeats_its_forward_pass(model, plan, word, module):
    """With its collectives: all of a feed-forward part."""
    _, usual = layer_of(model, word, plan, "")
    _, again = layer_of(model, word, plan, module)
    assert again.forward == usual.forward
    repeated = {part: s - usual.backward[part] for part, s in again.backward.items()}
    compared = [part for part in usual.forward if part != "launch_s"]
    assert [repeated[part] for part in compared] == pytest.approx(
        [usual.forward[part] for part in compared]
    )


@pytest.mark.parametrize(
    ("module", "names"),
    cells("""
    core_attn | flash
    moe_act | experts activation
    layernorm | norm
    mla_up_proj | q_up kv_up rotary
    shared_experts | shared up shared activation shared down
    mlp |
    """),
)
def test_what_keeps_no_more_than_ops_repeats_these(module, names):
    """Of a mixture whose ranks exchange no tokens, where none repeats a collective."""
    blocks, _ = layer_of("deepseek-v3", "*E", "dp16", f"{module}+mlp")
    repeated = [op.name for block in blocks for op in block.ops if np.any(op.again)]
    assert " ".join(dict.fromkeys(repeated)) == names
    assert not any(block.again for block in blocks)


def test_a_search_finds_modules_where_a_stack_launches_them():
    space = mm.planner.Space(recompute=("layernorm+moe_act",), micro_batch=(1,))
    asked = "mixtral-8x7b", mm.cluster("dgx-h100", nodes=2), 64
    found = mm.search(*asked, space=space, software="megatron-core")
    assert found.best.recompute == "layernorm+moe_act"
    options = {"global_batch": 64, "software": "megatron-core"}
    step_s = mm.estimate(*asked[:2], found.best, **options)["step_s"].item()
    assert found.table["step_s"].iloc[0] == pytest.approx(step_s)
    with pytest.raises(ValueError, match="torchtitan launches none"):
        mm.search(*asked, space=space, software="torchtitan")
