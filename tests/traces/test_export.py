"""What export_trace writes, read back by us and by HTA: the same spans to the
nanosecond, the same breakdown.
"""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from itertools import product
from operator import itemgetter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from support import (
    dataset_or_skip,
    drawn_table,
    lanes,
    make_timeline,
    refused_line,
    shows,
    with_columns,
)

from madmax_lib import Timeline, breakdown, export_trace, read_trace
from madmax_lib.simulator.events.engine import Program, to_timeline
from madmax_lib.timeline.accounting import rank_breakdown
from madmax_lib.timeline.kinds import kernel_kinds
from madmax_lib.timeline.timeline import BUSY_KINDS, SPANS, Meta
from madmax_lib.traces import exposed_by_collective
from madmax_lib.traces.read.kernel_names import original_name

LABELS = ("process_name", "thread_name")
EXACT = [column for column in SPANS if column not in ("name", "correlation", "kind")]


def simulated(ranks=2, layers=3, steps=1, **meta) -> Timeline:
    """Compute on stream 0 with an all-reduce per layer on stream 20 beside it, a copy,
    and an odd number of ns.
    """
    program = Program()
    for step in range(steps):
        for layer, rank in product(range(layers), range(ranks)):
            name, compute_s = f"layers.{layer}", 1.234567e-3 * (rank + 1)
            after = [program.op(0, "compute", f"{name} mlp", compute_s, rank=rank)]
            call = {"rank": rank, "group": "dp", "size_bytes": 1e6 + step}
            program.op(20, "comm", f"all_reduce {name}", 0.777e-3, after, **call)
        for rank in range(ranks):
            program.op(7, "memcpy", "offload", 1e-4, [len(program) - 1], rank=rank)
    timeline = to_timeline(program, Meta("simulated", ranks, device="H100", **meta))
    per_step = len(timeline) // steps
    step = np.arange(len(timeline), dtype=np.int32) // per_step
    return with_columns(timeline, step=step)


def events(path, phases: str = "") -> list[dict]:
    """Events of a file, of some phases."""
    every = document(path)["traceEvents"]
    return [event for event in every if not phases or event["ph"] in phases]


def of_streams(rows: list[dict]) -> list[dict]:
    return [event for event in rows if "stream" in event.get("args", ())]


def document(path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)


def canonical(spans: pd.DataFrame) -> pd.DataFrame:
    """Rows in one order, text in place of categories, names as they were."""
    spans = spans.assign(name=[original_name(name) for name in spans["name"]])
    spans = spans.astype({"kind": object, "name": object, "group": object})
    order = ["rank", "start_ns", "dur_ns", "stream", "kind", "name", "op"]
    return spans.sort_values(order, kind="stable").reset_index(drop=True)


def on_device(spans: pd.DataFrame) -> pd.DataFrame:
    busy = (spans["stream"] >= 0) & spans["kind"].isin(BUSY_KINDS)
    return spans[busy].reset_index(drop=True)


def assert_same_spans(timeline: Timeline, again: Timeline, rows: str = "all") -> None:
    """The spans of a timeline (rows="device": the busy ones on streams >= 0) and those
    read back from its export.
    """
    ours, theirs = canonical(timeline.spans), canonical(again.spans)
    if rows == "device":
        ours, theirs = on_device(ours), on_device(theirs)
    # where none was given, exporting numbers the launches
    given_one = (ours["correlation"] >= 0) | (rows == "all")
    columns = [*EXACT, "kind", "name", "correlation"]
    theirs["correlation"] = theirs["correlation"].where(given_one, ours["correlation"])
    pd.testing.assert_frame_equal(ours[columns], theirs[columns])
    pd.testing.assert_frame_equal(breakdown(timeline), breakdown(again))
    assert timeline.meta.world_size == again.meta.world_size
    assert timeline.meta.device == again.meta.device


@pytest.mark.parametrize("steps", [1, 3])
def test_simulated_timeline_comes_back(tmp_path, steps):
    timeline, folder = simulated(ranks=3, steps=steps), tmp_path / "new" / "folder"
    paths = export_trace(timeline, folder)
    assert [path.name for path in paths] == [f"rank{r}.json.gz" for r in range(3)]
    again = read_trace(folder)
    assert_same_spans(timeline, again, "device")
    assert again.steps == timeline.steps
    assert set(exposed_by_collective(again)["collective"]) == {"all_reduce"}
    assert sorted(folder.iterdir()) == paths


@pytest.mark.parametrize(
    "name, device",
    [("vit-ddp", False), ("dlrm-8xv100", True), ("resnet-ddp-a100", True)],
)
def test_measured_timeline_comes_back(tmp_path, name, device):
    timeline = read_trace(dataset_or_skip(name))
    export_trace(timeline, tmp_path)
    again = read_trace(tmp_path)
    assert_same_spans(timeline, again)
    assert again.meta.clock == "unix"
    # also in the same order, so that edges still fit
    columns = ["start_ns", "stream", "correlation", "op"]
    assert (again.spans[columns] == timeline.spans[columns]).all(axis=None)
    # shapes, types and inputs of operators, and what collectives say of themselves
    for name, columns in {
        "operators": ["shapes", "types", "inputs", "sequence"],
        "calls": ["dtype", "in_elements", "out_elements", "group_size", "ranks"],
    }.items():
        # a row or two per step would be taken for compute on a host: no operators then
        both = timeline.side_tables[name].merge(
            again.side_tables[name]["row"], on="row"
        )
        assert len(both) >= 0.99 * len(timeline.side_tables[name])
        told, written = (
            table.side_tables[name].set_index("row").loc[both["row"]]
            for table in (timeline, again)
        )
        for column in columns:
            assert (written[column].to_numpy() == told[column].to_numpy()).all()
    if device:  # every name of these traces means the same to HTA and to us
        assert set(again.spans["name"].unique()) == set(timeline.spans["name"].unique())
    part = timeline.select(ranks=timeline.ranks[:1], steps=timeline.steps[:1])
    export_trace(part, tmp_path / "part")
    assert_same_spans(part, read_trace(tmp_path / "part"))


def test_measured_spans_without_host_rows_keep_their_steps(tmp_path):
    timeline = read_trace(dataset_or_skip("resnet-ddp-a100"))
    busy = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    kernels = Timeline(busy.reset_index(drop=True), timeline.meta)
    assert len(set(kernels.spans["step"])) > 2
    export_trace(kernels, tmp_path)
    assert_same_spans(kernels, read_trace(tmp_path), "device")


ODD_NAMES = ["nccl_all_reduce", "Memcpy Sync", "ncclKernel", "dma x", "100% SyncBatchNorm", "0x%41", "kernel madmax",
             "x Memset", "cross_device_reduce", "nvshmem_put", "gloo:send"]  # fmt: skip
NAME = st.text(st.characters(max_codepoint=0x2FF), max_size=12)
SPAN = st.tuples(
    st.integers(0, 2),  # rank
    st.integers(0, 2**31 - 1),  # stream
    st.sampled_from(["compute", "comm", "memcpy"]),
    st.one_of(NAME, st.sampled_from(ODD_NAMES)),
    st.one_of(st.integers(0, 10**6), st.integers(-(2**60), 2**60)),  # start
    st.one_of(st.integers(0, 3000), st.integers(0, 2**60)),  # duration
    st.just(-1),  # correlation
    st.integers(-1, 3),  # step
)
META = {
    "source": st.sampled_from(["simulated", "measured"]),
    "clock": st.sampled_from(["unix", "relative"]),
    "world_size": st.just(3),
}


@settings(max_examples=25, deadline=None)
@given(st.lists(SPAN, min_size=1, max_size=8), st.fixed_dictionaries(META))
def test_any_device_spans_come_back_to_the_nanosecond(tmp_path_factory, rows, meta):
    timeline = make_timeline(rows, **meta)
    timeline = with_columns(timeline, op=np.arange(len(rows)))
    folder = tmp_path_factory.mktemp("any")
    try:
        paths = export_trace(timeline, folder)
    except ValueError as error:
        assert "later than 3e18 ns" in str(error)
        return
    assert_same_spans(timeline, read_trace(folder), "device")
    written = [event for path in paths for event in events(path)]
    kernels = of_streams(written)
    labels, kinds = [e["name"] for e in kernels], [e["args"]["kind"] for e in kernels]
    assert kernel_kinds(labels, rules="hta").tolist() == kinds
    told = zip(map(original_name, labels), kinds, strict=True)
    assert len(set(told)) == len(set(labels))
    assert all(Decimal(event["ts"]) >= 0 for event in written)


@pytest.mark.parametrize(
    "clock, zero", [("relative", 0), ("unix", 1_795_266_445_521_195_859)]
)
def test_times_are_decimal_text(tmp_path, clock, zero):
    drawn = f"7 compute: a {zero}+1, b {zero + 123_456_789}+1000001"
    (path,) = export_trace(make_timeline(lanes(drawn), clock=clock), tmp_path)
    text = gzip.decompress(path.read_bytes()).decode()
    base = document(path)["baseTimeNanoseconds"]
    assert base == (1_795_266_445_521_195_000 if clock == "unix" else 0)
    start = zero - base
    assert f'"ts": {start // 1000}.{start % 1000:03d}, "dur": 0.001' in text
    assert '"dur": 1000.001' in text
    assert read_trace(path).meta.clock == clock


def test_what_a_file_says(tmp_path):
    path = export_trace(simulated(ranks=2), tmp_path)[1]
    whole = document(path)
    assert whole["distributedInfo"] == {"backend": "nccl", "rank": 1, "world_size": 2}
    assert whole["deviceProperties"] == [{"id": 0, "name": "H100"}]
    keys = {"schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "traceName"}
    assert keys < set(whole)
    cats = Counter(event["cat"] for event in events(path, "X"))
    expected = {"kernel": 6, "gpu_memcpy": 1, "cuda_runtime": 7, "cpu_op": 7}
    assert cats == expected | {"user_annotation": 1}
    rows = events(path)
    names = [e["args"]["name"] for e in rows if e["name"] in LABELS]
    streams = ["stream 0", "stream 7", "stream 20"]
    assert names[:5] == ["rank 1 H100", "rank 1 host", *streams]
    comm = next(event for event in rows if event["name"].startswith("nccl"))
    assert comm["name"] == "ncclDevKernel_AllReduce madmax(all_reduce layers.0)"
    assert comm["tid"] == 20 and comm["pid"] == 0
    args = {"stream": 20, "device": 0, "Process Group Name": "dp", "bytes": 1_000_000}
    args |= {"Collective name": "all_reduce", "op name": "all_reduce layers.0"}
    args |= {"External id": 2 + 1}  # rank 1's first collective is the fourth op
    assert args.items() <= comm["args"].items()


def by_correlation(rows: list[dict]) -> dict:
    return {event["args"]["correlation"]: event for event in rows}


def test_launches_point_at_their_kernels(tmp_path):
    path = export_trace(simulated(ranks=1, steps=2), tmp_path)[0]
    x = events(path, "X")
    kernels = by_correlation(of_streams(x))
    launches = by_correlation([e for e in x if e["cat"] == "cuda_runtime"])
    operators = {e["args"]["External id"] for e in x if e["cat"] == "cpu_op"}
    assert operators == {e["args"]["External id"] for e in kernels.values()}
    names = {e["name"] for e in launches.values()}
    assert names == {"cudaLaunchKernel", "cudaMemcpyAsync"}
    start, end = ({e["id"]: e for e in events(path, phase)} for phase in "sf")
    assert set(start) == set(end) == set(kernels) == set(launches)
    where = itemgetter("pid", "tid", "ts")
    for number, kernel in kernels.items():
        launch = launches[number]
        assert where(end[number]) == where(kernel) and end[number]["bp"] == "e"
        assert where(start[number]) == where(launch)
        assert start[number]["cat"] == "ac2g"
        assert launch["ts"] <= kernel["ts"]
    threads = {}
    for e in x:  # Perfetto drops rows of a thread that overlap without being nested
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], -e["dur"]))
    for spans in threads.values():
        stack = []
        for ts, dur in sorted(spans):
            while stack and stack[-1] <= ts:
                stack.pop()
            assert not stack or ts - dur <= stack[-1]
            stack.append(ts - dur)
    steps = [e for e in x if e["name"].startswith("ProfilerStep")]
    assert [e["name"] for e in steps] == [f"ProfilerStep#{step}" for step in range(3)]
    assert [e["dur"] > 0 for e in steps] == [True, True, False]


def test_measured_launches_get_arrows(tmp_path):
    timeline = read_trace(dataset_or_skip("dlrm-8xv100")).select(ranks=[3])
    path = export_trace(timeline, tmp_path)[0]
    x = events(path, "X")
    assert len(x) == len(timeline)  # nothing is added to a measured trace
    launched = {e["args"].get("correlation") for e in x if e["cat"] == "cuda_runtime"}
    arrows = {event["id"] for event in events(path, "f")}
    assert arrows == set(by_correlation(of_streams(x))) & launched


def test_waits_annotations_and_allocations(tmp_path):
    drawn = """
        -1 cpu: cudaLaunchKernel 0+5
        7 compute: sgemm 0+100
        7 idle: Stream Wait Event 100+50
        7 annotation: forward 0+150
        3 other: barrier 200+50
        -2 memory: [memory] 3+0
    """
    path = export_trace(make_timeline(lanes(drawn)), tmp_path)[0]
    expected = """
        name                     cat
        cudaLaunchKernel         cuda_runtime
        sgemm                    kernel
        Stream Wait Event        cuda_sync
        forward                  gpu_user_annotation
        Memset madmax(barrier)   gpu_memset
        [memory]                 cpu_instant_event
    """
    written = events(path, "Xi")
    cats = {event["name"]: event["cat"] for event in written}
    assert cats == dict(drawn_table(expected)[1:])
    on_streams = {event["name"] for event in of_streams(written)}
    assert on_streams == {"sgemm", "Memset madmax(barrier)"}
    kinds = "kind  stream\ncpu  -1\ncompute  7\nidle  7\nannotation  7\nmemcpy  3"
    shows(read_trace(path).spans, kinds)


def test_host_threads_keep_their_numbers(tmp_path):
    drawn = "-3 cpu: c 0+1\n5 compute: k 0+1\n-1 cpu: a 0+1"
    again = read_trace(export_trace(make_timeline(lanes(drawn)), tmp_path)[0]).spans
    streams = dict(zip(again["name"], again["stream"], strict=True))
    assert streams == {"a": -1, "k": 5, "c": -3}


def test_host_work_stays_host_work(tmp_path):
    """The module is an outer frame that is no operator."""
    rows = lanes("""
        -1 cpu: module 0+1000
        -1 compute: aten::mm 10+100
        -1 cpu: aten::copy_ 20+90, tail 100+50
        -1 compute: aten::mm 120+100
        -2 comm: all_gather layers.1 0+500
        -2 annotation: gloo:all_reduce later 600+10
    """)
    timeline = make_timeline(rows)
    path = export_trace(timeline, tmp_path)[0]
    assert document(path)["distributedInfo"]["backend"] == "gloo"
    again = read_trace(path)
    pd.testing.assert_frame_equal(breakdown(timeline), breakdown(again))
    spans = again.spans.assign(name=again.spans["name"].map(original_name))
    told = spans[["stream", "kind", "name"]].astype(object).to_numpy().tolist()
    assert told == [list(row[1:4]) for row in rows]
    cats = {event["name"]: event["cat"] for event in events(path, "X")}
    assert cats["aten::copy_"] == "cpu_op"


def test_exporting_again_changes_nothing(tmp_path):
    first = export_trace(simulated(), tmp_path / "1")
    again = read_trace(tmp_path / "1")
    export_trace(again, tmp_path / "2")
    twice = read_trace(tmp_path / "2")
    assert_same_spans(again, twice)
    assert set(twice.spans["name"]) == set(again.spans["name"])
    same = export_trace(simulated(), tmp_path / "3")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in same]


def test_ranks_without_spans_get_a_file_too(tmp_path):
    both = {"represents": {0: [0], 1: [1]}, "world_size": 2}
    paths = export_trace(make_timeline(lanes("7 compute: a 0+10"), **both), tmp_path)
    assert len(paths) == 2 and read_trace(tmp_path).ranks == [0, 1]
    empty = make_timeline([], represents={0: [0]}, source="simulated")
    export_trace(empty, tmp_path / "empty")


BAD = {
    "device streams": "7 compute: a 0+1\n-1 compute: b 0+1",
    "memcpy on a host thread": "-1 memcpy: a 0+1",
    "cpu on a device stream": "1 cpu: a 0+1",
    "inside of another": "-1 compute: a 0+10, b 5+10",
    "outside of 3e18 ns": f"1 compute: a 0+{2**62}",
    "later than 3e18 ns": f"1 compute: a {2**62}+1",
    "is of step 3, but starts on the host during another": "7 compute: k 0+9\n-1 cpu: a 0+1, b 10+1",
    "not valid Unicode|surrogates": "1 compute: \ud800 0+1",
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_errors_are_one_line_and_leave_nothing(tmp_path, message):
    with pytest.raises(ValueError, match=message) as error:
        # pandas 3 refuses texts that are no Unicode itself
        timeline = make_timeline(lanes(BAD[message]))
        if "step" in message:
            timeline = with_columns(timeline, step=[3, 5, 3])
        export_trace(timeline, tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_files_appear_whole_or_not_at_all(tmp_path):
    old = tmp_path / "rank0.json.gz"
    old.write_bytes(b"before")
    rows = lanes("7 compute: fine 0+10\n1/7 compute: not \ud800 Unicode 0+10")
    with pytest.raises(ValueError, match=r"Unicode|surrogates"):
        export_trace(make_timeline(rows), tmp_path)
    assert old.read_bytes() == b"before" and list(tmp_path.iterdir()) == [old]
    with refused_line("is not a directory", NotADirectoryError):
        export_trace(simulated(), old)
    (tmp_path / "rank1.json.gz").mkdir()
    with refused_line("rank1.json.gz: is a directory", IsADirectoryError):
        export_trace(simulated(), tmp_path)
    assert old.read_bytes() == b"before"


HTA = """
import json, sys, warnings
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
from madmax_lib.traces import hta
analysis = TraceAnalysis(trace_dir=sys.argv[1])
table = hta.temporal(analysis).merge(hta.overlap(analysis), on="rank")
print("RESULT" + table.to_json(orient="records", double_precision=15))
"""


def says_hta(folder, rounding: bool) -> pd.DataFrame:
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "0" if rounding else "1"}
    command = [sys.executable, "-c", HTA, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    table = pd.DataFrame(json.loads(run.stdout.split("RESULT")[1]))
    return table.sort_values("rank", ignore_index=True)


def timeline_for_hta(name: str) -> Timeline:
    if name == "dlrm-8xv100":
        return read_trace(dataset_or_skip(name))
    return simulated(ranks=4, layers=20, steps=3 if name == "three steps" else 1)


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("name", ["one step", "three steps", "dlrm-8xv100"])
def test_hta_agrees(tmp_path, name, rounding):
    pytest.importorskip("hta")
    timeline = timeline_for_hta(name)
    export_trace(timeline, tmp_path)
    again = read_trace(tmp_path, hta_compatible=True) if rounding else timeline
    ours, theirs = rank_breakdown(again), says_hta(tmp_path, rounding)
    assert theirs["rank"].tolist() == timeline.ranks
    columns = ["total_s", "compute_s", "non_compute_s", "idle_s"]
    np.testing.assert_allclose(ours[columns], theirs[columns], rtol=0, atol=1e-6)
    near = 1e-4 if rounding else 1e-3
    np.testing.assert_allclose(ours["overlap"], theirs["overlap"], rtol=0, atol=near)


@pytest.mark.parametrize("source", ["simulated", "measured"])
def test_a_simulation_is_never_read_back_as_a_measurement(tmp_path, source):
    timeline = make_timeline(lanes("7 compute: gemm 0+10"), source=source)
    assert read_trace(export_trace(timeline, tmp_path)).meta.source == source
