"""Breakdown of a recording in parts: closed forms, and parts that add up to the whole."""

import json

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip, make_timeline

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.timeline.accounting import breakdown_between
from madmax_lib.traces import window
from madmax_lib.traces.waits.step_times import steady_state

MS = 1_000_000
SECONDS = [
    "total_s",
    "compute_s",
    "comm_s",
    "non_compute_s",
    "exposed_comm_s",
    "idle_s",
]


def recording(ranks, rows):
    """Steps as (rank, step, host start, end) and work as (rank, step, kind, start, end),
    in ms.
    """
    marks = [(r, step, "annotation", start, end) for r, step, start, end in ranks]
    spans = []
    for rank, step, kind, start, end in marks + rows:
        is_mark = kind == "annotation"
        name = f"ProfilerStep#{step}" if is_mark else "k"
        times = start * MS, (end - start) * MS
        spans.append((rank, -1 if is_mark else 7, kind, name, *times, -1, step))
    return make_timeline(spans)


def test_work_outside_of_the_steps_is_a_part_of_its_own():
    """6 ms of an earlier step, 2 idle, two steps of 10 ms, 1 idle, 4 ms of a later one."""
    timeline = recording(
        [(0, 1, 0, 5), (0, 2, 5, 10)],
        [
            (0, -1, "compute", 4, 10),
            (0, 1, "compute", 12, 20),
            (0, 1, "comm", 19, 22),
            (0, 2, "compute", 22, 32),
            (0, -1, "comm", 33, 37),
        ],
    )
    table = mm.breakdown(timeline, steps=True).set_index("part")
    assert list(table.index) == ["steps", "before", "after"]
    assert table["steps"].tolist() == [2, 0, 0]
    expected = {
        "steps": [0.020, 0.018, 0.003, 0.002, 0.002, 0.0],
        "before": [0.008, 0.006, 0.0, 0.0, 0.0, 0.002],
        "after": [0.005, 0.0, 0.004, 0.004, 0.004, 0.001],
    }
    for part, values in expected.items():
        assert table.loc[part, SECONDS].tolist() == pytest.approx(values, abs=1e-12)
    assert mm.breakdown(timeline)["total_s"].item() == pytest.approx(0.033)


def test_ranks_are_compared_over_the_same_steps():
    work = [(0, step, "compute", 10 * step, 10 * step + 8) for step in (1, 2, 3)]
    work += [(1, step, "compute", 10 * step, 10 * step + 8) for step in (2, 3, 4)]
    marks = [(rank, step, start, start + 1) for rank, step, _, start, _ in work]
    table = mm.breakdown(recording(marks, work), steps=True)
    recorded = table[table["part"] == "steps"]
    assert recorded["steps"].tolist() == [2, 2]
    assert recorded["total_s"].tolist() == pytest.approx([0.018, 0.018])
    outside = table[table["part"] != "steps"]
    assert outside[["rank", "part"]].values.tolist() == [[0, "before"], [1, "after"]]
    assert outside["compute_s"].tolist() == pytest.approx([0.008, 0.008])


def test_without_marks_and_in_simulations_the_whole_is_one_part():
    timelines = [
        recording([], [(0, 0, "compute", 1, 5), (1, 0, "compute", 2, 5)]),
        mm.simulate("gpt2-large", "dgx-a100", "dp2.tp2.pp2", global_batch=8),
        recording([], []),
    ]
    for timeline in timelines:
        table = mm.breakdown(timeline, steps=True)
        assert set(table["part"]) <= {"steps"}
        whole = table.drop(columns=["part", "steps"])
        pd.testing.assert_frame_equal(whole, mm.breakdown(timeline))


@pytest.mark.parametrize("name", ["gpt-ddp", "dlrm-8xv100", "vit-fsdp"])
def test_parts_add_up_to_the_whole(name):
    timeline = mm.read_trace(mm.dataset(name))
    parts = mm.breakdown(timeline, steps=True)
    whole = mm.breakdown(timeline).set_index("rank")[SECONDS]
    summed = parts.groupby("rank")[SECONDS].sum()
    assert np.abs(summed - whole).max().max() < 1e-12
    assert (parts["part"].iloc[: len(timeline.ranks)] == "steps").all()
    assert list(parts["rank"].iloc[: len(timeline.ranks)]) == timeline.ranks


@pytest.mark.parametrize("name", ["gpt-ddp", "dlrm-8xv100", "vit-h100"])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.6), (0.5, 0.55), (0.4, np.inf)])
def test_a_window_that_is_written_reads_back(name, low, high, tmp_path):
    timeline = mm.read_trace(mm.dataset(name))
    total_s = mm.breakdown(timeline)["total_s"].max()
    part = window(timeline, low * total_s, high * total_s)
    mm.export_trace(part, tmp_path)
    back = mm.breakdown(mm.read_trace(tmp_path))
    expected = breakdown_between(timeline, low * total_s, high * total_s)
    parts = [column for column in SECONDS if column not in ("total_s", "idle_s")]
    pd.testing.assert_frame_equal(back[["rank", *parts]], expected[["rank", *parts]])
    pd.testing.assert_frame_equal(back, mm.breakdown(part))


def test_a_window_keeps_the_launches_of_its_kernels():
    """The host is 20 ms ahead: the launch of what runs at 25 ms is at 2 ms. A piece of a
    step has no mark, and no number.
    """
    rows = [
        (0, -1, "annotation", "ProfilerStep#5", 0, 4 * MS, -1, 5),
        (0, -1, "cpu", "cudaLaunchKernel", 1 * MS, 1, 8, 5),
        (0, -1, "cpu", "cudaLaunchKernel", 2 * MS, 1, 9, 5),
        (0, 7, "compute", "a", 10 * MS, 10 * MS, 8, 5),
        (0, 7, "compute", "b", 20 * MS, 10 * MS, 9, 5),
    ]
    part = window(make_timeline(rows), 0.012, 0.016)
    spans = part.spans
    assert spans["name"].tolist() == ["cudaLaunchKernel", "b"]
    assert spans["start_ns"].tolist() == [2 * MS, 22 * MS]
    assert spans["dur_ns"].tolist() == [1, 4 * MS]
    assert set(spans["step"]) == {0}


@pytest.mark.parametrize("name", ["gpt-fsdp", "dlrm-8xv100", "vit-ddp"])
def test_a_window_of_all_has_all_steps(name):
    timeline = mm.read_trace(mm.dataset(name))
    whole = window(timeline, 0.0, np.inf)
    assert whole.steps == timeline.steps
    seconds = mm.traces.step_s(timeline)
    assert mm.traces.step_s(whole) == pytest.approx(seconds, rel=0.02)


def test_a_window_without_step_marks_keeps_its_annotations():
    rows = [
        (0, -1, "annotation", "forward", 0, 30 * MS, -1, 0),
        (0, 7, "compute", "a", 0, 30 * MS, -1, 0),
    ]
    part = window(make_timeline(rows), 0.01, 0.02)
    assert part.spans["name"].tolist() == ["forward", "a"]


def test_pieces_of_steps_at_the_edges_of_a_window_are_no_steps(tmp_path):
    """Of three steps of 10 ms a window from 5 to 25 ms has the second whole."""
    rows = []
    for step in range(3):
        begin = 10 * MS * step
        mark = (0, -1, "annotation", f"ProfilerStep#{step}", begin, 10 * MS, -1, step)
        rows.append(mark)
        rows.append((0, 7, "compute", "a", begin, 9 * MS, -1, step))
    part = window(make_timeline(rows), 0.005, 0.025)
    assert part.steps == [1]
    mm.export_trace(part, tmp_path)
    assert mm.read_trace(tmp_path).steps == [1]


def test_windows_and_steps_are_cut_in_the_shell(tmp_path, capsys):
    trace = str(mm.dataset("gpt-ddp"))
    timeline = mm.read_trace(trace)
    assert main(["cut", trace, "--steps", "11:20", "-o", str(tmp_path / "a")]) == 0
    assert main(["cut", trace, "--to", "0.02", "-o", str(tmp_path / "b")]) == 0
    steps, head = (mm.read_trace(tmp_path / name) for name in "ab")
    assert steps.steps == [11] and steps.ranks == head.ranks == [0, 1]
    expected = mm.breakdown(timeline.select(steps=[11]))
    pd.testing.assert_frame_equal(mm.breakdown(steps), expected)
    assert mm.breakdown(head)["total_s"].max() == pytest.approx(0.02)
    capsys.readouterr()
    wrong = {
        "--steps 3:5": "none of these steps",
        "--from 5": "nothing runs between 5.0 and",
        "--from 2 --to 1": "is not before",
    }
    for words, said in wrong.items():
        assert main(["cut", trace, *words.split(), "-o", str(tmp_path / "c")]) == 2
        assert said in capsys.readouterr().err


def test_a_cut_by_steps_keeps_what_runs_between_them(tmp_path, capsys):
    """Work that an earlier step has launched is no idle time of the steps that count."""
    source = str(local_or_skip("traces/more/torchrec-a2a5"))
    assert main(["cut", source, "--steps", "5:9", "-o", str(tmp_path)]) == 0
    timeline, counted = steady_state(mm.read_trace(source))
    assert counted == [5, 6]
    columns = ["rank", "total_s", "compute_s", "exposed_comm_s", "idle_s"]
    expected = mm.breakdown(timeline)[columns]
    cut = mm.breakdown(mm.read_trace(tmp_path))[columns]
    pd.testing.assert_frame_equal(cut, expected)
    capsys.readouterr()
    # the headline is that of the steps that count
    assert main(["breakdown", source, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["not_counted"] == ["step 4"]
    idle = expected["idle_s"].sum() / expected["total_s"].sum()
    assert summary["share_of_device_time"]["idle"] == pytest.approx(idle, rel=1e-3)


def test_ranks_without_a_trace_are_counted(tmp_path, capsys):
    one = mm.read_trace(mm.dataset("gpt-ddp")).select(ranks=[1])
    mm.export_trace(one, tmp_path)
    assert main(["breakdown", str(tmp_path)]) == 0
    assert "missing: 1 of 2 ranks have no trace" in capsys.readouterr().out
