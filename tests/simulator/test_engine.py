"""Ops on in-order streams: when they start, what cannot run, and the timeline they
become.
"""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from support import cells, refused

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
        kind = "comm" if stream else "compute"
        result.op(stream, kind, f"op {number}", duration_s, after, rank=rank)
    return result


THREE = [(0, 0, 1.0, []), (0, 1, 2.0, [0]), (0, 0, 1.0, [1])]


def test_streams_are_in_order_and_dependencies_hold():
    ops = [(0, 0, 1.0, []), (0, 1, 2.0, [0]), (0, 0, 1.0, []), (0, 0, 1.0, [1])]
    assert run(program(ops)) == ([0, 1, 1, 3], [1, 3, 2, 4])


@pytest.mark.parametrize(
    ("ops", "rule"),
    cells("""
    [(0, 0, 1.0, [1]), (1, 0, 1.0, [])] | op 0 (op 0) & op 1, which is not issued before it
    [(0, 0, 1.0, [7])] | waits for op 7, which is not
    [(0, 0, 1.0, []), (0, 0, 1.0, [-1])] | waits for op -1, which is not
    [(0, 0, -1.0, [])] | has duration -1.0 s
    """),
)
def test_what_cannot_run_is_refused(ops, rule):
    with refused(rule):
        run(program(ops))


def test_a_duration_that_is_no_number_is_refused():
    with refused("has duration nan s"):
        run(program([(0, 0, float("nan"), [])]))


def test_a_part_is_issued_again_on_another_rank():
    part = program(THREE)
    whole = Program()
    first = whole.extend(part, 0)
    second = whole.extend(part, 3, [(0, first + 1), (2, first + 2)])
    assert (first, second) == (0, 3) and whole.rank == [0, 0, 0, 3, 3, 3]
    assert whole.after == [(), (0,), (1,), (1,), (3,), (4, 2)]
    assert run(whole) == ([0, 1, 3, 3, 4, 6], [1, 3, 4, 4, 6, 7])


NUMBER = st.integers(0, 2)
SECONDS = st.integers(0, 9).map(float)
AFTER = st.sets(st.integers(0, 30), max_size=3)


def with_earlier(ops):
    """The ops, which wait for earlier ones alone."""
    numbered = enumerate(ops)
    return [(*op, sorted({j % i for j in after} if i else ())) for i, (*op, after) in numbered]  # fmt: skip


OP = st.tuples(NUMBER, NUMBER, SECONDS, AFTER)
OPS = st.lists(OP, min_size=1, max_size=30).map(with_earlier)


@given(OPS, st.integers(0, 29))
def test_a_longer_op_never_makes_another_start_earlier(ops, which):
    before, _ = run(program(ops))
    which %= len(ops)
    rank, stream, duration_s, after = ops[which]
    ops[which] = rank, stream, duration_s + 5, after
    longer, _ = run(program(ops))
    assert all(later >= earlier for earlier, later in zip(before, longer, strict=True))


@given(OPS)
def test_every_order_of_issue_across_ranks_gives_the_same_times(ops):
    """Issuing the last rank that can go on changes nothing but the numbering."""
    start_s, _ = run(program(ops))
    order, left = [], list(range(len(ops)))
    while left:
        heads = {ops[i][0]: i for i in reversed(left)}
        ready = [rank for rank, i in heads.items() if set(ops[i][3]) <= set(order)]
        order.append(heads[max(ready)])
        left.remove(order[-1])
    place = {op: at for at, op in enumerate(order)}
    issued = [(*ops[i][:3], [place[other] for other in ops[i][3]]) for i in order]
    again, _ = run(program(issued))
    assert [again[place[i]] for i in range(len(ops))] == start_s


@given(OPS)
def test_timeline_keeps_streams_free_of_overlap(ops):
    spans = to_timeline(program(ops), Meta(source="simulated", world_size=3)).spans
    for _, row in spans.groupby(["rank", "stream"]):
        ends = row["start_ns"] + row["dur_ns"]
        assert (row["start_ns"].to_numpy()[1:] >= ends.to_numpy()[:-1]).all()


def test_timeline_has_edges_and_breakdown():
    timeline = to_timeline(program(THREE), Meta(source="simulated"))
    edges = timeline.edges.astype({"why": str}).to_numpy().tolist()
    assert edges == [[0, 1, "data"], [1, 2, "data"], [0, 2, "stream"]]
    columns = ["total_s", "compute_s", "exposed_comm_s", "overlap"]
    assert breakdown(timeline).iloc[0][columns].tolist() == [4, 2, 2, 0]


@pytest.mark.parametrize(
    ("ops", "expected_s"),
    [
        # one after the other, beside each other, beside the first of two alone
        ([(0, 0, 1.0, []), (1, 0, 1.0, [0])], [0.6, 0.6]),
        ([(0, 0, 1.0, []), (1, 0, 1.0, [])], [1, 1]),
        ([(0, 0, 1.0, []), (0, 0, 1.0, []), (1, 0, 1.0, [])], [1, 0.6, 1]),
    ],
)
def test_ranks_that_share_cores_compute_faster_alone(ops, expected_s):
    """Ops of a second take 0.6 s alone."""
    shared = program(ops)
    apply_core_sharing(shared, 0.6)
    start_s, end_s = run(shared)
    took_s = [end - start for start, end in zip(start_s, end_s, strict=True)]
    assert took_s == pytest.approx(expected_s, rel=1e-3)


def on_shared_cores(call, plan, alone):
    """What a call says of a plan where a rank alone takes this share of the time."""
    constants = start().constants | {"alone": alone}
    parameters = replace(start(), constants=constants)
    ranks = mm.Plan.parse(plan).world_size
    cluster = replace(mm.cluster("kaggle-2xt4"), devices_per_node=ranks)
    run = {"global_batch": 8, "dtype": "fp16", "parameters": parameters}
    return call("gpt2", cluster, plan, **run)


def simulated_s(plan, alone=0.6):
    spans = on_shared_cores(mm.simulate, plan, alone).spans
    return float((spans["start_ns"] + spans["dur_ns"]).max() / 1e9)


@pytest.mark.parametrize(
    ("plan", "least", "most"),
    [("dp1.mb8", 0.5, 0.7), ("pp2.mb4", 0.7, 0.9), ("dp2.mb4", 1, 1)],
)
def test_steps_on_shared_cores(plan, least, most):
    """One rank computes alone, a pipeline in part, replicas never."""
    assert least <= simulated_s(plan) / simulated_s(plan, 1.0) <= most


@pytest.mark.parametrize(
    "plan", ["dp1.mb8", "pp2.mb4", "dp2.mb4", "pp2.mb1", "pp4.mb1"]
)
def test_what_simulate_lays_out_on_shared_cores_estimate_knows(plan):
    estimated_s = on_shared_cores(mm.estimate, plan, 0.6)["step_s"].iloc[0]
    assert estimated_s == pytest.approx(simulated_s(plan), rel=0.03)
