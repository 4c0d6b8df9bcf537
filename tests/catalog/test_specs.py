from dataclasses import replace

import pytest
from support import cells, refused

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.catalog.models import Cluster, Device, Link, Transformer


@pytest.mark.parametrize(
    ("name", "samples", "sequence", "flops"),
    cells("""
    gpt2-large | 8 | 1024 | 1.419657e13
    vit-huge | 16 | None | 5.353407e12
    qwen2.5-3b | 1 | 2048 | 1.387597e13
    """),
)
def test_forward_flops_equal_torchs_counter(name, samples, sequence, flops):
    """Counted by FlopCounterMode with MATH attention, printed with seven digits; a
    dense model is active as a whole.
    """
    model = mm.model(name)
    assert float(f"{model.forward_flops(samples, sequence):.6e}") == flops
    assert model.parameters == model.active_parameters


def test_a_mixture_of_one_expert_is_dense_but_for_the_router():
    dense = Transformer("dense", 2, 8, 2, 32, sequence=4, vocab=16)
    moe = replace(dense, experts=1, active_experts=1)
    assert moe.parameters - dense.parameters == 2 * 8
    assert moe.forward_flops(1) - dense.forward_flops(1) == 2 * 2 * 4 * 8


@pytest.mark.parametrize(
    ("name", "active", "embedding_counts"),
    cells("""
    deepseek-v3 | 37e9 | True
    deepseek-v2 | 21e9 | True
    deepseek-v2-lite | 2.4e9 | False
    gpt-oss-120b | 5.1e9 | False
    qwen3-30b-a3b | 3.3e9 | True
    """),
)
def test_mixtures_activate_what_was_published(name, active, embedding_counts):
    model = mm.model(name)
    embedding = 0 if embedding_counts else model.embedding_parameters
    assert model.active_parameters - embedding == pytest.approx(active, rel=0.03)


def test_latent_attention_in_closed_form():
    """DeepSeek-V3, one layer, by hand [arXiv 2412.19437, section 4.2]; scores have 192
    channels, values 128.
    """
    model = mm.model("deepseek-v3")
    down = 7168 * (1536 + 512 + 64)
    up = 1536 * 128 * 192 + 512 * 128 * 256
    assert model.attention_parameters == down + up + 128 * 128 * 7168 + 1536 + 512
    core = model.forward_flops(1, 2) - 2 * model.forward_flops(1, 1)
    assert core == pytest.approx(61 * 2 * (4 - 2) * 128 * (192 + 128))


@pytest.mark.parametrize(
    ("name", "windows"), [("gpt-oss-120b", [128, 0] * 2), ("gpt2-large", [0] * 4)]
)
def test_every_second_layer_has_a_window(name, windows):
    assert [mm.model(name).layer_window(layer) for layer in range(4)] == windows


def test_dlrm_flops_of_the_paper():
    assert mm.model("dlrm-a").forward_flops(1) == pytest.approx(638.1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "nearest"),
    cells("""
    v100-32 | bf16 | fp16
    t4 | bf16 | fp16
    p100 | bf16 | fp16
    t4 | tf32 | fp32
    t4 | fp8 | fp16
    a100-80 | tf32 | tf32
    a100-80 | fp8 | bf16
    h100-80 | fp8 | fp8
    h100-80 | mxfp8 | fp8
    h100-80 | nvfp4 | fp8
    b200 | mxfp8 | mxfp8
    mi300x | fp8 | fp8
    mi355x | mxfp8 | mxfp8
    tpu-v5p | fp16 | bf16
    l40s | nvfp4 | fp8
    gb300 | nvfp4 | nvfp4
    """),
)
def test_a_device_computes_in_what_its_silicon_has(name, dtype, nearest):
    device = catalog.device(name)
    assert device.nearest(dtype) == nearest
    if nearest == dtype:
        assert device.peak(dtype) == device.peak_flops[dtype]
    else:
        with refused(name, f"not compute in {dtype}; give dtype='{nearest}'"):
            device.peak(dtype)


V100 = Device("v100", 16e9, 9e11, {"fp32": 2e13, "fp16": 1e14})
OLD = Device("old", 8e9, 2e11, {"fp32": 5e12})
EIGHT = Cluster("c", V100, 8, 16, Link("a", 2e9), Link("b", 1e9))
SMALL = Transformer("t", 2, 12, 3, 40)


def test_a_cluster_is_one_flat_network_unless_told():
    assert EIGHT.world_size == 128 and EIGHT.leaf_devices is EIGHT.nics_per_node is None
    assert EIGHT.oversubscription == 1 and not EIGHT.inter.in_network_reduction


@pytest.mark.parametrize(
    ("device", "dtype", "rule"),
    [
        (V100, "fp64", "v100 & not compute in fp64 & fp32, fp16"),
        (V100, "fp12", "dtype='fp12' & not one of fp64, fp32, tf32"),
        (OLD, "fp16", "old & not compute in fp16 & dtype='fp32'"),
    ],
)
def test_a_dtype_that_a_device_lacks_is_refused(device, dtype, rule):
    with refused(rule):
        device.peak(dtype)


@pytest.mark.parametrize(
    ("part", "field", "value", "rule"),
    [
        (EIGHT, "nodes", 1.5, "c: & whole number above zero"),
        (EIGHT, "devices_per_node", 0, "c: & whole number above zero"),
        (EIGHT, "nics_per_node", 0, "c: & whole number above zero"),
        (EIGHT, "leaf_devices", 12, "c: & whole nodes of 8"),
        (EIGHT, "oversubscription", 0.5, "c: & 1 or more"),
        (V100, "memory_bytes", -1, "v100: & positive"),
        (V100, "family", "Hopper", "v100: & one of ampere, hopper, blackwell, cpu"),
        (EIGHT.intra, "bandwidth_bytes_per_s", 0, "a: & positive"),
        (EIGHT.intra, "latency_s", -1e-6, "a: & not be negative"),
        (SMALL, "kv_heads", 2, "divide heads=3"),
        (SMALL, "norm", "batch", "one of layer, rms"),
        (replace(SMALL, image=224, patch=16), "patch", 15, "divide image=224"),
        (replace(SMALL, experts=4, active_experts=1), "active_experts", 0, "1..4"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_specs_are_refused(part, field, value, rule):
    with refused(f"{field}={value!r}", rule):
        replace(part, **{field: value})


def test_heads_that_do_not_divide_the_width_are_refused():
    with refused("t: & hidden=10 & multiple of heads=3"):
        Transformer("t", 2, 10, 3, 40)
