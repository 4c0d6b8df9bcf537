"""The op table against torch's FLOP counter, published counts and closed forms of
bytes.
"""

from dataclasses import replace
from itertools import product

import pytest
from oracles.op_table import blocks, ops
from support import cells, core_flops, refused

import madmax_lib as mm
from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.layers import _stage_layers, chunk_layers
from madmax_lib.simulator.layers.ops import backward, gemm, precision

TINY = Transformer("tiny", 4, 64, 4, 256, sequence=128, vocab=512)
GATED = Transformer("gated", 3, 64, 8, 192, 64, 256, kv_heads=2, gated=True, norm="rms", positions="rope",
                    attention_bias="none", mlp_bias=False, tied=False)  # fmt: skip
MLA = replace(GATED, name="mla", kv_heads=8, head_dim=16, q_lora_rank=24, kv_lora_rank=32, rope_head_dim=4,
              v_head_dim=12, experts=8, active_experts=2, shared_experts=1, expert_ffn=48,
              dense_layers=1)  # fmt: skip
UNFUSED = mm.Plan(attention="unfused")


def of_torch(model, samples, sequence):
    """A model on the meta device, attention as plain products, and its inputs."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    d, heads, kv, h = model.head_dim, model.heads, model.kv_heads, model.hidden

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(h, n * d) for n in (heads, kv, kv))
            self.out = nn.Linear(heads * d, h)
            ups = (nn.Linear(h, model.ffn) for _ in range(1 + model.gated))
            self.up = nn.ModuleList(ups)
            self.down = nn.Linear(model.ffn, h)

        def forward(self, x):
            b, s, _ = x.shape
            q, k, v = (m(x).view(b, s, -1, d).transpose(1, 2) for m in self.qkv)
            k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
            values = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            x = x + self.out(values.transpose(1, 2).reshape(b, s, heads * d))
            inner = self.up[0](x)
            return x + self.down(inner * self.up[1](x) if model.gated else inner.relu())

    class Patches(nn.Conv2d):
        def forward(self, x):
            x = super().forward(x).flatten(2).transpose(1, 2)
            return torch.cat([torch.empty(samples, 1, h), x], dim=1)

    class First(nn.Module):
        def forward(self, x):
            return x[:, 0]

    layers = [Layer() for _ in range(model.layers)]
    if model.image:
        inputs = torch.empty(samples, 3, model.image, model.image)
        first = Patches(3, h, model.patch, stride=model.patch)
        head = First(), nn.Linear(h, model.classes)
    else:
        inputs = torch.zeros(samples, sequence, dtype=torch.long)
        first = nn.Embedding(model.vocab, h)
        head = (nn.Linear(h, model.vocab, bias=False),)
    return nn.Sequential(first, *layers, *head), inputs


def counted_by_torch(model, samples, sequence):
    """(forward, backward) FLOPs of the matrix products of a model."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        module, inputs = of_torch(model, samples, sequence)
        with FlopCounterMode(display=False) as forward:
            loss = module(inputs).sum()
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
    one, two = (replace(whole, layers=layers) for layers in (1, 2))
    first, both = (model.forward_flops(samples, sequence) for model in (one, two))
    rest = (whole.layers - 2) * (both - first)
    assert whole.forward_flops(samples, sequence) == both + rest


MODELS = [TINY, GATED, MLA, "gpt2-large", "qwen2.5-3b", "vit-huge", "mixtral-8x7b", "deepseek-v2-lite", "dlrm-a",
          "t5-11b", "mamba2-2.7b", "jamba-1.5-large", "nemotron-h-8b"]  # fmt: skip


def flat(stages):
    return [block for stage in stages for block in stage]


def total_flops(blocks):
    return sum(op.flops for block in blocks for op in block.ops)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_blocks_add_up_to_the_model(model):
    model = mm.model(model) if isinstance(model, str) else model
    parts = flat(blocks(model, UNFUSED))
    assert total_flops(parts) == pytest.approx(model.forward_flops(1), rel=1e-12)
    held = sum(block.parameters for block in parts)
    assert held == pytest.approx(model.parameters, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "name"),
    cells("""
    tp2 | tiny
    pp2 | tiny
    dp2.cp2 | tiny
    dp2.cp2.ulysses | tiny
    tp4.pp2 | tiny
    dp4.ep4 | mla
    dp2.ep2.tp2.cp2 | mla
    tp4 | t5-11b
    tp8.pp4 | nemotron-h-8b
    dp2.ep2.tp8.pp3 | jamba-1.5-large
    pp4 | mamba2-2.7b
    dp2.tp2.pp2 | bert-large
    """),
)
def test_devices_share_the_work_of_a_model(plan, name):
    """Summed over the devices of a replica; experts of a device take the tokens that
    come from ep devices.
    """
    plan = replace(mm.Plan.parse(plan), attention="unfused")
    model = {"tiny": TINY, "mla": MLA}.get(name) or mm.model(name)
    whole = total_flops(flat(blocks(model, plan))) * plan.tp * plan.cp
    assert whole == pytest.approx(model.forward_flops(1), rel=1e-12)


@pytest.mark.parametrize(
    ("model", "sequence", "share", "tile"),
    [
        (TINY, [4096], 0.5, 0.02),
        (mm.model("vit-huge"), [], 1, 1e-6),
        (mm.model("bert-large"), [512], 1, 1e-6),
    ],
    ids=str,
)
def test_flash_attention_computes_the_causal_half(model, sequence, share, tile):
    """Half, and half a tile per row; of an image and of an encoder all."""
    flash, full = (
        sum(map(core_flops, blocks(model, plan, *sequence)[0]))
        for plan in (mm.Plan(), UNFUSED)
    )
    assert flash / full == pytest.approx(share, abs=tile)


def test_windowed_layers_attend_to_fewer_tokens():
    model = replace(TINY, window=256, full_every=2)
    core = map(core_flops, blocks(model, mm.Plan(), 8192)[0])
    first, second, third, fourth = filter(None, core)
    assert first == third < second / 10 and second == fourth


def flops_by(table, *keys):
    return table.groupby(list(keys))["flops"].sum()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_phases_of_a_step(recompute):
    """Backward is twice the products; recompute repeats a layer, or its attention."""
    table = ops(TINY, mm.Plan(recompute=recompute, attention="unfused"))
    flops = flops_by(table, "phase")
    assert flops["backward"] == pytest.approx(2 * flops["forward"])
    of = flops_by(table, "phase", "op")["forward"]
    again = {
        "none": 0.0,
        "selective": of["scores"] + of["values"],
        "full": of.sum() - of["logits"],
    }
    assert flops.get("recompute", 0.0) == pytest.approx(again[recompute])


def test_attention_is_a_kind_and_flash_computes_it_two_and_a_half_times():
    core = ops(TINY, UNFUSED).query("op in ('scores', 'values')")
    assert set(core["kind"]) == {"attention"}
    fused = flops_by(ops(TINY, mm.Plan()), "kind", "phase")["attention"]
    assert fused["backward"] == 2.5 * fused["forward"]


def test_adam_moves_30_bytes_of_each_parameter():
    adam = ops(TINY, mm.Plan(dp=4, zero=1)).query("phase == 'optimizer'").iloc[0]
    moved = adam["read_bytes"] + adam["written_bytes"]
    assert moved * 4 == pytest.approx(30 * TINY.parameters)


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
    groups = table[table["kind"] == "comm"].groupby(["phase", "collective", "group"])
    return groups["size_bytes"].sum().to_dict()


EACH = 2 * 128 * 64  # bytes of the activations of TINY
KV = 4 * 2 * (2 * 128 / 4 * 64)  # of keys and values of a quarter, in four layers
QKVO = 4 * 2 * 128 / 4 * 4 * 64


@pytest.mark.parametrize(
    ("plan", "collectives", "group", "bytes_of"),
    [
        ("tp2.nosp.full", "all_reduce", "tp", (9 * EACH, 9 * EACH, 8 * EACH)),
        ("tp2", "all_gather reduce_scatter", "tp", (9 * EACH, 9 * EACH)),
        ("cp4", "send_recv", "cp", (3 * KV, 7 * KV)),
        ("cp4.ulysses", "all_to_all", "cp", (QKVO, QKVO)),
        ("dp8.z3", "", "", ()),
    ],
)
def test_volumes_of_a_dense_model(plan, collectives, group, bytes_of):
    """Tensor parallel: 4 all-reduces of 2 b s h per layer, 2 in recompute; embedding and
    head one each [arXiv 1909.08053]. Ring: K and V (cp-1) times; back with their
    gradients. Ulysses: Q K V, then the output [arXiv 2309.14509].
    """
    phases = zip(("forward", "backward", "recompute"), bytes_of, strict=False)
    pairs = product(phases, collectives.split())
    expected = {(phase, name, group): size for (phase, size), name in pairs}
    assert moved(TINY, plan) == expected


# Of a mixture layer: 64 tokens of 64 channels in 16 bits, to two experts, there or back.
HOP = 2 * 64 * 2 * 64


@pytest.mark.parametrize(
    ("plan", "imbalance", "collective", "group", "size"),
    [
        ("dp4.ep4", 1.0, "all_to_all", "ep", 2 * 2 * HOP),
        ("dp4.ep4", 1.5, "all_to_all", "ep", 1.5 * 2 * 2 * HOP),
        ("dp4.ep4.cap125", 1.5, "all_to_all", "ep", 1.25 * 2 * 2 * HOP),
        ("dp4.ep4.tp2", 1.0, "all_to_all", "ep", 2 * HOP),
        ("dp4.ep4.tp2", 1.0, "all_gather", "etp", 2 * HOP),
        # embedding, attention, dense layer and shared experts
        ("dp4.ep4.tp2", 1.0, "all_gather", "tp", HOP / 2 * (1 + 3 + 1 + 2)),
        # whole experts on each device: nothing to gather
        ("dp4.ep8.etp1.tp2", 1.0, "all_to_all", "ep", 2 * HOP),
        ("dp4.ep8.etp1.tp2", 1.0, "all_gather", "etp", None),
    ],
)
def test_expert_parallel_volume(plan, imbalance, collective, group, size):
    """Two exchanges of k h bytes per token and mixture layer, of which there are two;
    over tp each device sends its share of the tokens.
    """
    sent = moved(MLA, plan, imbalance=imbalance)
    assert sent.get(("forward", collective, group)) == size


def test_biases_of_experts_are_added_in_fp32():
    table = ops(replace(MLA, mlp_bias=True), mm.Plan())
    table = table.query("op == 'expert biases' and phase == 'forward'")
    sizes = table["read_bytes"] + table["written_bytes"]
    assert sizes.tolist() == [28 * 64 * 2 * (2 * 48 + 64)] * 2


@pytest.mark.parametrize(
    ("layers", "plan", "sizes"),
    [
        (70, "pp12.embedding-layer.head-layer", [5, *[6] * 10, 5]),  # BLOOM-176B
        (126, "pp16.embedding-layer.head-layer", [7, *[8] * 14, 7]),  # Llama 3 405B
        (32, "pp4.embedding-layer.head-layer", [8, 9, 8, 7]),  # torchtitan
        (61, "pp16.last1", [*[4] * 15, 1]),
        (14, "pp4.first3.last3", [3, 4, 4, 3]),
        (8, "pp2.first3.last5", [3, 5]),
        (14, "pp2.v2.embedding-layer.head-layer", [7, 7]),
        (4, "pp1.embedding-layer.head-layer", [4]),
    ],
)
def test_uneven_stages_of_megatron(layers, plan, sizes):
    stages = chunk_layers(layers, mm.Plan.parse(plan))
    assert [sum(map(len, stage)) for stage in stages] == sizes
    assert sorted(i for chunk in flat(stages) for i in chunk) == list(range(layers))


def test_stages_are_even_with_ends_not_longer_and_chunks_take_turns():
    assert [len(layers) for layers in _stage_layers(10, 4)] == [2, 3, 3, 2]
    assert flat(_stage_layers(105, 35)) == list(range(105))
    stages = chunk_layers(8, mm.Plan(pp=2, interleave=2))
    assert stages == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    plan = mm.Plan(pp=2, interleave=2, embedding_as_layer=True, head_as_layer=True)
    uneven = chunk_layers(14, plan)
    assert [[len(chunk) for chunk in stage] for stage in uneven] == [[3, 4], [4, 3]]


@pytest.mark.parametrize(
    ("layers", "plan", "rule"),
    cells("""
    9 | pp4.first2 | pp x interleave = 4 x 1 & 7 layers & evenly over 3 stages
    8 | pp2.first3.last4 | do not leave 8 layers & pp x interleave = 2 x 1
    4 | pp4.first4 | do not leave 4 layers & pp x interleave = 4 x 1
    """),
)
def test_layers_that_stages_cannot_share_are_refused(layers, plan, rule):
    with refused(rule):
        chunk_layers(layers, mm.Plan.parse(plan))


@pytest.mark.parametrize(
    ("sizes", "flops"),
    [
        ((6, 512, 8, 2048, 64), 73_249_325_056),
        ((24, 1024, 32, 16384, 128), 3_895_199_793_152),
    ],
    ids=["t5-small", "t5-3b"],
)
def test_flops_of_an_encoder_and_a_decoder(sizes, flops):
    """Of two samples, as torch's counter has them of T5ForConditionalGeneration of
    transformers 5.23, 512 and 128 tokens.
    """
    layers, *widths = sizes
    shape = dict(zip(("hidden", "heads", "ffn", "head_dim"), widths, strict=True))
    words = " ".join(["*-"] * layers + ["*x-"] * layers)
    shape |= {"layers": 2 * layers, "blocks": words, "kv_heads": 0, "v_head_dim": 0}
    assert replace(mm.model("t5-11b"), **shape).forward_flops(2) == flops
