"""A Timeline made with known constants gives them back."""

from dataclasses import replace

import numpy as np
import pytest
from support import make_timeline

import madmax_lib as mm
from madmax_lib.calibration.trace import fit_timeline, kernel_seconds, kernel_timeline
from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.inputs import Steps
from madmax_lib.simulator.step.step_time import step_time

MODEL, CLUSTER = mm.model("gpt2-large"), mm.cluster("dgx-h100")
TRUTH = {"gemm_efficiency:hopper-16": 0.6, "attention_efficiency:hopper-pytorch": 0.25, "pointwise_factor:eager": 2.5}
RUN = Case(MODEL, CLUSTER, Plan(micro_batch=8), 8, 1024, software="fsdp2")
MACHINE = Parameters(constants=dict(shipped().constants) | TRUTH)


def timeline(**options):
    """A run with known constants."""
    return kernel_timeline(RUN, MACHINE, **options)


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


def test_constants_come_back():
    fitted = fit_timeline(timeline(), RUN)
    for name, value in TRUTH.items():
        assert fitted.constants[name] == pytest.approx(value, rel=0.05), name
        low, high = fitted.intervals[name]
        assert low <= fitted.constants[name] <= high
    assert len(fitted.covariance) == len(fitted.fitted) == 4
    assert fitted.provenance["step_s"] == pytest.approx(seconds()["step_s"], abs=1e-8)
    nodes, plan = mm.cluster("dgx-h100", nodes=2), Plan(dp=16, zero=3)
    larger = estimate(mm.model("llama2-7b"), nodes, plan, global_batch=16, parameters=fitted)
    assert np.isfinite(larger["step_s"][0])
    noisy = timeline(steps=20, noise=0.03, seed=1)
    assert noisy.spans["step"].nunique() == 20 and noisy.meta.source == "simulated"
    fitted = fit_timeline(noisy, RUN)
    assert {name: fitted.constants[name] for name in TRUTH} == pytest.approx(TRUTH, rel=0.08)


def test_the_link_follows_large_all_reduces():
    """10 ms on 8 devices; small messages show latency and leave the share alone."""
    expected = {1e9: 2 * 7 / 8 * 1e9 / 0.01 / 450e9, 1e5: shipped().constants["link_share:nvlink4"]}
    all_reduce = (0, 9, "comm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, 10_000_000)
    for size_bytes, share in expected.items():
        step = make_timeline([(0, 7, "compute", "gemm", 0, 1000), all_reduce], device="NVIDIA H100 80GB HBM3")
        step.spans["size_bytes"] = [np.nan, size_bytes]
        fitted = fit_timeline(step, replace(RUN, plan=Plan(dp=8, micro_batch=8), global_batch=64))
        assert fitted.constants["link_share:nvlink4"] == pytest.approx(share)


def test_a_pipeline_is_refused():
    pipeline = replace(RUN, plan=Plan(pp=8))
    with pytest.raises(ValueError, match="profile with pp=1"):
        fit_timeline(timeline(), pipeline)
    with pytest.raises(ValueError, match="profile with pp=1"):
        kernel_timeline(pipeline, shipped())
