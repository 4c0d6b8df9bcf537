"""The op table against torch's FLOP counter, published counts and closed forms of
bytes.
"""

from dataclasses import replace
from itertools import product

import pytest
from oracles.op_table import blocks, ops
from support import core_flops

import madmax_lib as mm
from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.layers import _stage_layers, chunk_layers
from madmax_lib.simulator.layers.ops import backward, gemm, precision

TINY = Transformer(
    "tiny", layers=4, hidden=64, heads=4, ffn=256, sequence=128, vocab=512
)
GATED = Transformer("gated", 3, 64, 8, 192, 64, 256, kv_heads=2, gated=True, norm="rms", positions="rope",
                    attention_bias="none", mlp_bias=False, tied=False)  # fmt: skip
MLA = replace(GATED, name="mla", kv_heads=8, head_dim=16, q_lora_rank=24, kv_lora_rank=32, rope_head_dim=4,
              v_head_dim=12, experts=8, active_experts=2, shared_experts=1, expert_ffn=48,
              dense_layers=1)  # fmt: skip
UNFUSED = mm.Plan(attention="unfused")


def counted_by_torch(model, samples, sequence):
    """(forward, backward) FLOPs of the matrix products of a model on the meta device,
    attention as plain products.
    """
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    nn = torch.nn
    d, heads, kv = model.head_dim, model.heads, model.kv_heads

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (
                nn.Linear(model.hidden, n * d) for n in (heads, kv, kv)
            )
            self.out = nn.Linear(heads * d, model.hidden)
            self.up = nn.ModuleList(
                nn.Linear(model.hidden, model.ffn) for _ in range(1 + model.gated)
            )
            self.down = nn.Linear(model.ffn, model.hidden)

        def forward(self, x):
            b, s, _ = x.shape
            q, k, v = (
                m(x).view(b, s, -1, d).transpose(1, 2) for m in (self.q, self.k, self.v)
            )
            k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
            values = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            x = x + self.out(values.transpose(1, 2).reshape(b, s, heads * d))
            inner = self.up[0](x)
            return x + self.down(inner * self.up[1](x) if model.gated else inner.relu())

    with torch.device("meta"):
        layers = [Layer() for _ in range(model.layers)]
        if model.image:
            first = nn.Conv2d(3, model.hidden, model.patch, stride=model.patch)
            token, head = (
                nn.Parameter(torch.empty(1, 1, model.hidden)),
                nn.Linear(model.hidden, model.classes),
            )
            inputs = torch.empty(samples, 3, model.image, model.image)
        else:
            first, head = (
                nn.Embedding(model.vocab, model.hidden),
                nn.Linear(model.hidden, model.vocab, bias=False),
            )
            inputs = torch.zeros(samples, sequence, dtype=torch.long)
        with FlopCounterMode(display=False) as forward:
            x = first(inputs)
            if model.image:
                x = torch.cat(
                    [token.expand(samples, -1, -1), x.flatten(2).transpose(1, 2)], dim=1
                )
            for layer in layers:
                x = layer(x)
            loss = head(x[:, 0] if model.image else x).sum()
        with FlopCounterMode(display=False) as back:
            loss.backward()
    return forward.get_total_flops(), back.get_total_flops()


@pytest.mark.parametrize(
    ("name", "samples", "sequence"),
    [("gpt2-large", 8, 1024), ("vit-huge", 16, None), ("qwen2.5-3b", 1, 2048)],
)
def test_flops_equal_torchs_counter(name, samples, sequence):
    """Forward and backward, to the last FLOP, counted over two layers and over one: the
    rest of them are the same.
    """
    whole = mm.model(name)
    for layers in (1, 2):
        model = replace(whole, layers=layers)
        forward, back = counted_by_torch(model, samples, sequence)
        assert model.forward_flops(samples, sequence) == forward
        table = ops(model, replace(UNFUSED, micro_batch=samples), sequence)
        by_phase = table.groupby("phase")["flops"].sum()
        assert (by_phase["forward"], by_phase["backward"]) == (forward, back)
    per_layer = model.forward_flops(samples, sequence) - replace(
        whole, layers=1
    ).forward_flops(samples, sequence)
    assert (
        whole.forward_flops(samples, sequence)
        == forward + (whole.layers - 2) * per_layer
    )


MODELS = [TINY, GATED, MLA, "gpt2-large", "qwen2.5-3b", "vit-huge", "mixtral-8x7b", "deepseek-v2-lite", "dlrm-a",
          "t5-11b", "mamba2-2.7b", "jamba-1.5-large", "nemotron-h-8b"]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_blocks_add_up_to_the_model(model):
    model = mm.model(model) if isinstance(model, str) else model
    flat = [block for stage in blocks(model, UNFUSED) for block in stage]
    assert sum(op.flops for block in flat for op in block.ops) == pytest.approx(
        model.forward_flops(1), rel=1e-12
    )
    assert sum(block.parameters for block in flat) == pytest.approx(
        model.parameters, rel=1e-12
    )


@pytest.mark.parametrize("plan", ["tp2", "pp2", "dp2.cp2", "dp2.cp2.ulysses", "tp4.pp2", "dp4.ep4", "dp2.ep2.tp2.cp2",
                                  "tp4 t5-11b", "tp8.pp4 nemotron-h-8b", "dp2.ep2.tp8.pp3 jamba-1.5-large",
                                  "pp4 mamba2-2.7b"])  # fmt: skip
def test_devices_share_the_work_of_a_model(plan):
    """Summed over the devices of a replica; experts of a device take the tokens that
    come from ep devices.
    """
    plan, _, name = plan.partition(" ")
    plan = replace(mm.Plan.parse(plan), attention="unfused")
    model = mm.model(name) if name else MLA if plan.ep > 1 else TINY
    flat = [block for stage in blocks(model, plan) for block in stage]
    replica = plan.tp * plan.cp
    assert sum(op.flops for b in flat for op in b.ops) * replica == pytest.approx(
        model.forward_flops(1), rel=1e-12
    )


def test_flash_attention_computes_the_causal_half():
    def flash_share(*arguments):
        flash, full = (
            blocks(arguments[0], plan, *arguments[1:])[0]
            for plan in (mm.Plan(), UNFUSED)
        )
        return sum(map(core_flops, flash)) / sum(map(core_flops, full))

    assert flash_share(TINY, 4096) == pytest.approx(
        0.5, abs=0.02
    )  # half, and half a tile per row
    assert flash_share(mm.model("vit-huge")) == pytest.approx(1)


def test_windowed_layers_attend_to_fewer_tokens():
    model = replace(TINY, window=256, full_every=2)
    core = [
        core_flops(block)
        for block in blocks(model, mm.Plan(), 8192)[0]
        if core_flops(block)
    ]
    assert core[0] == core[2] < core[1] / 10 and core[1] == core[3]


def test_phases_of_a_step():
    """Backward is twice the products (flash 2.5 times the core); recompute repeats a
    layer, or its attention.
    """
    for recompute, share in (("none", 0.0), ("selective", None), ("full", 1.0)):
        table = ops(TINY, mm.Plan(recompute=recompute, attention="unfused"))
        flops = table.groupby("phase")["flops"].sum()
        core = table[
            table["op"].isin(["scores", "values"]) & (table["phase"] == "forward")
        ]["flops"].sum()
        head = table[(table["op"] == "logits") & (table["phase"] == "forward")][
            "flops"
        ].sum()
        assert flops["backward"] == pytest.approx(2 * flops["forward"])
        expected = core if share is None else share * (flops["forward"] - head)
        assert flops.get("recompute", 0.0) == pytest.approx(expected)
    assert set(ops(TINY, UNFUSED).query("op in ('scores', 'values')")["kind"]) == {
        "attention"
    }
    fused = (
        ops(TINY, mm.Plan())
        .query("kind == 'attention'")
        .groupby("phase")["flops"]
        .sum()
    )
    assert fused["backward"] == 2.5 * fused["forward"]
    adam = ops(TINY, mm.Plan(dp=4, zero=1)).query("phase == 'optimizer'").iloc[0]
    assert (adam["read_bytes"] + adam["written_bytes"]) * 4 == pytest.approx(
        30 * TINY.parameters
    )


def test_backward_of_a_product_is_two_products():
    op = gemm("g", 8, 4, 2, precision("bf16"), weights=True)
    (inputs,), (weights,) = backward(op)
    assert inputs.flops == weights.flops == op.flops == 2 * 8 * 4 * 2
    assert op.read_bytes == 2 * (8 * 2 + 2 * 4) and op.written_bytes == 2 * 8 * 4


def test_eight_bit_products_keep_attention_head_and_network_in_sixteen():
    narrow, wide = (ops(TINY, mm.Plan(tp=2), dtype=dtype) for dtype in ("fp8", "bf16"))
    is_wide = narrow.groupby("op")["wide"].agg(set)
    assert is_wide["up"] == is_wide["qkv"] == {False}
    assert is_wide["logits"] == is_wide["flash"] == is_wide["norm"] == {True}
    assert narrow["size_bytes"].equals(wide["size_bytes"])


def moved(model, plan, **options):
    """Bytes by (phase, collective, group)."""
    table = ops(model, mm.Plan.parse(plan), **options)
    return (
        table[table["kind"] == "comm"]
        .groupby(["phase", "collective", "group"])["size_bytes"]
        .sum()
        .to_dict()
    )


def test_tensor_parallel_volume():
    """4 all-reduces of 2 b s h per layer, 2 in recompute; embedding and head one each
    [arXiv 1909.08053].
    """
    each, calls = 2 * 128 * 64, {"forward": 9, "backward": 9, "recompute": 8}
    plain = {
        (phase, "all_reduce", "tp"): count * each for phase, count in calls.items()
    }
    assert moved(TINY, "tp2.nosp.full") == plain
    halves = product(("forward", "backward"), ("all_gather", "reduce_scatter"), ("tp",))
    assert (
        moved(TINY, "tp2") == dict.fromkeys(halves, 9 * each)
        and moved(TINY, "dp8.z3") == {}
    )


def test_context_parallel_volume():
    """Ring: K and V (cp-1) times; back with their gradients. Ulysses: Q K V, then the
    output [arXiv 2309.14509].
    """
    tokens = 128 / 4
    ring, ulysses = moved(TINY, "cp4"), moved(TINY, "cp4.ulysses")
    kv = 4 * 2 * (2 * tokens * 64)
    assert ring == {
        ("forward", "send_recv", "cp"): 3 * kv,
        ("backward", "send_recv", "cp"): 7 * kv,
    }
    assert ulysses == {
        (phase, "all_to_all", "cp"): 4 * 2 * tokens * 4 * 64
        for phase in ("forward", "backward")
    }


def test_expert_parallel_volume():
    """Two exchanges of k h bytes per token and mixture layer; over tp each device sends
    its share of the tokens.
    """
    tokens, layers, k = 64, 2, 2
    each = 2 * tokens * k * 64
    assert moved(MLA, "dp4.ep4")["forward", "all_to_all", "ep"] == 2 * layers * each
    both = moved(MLA, "dp4.ep4.tp2")
    assert both["forward", "all_to_all", "ep"] == layers * each
    around = 1 + 3 + 1 + 2  # embedding, attention, dense layer and shared experts
    assert both["forward", "all_gather", "etp"] == layers * each
    assert both["forward", "all_gather", "tp"] == 2 * tokens * 64 * around
    over_tp = moved(
        MLA, "dp4.ep8.etp1.tp2"
    )  # whole experts on each device: nothing to gather
    assert (
        over_tp["forward", "all_to_all", "ep"] == layers * each
        and ("forward", "all_gather", "etp") not in over_tp
    )
    for plan, factor in (("dp4.ep4", 1.5), ("dp4.ep4.cap125", 1.25)):
        assert (
            moved(MLA, plan, imbalance=1.5)["forward", "all_to_all", "ep"]
            == factor * 2 * layers * each
        )


def test_biases_of_experts_are_added_in_fp32():
    table = ops(replace(MLA, mlp_bias=True), mm.Plan()).query(
        "op == 'expert biases' and phase == 'forward'"
    )
    assert (table["read_bytes"] + table["written_bytes"]).tolist() == [
        28 * 64 * 2 * (2 * 48 + 64)
    ] * 2


@pytest.mark.parametrize(
    ("layers", "plan", "sizes"),
    [
        (
            70,
            mm.Plan(pp=12, embedding_as_layer=True, head_as_layer=True),
            [5, *[6] * 10, 5],
        ),  # BLOOM-176B
        (
            126,
            mm.Plan(pp=16, embedding_as_layer=True, head_as_layer=True),
            [7, *[8] * 14, 7],
        ),  # Llama 3 405B
        (
            32,
            mm.Plan(pp=4, embedding_as_layer=True, head_as_layer=True),
            [8, 9, 8, 7],
        ),  # torchtitan
        (61, mm.Plan(pp=16, last_layers=1), [*[4] * 15, 1]),
        (14, mm.Plan(pp=4, first_layers=3, last_layers=3), [3, 4, 4, 3]),
        (8, mm.Plan(pp=2, first_layers=3, last_layers=5), [3, 5]),
    ],
)
def test_uneven_stages_of_megatron(layers, plan, sizes):
    stages = chunk_layers(layers, plan)
    assert [sum(map(len, stage)) for stage in stages] == sizes
    assert sorted(i for stage in stages for chunk in stage for i in chunk) == list(
        range(layers)
    )


def test_stages_are_even_with_ends_not_longer_and_chunks_take_turns():
    assert [len(layers) for layers in _stage_layers(10, 4)] == [2, 3, 3, 2]
    assert [i for layers in _stage_layers(105, 35) for i in layers] == list(range(105))
    stages = chunk_layers(8, mm.Plan(pp=2, interleave=2))
    assert stages == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    uneven = chunk_layers(
        14, mm.Plan(pp=2, interleave=2, embedding_as_layer=True, head_as_layer=True)
    )
    assert [[len(chunk) for chunk in stage] for stage in uneven] == [[3, 4], [4, 3]]


@pytest.mark.parametrize(
    ("layers", "plan", "message"),
    [
        (
            9,
            "pp4.first2",
            "pp x interleave = 4 x 1: 7 layers do not divide evenly over 3 stages",
        ),
        (8, "pp2.first3.last4", "do not leave 8 layers for pp x interleave = 2 x 1"),
        (4, "pp4.first4", "do not leave 4 layers for pp x interleave = 4 x 1"),
    ],
)
def test_layers_that_stages_cannot_share_are_refused(layers, plan, message):
    with pytest.raises(ValueError, match=message):
        chunk_layers(layers, mm.Plan.parse(plan))


@pytest.mark.parametrize(
    ("name", "samples", "flops"),
    [("t5-small", 2, 73_249_325_056), ("t5-3b", 2, 3_895_199_793_152)],
)
def test_flops_of_an_encoder_and_a_decoder(name, samples, flops):
    """As torch's counter has them of T5ForConditionalGeneration of transformers 5.23,
    512 and 128 tokens.
    """
    layers, hidden, heads, ffn, width = {
        "t5-small": (6, 512, 8, 2048, 64),
        "t5-3b": (24, 1024, 32, 16384, 128),
    }[name]
    words = " ".join(["*-"] * layers + ["*x-"] * layers)
    sizes = {
        "heads": heads,
        "ffn": ffn,
        "head_dim": width,
        "blocks": words,
        "layers": 2 * layers,
        "hidden": hidden,
    }
    assert (
        replace(mm.model("t5-11b"), kv_heads=0, v_head_dim=0, **sizes).forward_flops(
            samples
        )
        == flops
    )
