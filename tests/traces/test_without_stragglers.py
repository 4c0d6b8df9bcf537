"""Steps replayed without stragglers: closed forms, a published job, and timelines
measured and simulated.
"""

import json
import re
from itertools import product

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip, make_timeline

import madmax_lib as mm
from madmax_lib.traces.stragglers import operations, what_if_no_stragglers

S = 1_000_000_000


def data_parallel(compute_s, reduce_s=0.0):
    """Operations of dp ranks (columns) over steps (rows) that compute and then reduce
    and step together.
    """
    rows = []
    for (step, dp_rank), seconds in np.ndenumerate(np.array(compute_s, dtype=float)):
        last = max(compute_s[step])
        calls = [
            ("grads-reduce-scatter", seconds, last + reduce_s - seconds),
            ("optimizer", last + reduce_s, 0.0),
        ]
        for kind, start, duration in [("forward-compute", 0.0, seconds), *calls]:
            rows.append((dp_rank, 0, dp_rank, step, kind, start, duration, 0))
    return pd.DataFrame(
        rows,
        columns=[
            "dp_rank",
            "stage",
            "rank",
            "step",
            "optype",
            "start_ts",
            "duration",
            "seq_id",
        ],
    )


def pipeline(forward_s, backward_s, micro_batches):
    """Operations of a pipeline that runs all forward passes, then all backward ones;
    messages take no time.
    """
    stages, rows, ends = len(forward_s), [], {}
    for way, times in (("forward", forward_s), ("backward", backward_s)):
        order = range(stages) if way == "forward" else range(stages)[::-1]
        for k, stage in product(range(micro_batches), order):
            before = stage - 1 if way == "forward" else stage + 1
            arrived = ends.get((way, before, k), 0.0)
            start = max(arrived, ends.get(stage, 0.0))
            ends[stage] = ends[way, stage, k] = start + times[stage]
            if 0 <= before < stages:
                rows += [
                    (before, f"{way}-send", arrived, 0.0, k),
                    (stage, f"{way}-recv", arrived, 0.0, k),
                ]
            rows.append((stage, f"{way}-compute", start, times[stage], k))
    rows += [(stage, "optimizer", ends[stage], 0.0, 0) for stage in range(stages)]
    frame = pd.DataFrame(
        rows, columns=["stage", "optype", "start_ts", "duration", "seq_id"]
    )
    return frame.assign(dp_rank=0, rank=frame["stage"], step=0)


@pytest.mark.parametrize(("ranks", "factor"), [(8, 2.0), (2, 1.5), (64, 3.0)])
def test_one_slow_rank(ranks, factor):
    answer = what_if_no_stragglers(data_parallel([[1.0] * (ranks - 1) + [factor]]))
    assert pytest.approx(ranks * factor / (ranks - 1 + factor)) == answer.S
    assert answer.by_dp[ranks - 1] == pytest.approx(answer.S) and answer.by_dp[
        0
    ] == pytest.approx(1)
    assert answer.by_rank.idxmax() == ranks - 1 and np.isnan(answer.M_S)
    assert pytest.approx(1) == answer.M_W


def test_one_slow_rank_before_a_reduction():
    answer = what_if_no_stragglers(data_parallel([[2.0] * 7 + [4.0]], reduce_s=0.75))
    assert (
        answer.S
        == pytest.approx((2 * 2 + 0.75) / (2 * 9 / 8 + 0.75))
        == pytest.approx(1.583333, abs=1e-6)
    )
    assert answer.replay_gap == pytest.approx(1)


def test_a_culprit_that_changes_halves_the_share_of_the_worst():
    answer = what_if_no_stragglers(data_parallel([[2.0, 1.0], [1.0, 2.0]]))
    assert (answer.S, *answer.by_dp, answer.M_W) == pytest.approx(
        (4 / 3, 7 / 6, 7 / 6, 0.5)
    )


def test_three_equally_slow_of_forty():
    answer = what_if_no_stragglers(data_parallel([[3.0] * 3 + [1.0] * 37]))
    assert pytest.approx((2.608696, 0), abs=1e-6) == (answer.S, answer.M_W)


def test_a_slow_last_stage():
    """T_replay = (p-1)(f0+b0) + M(f1+b1), the ideal (M+p-1) times the mean; repairing
    it gives back M / (M-1).
    """
    answer = what_if_no_stragglers(pipeline([1, 1, 1, 1.6], [2, 2, 2, 3.0], 4))
    assert (answer.T_replay, answer.T_ideal, answer.M_S) == pytest.approx(
        (27.4, 23.8, 4 / 3)
    )


def test_one_rank_and_equal_ranks_have_no_stragglers():
    for times in ([[1.0], [3.0]], [[1.0, 1.0], [1.0, 1.0]]):
        answer = what_if_no_stragglers(data_parallel(times))
        assert answer.S == 1.0 and np.isnan(answer.M_W) and "S = 1" in repr(answer)


def test_scale_names_and_order_of_rows_change_nothing():
    ops = data_parallel([[1.0, 1.2, 2.0], [1.5, 1.0, 1.0]], reduce_s=0.5)
    before, factor = what_if_no_stragglers(ops), 7.0
    scaled = ops.assign(
        start_ts=ops["start_ts"] * factor, duration=ops["duration"] * factor
    )
    turned = ops.assign(dp_rank=2 - ops["dp_rank"]).sample(frac=1, random_state=0)
    assert pytest.approx(before.S) == what_if_no_stragglers(scaled).S
    after = what_if_no_stragglers(turned)
    assert pytest.approx(before.S) == after.S and after.by_dp.tolist() == pytest.approx(
        before.by_dp.tolist()[::-1]
    )


def test_steps_that_lack_operations_are_left_out():
    ops = data_parallel([[1.0, 2.0]] * 3)
    answer = what_if_no_stragglers(
        ops.drop(ops.index[(ops["step"] == 1) & (ops["dp_rank"] == 1)])
    )
    assert answer.steps_dropped == 1 and answer.by_step["step"].tolist() == [0, 2]


def published():
    folder = local_or_skip("stragglers")
    answers = json.loads((folder / "answers-ST.json").read_text())
    return (
        pd.read_parquet(folder / "trace-ST.parquet"),
        answers,
        pd.read_csv(folder / "ideal-ST.csv"),
    )


def test_the_published_job():
    """All published numbers of one job of the OSDI 2025 artifact, which were computed
    in float32, to 1e-6.
    """
    ops, theirs, _ = published()
    ours = what_if_no_stragglers(ops)
    for name in (
        "S",
        "M_S",
        "M_W",
        "T_measured",
        "T_replay",
        "T_ideal",
        "replay_gap",
    ):
        assert getattr(ours, name) == pytest.approx(theirs[name], abs=1e-6), name
    for own, name in (
        (ours.by_kind, "S_op"),
        (ours.by_stage, "S_stage"),
        (ours.by_dp, "S_dp"),
    ):
        assert {str(key): value for key, value in own.items()} == pytest.approx(
            theirs[name], abs=1e-6
        )
    steps = ours.by_step.set_index("step").loc[theirs["per_step"]["step"]]
    for own, name in (("measured_s", "measured"), ("replay_s", "replay"), ("S", "S")):
        assert steps[own].tolist() == pytest.approx(theirs["per_step"][name], abs=1e-6)
    assert ours.by_rank.idxmax() == 7 and ours.steps_dropped == 0


def test_the_published_job_by_its_times_alone():
    """Without rules, from the order of starts and ends: S 1.166 for 1.179."""
    ops, theirs, _ = published()
    kinds = ops["optype"].astype(str)
    compute = kinds.isin(("forward-compute", "backward-compute", "gc", "optimizer"))
    both = kinds.str.replace("-send|-recv", "", regex=True)
    stage = ops["stage"] + kinds.eq("forward-send") - kinds.eq("backward-send")
    alone = compute | kinds.eq("layernorm-grads-all-reduce")
    everyone, ends = (
        kinds.eq("optimizer-clip-main-grad"),
        kinds.eq("embedding-grads-all-reduce"),
    )
    where = [ops["step"], both, stage.mask(everyone | ends, -1), ops["seq_id"]]
    where.append(
        ops["dp_rank"].mask(
            everyone | kinds.isin(("params-all-gather", "grads-reduce-scatter")), -1
        )
    )
    seen = ops.assign(
        stream=kinds.mask(compute, "").astype("category").cat.codes,
        is_call=~compute,
        like=0,
    )
    seen["call"] = ops.groupby(where, sort=False).ngroup().mask(alone, -1)
    assert pytest.approx(theirs["S"], rel=0.012) == what_if_no_stragglers(seen).S


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ops: ops.drop(columns="stage"), "lack the column(s) stage"),
        (lambda ops: ops.iloc[:0], "no operations"),
        (lambda ops: ops.assign(mc=1), "interleaved"),
        (lambda ops: ops.assign(optype="sleep"), "'sleep' are not known"),
        (lambda ops: pd.concat([ops, ops]), "is in two rows"),
        (lambda ops: ops.assign(duration=-1.0), "negative duration"),
        (
            lambda ops: ops.assign(
                optype=ops["optype"].replace("optimizer", "forward-send")
            ),
            "no receive",
        ),
    ],
)
def test_operations_that_cannot_be_replayed(change, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        what_if_no_stragglers(change(data_parallel([[1.0, 2.0]])))
    assert "\n" not in str(caught.value)


def meeting_timeline(compute_ns, reduce_ns):
    rows = []
    for step in range(2):
        zero = step * 100 * S
        for rank, own in enumerate(compute_ns):
            end = zero + max(compute_ns) + reduce_ns
            rows.append((rank, 7, "compute", "gemm", zero, own, -1, step))
            rows.append(
                (
                    rank,
                    20,
                    "comm",
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                    zero + own,
                    end - zero - own,
                    -1,
                    step,
                )
            )
    return make_timeline(rows, device="H100")


def test_a_measured_timeline_with_a_slow_rank():
    answer = what_if_no_stragglers(
        meeting_timeline([2 * S, 2 * S, 2 * S, 4 * S], 3 * S // 4)
    )
    assert (
        pytest.approx((4 + 0.75) / (10 / 4 + 0.75)) == answer.S
        and answer.by_rank.idxmax() == 3
    )
    assert answer.by_kind.idxmax() == "compute" and pytest.approx(1) == answer.M_W


def test_steps_that_overlap_are_compared_with_their_pace():
    trace = mm.read_trace(local_or_skip("traces") / "more/torchrec-a2a5")
    answer = what_if_no_stragglers(trace)
    assert answer.replay_gap == pytest.approx(1, abs=0.03)


def test_measured_timelines_of_this_project():
    for name in ("gpt-ddp", "gpt-fsdp"):
        answer = what_if_no_stragglers(operations(mm.read_trace(mm.dataset(name))))
        assert (
            0.9 < answer.S < 1.5 and answer.replay_gap > 1 and len(answer.by_rank) == 2
        )


@pytest.mark.parametrize(
    ("plan", "even"),
    [("dp8.z1", True), ("dp2.tp4", True), ("tp2.pp4", False), ("dp2.pp4", False)],
)
def test_simulated_steps_lose_what_their_stages_differ_by(plan, even):
    timeline = mm.simulate(
        "llama2-7b", "dgx-h100", plan, global_batch=16, sequence=2048
    )
    ops = operations(timeline)
    answer = what_if_no_stragglers(ops)
    assert pytest.approx(1, abs=1e-9) == answer.S if even else answer.S > 1.005
    if not even:  # the last stage holds the head
        assert (
            ops["stage"].nunique() == 4
            and answer.by_stage.idxmax() == 3
            and answer.M_S > 0.9
        )
        assert (
            ops[ops["optype"] == "forward-compute"].groupby("rank").size() > 1
        ).all()


def test_a_timeline_without_steps_has_nothing_to_replay():
    with pytest.raises(ValueError, match="nothing to replay"):
        operations(make_timeline([(0, 7, "compute", "gemm", 0, 5, -1, -1)]))
