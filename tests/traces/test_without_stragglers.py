"""Steps replayed without stragglers: closed forms, a published job, and timelines
measured and simulated.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip, make_timeline

import madmax_lib as mm
from madmax_lib.traces.stragglers import operations, what_if_no_stragglers

S = 1_000_000_000


COMPUTE = ("forward-compute", "backward-compute", "gc", "optimizer")
EVERYONE = ("optimizer-clip-main-grad",)
OVER_DP = ("params-all-gather", "grads-reduce-scatter", *EVERYONE)


def seen(ops):
    """Operations of a pipelined job by name, with the streams and calls that a timeline
    tells.
    """
    kinds = ops["optype"].astype(str)
    compute = kinds.isin(COMPUTE)
    both = kinds.str.replace("-send|-recv", "", regex=True)
    stage = ops["stage"] + kinds.eq("forward-send") - kinds.eq("backward-send")
    ends = kinds.eq("embedding-grads-all-reduce")
    alone = compute | kinds.eq("layernorm-grads-all-reduce")
    where = [ops["step"], both, stage.mask(kinds.isin(EVERYONE) | ends, -1)]
    where += [ops["dp_rank"].mask(kinds.isin(OVER_DP), -1), ops["seq_id"]]
    return ops.assign(
        optype=kinds,
        stream=kinds.mask(compute, "").astype("category").cat.codes,
        call=ops.groupby(where, sort=False).ngroup().mask(alone, -1),
        is_call=~compute,
        like=0,
    )


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
    names = ["dp_rank", "stage", "rank", "step", "optype"]
    return seen(pd.DataFrame(rows, columns=[*names, "start_ts", "duration", "seq_id"]))


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


def test_the_published_job():
    """One job of the OSDI 2025 artifact, from the order of its starts and ends: S 1.166
    for 1.179.
    """
    folder = local_or_skip("stragglers")
    theirs = json.loads((folder / "answers-ST.json").read_text())
    ops = seen(pd.read_parquet(folder / "trace-ST.parquet"))
    assert pytest.approx(theirs["S"], rel=0.012) == what_if_no_stragglers(ops).S


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ops: ops.drop(columns="stage"), "lack the column(s) stage"),
        (lambda ops: ops.iloc[:0], "no operations"),
        (lambda ops: ops.assign(duration=-1.0), "negative duration"),
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
