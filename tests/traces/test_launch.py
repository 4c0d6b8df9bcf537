"""Launches, queues, idle causes and launch-bound time: closed forms, conservation laws,
and HTA's numbers.
"""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from support import (
    dataset_or_skip,
    drawn_cases,
    lanes,
    local_or_skip,
    make_timeline,
    refused_line,
    shows,
    with_columns,
)

import madmax_lib as mm
from madmax_lib import Timeline, breakdown, read_trace
from madmax_lib.timeline.accounting import rank_breakdown
from madmax_lib.timeline.timeline import concat
from madmax_lib.traces import (
    hta,
    idle,
    launch_bound,
    launches,
    queue_length,
    queue_series,
)
from madmax_lib.traces.read.kineto import TraceWarning
from madmax_lib.traces.waits.idle import _CAUSES

US = 1000
ANALYSES = [launches, queue_series, queue_length, launch_bound, idle]


def timeline_of(drawn: str, step=0) -> Timeline:
    """Timeline of lanes in us; step: of each row."""
    rows = [(*row[:4], row[4] * US, row[5] * US, *row[6:]) for row in lanes(drawn)]
    return with_columns(make_timeline(rows), step=step)


# launched at 0, 8, 40 and 100 us; the device runs 5-25, 25-35, 50-60 and 90-95
# (unlaunched), 104-120
FOUR = """
    -1 cpu: cudaLaunchKernel 0+4 #1, cudaLaunchKernel 8+4 #2, cudaLaunchKernel 40+6 #3
    -1 cpu: cudaLaunchKernel 100+3 #4, cudaEventQuery 1+1 #99
    7 compute: gemm 5+20 #1, gemm 25+10 #2, gemm 50+10 #3, gemm 90+5, gemm 104+16 #4
"""
STEPS = [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def four() -> Timeline:
    return timeline_of(FOUR, step=STEPS)


def us(values) -> list[float]:
    return [round(value * 1e6, 6) for value in values]


def test_a_launch_finds_its_kernel_by_correlation():
    expected = """
        correlation  step  cpu_s us  gpu_s us  delay_s us  since_launch_s us  launch            row  launch_row  kernels
        1            0     4         20        1           5                  cudaLaunchKernel  5    0           1
        2            0     4         10        13          17                 cudaLaunchKernel  6    1           1
        3            0     6         10        4           10                 cudaLaunchKernel  7    2           1
        4            1     3         16        1           4                  cudaLaunchKernel  9    3           1
    """
    shows(launches(four()), expected)
    # its kernel starts during the launch
    early = timeline_of("-1 cpu: cudaLaunchKernel 0+10 #1\n7 compute: k 4+2 #1")
    shows(launches(early), "delay_s us  since_launch_s us\n0  4")


def test_ranks_do_not_share_correlations():
    one = four()
    later = Timeline(one.spans.assign(rank=3, start_ns=one.spans["start_ns"] + 7))
    table = launches(concat([one, later]))
    assert len(table) == 8
    columns = ["correlation", "cpu_s", "gpu_s", "delay_s"]
    first, second = (part[columns].to_numpy() for _, part in table.groupby("rank"))
    np.testing.assert_allclose(first, second)


GRAPH = """
    -1 cpu: cudaGraphLaunch 0+10 #1, cudaGraphLaunch 20+2 #2, cudaLaunchKernel 24+2 #3
    7 compute: gemm 12+3 #1, gemm 15+4 #1
    8 compute: gemm 15+5 #1
    7 compute: gemm 40+1 #2, gemm 41+1 #3
"""


def test_a_graph_is_launched_once():
    expected = """
        kernels  delay_s us  gpu_s us
        3        2           12
        1        18          1
        1        15          1
    """
    shows(launches(timeline_of(GRAPH)), expected)
    queue = queue_length(timeline_of(GRAPH))
    shows(queue, "stream  count  max  min\n7  6  2  0")


def test_a_correlation_used_twice_on_the_host_belongs_to_the_first_call():
    drawn = "-1 cpu: later 6+1 #1, cudaLaunchKernel 0+2 #1\n7 compute: gemm 8+2 #1"
    shows(launches(timeline_of(drawn)), "launch  delay_s us\ncudaLaunchKernel  6")


def test_queue_counts_launches_until_their_kernel_starts():
    """Lengths 1 2 1 0 1 0 1 0 at 0 8 ... : the second launch comes while the first
    kernel runs.
    """
    series = queue_series(four())
    assert us(series["time_s"]) == [0, 5, 8, 25, 40, 50, 100, 104]
    assert series["length"].tolist() == [1, 0] * 4
    calls = ", ".join(f"l {i}+1 #{i}" for i in range(4))
    kernels = ", ".join(f"gemm {10 + 10 * i}+10 #{i}" for i in range(4))
    ahead = timeline_of(f"-1 cpu: {calls}\n7 compute: {kernels}")
    table = queue_length(ahead, capacity=3)
    length = pd.Series([1, 2, 3, 4, 3, 2, 1, 0])
    assert table.iloc[0, 2:10].tolist() == pytest.approx(length.describe().tolist())
    shows(table, "full_s us  full_share\n18  18/40")  # 2 to 20 us


def test_ties_never_make_a_queue_negative():
    drawn = "7 compute: k 3+1 #1, k 2+1 #2\n-1 cpu: l 3+0 #1, l 5+0 #2"
    length = queue_series(timeline_of(drawn))["length"]
    assert length.min() == 0 and length.iloc[-1] == 0


@pytest.mark.parametrize(("capacity", "blocked_us"), [(5, [29]), (6, [0])])
def test_blocked_is_what_launches_into_a_full_queue_take_longer(capacity, blocked_us):
    drawn = """
        -1 cpu: l 0+1 #0, l 2+1 #1, l 4+1 #2, l 6+1 #3, l 8+30 #4, l 40+1 #5
        7 compute: k 50+1 #0, k 51+1 #1, k 52+1 #2, k 53+1 #3, k 54+1 #4, k 55+1 #5
    """
    timeline = timeline_of(drawn)
    assert us(queue_length(timeline, capacity=capacity)["blocked_s"]) == blocked_us
    with refused_line("capacity=0"):
        queue_length(timeline, capacity=0)


def test_idle_by_cause():
    """Gaps of stream 7: 15 us (launched 5 after the end), 30 us (no launch), 9 us
    (launched 5 after the end).
    """
    table = idle(four())
    shows(table, "idle_s us  count  share\n24  2  24/54\n0  0  0\n30  1  30/54")
    longer = idle(four(), consecutive_kernel_delay_s=31e-6)
    shows(longer, "idle_s us\n24\n30\n0")
    with refused_line("negative"):
        idle(four(), -1.0)


IDLE = {
    "launched as the work before ends": (
        "-1 cpu: l 0+1 #1, l 10+1 #2\n7 compute: k 5+5 #1, k 12+5 #2", 2),
    "overlap on a stream": ("7 compute: k 0+50, k 10+5, k 60+5, k 60+0", 10),
    "one kernel": ("7 compute: k 0+5", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", IDLE)
def test_idle_between_kernels_is_no_host_wait(case):
    drawn, between_us = IDLE[case]
    table = idle(timeline_of(drawn))
    assert us(table["idle_s"]) == [0, between_us, 0]
    assert table["share"].isna().all() == (between_us == 0)


BOUND = """
# two steps: of the gaps 35-50, 60-90 (no launch) and 95-104 the host launches in 40-50 and 100-104
    FOUR
    step  total_s us  idle_s us  launch_bound_s us  launching_s us  share
    0     90          45         15                 10              15/90
    1     25          9          9                  4               9/25
# another stream is busy
    FOUR
    9 compute: gemm 30+30
    step  total_s us  idle_s us  launch_bound_s us  launching_s us  share
    0     90          30         0                  0               0
    1     25          9          9                  4               9/25
# the gap 10-50 ends with the launch at 40; the call 15-25 in it launches a later kernel
    -1 cpu: l 0+2 #3, l 15+10 #2, l 40+5 #1
    7 compute: k 2+8 #3, k 50+5 #1, k 55+5 #2
    step  total_s us  idle_s us  launch_bound_s us  launching_s us  share
    0     58          40         40                 20              40/58
# work before the first step
    7 compute: k 0+10, k 20+10 #1
    -1 cpu: l 12+2 #1
    step  total_s us  idle_s us  launch_bound_s us  launching_s us  share
    -1    10          0          0                  0               0
    4     20          10         10                 8               10/20
""".replace("    FOUR\n", FOUR)  # fmt: skip


@pytest.mark.parametrize(("drawn", "expected"), drawn_cases(BOUND))
def test_launch_bound_closed_form(drawn, expected):
    rows = len(lanes(drawn))
    step = {10: STEPS, 11: [*STEPS, 0], 6: 0, 3: [-1, 4, 4]}[rows]
    shows(launch_bound(timeline_of(drawn, step=step)), expected)


def random_timeline(seed: int) -> Timeline:
    random, kernels = np.random.default_rng(seed), ""
    host, count = [], 60
    for i, start in enumerate(np.sort(random.integers(0, 3000, count))):
        delay, stream = int(random.integers(0, 40)), int(random.choice([0, 7]))
        host.append(f"l {start}+{random.integers(1, 20)} #{i}")
        kernel = f"k {start + delay}+{random.integers(0, 60)} #{i}"
        kernels += f"{stream} compute: {kernel}\n"
    drawn = f"-1 cpu: {', '.join(host)}\n{kernels}"
    return timeline_of(drawn, step=np.tile(np.arange(count) // 20, 2))


@pytest.mark.parametrize("seed", range(5))
def test_parts_sum_to_the_whole(seed):
    timeline = random_timeline(seed)
    table, whole = launch_bound(timeline), breakdown(timeline).loc[0]
    for column in ("total_s", "idle_s"):
        assert table[column].sum() == pytest.approx(whole[column])
    assert (table["launching_s"] <= table["launch_bound_s"] + 1e-12).all()
    assert (table["launch_bound_s"] <= table["idle_s"] + 1e-12).all()
    assert table["launch_bound_s"].sum() > 0
    for stream, part in idle(timeline).groupby("stream"):
        alone = timeline.where((timeline.spans["stream"] == stream).to_numpy())
        idle_s = breakdown(alone).loc[0, "idle_s"]
        assert part["idle_s"].sum() == pytest.approx(idle_s)
        assert part["share"].sum() == pytest.approx(1)
    assert len(launches(timeline)) == 60
    ends = queue_series(timeline).groupby("stream")["length"].agg(["min", "last"])
    assert (ends == 0).all(axis=None)


@pytest.mark.parametrize("drawn", ["", "-1 cpu: l 0+5 #1, l 9+5", "vit-ddp"])
@pytest.mark.parametrize("analysis", ANALYSES)
def test_without_device_work_tables_are_empty_with_their_columns(analysis, drawn):
    shipped = drawn == "vit-ddp"
    timeline = read_trace(dataset_or_skip(drawn)) if shipped else timeline_of(drawn)
    table = analysis(timeline)
    assert not len(table) and set(table) == set(analysis(four()))
    assert table.attrs["source"] == "measured"


def test_a_simulated_step_has_idle_time_but_no_launches():
    plan = mm.Plan(dp=4, tp=1, pp=2, micro_batch=1)
    cluster = mm.cluster("dgx-a100", nodes=1)
    step = mm.simulate(mm.model("gpt2-large"), cluster, plan, global_batch=8)
    assert not len(launches(step)) and not len(queue_length(step))
    causes = idle(step)
    assert causes.attrs["source"] == "simulated"
    assert causes.loc[causes["cause"] == "host_wait", "idle_s"].sum() == 0
    bound = launch_bound(step).groupby("rank")[["idle_s", "launch_bound_s"]].sum()
    assert bound["launch_bound_s"].sum() == 0
    whole_s = rank_breakdown(step).set_index("rank")["idle_s"]
    np.testing.assert_allclose(bound["idle_s"], whole_s, atol=1e-9)


# --- beside HTA 0.5.0

SAMPLES = "traces/hta-samples/"
NAMES = {
    "a100": SAMPLES + "nccl_data.json.gz",
    "v100": SAMPLES + "df_index_resolver.json.gz",
    "v100_ns": SAMPLES + "rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "graphs": SAMPLES + "rank0.json.gz",
    "syncs": SAMPLES + "cuda_event_sync_multi_stream.json.gz",
    "mi250": SAMPLES + "mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "mi300x": "traces/tracelens-samples/resnet_act_checkpoint.json.gz",
    "deepseek": "traces/deepseek-v3-train/train.json.gz",
}
RIGHT = ["a100", "v100", "v100_ns", "syncs", "deepseek"]  # HTA knows their launch calls


@cache
def both(name: str):
    """HTA's analysis and our compatible timeline."""
    path = local_or_skip(NAMES[name])
    return hta.analysis(path), read_trace(path, hta_compatible=True)


def launches_of_hta(analysis) -> pd.DataFrame:
    ranks = sorted(analysis.t.traces)
    tables = analysis.get_cuda_kernel_launch_stats(ranks=ranks, visualize=False)
    parts = [table.assign(rank=rank) for rank, table in tables.items()]
    return pd.concat(parts, ignore_index=True)


def queue_of_hta(analysis) -> pd.DataFrame:
    table = analysis.get_queue_length_summary(ranks=sorted(analysis.t.traces))
    return table.droplevel(0, axis="columns").reset_index()


KNOWN = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync")  # fmt: skip
LAUNCH_COLUMNS = {"cpu_s": "cpu_duration", "gpu_s": "gpu_duration"}
LAUNCH_COLUMNS |= {"delay_s": "launch_delay"}


@pytest.mark.parametrize("name", RIGHT)
def test_launches_equal_htas(name):
    analysis, timeline = both(name)
    theirs, ours = launches_of_hta(analysis), launches(timeline)
    ours = ours[ours["launch"].isin(KNOWN)]
    table = ours.merge(theirs, on=["rank", "correlation"])
    assert len(ours) == len(theirs) == len(table) > 5
    for column, other in LAUNCH_COLUMNS.items():
        np.testing.assert_allclose(table[column], table[other] * 1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*taken as rank 0:UserWarning")
@pytest.mark.parametrize("name", [*RIGHT, "mi250", "mi300x"])
def test_idle_equals_htas(name):
    analysis, timeline = both(name)
    ours, theirs = idle(timeline), hta.idle(analysis)
    keys = ["rank", "stream", "cause"]
    table = ours.merge(theirs, on=keys, how="left", suffixes=("", "_hta"))
    assert table["idle_s_hta"].notna().sum() == len(theirs) > 1
    # HTA rounds its share to 0.01
    for column, near in (("idle_s", 1e-12), ("share", 0.0051)):
        expected = table[f"{column}_hta"].fillna(0)
        np.testing.assert_allclose(table[column], expected, atol=near)
    assert set(table["cause"]) == set(_CAUSES)


@pytest.mark.parametrize("name", RIGHT)
def test_queue_equals_htas(name):
    """The same lengths wherever the time is not that of another change; there HTA's
    order is left to the sorting.
    """
    analysis, timeline = both(name)
    theirs, ours = queue_of_hta(analysis), queue_length(timeline, capacity=1024)
    columns = ["stream", "count", "max"]
    assert ours[columns].to_numpy().tolist() == theirs[columns].to_numpy().tolist()
    np.testing.assert_allclose(ours["mean"], theirs["mean"], rtol=0.02)
    rank = timeline.ranks[0]
    series = analysis.get_queue_length_time_series(ranks=[rank])[rank]
    last = series.groupby(["stream", "ts"])["queue_length"].last()
    mine = queue_series(timeline).groupby(["stream", "time_s"])["length"].last()
    assert last.to_numpy().tolist() == mine.to_numpy().tolist()


@pytest.mark.filterwarnings("ignore:.*taken as rank 0:UserWarning")
def test_amd_launches_on_stream_0_are_found():
    """HTA 0.5.0 knows no hip name here, so its table is empty; every kernel of stream 0
    was launched by a hip call.
    """
    assert not len(launches_of_hta(both("mi250")[0]))
    table = launches(read_trace(local_or_skip(NAMES["mi250"])))
    assert len(table) == 16 and set(table["stream"]) == {0}
    calls = {"hipLaunchKernel", "hipMemcpyWithStream", "hipExtModuleLaunchKernel"}
    assert set(table["launch"]) == calls
    assert (table["since_launch_s"] > 0).all() and set(table["step"]) == {1}


def test_amd_queue_holds_every_launch_call():
    """HTA's list lacks hipExtLaunchKernel, which starts all of RCCL's kernels: it loses
    stream 4.
    """
    analysis, timeline = both("mi300x")
    theirs, queue = queue_of_hta(analysis), queue_length(timeline).set_index("stream")
    assert theirs["stream"].tolist() == [0]
    assert queue["count"].to_dict() == {0: theirs["count"].iloc[0], 4: 24}
    busiest = queue.loc[0]
    assert busiest["max"] > 1022
    assert busiest["blocked_s"] < 0.03 * busiest["full_s"]


AMD = "traces/tracelens-samples/profile_trace_rank_0.json.gz"


@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [
        (AMD, "hipModuleLaunchKernel", (8066, 2317, 2317)),
        (NAMES["graphs"], "cudaGraphLaunch", (6600, 70, 345)),
    ],
)
def test_launches_by_calls_that_hta_does_not_know(name, call, expected):
    """A CPU operator that names a stream is not launched work; the kernels of a graph
    are one launch.
    """
    timeline = read_trace(local_or_skip(name))
    table = launches(timeline)
    of_call = table[table["launch"] == call]
    assert (len(table), len(of_call), of_call["kernels"].sum()) == expected
    if name == AMD:  # HTA's idle time: its rounding widens every gap by up to 2 us
        hosts = idle(timeline).set_index("cause").loc["host_wait"]
        assert 0 < 0.459639 - hosts["idle_s"] < 2e-6 * hosts["count"]


def test_times_rounded_as_hta_does_break_nothing():
    path = local_or_skip("traces/tracelens-samples/owlv2_h100.json.gz")
    with pytest.warns(TraceWarning, match="taken as rank 0"):
        table = launch_bound(read_trace(path, hta_compatible=True))
    assert (table["launch_bound_s"] <= table["idle_s"] + 1e-12).all()
    assert (table["idle_s"] > 0).all()
