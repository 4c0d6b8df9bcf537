"""A Timeline made with known constants gives them back."""

import numpy as np
import pytest
from conftest import make_timeline

import madmax_lib as mm
from madmax_lib.calibration.trace import fit_timeline, kernel_seconds
from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.parameters import Parameters, shipped

MODEL, CLUSTER = mm.model("gpt2-large"), mm.cluster("dgx-h100")
TRUTH = {"gemm_efficiency:hopper-16": 0.6, "attention_efficiency:hopper-pytorch": 0.25, "pointwise_factor:eager": 2.5}
RUN = {"global_batch": 8, "sequence": 1024, "stack": "eager"}


def timeline(all_reduce_s=0.0, size_bytes=0.0):
    """One step of each cause, in the kernels' names."""
    from madmax_lib.simulator.estimate import machine_fields, matrix_fields, model_fields, plan_fields
    from madmax_lib.simulator.step_time import step_time
    from madmax_lib.simulator.work import Work

    cluster = mm.cluster("dgx-h100")
    fields, classes = machine_fields(cluster, stack="eager")
    fields |= model_fields(MODEL, 1024) | matrix_fields(cluster.device, "bf16") | plan_fields(Plan(micro_batch=8), 8)
    parameters = Parameters(constants=dict(shipped().constants) | TRUTH)
    parts = {k: float(v[0]) for k, v in step_time(Work(fields, classes | {"mixture": "none"}), parameters).items()}
    kernels = [
        ("sm90_xmma_gemm_bf16", parts["gemm_s"] + parts["head_s"]), ("flash_fwd_kernel", parts["attention_s"]),
        ("vectorized_elementwise_kernel", parts["pointwise_s"]), ("multi_tensor_apply_kernel", parts["optimizer_s"]),
    ]  # fmt: skip
    rows, now = [], 0
    for name, seconds in kernels:
        rows.append((0, 7, "compute", name, now, round(seconds * 1e9)))
        now += round(seconds * 1e9)
    rest = round(parts["step_s"] * 1e9) - now
    rows.append((0, 8, "memcpy", "Memcpy DtoH", now + rest - 1, 1))
    if all_reduce_s:
        rows.append((0, 9, "comm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, round(all_reduce_s * 1e9)))
    made = make_timeline(rows, device="NVIDIA H100 80GB HBM3")
    made.spans["size_bytes"] = [size_bytes if kind == "comm" else np.nan for kind in made.spans["kind"]]
    return made, parts


def test_seconds_by_cause():
    made, parts = timeline()
    found = kernel_seconds(made)
    assert found["attention_s"] == pytest.approx(parts["attention_s"], abs=1e-8)
    assert found["gemm_s"] == pytest.approx(parts["gemm_s"] + parts["head_s"], abs=1e-8)
    assert found["step_s"] == pytest.approx(parts["step_s"], abs=1e-8)


def test_constants_come_back():
    made, parts = timeline()
    one = mm.cluster("dgx-h100")
    found = fit_timeline(made, MODEL, one, Plan(micro_batch=8), **RUN)
    for name, value in TRUTH.items():
        assert found.constants[name] == pytest.approx(value, rel=0.05), name
        low, high = found.intervals[name]
        assert low <= found.constants[name] <= high
    assert len(found.covariance) == len(found.fitted) == 4
    assert found.provenance["step_s"] == pytest.approx(parts["step_s"], abs=1e-8)
    big = estimate(mm.model("llama2-7b"), mm.cluster("dgx-h100", nodes=2), Plan(dp=16, zero=3), global_batch=16,
                   parameters=found)  # fmt: skip
    assert np.isfinite(big["step_s"][0])


def test_the_link_follows_large_all_reduces():
    made, _ = timeline(all_reduce_s=0.01, size_bytes=1e9)
    found = fit_timeline(made, MODEL, CLUSTER, Plan(dp=8, micro_batch=8), global_batch=64, sequence=1024)
    assert found.constants["nvlink_share:hopper"] == pytest.approx(2 * 7 / 8 * 1e9 / 0.01 / 450e9)
    small, _ = timeline(all_reduce_s=0.01, size_bytes=1e5)
    same = fit_timeline(small, MODEL, CLUSTER, Plan(dp=8, micro_batch=8), global_batch=64, sequence=1024)
    assert same.constants["nvlink_share:hopper"] == shipped().constants["nvlink_share:hopper"]


def test_bad_input():
    made, _ = timeline()
    with pytest.raises(ValueError, match="profile with pp=1"):
        fit_timeline(made, MODEL, CLUSTER, Plan(pp=8), global_batch=8)
    with pytest.raises(ValueError, match="no compute span"):
        kernel_seconds(make_timeline([(0, 1, "comm", "ncclKernel", 0, 5)]))
