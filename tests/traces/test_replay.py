"""A step replayed over other links, or among more ranks, is the step that would have
been measured there.
"""

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip, make_timeline, with_columns

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.traces.critical_path import what_if
from madmax_lib.traces.read.kineto import read_trace

CALL_NS, MB = 1000, 1e6
TABLE = pd.DataFrame(
    {
        "collective": "all_reduce",
        "ranks": 2,
        "nodes": 2,
        "size_bytes": [1e3, 1e9],
        "seconds": [1e-6, 1.0],
    }
)


def priced(ns):
    """Links on which every call takes as long."""
    return lambda kind, ranks, nodes, size_bytes: ns * 1e-9


def step_of(rows, size_bytes=MB):
    """Timeline of the rows of two ranks, in a labelled step whose end it has too."""
    end_ns = max(row[4] + row[5] for row in rows)
    timeline = make_timeline(
        rows
        + [(rank, -1, "annotation", "ProfilerStep#0", 0, end_ns) for rank in (0, 1)]
    )
    return with_columns(
        timeline,
        size_bytes=np.where(timeline.spans["kind"] == "comm", size_bytes, np.nan),
    ), end_ns


def blocking(compute_ns, price_ns):
    """Ranks that compute (rank, call) and wait for an all-reduce, one call after the
    other.
    """
    rows, now = [], [0, 0]
    for k in range(compute_ns.shape[1]):
        for rank in (0, 1):
            rows.append(
                (rank, -1, "compute", "aten::mm", now[rank], int(compute_ns[rank, k]))
            )
            now[rank] += int(compute_ns[rank, k])
            rows.append((rank, -1, "cpu", "c10d::allreduce_", now[rank], CALL_NS))
        end_ns = max(now) + CALL_NS // 2 + price_ns
        for rank in (0, 1):
            begin_ns = now[rank] + CALL_NS // 2
            rows.append(
                (rank, -2, "comm", "gloo:all_reduce", begin_ns, end_ns - begin_ns)
            )
        now = [end_ns, end_ns]
    rows += [(rank, -1, "compute", "aten::add_", now[rank], 700) for rank in (0, 1)]
    return step_of(rows)


def ddp(backward_ns, price_ns):
    """Backward passes whose nodes (rank, node) each fill a bucket; the links send one
    after the other.
    """
    rows, ready = [], np.zeros(backward_ns.shape, dtype=int)
    for rank in (0, 1):
        now = 0
        for k, ns in enumerate(backward_ns[rank].tolist()):
            rows.append(
                (
                    rank,
                    -1,
                    "cpu",
                    "autograd::engine::evaluate_function: MmBackward0",
                    now,
                    ns + CALL_NS,
                )
            )
            rows.append((rank, -1, "compute", "aten::mm", now, ns))
            rows.append((rank, -1, "cpu", "c10d::allreduce_", now + ns, CALL_NS))
            ready[rank, k], now = now + ns, now + ns + CALL_NS
    left, backward_end = [0, 0], ready[:, -1].max() + CALL_NS
    for k in range(backward_ns.shape[1]):
        # two threads
        begin, left_ns = (
            np.maximum(ready[:, k], left[k]),
            max(ready[:, k].max(), left[-1]) + price_ns,
        )
        left.append(left_ns)
        rows += [
            (
                r,
                -2 - k % 2,
                "comm",
                "gloo:all_reduce",
                int(begin[r]),
                int(left_ns - begin[r]),
            )
            for r in (0, 1)
        ]
    end_ns = [int(max(left_ns, ready[rank, -1] + CALL_NS)) + 5 for rank in (0, 1)]
    assert max(end_ns) == max(left_ns, backward_end) + 5
    rows += [(rank, -1, "compute", "aten::add_", end_ns[rank], 900) for rank in (0, 1)]
    return step_of(rows)


def pipeline(forward_ns, backward_ns, price_ns):
    """GPipe on two stages: (stage, micro-batch) passes; a message needs both of its
    ends.
    """
    rows = []

    def send(stage, now, times_ns):
        """Passes of a stage, each sent on by a call: when they are sent, and the end."""
        sent = []
        for ns in times_ns[stage].tolist():
            rows.extend(
                [
                    (stage, -1, "compute", "aten::mm", now, ns),
                    (stage, -1, "cpu", "c10d::send", now + ns, CALL_NS),
                ]
            )
            sent.append(now + ns + CALL_NS // 2)
            now += ns + CALL_NS
        return sent, now

    def receive(stage, now, sent, times_ns):
        """Passes of a stage, each when its message is there: when they come, and the
        end.
        """
        arrivals = []
        for ready, ns in zip(sent, times_ns[stage].tolist(), strict=True):
            posted = now + CALL_NS // 2
            arrivals.append(arrival := max(posted, ready) + price_ns)
            rows.append((stage, -1, "cpu", "c10d::recv_", now, CALL_NS))
            rows.append((stage, -1, "comm", "gloo:recv", posted, arrival - posted))
            rows.append((stage, -1, "compute", "aten::mm", arrival, ns))
            now = arrival + ns
        return arrivals, now

    sent, forward_end = send(0, 0, forward_ns)
    arrivals, other = receive(1, 0, sent, forward_ns)
    now = max(forward_end, *arrivals)
    rows += [(0, -1, "comm", "gloo:send", start, now - start) for start in sent]
    returned, other = send(1, other, backward_ns)
    arrivals, now = receive(0, now, returned, backward_ns)
    for start, arrival in zip(returned, arrivals, strict=True):
        other = max(other, arrival)
        rows.append((1, -1, "comm", "gloo:send", start, other - start))
    rows += [
        (0, -1, "compute", "aten::add_", now, 300),
        (1, -1, "compute", "aten::add_", other, 300),
    ]
    return step_of(rows)


def times(seed, *shape):
    return np.random.default_rng(seed).integers(20_000, 400_000, shape)


SHAPES = {"blocking": (blocking, 1), "ddp": (ddp, 1), "pipeline": (pipeline, 2)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_is_what_would_have_been_measured(shape, seed):
    build, tables = SHAPES[shape]
    parts = [times(seed + 100 * n, 2, 5) for n in range(tables)]
    for traced_ns, other_ns in (
        (30_000, 30_000),
        (30_000, 300_000),
        (10_000, 2_000_000),
        (500_000, 5_000),
    ):
        timeline, step_ns = build(*parts, traced_ns)
        _, expected_ns = build(*parts, other_ns)
        table = what_if(timeline, {}, collectives=priced(other_ns))
        assert table["faster"].item() == "other links"
        assert table["step_s"].item() * 1e9 == pytest.approx(expected_ns, rel=0.01), (
            traced_ns,
            other_ns,
        )
        same = what_if(timeline, [{}, {"comm": 1}], collectives=priced(traced_ns))[
            "step_s"
        ]
        assert (same * 1e9).round().tolist() == [step_ns, step_ns]


def test_blocking_collectives_add_up():
    """Step = compute + communication, from a table and from a function that sees kind,
    ranks, nodes and bytes.
    """
    compute_ns = times(0, 2, 4)
    timeline, step_ns = blocking(compute_ns, 50_000)
    expected_ns = step_ns + 4 * (2_000_000 - 50_000)
    seen = set()

    def ring(kind, ranks, nodes, size_bytes):
        seen.add((kind, ranks, nodes, size_bytes))
        return 2 * (ranks - 1) / ranks * size_bytes / 5e8

    for collectives, expected in ((TABLE, step_ns + 4 * 950_000), (ring, expected_ns)):
        assert what_if(timeline, {}, collectives=collectives)[
            "step_s"
        ].item() * 1e9 == pytest.approx(expected)
    assert seen == {("all_reduce", 2, 1, MB)}
    what_if(timeline, {}, collectives=ring, devices_per_node=1)
    assert seen == {("all_reduce", 2, 1, MB), ("all_reduce", 2, 2, MB)}
    assert what_if(timeline, {}, collectives=lambda *call: None)["saved_s"].item() == 0


def test_more_ranks_move_more_bytes_over_the_busiest_link():
    """An all-reduce of four takes 2 x 3/4 of its bytes where one of two takes 2 x 1/2;
    a function is asked for four.
    """
    timeline, step_ns = blocking(times(1, 2, 3), 100_000)
    table = what_if(timeline, {}, ranks=4)
    assert table["faster"].item() == "4 ranks" and np.isnan(table["factor"].item())
    assert table["step_s"].item() * 1e9 == pytest.approx(step_ns + 3 * 50_000)
    linear = what_if(
        timeline,
        {},
        ranks=8,
        collectives=lambda kind, ranks, nodes, size: ranks * 1e-5,
        devices_per_node=4,
    )
    assert linear["step_s"].item() * 1e9 == pytest.approx(step_ns - 3 * 20_000)
    assert what_if(timeline, {}, ranks=2)["saved_s"].item() == 0


def test_only_groups_of_data_parallelism_grow():
    timeline, step_ns = blocking(times(2, 2, 2), 100_000)
    names = np.where(timeline.spans["kind"] == "comm", "mesh_dp [0, 1]", None)
    grown = what_if(with_columns(timeline, group=pd.Categorical(names)), {}, ranks=4)[
        "step_s"
    ].item()
    assert grown * 1e9 == pytest.approx(step_ns + 2 * 50_000)


BAD = {
    "no row is of a call of the step, such as all_reduce of 2 ranks": {
        "collectives": TABLE.assign(ranks=8)
    },
    "'seconds' is missing": {"collectives": TABLE.drop(columns="seconds")},
    "measured on 1 and 2 nodes; which is it": {
        "collectives": pd.concat([TABLE, TABLE.assign(nodes=1)])
    },
    "is no time": {"collectives": lambda *call: -1.0},
    "ranks=3 is no multiple of the 2 ranks": {"ranks": 3},
    "ranks=1 is no multiple": {"ranks": 1},
    "devices_per_node=0 must be at least 1": {
        "collectives": TABLE,
        "devices_per_node": 0,
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_replayed(message):
    timeline, _ = blocking(times(0, 2, 2), 50_000)
    with pytest.raises(ValueError, match=message):
        what_if(timeline, {}, **BAD[message])


def test_a_step_without_collectives_has_no_more_ranks():
    timeline = make_timeline(
        [(0, -1, "compute", "aten::mm", 0, 5), (1, -1, "compute", "aten::mm", 0, 5)]
    )
    with pytest.raises(ValueError, match="no collective of the step"):
        what_if(timeline, {}, ranks=4)
    assert what_if(timeline, {}, collectives=priced(1000))["saved_s"].item() == 0


def test_a_simulated_step_is_replayed_with_other_prices():
    """Doubling what every call takes doubles what nothing hides: a step of tensor
    parallelism.
    """
    timeline = mm.simulate("gpt2", "dgx-a100", "tp4.dp2", global_batch=8)
    calls = mm.traces.calls(timeline).set_index("row")
    seconds = {
        (row.collective, row.size_bytes): row.duration_s for row in calls.itertuples()
    }
    same = what_if(
        timeline, {}, collectives=lambda kind, ranks, nodes, size: seconds[kind, size]
    )
    assert abs(same["saved_s"].item()) < 1e-6
    slower = what_if(
        timeline,
        {},
        collectives=lambda kind, ranks, nodes, size: 2 * seconds[kind, size],
    )
    assert 0 < -slower["saved_s"].item() <= calls["duration_s"].sum() / 8 + 1e-9


TRACES = [
    PROJECT / "traces" / name for name in ("gpt-ddp", "gpt-fsdp", "vit-ddp", "vit-fsdp")
]
SHARED = ("param-dlrm-8xV100", "hta-samples/nccl_data.json.gz", "hta-samples/rank0.json.gz",
          "tracelens-samples/resnet_act_checkpoint.json.gz", "hta-samples/df_index_resolver.json.gz")  # fmt: skip


@pytest.mark.parametrize(
    "name", [*map(str, TRACES), *(f"traces/{name}" for name in SHARED)]
)
def test_real_traces_keep_their_step_and_gain_by_faster_links(name):
    timeline = read_trace(name if name.startswith("/") else local_or_skip(name))
    step = timeline.steps[-1]
    calls = mm.traces.calls(timeline.select(steps=[step]))
    alone = (
        calls.groupby(["collective", "group_size", "size_bytes"])["duration_s"]
        .min()
        .to_dict()
    )

    def times_as_long(factor):
        return lambda kind, ranks, nodes, size: (
            factor * alone[kind, ranks, size] if (kind, ranks, size) in alone else None
        )

    table = pd.concat(
        what_if(timeline, {}, step, collectives=price)
        for price in (lambda *call: None, *map(times_as_long, (0.1, 0.5, 1, 2, 10)))
    )
    now_s = table["step_s"] + table["saved_s"]
    assert table["step_s"].iloc[0] == pytest.approx(now_s.iloc[0], rel=0.01)
    assert (np.diff(table["step_s"].iloc[1:]) >= -1e-9).all(), (
        "faster links never make a step slower"
    )


def test_a_step_traced_at_1_gbit_is_foretold_at_lower_rates():
    """Recorded on two hosts; the links of a bench, and what runs at these rates took."""
    folder = PROJECT / "traces" / "gpt-z2-1gbit"
    measured_s = pd.read_csv(folder / "measured.csv").set_index("network")["step_s"]
    for network, links in pd.read_csv(folder / "links.csv").groupby("network"):
        replayed = what_if(read_trace(folder), {}, collectives=links)
        assert replayed["step_s"].item() == pytest.approx(measured_s[network], rel=0.05)
