"""Where HTA 0.5.0 is known to be wrong, ours has the right value: one test per fault, both values shown.

Stragglers under new NCCL names are in test_alignment, AMD kernels that HTA's diff loses in test_diff.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import local_or_skip

from madmax_lib.accounting import breakdown
from madmax_lib.traces import hta
from madmax_lib.traces.read.kineto import TraceWarning, read_trace

pytest.importorskip("hta")
US = 1e-6


def sample(name: str):
    return local_or_skip(f"traces/{name}")


def test_rounding_to_whole_microseconds_loses_an_eighth_of_the_compute_time():
    path = sample("hta-samples/mi250_minitoy_train_ROCm6_2_kineto.json.gz")
    with pytest.warns(TraceWarning, match="taken as rank 0"):
        theirs, ours = hta.temporal(hta.analysis(path)), breakdown(read_trace(path))
    assert theirs["compute_s"].item() == pytest.approx(96 * US)
    assert ours["compute_s"].item() == pytest.approx(110.881 * US, abs=1e-9)


def test_the_last_step_counts():
    path = sample("hta-samples/nccl_data.json.gz")
    timeline = read_trace(path)
    assert timeline.steps == [4, 5, 6] and hta.analysis(path).get_profiler_steps() == [4, 5]
    assert hta.temporal(hta.analysis(path))["total_s"].item() == pytest.approx(435_586 * US)
    assert breakdown(timeline)["total_s"].item() == pytest.approx(660_551.005 * US, abs=1e-9)


def test_kernels_of_the_default_stream_of_amd_have_a_step_and_a_launch():
    path = sample("tracelens-samples/resnet_act_checkpoint.json.gz")
    spans, theirs = read_trace(path).spans, hta.analysis(path).t.get_trace(0)
    assert theirs.loc[theirs["stream"] == 0, "iteration"].isna().all()
    ours = spans[(spans["stream"] == 0) & (spans["kind"] == "compute")]
    launches = spans.loc[(spans["stream"] < 0) & (spans["correlation"] >= 0), "correlation"]
    launched = ours["correlation"].isin(launches)
    assert launched.sum() > 1000 and (ours.loc[launched, "step"] >= 0).all()


def test_expert_parallel_kernels_without_nccl_are_communication():
    path = sample("deepseek-v3-train/train.json.gz")
    assert np.isnan(hta.overlap(hta.analysis(path))["overlap"].item())
    ours = breakdown(read_trace(path))
    assert ours["comm_s"].item() > 0.01 and 0 <= ours["overlap"].item() <= 1


def test_a_run_on_cpus_has_communication_and_compute():
    path = sample("cpu-gloo-torch2.13/ddp-rank0.json.gz")
    with pytest.raises(IndexError):
        hta.analysis(path).get_temporal_breakdown(visualize=False)
    ours = breakdown(read_trace(path))
    assert ours["comm_s"].item() > 0 and ours["compute_s"].item() > 0
