"""The gate on steps whose noise and slow-down are drawn, so that the right verdict is
known.
"""

import shutil

import numpy as np
import pandas as pd
import pytest
from support import make_timeline, refused_line, with_columns, with_tables

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces import gate
from madmax_lib.traces.gate import _holm
from madmax_lib.traces.read.kineto import TraceWarning

MS = 1_000_000
OPS = {"aten::mm": 30.0, "aten::softmax": 10.0, "aten::layer_norm": 5.0}  # ms of a step


def recording(
    seed=0,
    *,
    noise=0.005,
    steps=20,
    factor=None,
    rank_factor=1.0,
    shift=1.0,
    warm=1.0,
    scale=1.0,
    host=False,
):
    """Two ranks that compute one operation after the other and meet in an all-reduce of
    5 ms at the end of each step.

    noise: of each operation, relative. factor: of operations. rank_factor: of rank 1's
    operations. shift: of all of the recording. warm: factor of the first two steps.
    host: of a CPU, with one more operation.
    """
    draw, rows, starts = np.random.default_rng(seed), [], np.zeros(2)
    compute, comm = (-1, -2) if host else (0, 1)
    factors, longer = factor or {}, shift * scale
    ranks = np.array([1.0, rank_factor])

    def span(rank, stream, kind, name, start, end, step):
        start, end = round(start * MS), round(end * MS)
        rows.append((rank, stream, kind, name, start, end - start, -1, step))

    for step in range(steps):
        begun, slow = starts, warm if step < 2 else 1.0
        for name, ms in (OPS | {"aten::gelu": 2.0} if host else OPS).items():
            own = ms * factors.get(name, 1.0) * ranks * longer * slow
            ends = starts + own * draw.normal(1.0, noise, 2)
            for r in range(2):
                span(r, compute, "compute", name, starts[r], ends[r], step)
            starts = ends
        end = starts.max() + 5 * factors.get("nccl:all_reduce", 1.0) * longer
        for r in range(2):
            span(r, comm, "comm", "nccl:all_reduce", starts[r], end, step)
            span(r, -1, "annotation", f"ProfilerStep#{step}", begun[r], end, step)
        starts = np.full(2, end)
    return make_timeline(rows)


def concat_spans(*timelines):
    """One timeline with the spans of several."""
    spans = [t.spans.astype({"kind": str, "name": str}) for t in timelines]
    return Timeline(pd.concat(spans, ignore_index=True))


def verdicts(result):
    return dict(zip(result.table["quantity"], result.table["verdict"], strict=True))


def row_of(result, quantity="step_s"):
    return result.table.set_index("quantity").loc[quantity]


def test_what_grew_is_found_and_named():
    result = gate(recording(1), recording(2, factor={"aten::softmax": 1.5}))
    row, told = row_of(result), row_of(result, "softmax")
    assert not result.passed and row["verdict"] == told["verdict"] == "slower"
    assert row["ratio"] == pytest.approx(55 / 50, rel=0.01)
    assert row["low"] < 55 / 50 < row["high"]
    worst = result.explanation.iloc[0]
    assert (worst["operation"], worst["rank"]) == ("softmax", -1)
    same = worst[["a_s", "b_s", "ratio"]].tolist()
    assert same == pytest.approx(told[["a", "b", "ratio"]].tolist(), rel=1e-12)
    assert worst["difference_s"] == pytest.approx(5e-3, rel=0.05)
    assert "softmax: +" in repr(result)
    assert verdicts(result)["mm"] == "fine"
    assert result.table["verdict"].iloc[0] == "slower"


def test_a_slow_rank_is_named_and_its_waiting_neighbour_is_not():
    result = gate(recording(1), recording(2, rank_factor=1.1))
    worst = result.explanation.head(2)
    assert not result.passed and set(worst["rank"]) == {1}
    assert "comm" not in set(worst["kind"]) and "on rank 1" in repr(result)


def test_a_slow_collective_is_named():
    result = gate(recording(1), recording(2, factor={"nccl:all_reduce": 2.0}))
    assert not result.passed and result.explanation["kind"].iloc[0] == "comm"
    assert verdicts(result)["exposed_comm_s"] == "slower"
    assert verdicts(result)["mm"] == "fine"


def test_what_surely_grew_less_than_the_threshold_passes():
    a, b = recording(1), recording(2, shift=1.01)
    assert gate(a, b).passed and verdicts(gate(a, b))["step_s"] == "fine"
    assert verdicts(gate(a, b, 0.005))["step_s"] == "slower"


def test_noise_is_said_and_neither_passes_nor_fails():
    result = gate(recording(1, noise=0.3), recording(2, noise=0.3))
    row = row_of(result)
    assert result.verdict == row["verdict"] == "cannot tell" and not result.passed
    assert row["detectable"] > 0.03
    assert "step_s: cannot tell at 0.03" in repr(result)


def test_a_recording_equals_itself_in_any_unit_of_time():
    a, more = recording(1), {"aten::mm": 1.2}
    same = gate(a, a)
    assert same.passed and (same.table["ratio"] == 1).all()
    assert not (same.explanation["difference_s"] != 0).any()
    expected, scaled = (
        gate(
            recording(1, scale=scale), recording(2, scale=scale, factor=more)
        ).table.set_index("quantity")[["ratio", "low", "high", "p"]]
        for scale in (1.0, 7.0)
    )
    pd.testing.assert_frame_equal(scaled, expected, rtol=0.02, atol=1e-3)


def test_an_operation_may_have_two_kinds_and_be_absent_from_most_steps():
    rows = [(0, 0, "other", "mm", 10 * MS * n, MS, -1, n) for n in range(3)]
    sides = [concat_spans(recording(seed), make_timeline(rows)) for seed in (1, 2)]
    result = gate(*sides)
    quantities = result.table["quantity"]
    assert result.verdict != "fail" and "mm" in set(quantities)
    assert quantities.is_unique


def test_warm_up_does_not_count():
    result = gate(recording(1), recording(2, warm=4.0))
    assert result.passed and result.table["ratio"].between(0.98, 1.02).all()


def test_quiet_recordings_raise_no_alarm_and_show_slow_downs():
    for n in range(6):
        a, b = (recording(2 * n + side, steps=12) for side in (0, 1))
        assert gate(a, b).passed
        # the step is 3.6 % longer
        slower = recording(100 + n, steps=12, factor={"aten::mm": 1.06})
        assert not gate(a, slower).passed


def test_several_recordings_show_how_far_runs_are_apart():
    shifts = list(enumerate((0.95, 1.0, 1.05)))
    a, b = ([recording(at + n, shift=s) for n, s in shifts] for at in (10, 20))
    assert gate(a[0], b[2]).verdict == "fail"
    assert gate(a, b).verdict == verdicts(gate(a, b))["step_s"] == "cannot tell"
    slower = [recording(30 + n, shift=1.4 * shift) for n, shift in shifts]
    assert gate(a, slower).verdict == "fail"


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_few_steps_are_measured_and_not_judged(steps):
    """As torch's customary `schedule(active=3)` records them."""
    slower = recording(2, steps=steps, factor={"aten::softmax": 1.5})
    for sides in ((recording(1, steps=steps), slower), (recording(1), slower)):
        result = gate(*sides)
        row = row_of(result)
        assert result.verdict == "cannot tell" and not result.passed
        assert row["ratio"] == pytest.approx(55 / 50, rel=0.02)
        # of the last step a device shows no period; one period shows no spread
        shows = {2: np.inf, 3: 0.3, 4: 0.1}
        assert not row["detectable"] > shows[steps]
        assert set(result.table["verdict"]) == {"cannot tell"}
        assert f"{steps - 1} steps that are neither warm-up nor" in result.too_few
        assert "measured +" in repr(result) and result.too_few in repr(result)


@pytest.mark.parametrize("shift", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_a_host_that_is_slow_in_all_operations_alike_may_be_busy(shift):
    """What one operation adds is found beside it; a device has no such excuse, nor have
    five recordings.
    """
    a, b = recording(1, host=True), recording(2, host=True, shift=shift)
    result = gate(a, b)
    assert result.verdict == ("cannot tell" if shift > 1 else "pass")
    assert result.host_factor == pytest.approx(shift, rel=0.01)
    row = row_of(result)
    assert row["low"] < min(1, shift) and max(1, shift) < row["high"]
    assert row["verdict"] == ("cannot tell" if shift > 1 else "fine")
    assert ("all operations take" in repr(result)) == (shift != 1)
    one = recording(2, host=True, shift=shift, factor={"aten::softmax": 4.0})
    slow = gate(a, one)
    assert verdicts(slow)["softmax"] == "slower" and not slow.passed
    on_device = gate(recording(1), recording(2, shift=shift))
    assert on_device.passed == (shift <= 1) and on_device.host_factor == 1
    sides = [
        [recording(at + n, host=True, shift=own) for n in range(3)]
        for at, own in ((10, 1.0), (20, shift))
    ]
    assert gate(*sides).passed == (shift <= 1)


def test_too_few_operations_do_not_show_what_a_host_does_to_all():
    sides = [recording(1, host=True), recording(2, host=True, factor={"aten::mm": 2.0})]
    result = gate(
        *(s.where((s.spans["name"] != "aten::gelu").to_numpy()) for s in sides)
    )
    assert result.verdict == verdicts(result)["step_s"] == "cannot tell"
    assert result.host_factor > 1.3


@pytest.mark.parametrize(
    ("size_bytes", "verdict"), [(1000, "fine"), (1029, "fine"), (1031, "slower")]
)
def test_memory_is_compared_as_it_is(size_bytes, verdict):
    row = {"rank": 0, "device": "cuda:0", "address": 1}
    sides = []
    for size in (1000, size_bytes):
        held = {"time_ns": 5 * MS, "size_bytes": size, "allocated_bytes": size}
        freed = {"time_ns": 9 * MS, "size_bytes": -size, "allocated_bytes": 0}
        sides.append(with_tables(recording(1), memory=[row | held, row | freed]))
    assert verdicts(gate(*sides))["peak_bytes"] == verdict


@pytest.mark.parametrize("seed", range(5))
def test_holm_with_equal_weights_is_holm(seed):
    p = np.random.default_rng(seed).random(7) ** 3
    order, adjusted = np.argsort(p), np.empty(7)
    adjusted[order] = [
        min(1, max(p[order][k] * (7 - k) for k in range(n + 1))) for n in range(7)
    ]
    np.testing.assert_allclose(_holm(p, np.full(7, 1 / 7)), adjusted)


FIVE = {"steps": 5}
REFUSED = [
    ({"steps": 0}, None, 0.03, "timeline: 0 steps neither warm-up nor cut"),
    (FIVE, "main", 0.03, "b='main' Timeline"),
    (FIVE, FIVE, 0, "threshold=0 is not a share above 0"),
    (FIVE, FIVE, "3%", "threshold='3%' must be a number"),
    (FIVE, [], 0.03, "b is an empty list"),
]


@pytest.mark.parametrize(
    ("a", "b", "threshold", "words"), REFUSED, ids=[row[3] for row in REFUSED]
)
def test_bad_input(a, b, threshold, words):
    with refused_line(words):
        other = recording(1, **b or {}) if isinstance(b, dict | None) else b
        gate(recording(1, **a), other, threshold)


def test_steps_in_which_nothing_works_do_not_count():
    """A profiler without the rows of the device leaves the marks of its steps."""
    marks = [(0, -1, "annotation", f"ProfilerStep#{i}", 9 * i, 9) for i in range(6)]
    idle = with_columns(make_timeline(marks), step=range(6))
    with refused_line("0 steps that neither warm-up nor cut"):
        gate(idle, idle)


def test_recordings_that_lack_a_rank_are_not_judged():
    whole = recording()
    half = Timeline(whole.spans[whole.spans["rank"] == 1].reset_index(drop=True))
    for sides in ((whole, half), (half, whole), (whole, [whole, half])):
        with refused_line("no trace of rank 0, which another has"):
            gate(*sides)


def test_a_file_that_ended_early_is_not_judged(tmp_path):
    for folder in ("whole", "cut"):
        shutil.copytree(PROJECT / "traces/gpt-before", tmp_path / folder)
    broken = tmp_path / "cut" / "rank1.json.gz"
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size * 9 // 10])
    whole = mm.read_trace(tmp_path / "whole")
    with pytest.warns(TraceWarning, match="truncated gzip; kept"):
        cut = mm.read_trace(tmp_path / "cut")
    kept = Timeline.load(cut.save(tmp_path / "kept.parquet"))
    for sides in ((whole, cut), (cut, whole), (whole, kept)):
        with refused_line(
            "rank1.json.gz: truncated gzip; a gate needs complete recordings"
        ):
            gate(*sides)
    # the file of rank 0 is whole; its steps are too noisy to pass, also beside themselves
    result = gate(whole.select(ranks=[0]), cut.select(ranks=[0]))
    assert result.verdict == "cannot tell" and not result.too_few
