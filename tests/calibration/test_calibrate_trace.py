"""A Timeline made with known constants gives them back."""

import numpy as np
import pytest
from support import make_timeline

import madmax_lib as mm
from madmax_lib.calibration.trace import fit_timeline, kernel_seconds, kernel_timeline
from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate, machine_fields, matrix_fields, model_fields, plan_fields
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.inputs import Work
from madmax_lib.simulator.step.step_time import step_time

MODEL, CLUSTER = mm.model("gpt2-large"), mm.cluster("dgx-h100")
TRUTH = {"gemm_efficiency:hopper-16": 0.6, "attention_efficiency:hopper-pytorch": 0.25, "pointwise_factor:eager": 2.5}
RUN = {"global_batch": 8, "sequence": 1024, "stack": "eager"}


def timeline(all_reduce_s=0.0, size_bytes=0.0, **options):
    """A run with known constants, beside it an all-reduce."""
    parameters = Parameters(constants=dict(shipped().constants) | TRUTH)
    made = kernel_timeline(MODEL, CLUSTER, Plan(micro_batch=8), **RUN, parameters=parameters, **options)
    if not all_reduce_s:
        return made
    rows = [(0, 7, "compute", "gemm", 0, 1000), (0, 9, "comm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0,
                                                  round(all_reduce_s * 1e9))]  # fmt: skip
    talking = make_timeline(rows, device="NVIDIA H100 80GB HBM3")
    talking.spans["size_bytes"] = [np.nan, size_bytes]
    return talking


def seconds():
    """What the run takes by cause, from the closed form."""
    parameters = Parameters(constants=dict(shipped().constants) | TRUTH)
    fields, classes = machine_fields(CLUSTER, stack="eager")
    fields |= model_fields(MODEL, 1024) | matrix_fields(CLUSTER.device, "bf16") | plan_fields(Plan(micro_batch=8), 8)
    parts = step_time(Work(fields, classes | {"mixture": "none"}), parameters)
    return {name: float(value[0]) for name, value in parts.items()}


def test_seconds_by_cause():
    parts, found = seconds(), kernel_seconds(timeline())
    assert found["attention_s"] == pytest.approx(parts["attention_s"], abs=1e-8)
    assert found["gemm_s"] == pytest.approx(parts["gemm_s"] + parts["head_s"], abs=1e-8)
    assert found["step_s"] == pytest.approx(parts["step_s"], abs=1e-8)


def test_constants_come_back():
    found = fit_timeline(timeline(), MODEL, CLUSTER, Plan(micro_batch=8), **RUN)
    for name, value in TRUTH.items():
        assert found.constants[name] == pytest.approx(value, rel=0.05), name
        low, high = found.intervals[name]
        assert low <= found.constants[name] <= high
    assert len(found.covariance) == len(found.fitted) == 4
    assert found.provenance["step_s"] == pytest.approx(seconds()["step_s"], abs=1e-8)
    big = estimate(mm.model("llama2-7b"), mm.cluster("dgx-h100", nodes=2), Plan(dp=16, zero=3), global_batch=16,
                   parameters=found)  # fmt: skip
    assert np.isfinite(big["step_s"][0])


def test_noisy_steps_give_nearly_the_same_constants():
    noisy = timeline(steps=20, noise=0.03, seed=1)
    assert noisy.spans["step"].nunique() == 20 and noisy.meta.source == "simulated"
    found = fit_timeline(noisy, MODEL, CLUSTER, Plan(micro_batch=8), **RUN)
    for name, value in TRUTH.items():
        assert found.constants[name] == pytest.approx(value, rel=0.08), name


def test_the_link_follows_large_all_reduces():
    made = timeline(all_reduce_s=0.01, size_bytes=1e9)
    found = fit_timeline(made, MODEL, CLUSTER, Plan(dp=8, micro_batch=8), global_batch=64, sequence=1024)
    assert found.constants["nvlink_share:hopper"] == pytest.approx(2 * 7 / 8 * 1e9 / 0.01 / 450e9)
    small = timeline(all_reduce_s=0.01, size_bytes=1e5)
    same = fit_timeline(small, MODEL, CLUSTER, Plan(dp=8, micro_batch=8), global_batch=64, sequence=1024)
    assert same.constants["nvlink_share:hopper"] == shipped().constants["nvlink_share:hopper"]


def test_bad_input():
    made = timeline()
    with pytest.raises(ValueError, match="profile with pp=1"):
        fit_timeline(made, MODEL, CLUSTER, Plan(pp=8), global_batch=8)
    with pytest.raises(ValueError, match="profile with pp=1"):
        kernel_timeline(MODEL, CLUSTER, Plan(pp=8), global_batch=8, parameters=shipped())
    with pytest.raises(ValueError, match="no compute span"):
        kernel_seconds(make_timeline([(0, 1, "comm", "ncclKernel", 0, 5)]))
