from random import Random
from statistics import median, median_low

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from support import (
    lanes,
    local_or_skip,
    make_timeline,
    refused_line,
    shows,
    with_columns,
    with_tables,
)

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.simulator.events.engine import Program, run, to_timeline
from madmax_lib.timeline.timeline import Meta, Timeline
from madmax_lib.traces import hta
from madmax_lib.traces.critical_path import (
    PATH_KINDS,
    critical_path,
    faster_kinds,
    launch_gain,
    path_share,
    what_if,
)
from madmax_lib.traces.read.kineto import read_trace

# of one step, of some of the ranks: what a replay cannot know
pytestmark = pytest.mark.filterwarnings(
    "ignore::madmax_lib.traces.read.events.TraceWarning"
)

INF = float("inf")
TRACES = PROJECT / "traces"


def trace(drawn, **tables) -> Timeline:
    """Timeline of rows, or of lanes, with side tables."""
    rows = lanes(drawn) if isinstance(drawn, str) else drawn
    return with_tables(make_timeline(rows), **tables)


def shows_path(path, drawn: str) -> None:
    """Compares a path with lines of kind, name, start and duration in ns."""
    shows(path, "kind  name  start_s ns  dur_s ns\n" + drawn)


def path_ns(path) -> int:
    """Length of a path, whose parts follow one another from 0 to the end of the step."""
    starts, durations = (path[c].mul(1e9).round() for c in ("start_s", "dur_s"))
    ends = (path["start_s"] + path["dur_s"]).mul(1e9).round()
    assert starts.tolist() == [0, *ends[:-1]][: len(path)]
    assert durations.sum() == round(path.attrs["step_s"] * 1e9)
    return round(durations.sum())


def new_ns(timeline, faster) -> int:
    return round(what_if(timeline, faster)["step_s"].iloc[0] * 1e9)


# Launch n costs 10 ns of host time, each kernel takes 4 ns and starts 6 ns after its
# launch began
LAUNCH_BOUND = """
    -1 cpu: launch 0+10 #0, launch 10+10 #1, launch 20+10 #2, launch 30+10 #3
    7 compute: k0 6+4 #0, k1 16+4 #1, k2 26+4 #2, k3 36+4 #3
"""


def test_a_launch_bound_chain_is_the_host():
    timeline = trace(LAUNCH_BOUND.replace("launch", "cudaLaunchKernel"))
    path = critical_path(timeline)
    shows_path(
        path, "\n".join(f"host  cudaLaunchKernel  {10 * n}  10" for n in range(4))
    )
    assert path.attrs["step_s"] == 40e-9
    assert new_ns(timeline, {"host": 2}) == 15 + 6 + 4
    # no gain: the last launch itself ends then
    assert new_ns(timeline, {"compute": 2}) == 40
    assert new_ns(timeline, {"host": INF}) == 6 + 4 * 4
    assert new_ns(timeline, {"host": INF, "launch delay": INF}) == 4 * 4


def test_a_launch_on_its_way_decides_even_if_the_stream_was_busy_meanwhile():
    """Every 10 us a launch of 8 us, and kernels of 4 us: each ends while the next
    launch is on its way.
    """
    timeline = launched(5, call_us=9, kernel_us=4, between_us=1, delay_us=-1)
    share = path_share(critical_path(timeline)).set_index("kind")["path_s"]
    assert share.mul(1e6).round(3).to_dict() == {
        "host": 40,
        "launch delay": 8,
        "compute": 4,
    }


TWO_STREAMS = """
    -1 cpu: cudaLaunchKernel 0+2 #1, cudaEventRecord 2+1 #2, cudaStreamWaitEvent 3+1 #3, cudaLaunchKernel 4+2 #4
    -1 cpu: cudaDeviceSynchronize 6+59 #5
    7 compute: mm 3+37 #1
    20 comm: AllReduce 42+20 #4
    20 idle: Stream Wait Event 3+38 #3
"""


def test_two_streams_with_an_event():
    timeline = trace(TWO_STREAMS, syncs=[(7, "Stream Wait Event", 7, 2)])
    path = critical_path(timeline)
    # the last returns 3 ns after the kernel it waited for
    expected = """
        kind          name                   start_s ns  dur_s ns  why
        launch delay  mm                     0           3         launch
        compute       mm                     3           37        work
        wait          AllReduce              40          2         event
        comm          AllReduce              42          20        work
        host          cudaDeviceSynchronize  62          3         sync
    """
    shows(path, expected)
    # now its launch decides, as late as the other one
    assert new_ns(timeline, {"compute": INF}) == 4 + 3 + 20 + 3
    assert new_ns(timeline, {"AllReduce": 2}) == 65 - 10
    share = path_share(path)
    expected = """
        kind          path_s ns  busy_s ns
        host          3          65
        launch delay  3          0
        compute       37         37
        comm          20         20
        wait          2          0
    """
    shows(share, expected)
    assert share["share"].sum() == pytest.approx(1)


def test_a_collective_waits_for_the_slow_rank():
    """Rank 1 computes 50 ns longer: its compute and the transfer decide, and rank 0's
    next kernel waits for both.
    """
    shared = "1/7 compute: mm 0+60\n1/7 comm: AllReduce 60+20\n7 compute: next 80+5\n"
    timeline = trace(shared + "7 compute: mm 0+10\n7 comm: AllReduce 10+70")
    expected = """
        kind     name       start_s ns  dur_s ns  rank  why
        compute  mm         0           60        1     work
        comm     AllReduce  60          20        0     collective
        compute  next       80          5         0     work
    """
    shows(critical_path(timeline), expected)
    assert new_ns(timeline, {"comm": 2}) == 85 - 10
    assert new_ns(timeline, {"compute": INF}) == 20
    slow_first = trace(shared + "7 compute: slow 0+50\n7 comm: AllReduce 50+30")
    assert new_ns(slow_first, {"mm": 6}) == 50 + 20 + 5  # now rank 0 arrives last


def test_a_graph_launch_is_one_launch_of_many_kernels():
    kernels = "7 compute: first 10+10 #5, left 21+30 #5, right 22+10 #5, last 52+5 #5"
    timeline = trace("-1 cpu: cudaGraphLaunch 0+9 #5\n" + kernels)
    expected = """
        launch delay  first  0   10
        compute       first  10  10
        wait          left   20  1
        compute       left   21  30
        wait          last   51  1
        compute       last   52  5
    """
    shows_path(critical_path(timeline), expected)
    # `right` goes on until 32, and a stream takes 1 ns to go on
    assert new_ns(timeline, {"left": INF}) == 33 + 0 + 5
    assert new_ns(timeline, {"host": INF}) == 57


def test_a_step_begins_when_the_device_has_done_the_one_before():
    host = "-1 cpu: cudaLaunchKernel 0+5 #1, cudaLaunchKernel 10+5 #2"
    timeline = trace(f"{host}\n7 compute: old 5+25 #1, new 31+9 #2")
    timeline = with_columns(timeline, step=[0, 1, 0, 1])
    shows_path(critical_path(timeline, 1), "wait  new  0  1\ncompute  new  1  9")
    told = critical_path(timeline).attrs
    assert (told["step_s"], told["step"]) == (10e-9, 1)
    # nothing before the first is recorded: it lasts from its launch on
    assert critical_path(timeline, 0).attrs["step_s"] == 30e-9
    with refused_line("step 7 [0, 1]"):
        critical_path(timeline, 7)


OPS = st.tuples(
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 9),
    st.sets(st.integers(0, 30), max_size=3),
)
OPS = st.lists(OPS, min_size=1, max_size=30)


def program(ops, faster=1) -> Program:
    """Program of (rank, stream, duration in ns, after); `faster` divides the time of
    communication.
    """
    made = Program()
    for number, (rank, stream, ns, after) in enumerate(ops):
        after = {a % number for a in after} if number else ()
        kind, factor = ("comm", faster) if stream == 2 else ("compute", 1)
        duration_s = ns * 1024e-9 / factor
        made.op(stream, kind, f"op {number}", duration_s, after, rank=rank)
    return made


@settings(max_examples=30, deadline=None)
@given(OPS)
def test_on_a_simulated_timeline_it_is_the_longest_path_of_the_engine(ops):
    path = critical_path(to_timeline(program(ops), Meta(source="simulated")))
    assert path_ns(path) == round(max(run(program(ops))[1]) * 1e9)
    assert set(path["why"]) <= {"work"}  # an engine does not rest


@settings(max_examples=30, deadline=None)
@given(OPS, st.sampled_from([1, 2, 4, INF]))
def test_what_if_is_what_the_engine_would_say(ops, faster):
    timeline = to_timeline(program(ops), Meta(source="simulated"))
    again_ns = round(max(run(program(ops, faster))[1]) * 1e9)
    assert new_ns(timeline, {"comm": faster}) == again_ns


@pytest.mark.parametrize("plan", ["dp8.z0", "dp2.tp2.pp2.z0", "pp4.dp2.z0"])
def test_simulated_steps(plan):
    cluster, plan = mm.cluster("dgx-a100", nodes=1), mm.Plan.parse(plan)
    timeline = mm.simulate(mm.model("gpt2-large"), cluster, plan, global_batch=16)
    path = critical_path(timeline)
    end_ns = int((timeline.spans["start_ns"] + timeline.spans["dur_ns"]).max())
    assert path_ns(path) == end_ns == new_ns(timeline, {"compute": 1})
    assert not set(path["kind"]) - {"compute", "comm", "host"}
    with refused_line("no launches to replay"):
        launch_gain(timeline)


@pytest.mark.parametrize("name", ["gpt-ddp", "gpt-fsdp", "vit-ddp"])
def test_a_measured_step_is_taken_apart_and_replayed_exactly(name):
    timeline = read_trace(TRACES / name)
    everything = dict.fromkeys(("host", "compute", "comm", "launch delay"), INF)
    for step in timeline.steps:
        path = critical_path(timeline, step)
        same_s, none_s = what_if(timeline, [{"host": 1}, everything], step)["step_s"]
        assert path_ns(path) == round(path.attrs["step_s"] * 1e9)
        assert same_s == pytest.approx(path.attrs["step_s"], rel=0.05)
        assert 0 <= none_s < 0.2 * path.attrs["step_s"]


@pytest.mark.parametrize("seed", range(5))
def test_the_step_that_nobody_names_is_the_median_one_without_warm_up(seed):
    lengths = [400, *(Random(seed).sample(range(95, 106), 5 + seed % 2))]
    spans = ", ".join(f"mm {sum(lengths[:n])}+{ns}" for n, ns in enumerate(lengths))
    timeline = with_columns(trace(f"7 compute: {spans}"), step=range(len(lengths)))
    median_ns = median_low(lengths[1:])
    step, gain = lengths.index(median_ns), launch_gain(timeline)
    assert path_ns(critical_path(timeline)) == median_ns
    step_ns = what_if(timeline, {})["step_s"].item() * 1e9
    assert step_ns == pytest.approx(median(lengths[1:]))
    assert what_if(timeline, {})["step"].item() == gain["step"].iloc[0] == step
    assert what_if(timeline, {}, 0)["step_s"].item() == 400e-9


def test_faster_kinds():
    timeline = trace(TWO_STREAMS, syncs=[(7, "Stream Wait Event", 7, 2)])
    table = faster_kinds(timeline)
    assert set(table["faster"]) == {"host", "launch delay", "compute", "comm"}
    assert len(table) == 8
    assert (table["saved_s"] >= 0).all() and (table["speedup"] >= 1).all()
    both = what_if(timeline, {"compute": 2, "comm": 4}).iloc[0]
    assert both["faster"] == "compute + comm" and np.isnan(both["factor"])


REFUSED = [
    ({"comm": 0}, {}, "factor 0 'comm' not positive"),
    ({"comm": "2"}, {}, "factor '2' 'comm' not positive"),
    ({"(": 2}, {}, "'(' not regular expression"),
    ({"nothing": 2}, {}, "'nothing' no kind no name"),
    ({}, {"ranks": 4.0}, "ranks=4.0 is not a number of devices"),
    ({}, {"ranks": True}, "ranks=True is not a number of devices"),
    ({}, {"devices_per_node": "x"}, "devices_per_node='x' is not a number of devices"),
]


@pytest.mark.parametrize(("faster", "counts", "words"), REFUSED)
def test_bad_scenarios(faster, counts, words):
    with refused_line(words):
        what_if(trace(TWO_STREAMS), faster, **counts)


@pytest.mark.parametrize(
    "drawn", ["", "-1 annotation: label 0+5", "7 memory: [memory] 0+0"]
)
def test_nothing_to_walk(drawn):
    timeline = trace(drawn)
    path = critical_path(timeline)
    assert not len(path) and path.attrs["step_s"] == 0
    assert not len(path_share(path)) and not len(faster_kinds(timeline))
    assert what_if(timeline, {"compute": 2})["step_s"].tolist() == [0]


CALLS = ("cudaLaunchKernel", "cudaDeviceSynchronize", "cudaStreamWaitEvent", "cudaEventRecord", "cudaMemcpyAsync",
         "c10d::allreduce_", "aten::mm")  # fmt: skip


def any_row(random, reach_ns) -> tuple:
    rank, start_ns = random.randint(0, 1), random.randint(0, reach_ns)
    dur_ns = random.randint(0, reach_ns // 2)
    threads = [("cpu", random.choice(CALLS)), ("annotation", "label")]
    threads += [(random.choice(["comm", "compute"]), "gloo:x")]
    kind = random.choice(["compute", "comm", "memcpy", "memory"])
    streams = [("idle", "Stream Wait Event"), (kind, random.choice("ab"))]
    stream = random.choice([-3, -2, -1, 0, 1, 2])
    span = random.choice(threads if stream < 0 else streams)
    return rank, stream, *span, start_ns, dur_ns, random.randint(-1, 6)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_trace_says_the_parts_sum_to_the_step(seed):
    random = Random(seed)
    rows = [any_row(random, random.choice([5, 100, 200_000])) for _ in range(40)]
    of_kind = {
        kind: [row for row, values in enumerate(rows) if values[2] == kind]
        for kind in ("idle", "cpu")
    }
    waits = ("Stream Wait Event", "Event Sync", "Stream Sync")
    syncs = [
        (row, random.choice(waits), random.randint(-1, 2), random.randint(-1, 6))
        for row in of_kind["idle"]
    ]
    operators = [
        (row, "", "", "", random.randint(-1, 2), random.randint(-1, 1))
        for row in of_kind["cpu"]
    ]
    timeline = trace(rows, syncs=syncs, operators=operators)
    timeline = with_columns(timeline, step=[random.randint(-1, 1) for _ in rows])
    scenarios = [{"host": 1}, dict.fromkeys(PATH_KINDS, INF)]
    for step in timeline.steps:
        times_s = what_if(timeline, scenarios, step)["step_s"]
        path = critical_path(timeline, step)
        assert path_ns(path) == round(path.attrs["step_s"] * 1e9)
        assert np.isfinite(times_s).all() and (times_s >= 0).all()


# Launches replayed

US = 1000


def launched(kernels, call_us, kernel_us, between_us, delay_us=2):
    """A host that launches one kernel after another; each starts `delay_us` after its
    call ends, or when free.
    """
    rows, host, free = [], 0, 0
    for number in range(kernels):
        end = host + call_us * US
        begin = max(end + delay_us * US, free)
        free = begin + kernel_us * US
        rows.append((0, -1, "cpu", "cudaLaunchKernel", host, call_us * US, number))
        rows.append((0, 7, "compute", "gemm", begin, kernel_us * US, number))
        host = end + between_us * US
    return make_timeline(rows)


def gains(timeline):
    return launch_gain(timeline).set_index("scenario")["step_s"] * 1e6


def test_a_launch_bound_step():
    """Ten calls of 10 us, 7 us between them, kernels of 3 us that start 12 us after
    their call does.
    """
    timeline = launched(10, 10, 3, 7)
    expected = """
        scenario           step_s us
        as measured        9*17+12+3
        free launches      9*7+12+3
        graph of kernels   9*7+3
        graph of the step  10*3
    """
    table = launch_gain(timeline)
    shows(table, expected)
    assert (table["launches"] == 10).all()
    assert table["bound_s"].to_numpy() == pytest.approx(9 * 14e-6)
    assert table["saved_s"].iloc[0] == 0 and (table["speedup"] >= 1).all()
    busy = gains(launched(10, 1, 100, 1))  # gains nothing but the start
    assert busy["as measured"] - busy["graph of the step"] == pytest.approx(1 + 2)


@pytest.mark.parametrize("name", ["gpt-ddp", "vit-ddp"])
def test_shipped_traces(name):
    """No kernel is launched on a CPU; without the host's work between operators a step
    cannot be longer.
    """
    table = launch_gain(mm.read_trace(mm.dataset(name)))
    assert table["scenario"].tolist() == ["as measured", "graph of the step"]
    assert (table["launches"] == 0).all() and 1 < table["speedup"].iloc[1] < 1.5


# Beside HTA

# HTA gives them no time on the path
HTA_BLOCKING = ("cudaDeviceSynchronize", "cudaEventQuery")


def test_equals_hta_where_hta_counts_everything():
    """Differences: HTA gives no time to what lies between top-level operators, nor to
    calls that may block.
    """
    file = local_or_skip("traces/hta-samples/cuda_event_sync_multi_stream.json.gz")
    theirs = hta_path(file, "", 0)
    path = critical_path(read_trace(file))
    ns = path["dur_s"].mul(1e6).round()
    unknown = (path["why"] == "order") | path["name"].isin(HTA_BLOCKING)
    between = (path["kind"] == "host") & unknown
    ours = ns[~between].groupby(path["kind"]).sum()
    assert ours.sum() == theirs.sum() == 1178
    # the last kernel starts 15 us after its launch, which began in the microsecond in
    # which a memset before it ended:
    # to HTA 14 us of the memset's launch, 1 us of memset and 15 us between kernels, to
    # us 15 us of host and of launch
    assert ours["compute"] == theirs["gpu_compute_bound"] - 1 == 123
    assert ours["host"] == theirs["cpu_bound"] + 15 == 1040
    assert ours["launch delay"] == theirs["gpu_kernel_kernel_overhead"] == 15


def test_hta_rounds_away_a_microsecond_of_every_kernel():
    name = "rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
    file = local_or_skip(f"traces/hta-samples/{name}")
    theirs = hta_path(file, "ProfilerStep", 0)
    path = critical_path(read_trace(file), 101)
    ours = path.groupby("kind")["dur_s"].sum().mul(1e6)
    kernels = path["kind"].isin(["compute", "memcpy"]).sum()
    delay_us = theirs["gpu_kernel_launch_overhead"]
    assert ours["launch delay"] == pytest.approx(delay_us, abs=1)
    gpu, computing_us = ours["compute"] + ours["memcpy"], theirs["gpu_compute_bound"]
    both = computing_us + theirs["gpu_kernel_kernel_overhead"]
    assert gpu + ours["wait"] == pytest.approx(both, abs=2)
    assert 0.5 * kernels < gpu - computing_us < kernels


def hta_path(file, annotation, instance) -> pd.Series:
    """HTA's path in microseconds by what bounds it."""
    analysis = hta.analysis(file)
    with hta._quiet():
        path, _ = analysis.critical_path_analysis(
            analysis.t.get_ranks()[0], annotation, instance
        )
        return path.get_critical_path_breakdown().groupby("bound_by")["duration"].sum()
