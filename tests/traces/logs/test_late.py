"""Who is late in logs with planted facts, and that nobody is where nothing is planted."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.traces import find_late, history, read_log
from madmax_lib.traces.logs.changes import changes
from tests.support import local_or_skip
from tests.traces.logs.made_logs import FWD_S, inspector_line, write_job


def slow_from(phase, rank, seconds, first=1):
    return lambda name, at, step: (
        seconds if (name, at) == (phase, rank) and step >= first else 0.0
    )


@pytest.mark.parametrize(
    ("phase", "rank", "share", "first"),
    [
        ("fwd_bwd", 2, 0.05, 1),
        ("fwd_bwd", 5, 0.04, 151),
        ("fetching_batch", 3, 0.03, 1),
        ("optim", 7, 0.02, 101),
    ],
)
def test_a_slow_rank_is_named_with_phase_step_and_cost(
    tmp_path, phase, rank, share, first
):
    seconds = share * 0.43
    log = read_log(write_job(tmp_path, extra=slow_from(phase, rank, seconds, first)))
    worst = find_late(log).iloc[0]
    assert (worst["rank"], worst["host"], worst["phase"]) == (rank, None, phase)
    assert abs(worst["since_step"] - first) <= 2
    assert worst["kind"] == "late"
    assert worst["cost_share"] == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("ranks", [8, 12])
def test_a_slow_host_is_one_finding(tmp_path, ranks):
    def extra(name, rank, step):
        return 0.02 if name == "fwd_bwd" and 4 <= rank < 8 else 0.0

    (row,) = find_late(
        read_log(write_job(tmp_path, ranks=ranks, extra=extra))
    ).itertuples()
    assert (row.rank, row.host, row.phase) == (None, "node01", "fwd_bwd")
    assert row.cost_share == pytest.approx(0.02 / 0.43, abs=0.01)


def test_all_ranks_slower_in_one_phase_is_a_change_of_it(tmp_path):
    def extra(name, rank, step):
        return 0.02 if name == "fetching_batch" and step > 180 else 0.0

    (row,) = find_late(read_log(write_job(tmp_path, extra=extra))).itertuples()
    assert (row.rank, row.phase, row.kind) == (None, "fetching_batch", "change")
    assert abs(row.since_step - 181) <= 2


def test_a_job_that_drifts_names_the_phase(tmp_path):
    def extra(name, rank, step):
        return 0.03 * step / 600 if name == "fwd_bwd" else 0.0

    job = write_job(tmp_path, ranks=2, steps=600, extra=extra)
    (row,) = find_late(read_log(job)).itertuples()
    assert (row.rank, row.phase, row.kind) == (None, "fwd_bwd", "drift")


def test_who_waits_inside_of_a_phase_is_not_late(tmp_path):
    log = read_log(write_job(tmp_path))
    phases = {key: seconds.copy() for key, seconds in log.phases.items()}
    phases["training", "fetching_batch"][3] += 0.015
    phases["training", "fwd_bwd"][np.arange(8) != 3] += 0.015
    pace_s = log.own_pace_s + np.float32(0.015)
    (row,) = find_late(replace(log, phases=phases, own_pace_s=pace_s)).itertuples()
    assert (row.rank, row.phase) == (3, "fetching_batch")


def test_two_slow_ranks_are_both_named(tmp_path):
    def extra(name, rank, step):
        return 0.03 if name == "fwd_bwd" and rank in (1, 6) else 0.0

    table = find_late(read_log(write_job(tmp_path, extra=extra)))
    assert set(table["rank"]) == {1, 6}
    assert table["cost_share"].to_numpy() == pytest.approx(0.065, abs=0.015)


def test_a_rank_that_becomes_slower_drifts(tmp_path):
    def extra(name, rank, step):
        return 0.05 * step / 400 if (name, rank) == ("fwd_bwd", 1) else 0.0

    worst = find_late(read_log(write_job(tmp_path, steps=400, extra=extra))).iloc[0]
    assert (worst["rank"], worst["kind"]) == (1, "drift")


def test_a_host_that_its_device_hides_is_not_named(tmp_path):
    extra = slow_from("fwd_bwd", 2, 0.03)
    log = read_log(write_job(tmp_path, device_s=0.6, extra=extra))
    table = find_late(log)
    assert table.empty and table.attrs["hidden"] == ["fwd_bwd of 2"]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_late_among_equals(tmp_path, seed):
    assert find_late(read_log(write_job(tmp_path, seed=seed))).empty


def test_a_restart_overrides_what_it_repeats(tmp_path):
    write_job(tmp_path, ranks=2, steps=120)
    write_job(tmp_path, ranks=2, steps=100, first=101, seed=1)
    log = read_log(tmp_path)
    assert len(log.units) == 2 and list(log.steps) == list(range(1, 201))
    assert list(log.tags[[0, 99, 100]]) == ["start", "checkpoint_save", "start"]
    # 20 steps stand in both files, and the later one counts
    assert np.isfinite(log.phases["training", "fwd_bwd"]).all()


def test_half_a_line_and_a_missing_rank_are_noted(tmp_path):
    write_job(tmp_path, ranks=4, steps=30)
    cut, gone = sorted(tmp_path.iterdir())[:2]
    cut.write_text(cut.read_text()[:-90])
    gone.unlink()
    log = read_log(tmp_path)
    assert list(log.units["rank"]) == [0, 2, 3]
    assert any("no file of rank 1" in note for note in log.notes)
    assert any("1 lines are cut" in note for note in log.notes)


def test_the_late_rank_of_a_collective_is_the_fastest(tmp_path):
    rng = np.random.default_rng(0)
    for rank in range(4):
        lines = [
            json.dumps(inspector_line(rank, 1 << 20, call, us - 300 * (rank == 2)))
            for call, us in enumerate(rng.integers(900, 1100, 50).tolist())
        ]
        (tmp_path / f"node00-pid{rank}.log").write_text("\n".join(lines))
    worst = find_late(read_log(tmp_path)).iloc[0]
    assert worst["rank"] == 2 and worst["phase"] == "AllReduce 1048576"
    assert worst["excess_s"] == pytest.approx(300e-6, rel=0.15)


def test_findings_of_the_samples_are_those_that_were_planted():
    folder = local_or_skip("logs_2026")
    key = json.loads((folder / "key.json").read_text())
    plant = key["torchtitan"]["plants"][0]
    table = find_late(read_log(folder / "jsonl" / "straggler-4x200"))
    worst = table.iloc[0]
    assert ([worst["rank"]], worst["phase"]) == (plant["ranks"], plant["phase"])
    costs = plant["mean_step_cost_pct"] / 100, plant["step_cost_pct"] / 100
    assert costs[0] - 0.002 < worst["cost_share"] < costs[1] + 0.002
    slow = find_late(read_log(folder / "jsonl" / "rl-20"))
    assert list(slow["host"]) == [key["torchtitan-rl"]["slow"]["host"]]
    assert find_late(read_log(folder / "inspector" / "v40-8ranks"))[
        "rank"
    ].unique() == [3]
    for quiet in ("v42-4ranks", "v43-4ranks", "v40-verbose-4ranks"):
        assert find_late(read_log(folder / "inspector" / quiet)).empty
    summary = find_late(read_log(folder / "traceml")).iloc[0]
    assert (summary["rank"], summary["phase"], summary["kind"]) == (
        3,
        "compute",
        "slow",
    )


@pytest.mark.parametrize(("size", "at"), [(100, 50), (5000, 1234), (5000, 4600)])
def test_a_change_is_found_where_it_is(size, at):
    rng = np.random.default_rng(at)
    values = FWD_S * rng.normal(1, 0.0075, size)
    assert changes(values) == []
    values[at:] *= 1.03
    (change,) = changes(values)
    assert change.kind == "change" and abs(change.at - at) <= 3
    assert change.share == pytest.approx(0.03, abs=0.005) and change.confidence > 0.99


def test_a_drift_is_no_change_and_single_slow_steps_are_neither():
    rng = np.random.default_rng(1)
    values = rng.normal(1, 0.0075, 2000) + 0.3 * (rng.random(2000) < 0.01)
    assert changes(values) == []
    (drift,) = changes(values + np.linspace(0, 0.05, 2000))
    assert drift.kind == "drift" and drift.share == pytest.approx(0.05, abs=0.01)


def test_history_reads_what_train_wrote():
    folder = PROJECT / "traces" / "runs" / "llm"
    table = history(folder).set_index("run")
    # the first step of a start is not counted
    times_s = pd.read_csv(folder / "moe-tiny_dp1" / "steps.csv")["total_s"][1:]
    assert table.at["moe-tiny_dp1", "steps"] == len(times_s) and len(table) == 11
    assert table.at["moe-tiny_dp1", "step_s"] == pytest.approx(times_s.median())
