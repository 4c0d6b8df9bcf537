"""Pictures of traces: each keeps the table it shows, hatches what is simulated, and has
something to say of nothing.
"""

from dataclasses import replace

import pandas as pd
import pytest
from support import make_timeline, with_tables

import madmax_lib as mm
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots import comm, diff, launch, memory, operators, path

# of one step: what a replay cannot know
pytestmark = pytest.mark.filterwarnings("ignore:one step is recorded:UserWarning")

US = 1000
PLOTS = {
    operators.plot_kernels: mm.traces.kernels,
    operators.plot_operators: mm.traces.operators,
    operators.plot_roofline: mm.traces.roofline,
    comm.plot_groups: mm.traces.by_group,
    comm.plot_bandwidth: mm.traces.calls,
    comm.plot_stragglers: mm.traces.stragglers,
    launch.plot_launches: mm.traces.launches,
    launch.plot_idle: mm.traces.idle,
    launch.plot_steps: mm.traces.steps,
    path.plot_what_if: mm.traces.faster_kinds,
    memory.plot_memory: lambda timeline: timeline,
    diff.plot_compare: lambda timeline: mm.compare(
        timeline, timeline.select(ranks=timeline.ranks[:1])
    ),
}
NO_AREAS = [operators.plot_roofline, launch.plot_launches, comm.plot_bandwidth]


def everything(**meta) -> Timeline:
    """Two ranks, each with a module, an operator with shapes, two launches, a kernel, a
    call and an allocation.
    """
    rows, shaped = [], []
    event = {
        "stream": -1,
        "time_ns": 3 * US,
        "size_bytes": 512,
        "address": 1,
        "device": "cuda:0",
    }
    allocated = [{"rank": rank, **event} for rank in (0, 1)]
    for rank in (0, 1):
        shaped.append((len(rows) + 1, "[[64,64],[64,64]]", '["float","float"]'))
        rows += [
            (rank, -1, "cpu", "nn.Module: L_0", 0, 30 * US),
            (rank, -1, "cpu", "aten::mm", US, 9 * US),
        ]
        rows += [
            (rank, -1, "cpu", "cudaLaunchKernel", start * US, 2 * US, start)
            for start in (2, 6)
        ]
        rows.append((rank, 7, "compute", "gemm", 12 * US, 20 * US, 2))
        rows.append(
            (
                rank,
                20,
                "comm",
                "ncclDevKernel_AllReduce",
                (33 + 9 * rank) * US,
                (50 - 9 * rank) * US,
                6,
            )
        )
    timeline = make_timeline(rows, **{"device": "a100-80"} | meta)
    sized = timeline.spans.assign(
        size_bytes=[1e6 if kind == "comm" else None for kind in timeline.spans["kind"]]
    )
    return with_tables(
        replace(timeline, spans=sized), operators=shaped, memory=allocated
    )


@pytest.mark.parametrize("plot", PLOTS)
def test_a_picture_keeps_its_table(plot):
    data = figure_data(plot(PLOTS[plot](everything())))
    assert (
        len(data) and data.attrs["source"] == "measured" and "provenance" in data.attrs
    )


@pytest.mark.parametrize("plot", [plot for plot in PLOTS if plot not in NO_AREAS])
def test_what_is_simulated_is_hatched(plot):
    simulated, measured = (
        plot(PLOTS[plot](everything(source=source)))
        for source in ("simulated", "measured")
    )
    hatched = [
        sum(bool(mark.get_hatch()) for mark in (*ax.patches, *ax.collections))
        for ax in (simulated, measured)
    ]
    assert (
        hatched[0] > hatched[1] == 0
        and figure_data(simulated).attrs["source"] == "simulated"
    )


@pytest.mark.filterwarnings("ignore:no modules are recorded")
@pytest.mark.parametrize("plot", PLOTS)
def test_a_picture_of_nothing_is_no_error(plot):
    ax = plot(PLOTS[plot](make_timeline([])))
    assert ax.get_title(loc="left") + ax.get_title() and isinstance(
        figure_data(ax), pd.DataFrame
    )


def test_a_path_needs_a_step():
    timeline, nothing = everything(), make_timeline([])
    data = figure_data(path.plot_path(mm.traces.critical_path(timeline), timeline))
    assert set(data["part"]) == {"path", "beside"}
    on_path_s = data.loc[data["part"] == "path", "dur_s"].sum()
    assert on_path_s == pytest.approx(mm.traces.critical_path(timeline)["dur_s"].sum())
    with pytest.raises(ValueError, match="the path is empty"):
        path.plot_path(mm.traces.critical_path(nothing), nothing)


def remembering(events: list[dict], **meta) -> Timeline:
    events = [{"rank": 0, "stream": -1, "device": "cuda:0"} | event for event in events]
    rows = [(0, -1, "cpu", "aten::mm", 10 * i, 10) for i in range(len(events))]
    return with_tables(
        make_timeline(rows, **meta),
        memory=events,
        operators=[(row,) for row in range(len(rows))],
    )


def test_a_long_history_is_thinned_and_keeps_its_peak():
    sizes = [
        size
        for block in range(1, 2001)
        for size in (block % 777 + 1, -(block % 777) - 1)
    ]
    timeline = remembering(
        [
            {"time_ns": 10 * i + 5, "size_bytes": s, "address": 1}
            for i, s in enumerate(sizes)
        ]
    )
    drawn = figure_data(memory.plot_memory(timeline))
    assert (
        drawn["allocated_bytes"].max()
        == mm.traces.peak(timeline)["peak_bytes"].item()
        == 777
    )
    assert len(drawn) <= 1204 < len(sizes)


def test_the_fullest_device_is_drawn_unless_another_is_named():
    large = {"time_ns": 1, "size_bytes": 900, "address": 2, "device": "cuda:1"}
    timeline = remembering([{"time_ns": 0, "size_bytes": 5, "address": 1}, large])
    for name, device in ((None, "cuda:1"), ("cuda:0", "cuda:0")):
        drawn = figure_data(memory.plot_memory(timeline, device=name))
        assert set(drawn["device"]) == {device}
    with pytest.raises(ValueError, match="has no allocator events; there are"):
        memory.plot_memory(timeline, device="cuda:3")


def test_a_pair_of_timelines_shows_both_sides(tmp_path, monkeypatch):
    monkeypatch.setenv("MADMAX_FIGURES", str(tmp_path))
    a, b = (
        everything(provenance={"files": {"0": "sha a"}}),
        everything(source="simulated"),
    )
    pair = diff.plot_pair(a, b)
    data, hatched = (
        figure_data(pair),
        [bool(c.get_hatch()) for c in pair.collections if len(c.get_facecolor())],
    )
    kinds = data["kind"].nunique()
    assert (
        set(data["side"]) == {"a", "b"} and hatched == [False] * kinds + [True] * kinds
    )
    ops = diff.plot_ops(
        mm.traces.compare_ops(
            a, everything(source="simulated", device="t4").select(ranks=[0])
        )
    )
    for ax in (pair, ops, diff.plot_compare(mm.compare(a, b))):
        assert (
            "simulated"
            in mm.save_figure(ax, "diff/test").with_suffix(".json").read_text()
        )
    with pytest.raises(ValueError, match="nothing to draw"):
        diff.plot_pair(a, make_timeline([]))
