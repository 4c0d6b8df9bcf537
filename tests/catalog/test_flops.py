"""FLOPs as frameworks and papers count them: closed forms, and their own numbers."""

import pytest
from support import refused

import madmax_lib as mm
from madmax_lib.catalog import Transformer, conventions

LLAMA = {
    "gated": True,
    "norm": "rms",
    "positions": "rope",
    "attention_bias": "none",
    "mlp_bias": False,
    "tied": False,
}
# hidden 4096, 32 layers and heads, as in verl's tests/utils/test_flops_counter.py
OF_VERL = Transformer(
    "llama", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, **LLAMA
)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((512, 1024, 2048), 149226491215872), ((4096, 4096, 4096), 536372695793664)],
)
def test_verl_has_these_numbers_in_its_own_test(lengths, expected):
    each = [mm.flops(OF_VERL, sequence=s, convention="verl") for s in lengths]
    assert sum(map(float, each)) == pytest.approx(expected, rel=1e-9)


# FLOPs per token of Llama 3 8B at 8,192 tokens: N = 8,030,261,248 with a table of
# 128,256 x 4,096 rows; attention over 32 layers of 4,096 channels
N, TABLE = 8_030_261_248, 128_256 * 4_096
NORMS = 65 * 4_096
SCORES = 12 * 32 * 4_096 * 8_192


@pytest.mark.parametrize(
    ("convention", "per_token"),
    [
        ("model", 6 * (N - TABLE - NORMS) + SCORES),
        ("megatron-lm-2024", 6 * (N - TABLE - NORMS) + SCORES),
        ("nemo-rl", 6 * (N - TABLE - NORMS) + SCORES),
        ("megatron-bridge", 6 * (N - TABLE - NORMS) + SCORES / 2),
        ("maxtext", 6 * (N - TABLE - NORMS) + SCORES / 2),
        ("torchtitan", 6 * (N - TABLE) + SCORES),
        ("verl", 6 * (N - NORMS) + SCORES / 2),
        ("palm", 6 * N + SCORES),
        ("chinchilla", 6 * (N - NORMS) + SCORES * (1 + 9 / (12 * 128))),
        ("hardware", 8 * (N - TABLE - NORMS) + SCORES * 2 / 3 - 2 * TABLE),
    ],
)
def test_a_dense_model_by_hand(convention, per_token):
    count = mm.flops("llama3-8b", sequence=8192, convention=convention)
    assert count.per_token == pytest.approx(per_token, rel=1e-12)
    assert count.table["share"].sum() == pytest.approx(1)


def test_a_mixture_counts_the_experts_in_use_and_windows_where_they_are_known():
    active = mm.model("deepseek-v3").active_parameters
    count = mm.flops("deepseek-v3", sequence=4096, convention="torchtitan")
    table = 129_280 * 7_168
    scores = 6 * 61 * 128 * (192 + 128) * 4096
    assert count.per_token == pytest.approx(6 * (active - table) + scores, rel=1e-12)
    ours, bridge = (
        mm.flops("gemma3-4b", sequence=32768, convention=name).terms["scores"]
        for name in ("maxtext", "megatron-bridge")
    )
    assert 5 < bridge / ours < 6  # of 6 layers 5 see 1,024 tokens


def test_ours_is_three_forward_passes():
    for name in ("gpt2-large", "mamba2-2.7b", "t5-11b", "vit-base", "gpt-oss-20b"):
        model = mm.model(name)
        sequence = model.sequence or 4096
        expected = 3 * model.forward_flops(1, sequence)
        assert float(mm.flops(name, sequence=sequence)) == pytest.approx(expected)


def test_what_is_not_counted_is_refused():
    assert "megatron-lm" in set(conventions()["convention"])
    with refused("'6N' is not one of model, hardware, megatron-2021"):
        mm.flops("gpt2", convention="6N")
    with refused("must be a Transformer", error=(TypeError, ValueError)):
        mm.flops("dlrm-a")
