"""What cheaper launches gain: steps whose answer is known, and bounds on shipped traces."""

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.timeline import Meta, Timeline
from madmax_lib.traces.critical_path import launch_gain

US = 1000


def launched(kernels, call_us, kernel_us, between_us, delay_us=2):
    """A host that launches one kernel after another; each starts `delay_us` after its call ends, or when free."""
    rows, host, free = [], 0, 0
    for number in range(kernels):
        end = host + call_us * US
        begin = max(end + delay_us * US, free)
        free = begin + kernel_us * US
        rows += [
            (-1, "cpu", "cudaLaunchKernel", host, call_us * US, number),
            (7, "compute", "gemm", begin, kernel_us * US, number),
        ]
        host = end + between_us * US
    table = pd.DataFrame(rows, columns=["stream", "kind", "name", "start_ns", "dur_ns", "correlation"])
    table = table.assign(rank=0, step=0, op=-1, group=None, size_bytes=np.nan)
    return Timeline(table, Meta(source="measured"))


def gains(timeline):
    return launch_gain(timeline).set_index("scenario")["step_s"] * 1e6


def test_a_launch_bound_step():
    """Ten calls of 10 us, 7 us between them, kernels of 3 us that start 12 us after their call does.

    Free launches leave 7 us for each of the others and the last kernel's delay, a graph of the step the kernels.
    """
    found = gains(launched(10, 10, 3, 7))
    assert found["as measured"] == pytest.approx(9 * 17 + 12 + 3)
    assert found["free launches"] == pytest.approx(9 * 7 + 12 + 3)
    assert found["graph of kernels"] == pytest.approx(9 * 7 + 3)
    assert found["graph of the step"] == pytest.approx(10 * 3)


def test_a_busy_device_gains_nothing_but_the_start():
    found = gains(launched(10, 1, 100, 1))
    assert found["as measured"] - found["graph of the step"] == pytest.approx(1 + 2)


def test_launches_are_counted():
    table = launch_gain(launched(10, 10, 3, 7))
    assert (table["launches"] == 10).all() and table["bound_s"].to_numpy() == pytest.approx(9 * 14e-6)
    assert table["saved_s"].iloc[0] == 0 and (table["speedup"] >= 1).all()


@pytest.mark.parametrize("name", ["gpt-ddp", "vit-ddp"])
def test_shipped_traces(name):
    """No kernel is launched on a CPU; without the host's work between operators a step cannot be longer."""
    table = launch_gain(mm.read_trace(mm.dataset(name)))
    assert table["scenario"].tolist() == ["as measured", "graph of the step"]
    assert (table["launches"] == 0).all() and 1 < table["speedup"].iloc[1] < 1.5


def test_simulated_steps_have_no_launches():
    step = mm.simulate(mm.model("gpt2"), mm.cluster("colab-t4"), mm.Plan(), global_batch=1)
    with pytest.raises(ValueError, match="no launches to be replayed"):
        launch_gain(step)
