"""Ops on in-order streams: when they start, what cannot run, and the timeline they
become.
"""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import madmax_lib as mm
from madmax_lib.simulator.events.engine import (
    Program,
    apply_core_sharing,
    run,
    to_timeline,
)
from madmax_lib.simulator.rates.parameters import start
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import Meta


def program(ops):
    """Program of (rank, stream, duration, after) tuples."""
    result = Program()
    for number, (rank, stream, duration_s, after) in enumerate(ops):
        result.op(
            stream,
            "comm" if stream else "compute",
            f"op {number}",
            duration_s,
            after,
            rank=rank,
        )
    return result


def test_streams_are_in_order_and_dependencies_hold():
    start_s, end_s = run(
        program([(0, 0, 1.0, []), (0, 1, 2.0, [0]), (0, 0, 1.0, []), (0, 0, 1.0, [1])])
    )
    assert start_s == [0, 1, 1, 3] and end_s == [1, 3, 2, 4]


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            [(0, 0, 1.0, [1]), (1, 0, 1.0, [])],
            r"op 0 \(op 0\) waits for op 1, which is not issued before it",
        ),
        ([(0, 0, 1.0, [7])], "waits for op 7, which is not"),
        ([(0, 0, 1.0, []), (0, 0, 1.0, [-1])], "waits for op -1, which is not"),
        ([(0, 0, -1.0, [])], "has duration -1.0 s"),
        ([(0, 0, float("nan"), [])], "has duration nan s"),
    ],
)
def test_what_cannot_run_is_refused(ops, message):
    with pytest.raises(ValueError, match=message):
        run(program(ops))


def test_a_part_is_issued_again_on_another_rank():
    part = program([(0, 0, 1.0, []), (0, 1, 2.0, [0]), (0, 0, 1.0, [1])])
    whole = Program()
    first = whole.extend(part, 0)
    second = whole.extend(part, 3, [(0, first + 1), (2, first + 2)])
    assert (first, second) == (0, 3) and whole.rank == [0, 0, 0, 3, 3, 3]
    assert whole.after == [(), (0,), (1,), (1,), (3,), (4, 2)]
    assert run(whole) == ([0, 1, 3, 3, 4, 6], [1, 3, 4, 4, 6, 7])


NUMBER = st.integers(0, 2)
OP = st.tuples(
    NUMBER,
    NUMBER,
    st.integers(0, 9).map(float),
    st.sets(st.integers(0, 30), max_size=3),
)
OPS = st.lists(OP, min_size=1, max_size=30).map(
    lambda ops: [
        (*op[:3], sorted({other % i for other in op[3]} if i else ()))
        for i, op in enumerate(ops)
    ]
)


@given(OPS, st.integers(0, 29))
def test_a_longer_op_never_makes_another_start_earlier(ops, which):
    before, _ = run(program(ops))
    which %= len(ops)
    rank, stream, duration_s, after = ops[which]
    longer, _ = run(
        program(
            [*ops[:which], (rank, stream, duration_s + 5, after), *ops[which + 1 :]]
        )
    )
    assert all(later >= earlier for earlier, later in zip(before, longer, strict=True))


@given(OPS)
def test_every_order_of_issue_across_ranks_gives_the_same_times(ops):
    """Issuing the last rank that can go on changes nothing but the numbering."""
    start_s, _ = run(program(ops))
    order, left = [], list(range(len(ops)))
    while left:
        heads = [
            i for i in left if i == next(j for j in left if ops[j][0] == ops[i][0])
        ]
        order.append(
            max(
                (i for i in heads if set(ops[i][3]) <= set(order)),
                key=lambda i: ops[i][0],
            )
        )
        left.remove(order[-1])
    again, _ = run(
        program(
            [(*ops[i][:3], [order.index(other) for other in ops[i][3]]) for i in order]
        )
    )
    assert [again[order.index(i)] for i in range(len(ops))] == start_s


@given(OPS)
def test_timeline_keeps_streams_free_of_overlap(ops):
    spans = to_timeline(program(ops), Meta(source="simulated", world_size=3)).spans
    for _, row in spans.groupby(["rank", "stream"]):
        ends = row["start_ns"] + row["dur_ns"]
        assert (row["start_ns"].to_numpy()[1:] >= ends.to_numpy()[:-1]).all()


def test_timeline_has_edges_and_breakdown():
    timeline = to_timeline(
        program([(0, 0, 1.0, []), (0, 1, 2.0, [0]), (0, 0, 1.0, [1])]),
        Meta(source="simulated"),
    )
    edges = timeline.edges.astype({"why": str}).to_numpy().tolist()
    assert edges == [[0, 1, "data"], [1, 2, "data"], [0, 2, "stream"]]
    row = breakdown(timeline).iloc[0]
    assert (
        row["total_s"],
        row["compute_s"],
        row["exposed_comm_s"],
        row["overlap"],
    ) == (4, 2, 2, 0)


@pytest.mark.parametrize(
    ("beside", "first_s", "last_s"), [(0.0, 0.6, 1.2), (1.0, 1.0, 1.0), (0.5, 0.0, 0.0)]
)
def test_ranks_that_share_cores_compute_faster_alone(beside, first_s, last_s):
    """Two ops of a second one after the other take 0.6 s each, beside each other a
    second each; in between, in between.

    With half of an op beside the other: x is alone for w seconds and beside for the
    rest b, w / 0.6 + b = 1.
    """
    program = Program()
    first = program.op(0, "compute", "x", 1.0)
    half = program.op(0, "compute", "x", 1.0) if beside == 0.5 else None
    program.op(0, "compute", "y", 1.0, [] if beside else [first], rank=1)
    apply_core_sharing(program, 0.6)
    start_s, end_s = run(program)
    if half is not None:  # y lies beside the first x alone
        assert end_s[half] - start_s[half] == pytest.approx(0.6, rel=1e-3) and end_s[
            first
        ] == pytest.approx(1.0, rel=1e-3)
    else:
        assert end_s[0] == pytest.approx(first_s, rel=1e-3) and end_s[
            1
        ] == pytest.approx(last_s, rel=1e-3)


def test_steps_on_shared_cores():
    """One rank computes alone, a pipeline in part, replicas never; what simulate lays
    out, estimate knows.
    """

    def seconds(plan, alone):
        constants = start().constants | {"alone": alone}
        cluster = replace(
            mm.cluster("kaggle-2xt4"), devices_per_node=mm.Plan.parse(plan).world_size
        )
        run = {
            "global_batch": 8,
            "dtype": "fp16",
            "parameters": replace(start(), constants=constants),
        }
        step = mm.simulate("gpt2", cluster, plan, **run).spans
        return float((step["start_ns"] + step["dur_ns"]).max() / 1e9), mm.estimate(
            "gpt2", cluster, plan, **run
        )["step_s"].iloc[0]

    ratios = {
        plan: seconds(plan, 0.6)[0] / seconds(plan, 1.0)[0]
        for plan in ("dp1.mb8", "pp2.mb4", "dp2.mb4")
    }
    assert ratios["dp1.mb8"] < 0.7 < ratios["pp2.mb4"] < 0.9 and ratios["dp2.mb4"] == 1
    for plan in (*ratios, "pp2.mb1", "pp4.mb1"):
        simulated, estimated = seconds(plan, 0.6)
        assert estimated == pytest.approx(simulated, rel=0.03)
