"""Modules that are computed again, and memory budgets: what a layer keeps, and what its
backward pass repeats.
"""

import numpy as np
import pytest
from support import cells

import madmax_lib as mm
from madmax_lib.catalog.blocks import Blocks
from madmax_lib.catalog.models import Transformer
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


SMALL = {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 896}
LLAMA = {"layers": 2, "vocab": 512, "positions": "rope", "norm": "rms", "gated": True}
TOKENS = 64  # so few that attention has fewer FLOPs a byte than products


def within(budget):
    """Bytes that a small layer keeps and FLOPs of products that it repeats, in units of
    the numbers of its input and of a square product.
    """
    model = Transformer("small", sequence=TOKENS, **SMALL, **LLAMA)
    recompute = f"budget{budget}" if budget < 100 else "none"
    software = mm.catalog.software("torchtitan-compiled")
    plan = mm.Plan(recompute=recompute)
    case = Case(model, mm.cluster("dgx-h100", devices=1), plan, 1, software=software)
    kept = layer_bytes(case, "*-", software).stored / (2 * TOKENS * model.hidden)
    blocks = layer_blocks(Steps.of(case).work, 0, Blocks("*-"))
    repeated = sum(
        float(op.flops * op.again)
        for block in blocks
        for op in block.ops
        if op.kind == "gemm"
    )
    return kept, repeated / (2 * TOKENS * model.hidden**2)


def test_a_budget_lies_between_full_recompute_and_none():
    kept, repeated = np.transpose([within(budget) for budget in range(101)])
    assert kept[0] == 1 and repeated[0] == pytest.approx(10)  # all but the last product
    assert (np.diff(kept) >= 0).all() and (np.diff(repeated) <= 0).all()
    # what costs most to repeat is kept the longest: convex
    assert (np.diff(repeated, n=2) >= -1e-9).all()
    # norms and the activation, two widths and 3.5, are repeated within any budget
    assert kept[100] - kept[99] == pytest.approx(5.5) and repeated[99] == 0
    asked = "llama3-8b", mm.cluster("dgx-h100"), ["dp8.z3.full", "dp8.z3"]
    options = {"global_batch": 32, "software": "torchtitan-compiled"}
    full, none = mm.estimate(*asked, **options).to_dict("records")
    budgets = [f"dp8.z3.recompute-budget{n}" for n in (0, 25, 50, 75, 99)]
    table = mm.estimate(*asked[:2], budgets, **options)
    assert table["memory_bytes"].iloc[0] == pytest.approx(
        full["memory_bytes"], rel=0.01
    )
    assert table["memory_bytes"].is_monotonic_increasing
    assert table["step_s"].is_monotonic_decreasing
    assert none["step_s"] < table["step_s"].min()
    assert table["step_s"].max() < full["step_s"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", [0, 25, 50, 75, 100])
def test_a_budget_keeps_and_repeats_what_torch_does(budget):
    """Its partitioner on a compiled layer of Llama. On a CPU attention's output is kept
    twice, once as the next product reads it.
    """
    torch = pytest.importorskip("torch")
    import torch._functorch.config as functorch
    from torch.utils.flop_counter import FlopCounterMode

    hidden, heads, kv_heads, ffn = SMALL.values()
    size = hidden // heads
    shapes = [hidden, kv_heads * size, kv_heads * size, hidden, ffn, ffn]
    bf16 = {"dtype": torch.bfloat16, "requires_grad": True}
    weights = [torch.randn(inner, hidden, **bf16) for inner in shapes]
    weights += [torch.randn(hidden, ffn, **bf16)]
    turns = torch.randn(2, TOKENS, size // 2)
    x = torch.randn(TOKENS, hidden, **bf16)

    def turned(head):
        left, right = head.float().chunk(2, -1)
        cos, sin = turns
        parts = left * cos - right * sin, right * cos + left * sin
        return torch.cat(parts, -1).to(head.dtype)

    def layer(x, q, k, v, o, gate, up, down):
        normed = torch.rms_norm(x, (hidden,))
        q, k, v = (
            (normed @ w.T).view(TOKENS, -1, size).transpose(0, 1) for w in (q, k, v)
        )
        core = torch.nn.functional.scaled_dot_product_attention(
            turned(q)[None], turned(k)[None], v[None], is_causal=True, enable_gqa=True
        )
        x = x + core[0].transpose(0, 1).reshape(TOKENS, hidden) @ o.T
        normed = torch.rms_norm(x, (hidden,))
        gate = torch.nn.functional.silu(normed @ gate.T)
        return x + (gate * (normed @ up.T)) @ down.T

    given = {t.untyped_storage().data_ptr() for t in (*weights, turns)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def run(share):
        """FLOPs of the backward pass."""
        torch._dynamo.reset()
        kept.clear()
        with functorch.patch(activation_memory_budget=share):
            compiled = torch.compile(layer, backend="aot_eager")
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                y = compiled(x, *weights)
            with FlopCounterMode(display=False) as counter:
                y.sum().backward()
        return counter.get_total_flops()

    least = run(1.0)
    repeated = (run(budget / 100) - least) / (2 * TOKENS * hidden**2)
    ours, again = within(budget)
    unit = 2 * TOKENS * hidden
    assert ours == pytest.approx(sum(kept.values()) / unit, rel=0.08)
    assert again == pytest.approx(repeated, abs=0.5)
