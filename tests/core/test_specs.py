import pytest

import madmax_lib as mm
from madmax_lib.specs import DLRM, Cluster, Device, Link, Transformer

GPT2_LARGE = Transformer("gpt2-large", 36, 1280, 20, 5120, 1024, 50257)
VIT_HUGE = Transformer("vit-huge", 32, 1280, 16, 5120, image=224, patch=14, classes=101)
QWEN = Transformer("qwen2.5-3b", 36, 2048, 16, 11008, 32768, 151936, kv_heads=2, gated=True, norm="rms",
                   positions="rope", attention_bias="qkv", mlp_bias=False)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "parameters"), [(GPT2_LARGE, 774_030_080), (VIT_HUGE, 630_894_181), (QWEN, 3_085_938_688)]
)
def test_parameters_are_exact(model, parameters):
    assert model.parameters == parameters == model.active_parameters


@pytest.mark.parametrize(
    ("model", "samples", "sequence", "flops"),
    [(GPT2_LARGE, 8, 1024, 1.419657e13), (VIT_HUGE, 16, None, 5.353407e12), (QWEN, 1, 2048, 1.387597e13)],
)
def test_forward_flops_equal_torchs_counter(model, samples, sequence, flops):
    """Counted by FlopCounterMode with MATH attention, printed with seven digits."""
    assert float(f"{model.forward_flops(samples, sequence):.6e}") == flops


def test_a_mixture_of_one_expert_is_dense_but_for_the_router():
    shape = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 32, "sequence": 4, "vocab": 16}
    dense = Transformer("dense", **shape)
    moe = Transformer("moe", **shape, experts=1, active_experts=1)
    assert moe.parameters - dense.parameters == 2 * 8
    assert moe.forward_flops(1) - dense.forward_flops(1) == 2 * 2 * 4 * 8


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("deepseek-v3", 671_026_419_200, 37e9),  # released weights without the multi-token module: 671B, 37B active
        ("deepseek-v2", 235_741_434_880, 21e9),
        ("deepseek-v2-lite", 15_706_484_224, 2.4e9),  # without the embedding's 0.2B
        ("gpt-oss-120b", 116_829_156_672, 5.1e9),  # without the embedding's 0.6B
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
    ],
)
def test_mixtures_count_as_published(name, parameters, active):
    model = mm.model(name)
    assert model.parameters == parameters
    embedding = model.embedding_parameters if name in ("deepseek-v2-lite", "gpt-oss-120b") else 0
    assert model.active_parameters - embedding == pytest.approx(active, rel=0.03)


def test_latent_attention_in_closed_form():
    """DeepSeek-V3, one layer, by hand [arXiv 2412.19437, section 4.2]; scores have 192 channels, values 128."""
    model = mm.model("deepseek-v3")
    down, up = 7168 * (1536 + 512 + 64), 1536 * 128 * 192 + 512 * 128 * 256
    assert model.attention_parameters == down + up + 128 * 128 * 7168 + 1536 + 512
    core = model.forward_flops(1, 2) - 2 * model.forward_flops(1, 1)
    assert core == pytest.approx(61 * 2 * (4 - 2) * 128 * (192 + 128))


def test_every_second_layer_has_a_window():
    model = mm.model("gpt-oss-120b")
    assert [model.layer_window(layer) for layer in range(4)] == [128, 0, 128, 0]
    assert GPT2_LARGE.layer_window(0) == 0


def test_dlrm_counts_of_the_paper():
    model = DLRM("dlrm-a", 4096, 2_080_000, 94, 15, 10, 10, 3994)
    assert model.parameters == pytest.approx(801.2e9, rel=1e-3)
    assert model.forward_flops(1) == pytest.approx(638.1e6, rel=1e-3)


def test_peak_falls_back_to_the_next_wider_dtype():
    device = Device("v100", 16e9, 900e9, {"fp32": 15.7e12, "fp16": 125e12})
    assert device.peak("bf16") == device.peak("fp8") == device.peak("nvfp4") == 125e12
    assert device.peak("tf32") == 15.7e12
    with pytest.raises(ValueError, match="v100 has no peak for dtype 'fp64'; it has fp32, fp16"):
        device.peak("fp64")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "nvfp4"])
def test_a_device_without_half_precision_has_no_peak_for_it(dtype):
    with pytest.raises(ValueError, match=f"old has no peak for dtype '{dtype}'; it has fp32"):
        Device("old", 8e9, 200e9, {"fp32": 5e12}).peak(dtype)


def test_cluster_counts_devices():
    device = Device("d", 1, 1, {})
    assert Cluster("c", device, 8, 16, Link("a", 1), Link("b", 1)).world_size == 128


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("d", -1, 1, {}), "d: memory_bytes=-1 must be positive"),
        (lambda: Link("l", 0), "l: bandwidth_bytes_per_s=0 must be positive"),
        (lambda: Transformer("t", 2, 10, 3, 40), "t: hidden=10 is not a multiple of heads=3"),
        (lambda: Transformer("t", 2, 12, 3, 40, kv_heads=2), "kv_heads=2 does not divide heads=3"),
        (lambda: Transformer("t", 2, 12, 3, 40, norm="batch"), "norm='batch' is not one of layer, rms"),
        (lambda: Transformer("t", 2, 12, 3, 40, image=224, patch=15), "patch=15 does not divide image=224"),
        (lambda: Transformer("t", 2, 12, 3, 40, experts=4), r"active_experts=0 is not in 1..4"),
    ],
)
def test_bad_specs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
