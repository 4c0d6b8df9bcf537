"""A Timeline made with known constants gives them back, a recorded one is met, and one
of another run refused.
"""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip, make_timeline

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.base.units import NS_PER_S
from madmax_lib.calibration.job.attention import check_attention
from madmax_lib.calibration.trace import _with_cores, fit_timeline, kernel_seconds
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Cluster, Device, Link, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.read.kineto import read_trace

MODEL, CLUSTER = mm.model("gpt2-large"), mm.cluster("dgx-h100")
TRUTH = {
    "gemm_efficiency:hopper-16": 0.8,
    "attention_efficiency:hopper-pytorch": 0.25,
    "pointwise_factor:eager": 2.5,
}
RUN = Case(MODEL, CLUSTER, Plan(micro_batch=8), 8, 1024, software="fsdp2")
MACHINE = Parameters(constants=dict(shipped().constants) | TRUTH)


# a kernel of each part, as a profiler names it
KERNELS = {
    "gemm_s": "sm90_xmma_gemm_bf16",
    "attention_s": "flash_fwd_kernel",
    "pointwise_s": "vectorized_elementwise_kernel",
    "optimizer_s": "multi_tensor_apply_kernel",
}


def timeline(steps=5, noise=0.0, seed=0):
    """Not a recording: a run with known constants, one kernel a cause and step."""
    random, rows, now_ns = np.random.default_rng(seed), [], 0
    truth = step_seconds()
    for step in range(steps):
        begin_ns = now_ns
        for cause, name in KERNELS.items():
            factor = np.exp(noise * random.standard_normal())
            length_ns = round(truth[cause] * factor * NS_PER_S)
            rows.append((0, 7, "compute", name, now_ns, length_ns, step))
            now_ns += length_ns
        # the loss is read: the step ends
        now_ns = max(now_ns, begin_ns + round(truth["step_s"] * NS_PER_S))
        rows.append((0, 8, "memcpy", "Memcpy DtoH", now_ns - 1, 1, step))
    made = make_timeline([row[:6] for row in rows], device="h100-80")
    spans = made.spans.assign(step=np.array([row[6] for row in rows], dtype=np.int32))
    return Timeline(spans, replace(made.meta, source="simulated"))


def step_seconds():
    """What the run takes by cause beside no products, the head among them."""
    alone = replace(RUN, plan=replace(RUN.plan, overlap_tp=False))
    parts = {k: float(v[0]) for k, v in step_time(Steps.of(alone), MACHINE).items()}
    return parts | {"gemm_s": parts["gemm_s"] + parts["head_s"]}


def seconds():
    """What the run takes by cause, from the closed form."""
    parts = step_time(Steps.of(RUN), MACHINE)
    return {name: float(value[0]) for name, value in parts.items()}


def test_seconds_by_cause():
    expected, seconds_by_cause = seconds(), kernel_seconds(timeline())
    expected["gemm_s"] += expected["head_s"]
    for cause in ("attention_s", "gemm_s", "step_s"):
        assert seconds_by_cause[cause] == pytest.approx(expected[cause], abs=1e-8)
    with pytest.raises(ValueError, match="no compute span"):
        kernel_seconds(make_timeline([(0, 1, "comm", "ncclKernel", 0, 5)]))


@pytest.mark.parametrize(
    ("rows", "optimizer_ns"),
    [
        # on a CPU what runs in the call; plain arithmetic outside of it is pointwise
        ([(0, -1, "compute", "aten::mul_", 25, 10), (0, -1, "compute", "aten::mul_", 5, 7)], 10),
        # on a GPU what is launched in it, on its own rank
        ([(0, -1, "cpu", "cudaLaunchKernel", 30, 2, 1), (0, 7, "compute", "mul", 90, 9, 1)], 9),
        ([(1, -1, "compute", "aten::mul_", 25, 10)], 0),
        ([(0, -1, "compute", "aten::addcdiv_", 60, 4)], 4),  # by its name
    ],
)  # fmt: skip
def test_what_an_optimizer_calls_is_its_work(rows, optimizer_ns):
    call = (0, -1, "annotation", "Optimizer.step#AdamW.step", 20, 30)
    trace = make_timeline([call, *rows])
    by_cause = kernel_seconds(trace.select(ranks=[rows[-1][0]]))
    assert by_cause["optimizer_s"] == pytest.approx(optimizer_ns * 1e-9)


def test_constants_come_back():
    fitted = fit_timeline(timeline(), RUN)
    for name, value in TRUTH.items():
        assert fitted.constants[name] == pytest.approx(value, rel=0.05), name
        low, high = fitted.intervals[name]
        assert low <= fitted.constants[name] <= high
    assert len(fitted.covariance) == len(fitted.fitted) == 5
    assert fitted.provenance["step_s"] == pytest.approx(seconds()["step_s"], abs=1e-8)
    nodes, plan = mm.cluster("dgx-h100", nodes=2), Plan(dp=16, zero=3)
    larger = estimate(
        mm.model("llama2-7b"), nodes, plan, global_batch=16, parameters=fitted
    )
    assert np.isfinite(larger["step_s"][0])
    noisy = timeline(steps=20, noise=0.03, seed=1)
    assert noisy.spans["step"].nunique() == 20 and noisy.meta.source == "simulated"
    fitted = fit_timeline(noisy, RUN)
    assert {name: fitted.constants[name] for name in TRUTH} == pytest.approx(
        TRUTH, rel=0.08
    )


def test_the_link_follows_large_all_reduces():
    """10 ms on 8 devices; small messages show latency and leave the share alone."""
    expected = {
        (8, 1, 1e9): 2 * 7 / 8 * 1e9 / 0.01 / 450e9,
        (1, 4, 1e5): shipped().constants["link_share:nvlink4"],
    }
    all_reduce = (
        0,
        9,
        "comm",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        0,
        10_000_000,
    )
    for (dp, tp, size_bytes), share in expected.items():
        rows = [(0, 7, "compute", "gemm", 0, 100_000_000), all_reduce]
        step = make_timeline(rows, device="NVIDIA H100 80GB HBM3", world_size=dp * tp)
        step.spans["size_bytes"] = [np.nan, size_bytes]
        fitted = fit_timeline(
            step,
            replace(RUN, plan=Plan(dp=dp, tp=tp, micro_batch=8), global_batch=8 * dp),
        )
        assert fitted.constants["link_share:nvlink4"] == pytest.approx(share)


# Recorded traces: two small models, one core a rank

CORE = Device("core", 64e9, 1e10, {"fp32": 1.2e11, "bf16": 1.2e11}, family="cpu")
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 512}
GPT = Transformer("gpt", **SIZES, vocab=512, sequence=64, tied=False)
VIT = Transformer("vit", **SIZES, image=32, patch=4, classes=10)
RECORDED = {"gpt-ddp": (GPT, "dp2"), "gpt-fsdp": (GPT, "dp2.z3"), "gpt-memory": (GPT, "dp1"),
            "vit-ddp": (VIT, "dp2"), "vit-fsdp": (VIT, "dp2.z3")}  # fmt: skip


def desk(devices):
    return Cluster("desk", CORE, 1, devices, Link("loopback", 2e9), Link("none", 1e9))


def recorded_case(name, **changes):
    model, plan = RECORDED[name]
    plan = Plan.parse(f"{plan}.mb8")
    case = Case(
        model, desk(plan.world_size), plan, 8 * plan.dp, None, "fp32", "workbench"
    )
    return replace(case, **changes)


def step_interval(case, parameters):
    row = estimate(case.model, case.cluster, case.plan, global_batch=case.global_batch, dtype=case.dtype,
                   software=case.software, parameters=parameters).iloc[0]  # fmt: skip
    return row["low_s"], row["high_s"]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_lies_in_its_own_interval_and_its_parts_are_met(name):
    trace, case = read_trace(PROJECT / "traces" / name), recorded_case(name)
    fitted = fit_timeline(trace, case)
    low_s, high_s = step_interval(case, fitted)
    measured_s = kernel_seconds(trace)["step_s"]
    assert low_s <= measured_s <= high_s and fitted.provenance["step_s"] == measured_s
    (errors,) = fitted.provenance["errors"]
    assert set(errors) == {
        "gemm_s",
        "attention_s",
        "pointwise_s",
        "optimizer_s",
        "step_s",
    }
    assert (
        max(
            abs(errors[part])
            for part in ("gemm_s", "attention_s", "pointwise_s", "step_s")
        )
        < 0.3
    )
    kinds = {
        "ddp": {"all_reduce", "reduce_scatter"},
        "fsdp": {"all_gather", "all_reduce", "reduce_scatter"},
    }
    shown = {
        key.split()[0] for key in fitted.collectives
    }  # what the ranks own collectives took
    assert shown == kinds.get(name.split("-")[1], set())


def test_several_traces_share_their_constants_and_each_lies_in_its_interval():
    names = ("gpt-ddp", "gpt-fsdp", "vit-ddp")
    traces, cases = (
        [read_trace(PROJECT / "traces" / name) for name in names],
        [*map(recorded_case, names)],
    )
    fitted = fit_timeline(traces, cases)
    assert len(fitted.provenance["errors"]) == 3
    for trace, case in zip(traces, cases, strict=True):
        low_s, high_s = step_interval(case, fitted)
        assert low_s <= kernel_seconds(trace)["step_s"] <= high_s
    with pytest.raises(
        ValueError, match="3 traces and 1 cases: each trace needs its own"
    ):
        fit_timeline(traces, cases[:1])


def _plan(text):
    return {"plan": Plan.parse(text)}


WRONG = [  # trace, changes of its case, what is said
    (
        "gpt-ddp",
        {"model": "llama3-70b", "cluster": mm.cluster("dgx-h100"), **_plan("tp8")},
        "a trace of a CPU, but",
    ),
    (
        "gpt-ddp",
        {"model": "gpt2", "sequence": 64},
        "FLOPs of a rank and step were traced",
    ),
    (
        "gpt-memory",
        {"model": "vit-huge", "sequence": None},
        "FLOPs of a rank and step were traced",
    ),
    ("gpt-ddp", {"global_batch": 64}, "FLOPs of a rank and step were traced"),
    ("gpt-fsdp", {"sequence": 16}, "FLOPs of a rank and step were traced"),
    (
        "vit-ddp",
        {"model": GPT, "sequence": 64, "global_batch": 64},
        "FLOPs of a rank and step were traced",
    ),
    ("vit-ddp", {"dtype": "bf16"}, "products in fp32 were traced, but dtype=bf16"),
    (
        "gpt-ddp",
        {"cluster": desk(1), "global_batch": 8, **_plan("dp1.mb8")},
        "2 rank.s. on their own, but dp1",
    ),
    (
        "gpt-ddp",
        {"cluster": desk(4), "global_batch": 32, **_plan("dp4.mb8")},
        "2 rank.s. .* but dp4.mb8 has 4",
    ),
    (
        "gpt-memory",
        {"cluster": desk(2), "global_batch": 16, **_plan("dp2.mb8")},
        "1 rank.s. on their own, but dp2",
    ),
    (
        "gpt-ddp",
        _plan("dp2.z3.mb8"),
        "no all-gather, but dp2.z3.mb8 gathers parameters",
    ),
    (
        "gpt-fsdp",
        _plan("dp2.mb8"),
        "all-gathers of .* bytes a step, but dp2.mb8 gathers nothing",
    ),
    (
        "gpt-ddp",
        {"global_batch": 8, **_plan("pp2.mb8")},
        "no message between stages, but dp1.pp2.mb8 is a pipeline",
    ),
    (
        "gpt-ddp",
        {"cluster": replace(desk(2), device=replace(CORE, peak_flops={"fp32": 1e9}))},
        "of core's peak",
    ),
    (
        "gpt-ddp",
        {"cluster": replace(desk(2), device=replace(CORE, peak_flops={"fp32": 1e15}))},
        "of core's peak",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_a_trace_of_another_run_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        fit_timeline(
            read_trace(PROJECT / "traces" / name), recorded_case(name, **changes)
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-ddp", _plan("dp2.mb4"), "4 backward passes of attention in a step, but"),
        ("gpt-fsdp", {"sequence": 56}, "512 tokens a micro-batch .* has 448"),
        ("vit-ddp", {"global_batch": 32, **_plan("dp2.mb16")}, "a micro-batch"),
        (
            "gpt-ddp",
            {"global_batch": 16, **_plan("tp2.mb16")},
            "heads of attention on a rank, but dp1.tp2.mb16.* leaves",
        ),
    ],
)
def test_attention_tells_another_plan(name, changes, message):
    """Of plans whose ranks and FLOPs are the same."""
    trace = read_trace(PROJECT / "traces" / name)
    check_attention(trace, recorded_case(name))
    case = recorded_case(name, **changes)
    with pytest.raises(ValueError, match=message):
        check_attention(trace, case)
    how = {"global_batch": case.global_batch, "sequence": case.sequence}
    how |= {"dtype": "fp32", "software": "workbench", "timeline": trace}
    answer = mm.expect(case.model, case.cluster, case.plan, **how)
    assert answer.verdict == "cannot tell"


@pytest.mark.parametrize(
    ("cluster", "plan", "message"),
    [
        ("dgx-h100", "dp1.mb64.full", "attention is not computed again"),
        ("dgx-h200", "dp1.mb64", "a trace of NVIDIA H100 .* device is h200"),
        ("hgx-h800", "dp1.mb64", "a trace of NVIDIA H100 .* device is h800"),
    ],
)
def test_recompute_and_device_that_a_trace_contradicts(cluster, plan, message):
    how = {"global_batch": 64, "timeline": read_trace(PROJECT / "traces" / "vit-h100")}
    answers = [
        mm.expect("vit-huge", mm.cluster(name, devices=1), text, **how)
        for name, text in (("dgx-h100", "dp1.mb64"), (cluster, plan))
    ]
    assert [answer.verdict for answer in answers] == ["fine", "cannot tell"]
    assert re.search(message, answers[1].reason)


SHARED = [
    (
        "hta-samples/nccl_data.json.gz",
        "h100-80",
        "a trace of NVIDIA A100|a trace of A100",
    ),
    ("hta-samples/rank0.json.gz", "h100-80", "a trace of"),
    ("hta-samples/rank0.json.gz", "a100-80", "rank|FLOPs|peak|group"),
    ("param-dlrm-8xV100", "v100-32", "FLOPs|rank|peak|messages"),
    ("hta-samples/rank_non_gpu.json.gz", "a100-80", "a trace of a CPU|no compute"),
    ("tracelens-samples/owlv2_h100.json.gz", "h100-80", "FLOPs|peak|rank"),
]


@pytest.mark.parametrize(("name", "device", "message"), SHARED)
@pytest.mark.filterwarnings("ignore::madmax_lib.traces.read.events.TraceWarning")
@pytest.mark.parametrize("model, plan", [("llama3-8b", "tp8"), ("gpt2", "dp1")])
def test_traces_of_other_machines_and_models_are_refused(
    name, device, message, model, plan
):
    plan = Plan.parse(plan)
    cluster = Cluster(
        "node",
        catalog.device(device),
        1,
        plan.world_size,
        Link("nvlink4", 450e9),
        Link("ib", 5e10),
    )
    case = Case(model, cluster, plan, 8 * plan.dp, software="fsdp2")
    with pytest.raises(ValueError, match=message):
        fit_timeline(read_trace(local_or_skip(f"traces/{name}")), case)


def test_collectives_under_compute_of_a_cpu_are_timed_with_cores_of_their_own():
    """A small bucket that the backward pass starves is no slower, byte for byte, than a
    large one that nothing hides.
    """
    group = {"collective": "all_reduce", "ranks": 2, "nodes": 1}
    rows = [(1e6, 21e-3, 0), (1e6, 8e-3, 0), (9e6, 5.6e-3, 1), (9e6, 5.4e-3, 1)]
    table = pd.DataFrame(rows, columns=["size_bytes", "seconds", "exposed"])
    seconds = _with_cores(table.assign(**group)).set_index("size_bytes")["seconds"]
    assert seconds.to_dict() == pytest.approx({1e6: 5.5e-3 / 9, 9e6: 5.5e-3})
    # where nothing is exposed the fastest call is what there is
    alone = _with_cores(table.assign(**group, exposed=0)).set_index("size_bytes")
    assert alone["seconds"].to_dict() == pytest.approx({1e6: 8e-3, 9e6: 5.4e-3})
