"""A step replayed over other links, or among more ranks, is the step that would have
been measured there.
"""

import numpy as np
import pandas as pd
import pytest
from support import lanes, local_or_skip, make_timeline, refused_line, with_columns

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.traces.critical_path import what_if
from madmax_lib.traces.read.kineto import read_trace

NOTES = "ignore::madmax_lib.traces.read.events.TraceWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NOTES)]

CALL_NS, MB = 1000, 1e6
PRICED = {"size_bytes": [1e3, 1e9], "seconds": [1e-6, 1.0]}
TABLE = pd.DataFrame({"collective": "all_reduce", "ranks": 2, "nodes": 2, **PRICED})


def priced(ns):
    """Links on which every call takes as long."""
    return lambda kind, ranks, nodes, size_bytes: ns * 1e-9


def replayed_ns(timeline, **options) -> float:
    return what_if(timeline, {}, **options)["step_s"].item() * 1e9


class Host:
    """Rows of a host's thread (-1) of a rank, one after the other from a time on."""

    def __init__(self, rows: list, rank: int, now=0):
        self.rows, self.rank, self.now = rows, rank, now

    def span(self, kind, name, ns, start=None, stream=-1):
        start = self.now if start is None else start
        self.rows.append((self.rank, stream, kind, name, int(start), int(ns)))

    def run(self, kind, name, ns):
        self.span(kind, name, ns)
        self.now += int(ns)


def step_of(rows, size_bytes=MB):
    """Timeline of the rows of two ranks, in a labelled step whose end it has too."""
    end_ns = max(row[4] + row[5] for row in rows)
    marks = [(r, -1, "annotation", "ProfilerStep#0", 0, end_ns) for r in (0, 1)]
    timeline = make_timeline(rows + marks)
    is_comm = timeline.spans["kind"] == "comm"
    sizes = np.where(is_comm, size_bytes, np.nan)
    return with_columns(timeline, size_bytes=sizes), end_ns


def blocking(compute_ns, price_ns):
    """Ranks that compute (rank, call) and wait for an all-reduce, one call after the
    other.
    """
    rows = []
    hosts = [Host(rows, rank) for rank in (0, 1)]
    for times_ns in compute_ns.T:
        for host, ns in zip(hosts, times_ns, strict=True):
            host.run("compute", "aten::mm", ns)
            host.span("cpu", "c10d::allreduce_", CALL_NS)
        end_ns = max(host.now for host in hosts) + CALL_NS // 2 + price_ns
        for host in hosts:
            begin_ns = host.now + CALL_NS // 2
            host.span("comm", "gloo:all_reduce", end_ns - begin_ns, begin_ns, -2)
            host.now = end_ns
    for host in hosts:
        host.run("compute", "aten::add_", 700)
    return step_of(rows)


def ddp(backward_ns, price_ns):
    """Backward passes whose nodes (rank, node) each fill a bucket; the links send one
    after the other.
    """
    rows, ready = [], np.zeros(backward_ns.shape, dtype=int)
    hosts, node = [Host(rows, rank) for rank in (0, 1)], "MmBackward0"
    for (rank, k), ns in np.ndenumerate(backward_ns):
        host = hosts[rank]
        host.span("cpu", f"autograd::engine::evaluate_function: {node}", ns + CALL_NS)
        host.run("compute", "aten::mm", ns)
        ready[rank, k] = host.now
        host.run("cpu", "c10d::allreduce_", CALL_NS)
    left_ns = [0, 0]  # of two threads
    for k, both in enumerate(ready.T):
        begin_ns = np.maximum(both, left_ns[k])
        left_ns.append(max(both.max(), left_ns[-1]) + price_ns)
        for host, begin in zip(hosts, begin_ns, strict=True):
            ns = left_ns[-1] - begin
            host.span("comm", "gloo:all_reduce", ns, begin, -2 - k % 2)
    for host in hosts:
        host.now = max(left_ns[-1], host.now) + 5
        host.run("compute", "aten::add_", 900)
    return step_of(rows)


def pipeline(forward_ns, backward_ns, price_ns):
    """GPipe on two stages: (stage, micro-batch) passes; a message needs both of its
    ends.
    """
    rows = []
    hosts = [Host(rows, stage) for stage in (0, 1)]

    def send(host, times_ns):
        """Passes of a stage, each sent on by a call: when they are sent."""
        sent = []
        for ns in times_ns[host.rank]:
            host.run("compute", "aten::mm", ns)
            sent.append(host.now + CALL_NS // 2)
            host.run("cpu", "c10d::send", CALL_NS)
        return sent

    def receive(host, sent, times_ns):
        """Passes of a stage, each when its message is there: when they come."""
        arrivals = []
        for ready, ns in zip(sent, times_ns[host.rank], strict=True):
            posted = host.now + CALL_NS // 2
            arrivals.append(arrival := max(posted, ready) + price_ns)
            host.span("cpu", "c10d::recv_", CALL_NS)
            host.span("comm", "gloo:recv", arrival - posted, posted)
            host.now = arrival
            host.run("compute", "aten::mm", ns)
        return arrivals

    first, last = hosts
    sent = send(first, forward_ns)
    arrivals = receive(last, sent, forward_ns)
    first.now = max(first.now, *arrivals)
    for start in sent:
        first.span("comm", "gloo:send", first.now - start, start)
    returned = send(last, backward_ns)
    arrivals = receive(first, returned, backward_ns)
    for start, arrival in zip(returned, arrivals, strict=True):
        last.now = max(last.now, arrival)
        last.span("comm", "gloo:send", last.now - start, start)
    for host in hosts:
        host.run("compute", "aten::add_", 300)
    return step_of(rows)


def times(seed, *shape):
    return np.random.default_rng(seed).integers(20_000, 400_000, shape)


SHAPES = {"blocking": (blocking, 1), "ddp": (ddp, 1), "pipeline": (pipeline, 2)}


PRICES = [(30_000, 30_000), (30_000, 300_000), (10_000, 2_000_000), (500_000, 5_000)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_is_what_would_have_been_measured(shape, seed):
    build, tables = SHAPES[shape]
    parts = [times(seed + 100 * n, 2, 5) for n in range(tables)]
    for traced_ns, other_ns in PRICES:
        timeline, step_ns = build(*parts, traced_ns)
        _, expected_ns = build(*parts, other_ns)
        table = what_if(timeline, {}, collectives=priced(other_ns))
        assert table["faster"].item() == "other links"
        replayed = table["step_s"].item() * 1e9
        assert replayed == pytest.approx(expected_ns, rel=0.01), (traced_ns, other_ns)
        same = what_if(timeline, [{}, {"comm": 1}], collectives=priced(traced_ns))
        assert (same["step_s"] * 1e9).round().tolist() == [step_ns, step_ns]


def test_blocking_collectives_add_up():
    """Step = compute + communication, from a table and from a function that sees kind,
    ranks, nodes and bytes.
    """
    timeline, step_ns = blocking(times(0, 2, 4), 50_000)
    seen = set()

    def ring(kind, ranks, nodes, size_bytes):
        seen.add((kind, ranks, nodes, size_bytes))
        return 2 * (ranks - 1) / ranks * size_bytes / 5e8

    for collectives, price_ns in ((TABLE, 1_000_000), (ring, 2_000_000)):
        expected_ns = step_ns + 4 * (price_ns - 50_000)
        replayed = replayed_ns(timeline, collectives=collectives)
        assert replayed == pytest.approx(expected_ns)
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
    linear = {"collectives": lambda kind, ranks, nodes, size: ranks * 1e-5}
    replayed = replayed_ns(timeline, ranks=8, devices_per_node=4, **linear)
    assert replayed == pytest.approx(step_ns - 3 * 20_000)
    assert what_if(timeline, {}, ranks=2)["saved_s"].item() == 0


def test_only_groups_of_data_parallelism_grow():
    timeline, step_ns = blocking(times(2, 2, 2), 100_000)
    names = np.where(timeline.spans["kind"] == "comm", "mesh_dp [0, 1]", None)
    grown = with_columns(timeline, group=pd.Categorical(names))
    assert replayed_ns(grown, ranks=4) == pytest.approx(step_ns + 2 * 50_000)


BOTH = pd.concat([TABLE, TABLE.assign(nodes=1)])
BAD = [
    ({"collectives": TABLE.assign(ranks=8)}, "no row call all_reduce of 2 ranks"),
    ({"collectives": TABLE.drop(columns="seconds")}, "'seconds' is missing"),
    ({"collectives": BOTH}, "measured on 1 and 2 nodes"),
    ({"collectives": lambda *call: -1.0}, "is not a time"),
    ({"ranks": 3}, "ranks=3 is not a multiple of the 2 ranks"),
    ({"ranks": 1}, "ranks=1 is no multiple"),
    ({"collectives": TABLE, "devices_per_node": 0}, "devices_per_node=0 at least 1"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[words for _, words in BAD])
def test_what_cannot_be_replayed(options, words):
    timeline, _ = blocking(times(0, 2, 2), 50_000)
    with refused_line(words):
        what_if(timeline, {}, **options)


def test_a_step_without_collectives_has_no_more_ranks():
    drawn = "-1 compute: aten::mm 0+5\n1/-1 compute: aten::mm 0+5"
    timeline = make_timeline(lanes(drawn))
    with refused_line("no collective of the step"):
        what_if(timeline, {}, ranks=4)
    assert what_if(timeline, {}, collectives=priced(1000))["saved_s"].item() == 0


def test_a_simulated_step_is_replayed_with_other_prices():
    """Doubling what every call takes doubles what nothing hides: a step of tensor
    parallelism.
    """
    timeline = mm.simulate("gpt2", "dgx-a100", "tp4.dp2", global_batch=8)
    calls = mm.traces.calls(timeline)
    keys = zip(calls["collective"], calls["size_bytes"], strict=True)
    seconds = dict(zip(keys, calls["duration_s"], strict=True))
    same, slower = (
        what_if(
            timeline,
            {},
            collectives=lambda kind, ranks, nodes, size, f=factor: (
                f * seconds[kind, size]
            ),
        )["saved_s"].item()
        for factor in (1, 2)
    )
    assert abs(same) < 1e-6
    assert 0 < -slower <= calls["duration_s"].sum() / 8 + 1e-9


SHIPPED = ("gpt-ddp", "gpt-fsdp", "vit-ddp", "vit-fsdp")
TRACES = [str(PROJECT / "traces" / name) for name in SHIPPED]
SHARED = ("param-dlrm-8xV100", "hta-samples/nccl_data.json.gz", "hta-samples/rank0.json.gz",
          "tracelens-samples/resnet_act_checkpoint.json.gz", "hta-samples/df_index_resolver.json.gz")  # fmt: skip


@pytest.mark.parametrize("name", [*TRACES, *(f"traces/{name}" for name in SHARED)])
def test_real_traces_keep_their_step_and_gain_by_faster_links(name):
    timeline = read_trace(name if name.startswith("/") else local_or_skip(name))
    step = timeline.steps[-1]
    calls = mm.traces.calls(timeline.select(steps=[step]))
    like = calls.groupby(["collective", "group_size", "size_bytes"])
    alone = like["duration_s"].min().to_dict()

    def times_as_long(factor):
        def price(kind, ranks, nodes, size):
            seconds = alone.get((kind, ranks, size))
            return None if seconds is None else factor * seconds

        return price

    prices = [lambda *call: None, *map(times_as_long, (0.1, 0.5, 1, 2, 10))]
    tables = [what_if(timeline, {}, step, collectives=price) for price in prices]
    same = tables[0].iloc[0]
    now_s = same["step_s"] + same["saved_s"]
    assert same["step_s"] == pytest.approx(now_s, rel=0.01)
    steps_s = [table["step_s"].item() for table in tables[1:]]
    assert (np.diff(steps_s) >= -1e-9).all(), "faster links never make a step slower"


def test_a_step_traced_at_1_gbit_is_foretold_at_lower_rates():
    """Recorded on two hosts; the links of a bench, and what runs at these rates took."""
    folder = PROJECT / "traces" / "gpt-z2-1gbit"
    measured_s = pd.read_csv(folder / "measured.csv").set_index("network")["step_s"]
    timeline = read_trace(folder)
    for network, links in pd.read_csv(folder / "links.csv").groupby("network"):
        replayed = replayed_ns(timeline, collectives=links)
        assert replayed == pytest.approx(measured_s[network] * 1e9, rel=0.05)
