"""The gate on steps whose noise and slow-down are drawn, so that the right verdict is
known.
"""

import shutil

import numpy as np
import pandas as pd
import pytest
from support import make_timeline, with_tables

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
    factor=(),
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
    for step in range(steps):
        begun, slow = starts.copy(), warm if step < 2 else 1.0
        for name, ms in (OPS | {"aten::gelu": 2.0} if host else OPS).items():
            own = (
                ms
                * dict(factor).get(name, 1.0)
                * np.array([1.0, rank_factor])
                * shift
                * slow
                * scale
            )
            lasts = own * draw.normal(1.0, noise, 2)
            rows += [
                (
                    r,
                    compute,
                    "compute",
                    name,
                    round(starts[r] * MS),
                    round(lasts[r] * MS),
                    -1,
                    step,
                )
                for r in range(2)
            ]
            starts = starts + lasts
        end = (
            starts.max() + 5 * dict(factor).get("nccl:all_reduce", 1.0) * shift * scale
        )
        for r in range(2):
            at, mark = round(starts[r] * MS), round(begun[r] * MS)
            rows.append(
                (r, comm, "comm", "nccl:all_reduce", at, round(end * MS) - at, -1, step)
            )
            rows.append(
                (
                    r,
                    -1,
                    "annotation",
                    f"ProfilerStep#{step}",
                    mark,
                    round(end * MS) - mark,
                    -1,
                    step,
                )
            )
        starts = np.full(2, end)
    return make_timeline(rows)


def concat_spans(*timelines):
    """One timeline with the spans of several."""
    return Timeline(
        pd.concat(
            [t.spans.astype({"kind": str, "name": str}) for t in timelines],
            ignore_index=True,
        )
    )


def verdicts(result):
    return dict(zip(result.table["quantity"], result.table["verdict"], strict=True))


def test_what_grew_is_found_and_named():
    result = gate(recording(1), recording(2, factor={"aten::softmax": 1.5}.items()))
    row = result.table.set_index("quantity").loc["step_s"]
    assert (
        not result.passed
        and verdicts(result)["step_s"] == verdicts(result)["softmax"] == "slower"
    )
    assert (
        row["ratio"] == pytest.approx(55 / 50, rel=0.01)
        and row["low"] < 55 / 50 < row["high"]
    )
    worst = result.explanation.iloc[0]
    assert (worst["operation"], worst["rank"]) == ("softmax", -1)
    told = result.table.set_index("quantity").loc["softmax", ["a", "b", "ratio"]]
    assert worst[["a_s", "b_s", "ratio"]].tolist() == pytest.approx(
        told.tolist(), rel=1e-12
    )
    assert worst["difference_s"] == pytest.approx(
        5e-3, rel=0.05
    ) and "softmax: +" in repr(result)
    assert (
        verdicts(result)["mm"] == "fine" and result.table["verdict"].iloc[0] == "slower"
    )


def test_a_slow_rank_is_named_and_its_waiting_neighbour_is_not():
    result = gate(recording(1), recording(2, rank_factor=1.1))
    assert not result.passed and set(result.explanation["rank"].head(2)) == {1}
    assert "comm" not in set(
        result.explanation["kind"].head(2)
    ) and "on rank 1" in repr(result)


def test_a_slow_collective_is_named():
    result = gate(recording(1), recording(2, factor={"nccl:all_reduce": 2.0}.items()))
    assert not result.passed and result.explanation["kind"].iloc[0] == "comm"
    assert (
        verdicts(result)["exposed_comm_s"] == "slower"
        and verdicts(result)["mm"] == "fine"
    )


def test_what_surely_grew_less_than_the_threshold_passes():
    a, b = recording(1), recording(2, shift=1.01)
    assert gate(a, b).passed and verdicts(gate(a, b))["step_s"] == "fine"
    assert verdicts(gate(a, b, 0.005))["step_s"] == "slower"


def test_noise_is_said_and_does_not_fail():
    result = gate(recording(1, noise=0.3), recording(2, noise=0.3))
    row = result.table.set_index("quantity").loc["step_s"]
    assert (
        result.passed and row["verdict"] == "cannot tell" and row["detectable"] > 0.03
    )
    assert "step_s: cannot tell at 0.03" in repr(result)


def test_a_recording_equals_itself_in_any_unit_of_time():
    a = recording(1)
    same = gate(a, a)
    assert (
        same.passed
        and (same.table["ratio"] == 1).all()
        and not (same.explanation["difference_s"] != 0).any()
    )
    other = recording(2, factor={"aten::mm": 1.2}.items())
    slow = gate(
        recording(1, scale=7.0),
        recording(2, scale=7.0, factor={"aten::mm": 1.2}.items()),
    )
    columns = ["ratio", "low", "high", "p"]
    expected = gate(a, other).table.set_index("quantity")[columns]
    pd.testing.assert_frame_equal(
        slow.table.set_index("quantity")[columns], expected, rtol=0.02, atol=1e-3
    )


def test_an_operation_may_have_two_kinds_and_be_absent_from_most_steps():
    rows = [(0, 0, "other", "mm", 10 * MS * n, MS, -1, n) for n in range(3)]
    sides = [concat_spans(recording(seed), make_timeline(rows)) for seed in (1, 2)]
    result = gate(*sides)
    assert (
        result.passed
        and "mm" in set(result.table["quantity"])
        and result.table["quantity"].is_unique
    )


def test_warm_up_does_not_count():
    result = gate(recording(1), recording(2, warm=4.0))
    assert result.passed and result.table["ratio"].between(0.98, 1.02).all()


def test_quiet_recordings_raise_no_alarm_and_show_slow_downs():
    draws = [
        (recording(2 * n, steps=12), recording(2 * n + 1, steps=12)) for n in range(6)
    ]
    assert all(gate(*pair).passed for pair in draws)
    slower = [
        (a, recording(100 + n, steps=12, factor={"aten::mm": 1.06}.items()))
        for n, (a, _) in enumerate(draws)
    ]
    assert not any(gate(*pair).passed for pair in slower)  # the step is 3.6 % longer


def test_several_recordings_show_how_far_runs_are_apart():
    shifts = [0.95, 1.0, 1.05]
    sides = [
        [recording(10 * at + n, shift=shift) for n, shift in enumerate(shifts)]
        for at in (1, 2)
    ]
    assert not gate(sides[0][0], sides[1][2]).passed and gate(*sides).passed
    assert verdicts(gate(*sides))["step_s"] == "cannot tell"
    assert not gate(
        sides[0],
        [recording(30 + n, shift=1.4 * shift) for n, shift in enumerate(shifts)],
    ).passed


@pytest.mark.parametrize("shift", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_a_host_that_is_slow_in_all_operations_alike_may_be_busy(shift):
    """What one operation adds is found beside it; a device has no such excuse, nor have
    five recordings.
    """
    result = gate(recording(1, host=True), recording(2, host=True, shift=shift))
    assert result.passed and result.host_factor == pytest.approx(shift, rel=0.01)
    row = result.table.set_index("quantity").loc["step_s"]
    assert row["low"] < min(1, shift) and max(1, shift) < row["high"]
    assert row["verdict"] == ("cannot tell" if shift > 1 else "fine")
    assert ("all operations take" in repr(result)) == (shift != 1)
    slow = gate(
        recording(1, host=True),
        recording(2, host=True, shift=shift, factor=[("aten::softmax", 4.0)]),
    )
    assert verdicts(slow)["softmax"] == "slower" and not slow.passed
    on_device = gate(recording(1), recording(2, shift=shift))
    assert on_device.passed == (shift <= 1) and on_device.host_factor == 1
    sides = [
        [recording(10 * at + n, host=True, shift=own) for n in range(3)]
        for at, own in enumerate((1.0, shift))
    ]
    assert gate(*sides).passed == (shift <= 1)


def test_too_few_operations_do_not_show_what_a_host_does_to_all():
    sides = [
        recording(1, host=True),
        recording(2, host=True, factor=[("aten::mm", 2.0)]),
    ]
    sides = [
        side.where((side.spans["name"] != "aten::gelu").to_numpy()) for side in sides
    ]
    result = gate(*sides)
    assert (
        result.passed
        and verdicts(result)["step_s"] == "cannot tell"
        and result.host_factor > 1.3
    )


@pytest.mark.parametrize(
    ("size_bytes", "verdict"), [(1000, "fine"), (1029, "fine"), (1031, "slower")]
)
def test_memory_is_compared_as_it_is(size_bytes, verdict):
    def events(size):
        row = {"rank": 0, "device": "cuda:0", "address": 1}
        held = row | {"time_ns": 5 * MS, "size_bytes": size, "allocated_bytes": size}
        return [
            held,
            row | {"time_ns": 9 * MS, "size_bytes": -size, "allocated_bytes": 0},
        ]

    sides = [
        with_tables(recording(1), memory=events(size)) for size in (1000, size_bytes)
    ]
    assert verdicts(gate(*sides))["peak_bytes"] == verdict


@pytest.mark.parametrize("seed", range(5))
def test_holm_with_equal_weights_is_holm(seed):
    p = np.random.default_rng(seed).random(7) ** 3
    order, adjusted = np.argsort(p), np.empty(7)
    adjusted[order] = [
        min(1, max(p[order][k] * (7 - k) for k in range(n + 1))) for n in range(7)
    ]
    np.testing.assert_allclose(_holm(p, np.full(7, 1 / 7)), adjusted)


@pytest.mark.parametrize(
    ("a", "b", "threshold", "message"),
    [
        (
            recording(1, steps=3),
            recording(2),
            0.03,
            "timeline: 2 steps that are neither warm-up nor cut",
        ),
        (recording(1, steps=5), "main", 0.03, "b='main' must be a Timeline"),
        (
            recording(1, steps=5),
            recording(1, steps=5),
            0,
            "threshold=0 is not a share above 0",
        ),
        (
            recording(1, steps=5),
            recording(1, steps=5),
            "3%",
            "threshold='3%' must be a number",
        ),
        (recording(1, steps=5), [], 0.03, "b is an empty list"),
    ],
    ids=["few steps", "no timeline", "zero", "text", "empty"],
)
def test_bad_input(a, b, threshold, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        gate(a, b, threshold)


def test_recordings_that_lack_a_rank_are_not_judged():
    whole = recording()
    half = Timeline(whole.spans[whole.spans["rank"] == 1].reset_index(drop=True))
    for sides in ((whole, half), (half, whole), (whole, [whole, half])):
        with pytest.raises(ValueError, match="no trace of rank 0, which another has"):
            gate(*sides)


def test_a_file_that_ended_early_is_not_judged(tmp_path):
    for folder in ("whole", "cut"):
        shutil.copytree(PROJECT / "traces/gpt-before", tmp_path / folder)
    broken = tmp_path / "cut" / "rank1.json.gz"
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size * 9 // 10])
    whole = mm.read_trace(tmp_path / "whole")
    with pytest.warns(TraceWarning, match="truncated gzip; kept"):
        cut = mm.read_trace(tmp_path / "cut")
    for sides in (
        (whole, cut),
        (cut, whole),
        (whole, Timeline.load(cut.save(tmp_path / "kept.parquet"))),
    ):
        with pytest.raises(
            ValueError,
            match=r"^rank1.json.gz: truncated gzip; a gate needs whole recordings",
        ):
            gate(*sides)
    # the file of rank 0 is whole
    assert gate(whole.select(ranks=[0]), cut.select(ranks=[0])).passed
