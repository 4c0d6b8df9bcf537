"""Where every byte lies: closed forms per method, conservation, published fits and
limits.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from support import cells, local_or_skip, refused

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.catalog.models import Cluster, Host, Link, Transformer
from madmax_lib.papers.studies.memory_wall import shape as seed_model
from madmax_lib.plan.case import Case
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.simulator.offload.fits import fits, gpt_shape, largest_model
from madmax_lib.simulator.offload.placement import (
    METHODS,
    Policy,
    _chunk_waste,
    _packed,
    _tensor_sizes,
    bytes_by_place,
    host_of,
    split_of,
)

V100 = replace(mm.cluster("dgx-2"), devices_per_node=1)
FOUR = mm.cluster("hetero-4xv100")
EIGHT = mm.cluster("patrickstar-8xv100")
H100 = mm.cluster("dgx-h100")
STATES = ["weights", "gradients", "optimizer"]
FOUR_LAYERS = gpt_shape(512, 4)
STATIC = Policy(share=1.0)
SHAPES = catalog.table("papers/studies/hetero_models").set_index("name")


def fit(model, cluster, plan, batch, **options):
    options = {"dtype": "fp16", "global_batch": batch} | options
    return fits(model, cluster, mm.Plan.parse(plan), **options)


def states(result, place):
    table = result.table[result.table["place"] == place]
    return table.loc[table["component"].isin(STATES), "size_bytes"].sum()


# arXiv 2101.06840 keeps 2 P on the device, the hosts share 14 P; arXiv 2104.07857 has
# 20 P on NVMe.
@pytest.mark.parametrize(
    ("plan", "device", "host", "nvme"),
    cells("""
    dp8.z2.offload-optimizer | 2 | 14 | 0
    dp8.z3.offload-all | 0 | 27.0 | 0
    dp8.offload-chunks | 0 | 14 | 0
    dp8.z3.offload-chunks | 0 | 14 | 0
    dp8.z3.offload-nvme | 0 | 0 | 20
    """),
)
def test_bytes_per_parameter(plan, device, host, nvme):
    model = seed_model("gpt2_3b")
    result = fit(model, mm.cluster("dgx-a100"), f"{plan}.full", 8, policy=STATIC)
    for place, held in {"device": device, "host": host, "nvme": nvme}.items():
        each = states(result, place) / model.parameters
        assert each == pytest.approx(held, rel=1e-9), place


def test_host_memory_of_deepspeeds_estimator():
    """It prints 1.52 GB (2^30) of host memory for the 60.5e6 parameters of t5-small
    under ZeRO-3 with full offload.
    """
    method = METHODS["all"]
    each = method.buffer * (method.weights + method.gradients + method.optimizer)
    assert each * 60_506_624 / 2**30 == pytest.approx(1.52, abs=0.005)


@pytest.mark.parametrize("offload", METHODS)
@given(share=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_no_state_is_lost(offload, share):
    """What leaves the device arrives, times the method's buffer; the tails of chunks
    are extra.
    """
    method = METHODS[offload]
    zero = 2 if offload == "optimizer" else 3
    plan = mm.Plan(dp=4, zero=zero, offload=offload, recompute="full")
    case = Case(FOUR_LAYERS, FOUR, plan, global_batch=4)
    sizes = bytes_by_place(case, share, Policy())
    for name in STATES:
        sharded = 1 if offload == "optimizer" and name == "weights" else 4
        whole = getattr(method, name) * FOUR_LAYERS.parameters / sharded
        kept, left = sizes[name, "device"].sum(), sizes[name, method.to].sum()
        assert kept + left / method.buffer == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("offload", METHODS)
def test_more_off_the_device_is_less_on_it(offload):
    plan = f"z3.full.offload-{offload}"
    margins = [
        fit(FOUR_LAYERS, V100, plan, 1, policy=Policy(share)).margins_bytes["device"]
        for share in (0, 0.3, 0.7, 1)
    ]
    assert (np.diff(margins) > 0).all()


@pytest.mark.parametrize(
    ("share", "states_off", "weights_off"),
    [(0, 0, 0), (6 / 14, 0.5, 0), (12 / 14, 1, 0), (13 / 14, 1, 0.5), (1, 1, 1)],
)
def test_optimizer_states_leave_first(share, states_off, weights_off):
    split = split_of(METHODS["chunks"], share)
    assert (split.states, split.weights) == pytest.approx((states_off, weights_off))


def test_gradients_wait_on_the_device_where_they_are_reduced_once():
    """ZeRO-1 over two devices sums 2 bytes per parameter over its micro-batches; ZeRO-2
    sends each one down.
    """
    two = replace(V100, devices_per_node=2)
    summed, sent = (
        fit(FOUR_LAYERS, two, f"dp2.{zero}.offload-optimizer", 8, policy=STATIC)
        for zero in ("z1", "z2")
    )
    more = states(summed, "device") - states(sent, "device")
    assert more / FOUR_LAYERS.parameters == pytest.approx(2)


def test_checkpoints_of_activations_go_to_the_host():
    model, plan = seed_model("gpt2_10b"), "dp8.z3.mb8.full.offload-all"
    here, there = (
        fit(model, H100, plan, 64, policy=Policy(share=1.0, checkpoints=c))
        for c in (False, True)
    )
    table = there.table.query("component == 'activations' and place == 'host'")
    # s b h in 16 bits per layer, and dropout
    each = table["size_bytes"].item() / 8
    assert each == pytest.approx(2 * 8 * 1024 * 4096 * 50, rel=0.03)
    assert there.margins_bytes["device"] > here.margins_bytes["device"]


def test_without_offload_it_is_the_memory_model():
    model, cluster = mm.model("llama-7b"), mm.cluster("dgx-a100")
    plan = mm.Plan.parse("dp4.pp2.z1.full")
    result = fits(model, cluster, plan, global_batch=64)
    peak = peak_bytes(memory(model, plan, global_batch=64))
    assert result.margins_bytes == {"device": usable_bytes(cluster.device) - peak}
    assert result.fits and np.isnan(result.share)
    assert set(result.table["place"]) == {"device"}


@pytest.mark.parametrize("name", ["h100-80", "b200"])
def test_a_device_with_other_memory_has_other_room(name):
    device = catalog.device(name)
    half = replace(device, memory_bytes=device.memory_bytes / 2)
    assert usable_bytes(half) == pytest.approx(usable_bytes(device) / 2)


def test_experts_are_shared_over_what_expert_parallelism_leaves():
    model = Transformer("moe", 4, 512, 8, 2048, 256, 1024, experts=8, active_experts=2)
    eight = replace(V100, devices_per_node=8)
    plan = "dp8.ep4.z3.full.offload-chunks"
    result = fit(model, eight, plan, 8, policy=STATIC)
    assert states(result, "host") == pytest.approx(14 * model.parameters, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "empty"),
    [([4, 4], 0), ([5, 4, 3], 4), ([9], 0), ([3, 9, 3], 2), ([1] * 7, 1)],
)
def test_packing_in_chunks_of_8(sizes, empty):
    assert _packed(sizes, 8) == pytest.approx(empty / (sum(sizes) + empty))


ZOO = """
    gpt2-large gpt3-175b llama-7b mixtral-8x7b vit-huge deepseek-v3 qwen3-30b-a3b
"""


@pytest.mark.parametrize("name", ZOO.split())
def test_tensors_hold_all_parameters(name):
    model = mm.model(name)
    assert sum(_tensor_sizes(model)) == pytest.approx(model.parameters, rel=1e-6)


@pytest.mark.parametrize("size", [32, 64, 100, 160])
def test_the_best_chunk_wastes_no_more_than_others(size):
    model = seed_model("gpt2_10b")
    waste = _chunk_waste(model)
    assert 0 <= waste < 0.02 and waste <= _packed(_tensor_sizes(model), size * 2**20)


@pytest.mark.parametrize("name", SHAPES.index)
def test_shapes_of_the_seed(name):
    published = float(SHAPES.at[name, "params_e9"])
    assert seed_model(name).parameters / 1e9 == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize(
    ("gradient_bytes", "largest"), [(0, "gpt2_10b"), (2, "gpt2_10b"), (4, "gpt2_9b")]
)
@pytest.mark.parametrize("name", ["gpt2_9b", "gpt2_10b", "gpt2_14b"])
def test_static_offload_of_the_seed(name, gradient_bytes, largest):
    """4 V100-32GB and 192 GB: with chunks that gradients reuse 10B fits too, with 18
    bytes 9.1B is the limit.
    """
    model, policy = seed_model(name), Policy(share=1.0, gradient_bytes=gradient_bytes)
    result = fit(model, FOUR, "dp4.mb4.full.offload-chunks", 16, policy=policy)
    assert result.fits == (model.parameters <= seed_model(largest).parameters)
    each = states(result, "host") / model.parameters
    assert each == pytest.approx(14 + gradient_bytes)
    assert result.margins_bytes["device"] > 20e9


@pytest.mark.parametrize(("name", "by_half"), [("gpt2_20b", True), ("gpt2_40b", False)])
def test_h100_is_not_bound_by_its_host(name, by_half):
    model, plan = seed_model(name), "mb4.full.offload-chunks"
    result = fit(model, H100, f"dp8.{plan}", 32, policy=STATIC)
    assert result.fits and result.margins_bytes["host"] > 1e12
    asked = replace(H100.host, memory_bytes=500e9)  # as its launch script does
    half = replace(H100, devices_per_node=4, host=asked)
    assert fit(model, half, f"dp4.{plan}", 16, policy=STATIC).fits == by_half


def test_14b_of_the_seed_and_18b_of_patrickstar_need_the_devices():
    """252 GB of chunks and 240 GB of host: with the share of the devices it fits, by
    the host alone it does not. Its first version had 12B, 168 GB.
    """
    model, plan = gpt_shape(6144, 39), "dp8.mb4.full.offload-chunks"
    assert model.parameters == pytest.approx(18e9, rel=0.01)
    assert fit(model, EIGHT, plan, 32).fits
    shared = fit(seed_model("gpt2_14b"), FOUR, "dp4.mb4.full.offload-chunks", 16)
    assert shared.fits and 0.3 < shared.share < 0.95
    alone = fit(model, EIGHT, plan, 32, policy=STATIC)
    assert not alone.fits
    assert alone.margins_bytes["device"] > 0 > alone.margins_bytes["host"]
    assert fit(gpt_shape(6144, 26), EIGHT, plan, 32, policy=STATIC).fits


# PatrickStar 68B; ZeRO-Offload 13B; ZeRO-3 Offload 40B; ZeRO-Offload with tp 16, 70B;
# ZeRO-Infinity, 1T on a DGX-2, and the same without NVMe
@pytest.mark.parametrize(
    ("shape", "cluster", "plan", "batch", "fitting"),
    cells("""
    (8192, 120) | dgx-a100-40 | dp8.mb4.full.offload-chunks | 32 | False
    (5120, 50) | one | z2.full.offload-optimizer | 1 | False
    (8192, 50) | one | z2.full.offload-optimizer | 1 | False
    (8192, 86) | dgx-2 | tp16.full.offload-optimizer | 8 | True
    (25600, 128) | dgx-2 | dp16.z3.full.offload-nvme | 16 | True
    (25600, 128) | dgx-2 | dp16.z3.full.offload-all | 16 | False
    """),
)
def test_published_sizes(shape, cluster, plan, batch, fitting):
    """Beside those of `papers.studies.memory_facts`."""
    cluster = V100 if cluster == "one" else mm.cluster(cluster)
    assert fit(gpt_shape(*shape), cluster, plan, batch).fits == fitting


@pytest.mark.parametrize(
    "row",
    catalog.table("papers/studies/scale_limits").to_dict("records"),
    ids=lambda row: f"{row['system']} {row['params_e9']}",
)
def test_limits_reach_what_was_published(row):
    """A published size is a lower bound of what fits; ours is at most twice as large
    where the host was full. On H100 the seed stopped at its largest shape.
    """
    cluster = replace(mm.cluster(row["cluster"]), devices_per_node=int(row["devices"]))
    published_bytes = float(row["host_memory_gb"]) * 1e9
    assert cluster.host.memory_bytes == pytest.approx(published_bytes, rel=0.03)
    largest = largest_model(cluster, row["method"])[0].parameters / 1e9
    most = np.inf if row["cluster"] == "dgx-h100" else 2
    assert 1 < largest / float(row["params_e9"]) < most


@pytest.mark.parametrize(
    "ladder", ["ddp zero-1 zero-2 zero-3", "ddp zero-offload", "chunks-static chunks"]
)
def test_methods_in_order(ladder):
    sizes = [largest_model(FOUR, method)[0].parameters for method in ladder.split()]
    assert sizes == sorted(set(sizes))


def test_the_next_layer_does_not_fit():
    model, plan, result = largest_model(FOUR, "zero-offload")
    deeper = gpt_shape(model.hidden, model.layers + 1)
    assert result.fits
    assert not fits(deeper, FOUR, plan, global_batch=4, dtype="fp16").fits


@pytest.mark.parametrize("column", ["hidden", "layers", "heads", "params_e9"])
def test_data_are_those_of_the_shared_files(column):
    ours = SHAPES.drop("gpt2_9b")[column].astype(float)
    theirs = pd.read_csv(local_or_skip("seed_runs") / "iisc_gpt_models.csv")[column]
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-3)


ONE = Link("l", 1e9)
SMALL = Cluster("c", replace(FOUR.device, memory_bytes=1e9), 1, 1, ONE, ONE)


@pytest.mark.parametrize(
    ("call", "arguments", "rule"),
    [
        (fit, (FOUR_LAYERS, FOUR, "dp4.z3.offload-nvme", 4), "offload=nvme & 4xv100"),
        (fit, (mm.model("dlrm-a"), FOUR, "dp4.z3.offload-all", 4), "dlrm-a & transformers"),
        (Policy, (1.5,), "share=1.5 & 0..1"),
        (partial(Policy, gradient_bytes=-1), (), "gradient_bytes=-1 & negative"),
        (largest_model, (FOUR, "ddq"), "method='ddq' & one of ddp, zero-1"),
        (largest_model, (SMALL, "ddp"), "not even 512 channels and 16 layers fit"),
        (host_of, (mm.cluster("rtx-3090-2"),), "rtx-3090-2 & data/hosts.csv has none"),
        (partial(Host, "h", 1.0, 1.0, 1.0, nvme_bytes=1.0), (), "nvme_bytes=1.0 & rates"),
    ],
)  # fmt: skip
def test_bad_input(call, arguments, rule):
    with refused(rule):
        call(*arguments)


def test_stacks_that_hold_what_the_usual_one_does_not_are_named():
    run = {"global_batch": 64}
    node = mm.cluster("dgx-h100", nodes=1)
    result = fits("gemma2-9b", node, "dp8.z3", **run)
    assert not result.fits and f"does under {result.stacks}" in repr(result)
    for stack in result.stacks.split():
        assert fits("gemma2-9b", node, "dp8.z3", software=stack, **run).fits
    assert not fits("gemma2-9b", node, "dp8", **run).stacks


def test_hosts_of_users(tmp_path, monkeypatch):
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path))
    rows = "cluster,quantity,value,unit\nrtx-3090-2,memory,64,GB\n"
    links = "rtx-3090-2,memory_bandwidth,50,GB/s\nrtx-3090-2,link,25,GB/s\n"
    (tmp_path / "hosts.csv").write_text(rows + links)
    host = mm.cluster("rtx-3090-2").host
    assert np.isnan(host.tdp_w)
    host = replace(host, tdp_w=0.0)
    assert host == Host("host of rtx-3090-2", 64e9, 50e9, 25e9, tdp_w=0.0)
    (tmp_path / "hosts.csv").write_text(rows)
    with refused("hosts.csv: rtx-3090-2 & 'memory_bandwidth'"):
        mm.cluster("rtx-3090-2")


def test_a_named_stack_offloads_all_that_may_leave():
    """Where none is named the best share is searched, here next to nothing."""
    run = {"global_batch": 8, "sequence": 4096}
    step = ("llama3-8b", H100, "dp8.z3.offload-optimizer")
    stacks = ("deepspeed", None)
    assert [fits(*step, **run, software=stack).share for stack in stacks] == [1.0, 0.0]
    all_away, least = (
        mm.estimate(*step, **run, software=stack)["step_s"].item() for stack in stacks
    )
    policy = Policy(share=1.0)
    stated = mm.estimate(*step, **run, software="deepspeed", policy=policy)
    assert stated["step_s"].item() == all_away > 2 * least
    with pytest.warns(UserWarning, match="as DeepSpeed holds it, not megatron-core"):
        fits(*step, **run, software="megatron-core")
