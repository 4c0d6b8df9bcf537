"""Traces of every vendor and year in, one Timeline with known numbers out."""

import gzip
import json
import warnings
from itertools import product
from pathlib import Path

import pytest
from support import local_or_skip, refused_line, shows

from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import BUSY_KINDS
from madmax_lib.traces.read.kineto import TraceWarning, read_trace


def write(path: Path, events: list, **envelope) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**envelope, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def row(name: str, ts, dur, cat: str = "kernel", tid=7, pid=0, **args) -> dict:
    event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
    return event | {"ts": ts, "dur": dur, "args": args}


def op(name: str, ts, dur, tid=100, cat: str = "cpu_op", **args) -> dict:
    return row(name, ts, dur, cat, tid, 9, **args)


def times_us(timeline) -> dict[str, float]:
    """The times of the only rank in microseconds, and its overlap as a share."""
    table = breakdown(timeline).iloc[0].drop("rank")
    return {
        key.removesuffix("_s"): value * (1e6 if key.endswith("_s") else 1)
        for key, value in table.items()
    }


# Compute 0..100, communication 60..160, copy 200..220 on a device: a closed form for
# every way to write it down.
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)"
CLOSED_FORM = {"total": 220, "compute": 100, "comm": 100, "memory": 20}
CLOSED_FORM |= {"non_compute": 80, "exposed_comm": 60, "idle": 40, "overlap": 0.4}


def device(
    comm=ALL_REDUCE,
    copy="Memcpy HtoD (Pinned -> Device)",
    cats="kernel kernel gpu_memcpy",
    tids=(7, 20, 7),
    args=({"stream": 7}, {"stream": 20}, {"stream": 7}),
) -> list[dict]:
    spans = (("sgemm", 0, 100), (comm, 60, 100), (copy, 200, 20))
    return [
        row(*span, c, tid, **a)
        for span, c, tid, a in zip(spans, cats.split(" "), tids, args, strict=True)
    ]


NO_ARGS = ({}, {}, {})
VENDORS = {
    "NVIDIA": device(),
    "AMD default stream": device("ncclDevKernel_Generic", args=({"stream": 0}, {"stream": 4}, {"stream": 0})),
    "stream is text": device(args=({"stream": "7"}, {"stream": "20"}, {"stream": "7"})),
    "stream only in tid": device(args=NO_ARGS),
    "stream is -1": device(args=({"stream": -1},) * 3),
    "MTIA": device("hccl:all_reduce", "dma_request", ("mtia_ccp_events "
        "mtia_ccp_events mtia_ccp_events"), args=NO_ARGS),
    "2020": device("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "Memcpy HtoD\n", "Kernel Kernel\n Memcpy",
                   ("stream 7", "stream 20", "stream 7"), NO_ARGS),
    "Ascend": [  # no category, but a type of task
        {key: value for key, value in event.items() if key != "cat"}
        for event in device("hcom_allReduce_", "MEMCPY_ASYNC", args=({"Task Type": "", "connection_id": 8},) * 3)
    ],
    "copy is a memset": device(copy="Memset (Device)", cats="kernel kernel gpu_memset"),
    **{name: device(name) for name in (
        "void rcclGenericKernel<1, false>(ncclDevComm*)", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(...)",
        "void deep_ep::internode::dispatch<false, 8>(int4*)", "deep_ep::intranode::combine<8>",
        "multimem_all_reduce_kernel<c10::BFloat16>", "two_shot_all_reduce_kernel", "vllm::cross_device_reduce_2stage")},
}  # fmt: skip
MEMORY = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 5}
PROCESS = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0}
NOISE = [  # none of it is work of the device
    op("aten::mm", -50, 900, stream=7),
    op("cudaLaunchKernel", -40, 5, cat="cuda_runtime", correlation=1),
    op("nccl:all_reduce", -30, 500, cat="user_annotation"),
    row("nccl:all_reduce", 0, 900, "gpu_user_annotation", tid=20),
    row("Stream Wait Event", 0, 900, "cuda_sync", stream=20, correlation=1),
    row("Event Sync", 0, 900, "cuda_sync", tid=100, stream=-1),
    op("PyTorch Profiler (0)", -90, 1000, "Traces", "Trace"),
    MEMORY | {"args": {"Bytes": 1, "stream": 7}},
    PROCESS | {"args": {"name": "python"}},
]


@pytest.mark.parametrize("vendor", VENDORS)
def test_device_rows_are_recognised_by_category(tmp_path, vendor):
    timeline = read_trace(write(tmp_path / "rank0.json", NOISE + VENDORS[vendor]))
    assert times_us(timeline) == pytest.approx(CLOSED_FORM, rel=1e-12)
    assert len(timeline) == len(VENDORS[vendor]) + 6
    work = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    assert work["kind"].tolist() == ["compute", "comm", "memcpy"]
    assert work["stream"].min() >= 0


def test_hta_rounds_inward_and_takes_any_row_with_a_stream(tmp_path):
    events = [row("a", 0.25, 10.5, stream=7), row("b", 20.0, 5.0, stream=7)]
    events += [op("aten::mm", 300, 100, stream=7)]
    path = write(tmp_path / "rank0.json", events)
    for rules, compute_us in ((False, 10.5 + 5), (True, 9 + 5 + 100)):
        times = times_us(read_trace(path, hta_compatible=rules))
        assert times["compute"] == pytest.approx(compute_us)


def test_a_users_table_comes_first(tmp_path):
    path = write(tmp_path / "rank0.json", device("Memcpy PtoP (Device -> Device)"))
    assert times_us(read_trace(path))["memory"] == pytest.approx(120)
    table = tmp_path / "kinds.csv"
    table.write_text("kind,pattern\ncomm,^Memcpy PtoP\n")
    assert times_us(read_trace(path, kinds=table)) == pytest.approx(CLOSED_FORM)


def test_an_edited_table_counts_at_the_next_reading(tmp_path):
    path, table = write(tmp_path / "rank0.json", device()), tmp_path / "kinds.csv"
    for kind, comm in (("comm", 160), ("compute", 100)):
        table.write_text(f"kind,pattern\n{kind},sgemm\n")
        assert times_us(read_trace(path, kinds=table))["comm"] == pytest.approx(comm)


GLOO = {"cat": "user_annotation"}
CPU = {  # events of a trace without a device; compute, comm, exposed and total time
    "all-reduce on its thread": (
        [op("aten::mm", 0, 100), op("aten::t", 10, 5), op("gloo:all_reduce", 60, 100, 101, **GLOO),
         op("aten::add_", 70, 10, 101), op("ProfilerStep#1", 0, 500, **GLOO), op("FSDP::pre", 0, 90, **GLOO)],
        (100, 100, 60, 160)),
    "2020 operators": ([op("mm", 0, 100, cat="Operator"), op("t", 10, 20, cat="Operator")], (100, 0, 0, 100)),
    "steps of 2020 are operators": (
        [op("ProfilerStep#5", 0, 100, cat="Operator"), op("mm", 10, 20, cat="Operator")], (20, 0, 0, 20)),
    "two overlapping collectives": (
        [op("gloo:all_gather", 0, 60, 101, **GLOO), op("gloo:all_reduce", 40, 60, 102, **GLOO)], (0, 100, 100, 100)),
    "blocking send": (
        [op("aten::mm", 0, 50), op("gloo:send", 50, 30, **GLOO), op("aten::mm", 80, 20)], (70, 30, 30, 100)),
    # torch 2.14: gloo:send begins inside of c10d::send, on its thread, and ends at
    # wait(); mm runs meanwhile
    "send in flight": (
        [op("c10d::send", 0, 10), op("gloo:send", 5, 95, **GLOO), op("aten::matmul", 20, 60), op("aten::mm", 21, 50)],
        (60, 95, 35, 95)),
    "waiting inside of the operator that needs the result": (
        [op("aten::add", 0, 100), op("_c10d_functional::wait_tensor", 5, 85), op("aten::add", 90, 9),
         op("gloo:all_reduce", 0, 89, 101, **GLOO)], (9, 89, 89, 99)),
    "waiting inside of a node of the backward pass": (
        [op("evaluate_function: PostBackward", 0, 100), op("PostBackward", 1, 98), op("aten::copy_", 2, 10),
         op("gloo:all_gather", 8, 82, 101, **GLOO)], (10, 82, 78, 88)),
    "computing while a collective ends": (
        [op("evaluate_function: MmBackward0", 0, 100), op("aten::mm", 10, 80),
         op("gloo:all_reduce", 0, 50, 101, **GLOO)], (100, 50, 0, 100)),
}  # fmt: skip


@pytest.mark.parametrize("case", CPU)
def test_cpu_traces_count_annotations_and_operators(tmp_path, case):
    events, expected = CPU[case]
    times = times_us(read_trace(write(tmp_path / "rank0.json", events)))
    assert [
        times[key] for key in ("compute", "comm", "exposed_comm", "total")
    ] == pytest.approx(expected)


# ts and dur as they stand in the file, baseTimeNanoseconds, start and duration in ns
TIMES = [
    ("10", "4", None, 10_000, 4_000),
    ("0", "0", 1_700_000_000_000_000_000, 1_700_000_000_000_000_000, 0),
    ("4567890123.457", "0.001", 1_712_102_300_000_000_001, 1_712_106_867_890_123_458, 1),
    ("8796093022207.999", "8.192", 1, 8_796_093_022_208_000, 8_192),
    ("8796093022209.001", "1", 0, 8_796_093_022_209_001, 1_000),
    ("1712102341234567.123", "10.007", None, 1_712_102_341_234_567_123, 10_007),
    ("1.712102341234567891e15", "1e1", None, 1_712_102_341_234_567_891, 10_000),
    ('"1712102341234567.125"', '"7"', None, 1_712_102_341_234_567_125, 7_000),
    ('"12.5"', "0.25", None, 12_500, 250),
    ("-3.001", "3.001", None, -3_001, 3_001),
]  # fmt: skip


@pytest.mark.parametrize(("ts", "dur", "base", "start_ns", "dur_ns"), TIMES)
def test_times_are_exact_to_the_nanosecond(tmp_path, ts, dur, base, start_ns, dur_ns):
    events = [row("a", "TS", "DUR", stream=7)]
    path = write(tmp_path / "rank0.json", events, baseTimeNanoseconds=base)
    path.write_text(path.read_text().replace('"TS"', ts).replace('"DUR"', dur))
    timeline = read_trace(path)
    times = timeline.spans[["start_ns", "dur_ns"]].to_numpy().tolist()
    assert times == [[start_ns, dur_ns]]
    assert timeline.meta.clock == ("unix" if start_ns > 10**18 else "relative")


def test_unusable_times_are_left_out_and_negative_durations_count_as_nothing(tmp_path):
    bad = [(None, 5), ("soon", 5), (True, 5), ([1], 5), (1, float("nan"))]
    bad += [(-(2**63), 5), (2**63 - 1, 5), (5, 2**63 - 1), (1e300, 5)]
    events = [row("bad", ts, dur) for ts, dur in bad]
    events += [row("no dur", 1, None), row("good", 1, 5), row("negative", 9, -5)]
    with pytest.warns(TraceWarning) as warned:
        timeline = read_trace(write(tmp_path / "rank0.json", events))
    shows(timeline.spans, "name  dur_ns\ngood  5000\nnegative  0")
    assert "skipped 8 unreadable of 12 events" in str(warned[0].message)
    assert "1 negative durations taken as 0" in str(warned[1].message)


ODD = [
    ({"tid": [1]}, {}), ({"tid": {"a": 1}, "pid": None}, {}), ({"tid": 2**64, "pid": "Spans"}, {}),
    ({"name": ["x"]}, {}), ({"name": None}, {}), ({"args": {"stream": [7]}}, {}), ({}, {"baseTimeNanoseconds": "2020"}),
    ({"args": {"stream": 2**31 + 5}}, {}), ({"args": {"correlation": "x", "External id": 1e300, "bytes": "many"}}, {}),
    ({}, {"deviceProperties": {"0": {}}}), ({}, {"deviceProperties": 5}), ({}, {"distributedInfo": []}),
    ({}, {"distributedInfo": {"rank": "0"}}), ({}, {"baseTimeNanoseconds": 2**70}),
]  # fmt: skip


@pytest.mark.parametrize(("event", "envelope"), ODD)
def test_odd_values_are_no_reason_to_fail(tmp_path, event, envelope):
    events = [row("a", 0, 10, stream=7) | event, row("b", 10, 10, stream=7)]
    timeline = read_trace(write(tmp_path / "rank0.json", events, **envelope))
    assert times_us(timeline)["compute"] == pytest.approx(20)
    assert timeline.spans["stream"].min() >= 0


# counts inside of the group: global rank 5
LOCAL = {"Rank": 1, "Process Group Ranks": "[4, 5]"}
MANY = {"Rank": 2, "Process Group Ranks": "[0, 8, 16, ..., 248]"}
RANKS = [
    ("rank3.json", {"rank": 2}, LOCAL, 2),
    ("rank3.json", {"backend": "nccl"}, LOCAL, 5),
    ("rank3.json", None, LOCAL, 5),
    ("rank3.json", None, MANY, 16),
    ("rank3.json", None, {"Rank": 6}, 6),
    ("rank3.json", None, {}, 3),
    ("rank-12.Apr_03_18_51_38.pt.trace.json.gz", {"backend": "nccl"}, {}, 12),
    ("worker7_step_12.1694128201553.pt.trace.json", None, {}, 7),
    # names of servers
    ("1756-TP-3.trace.json.gz", None, {}, 3),
    ("dp0_pp0_tp3_dcp0_ep3_rank3.1756.pt.trace.json.gz", None, {}, 3),
    ("http_0.json.gz", None, {}, 0),
]


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
@pytest.mark.parametrize("late", [False, True], ids=["info first", "info last"])
@pytest.mark.parametrize(("name", "info", "args", "rank"), RANKS)
def test_rank_of_a_file(tmp_path, name, info, args, rank, late):
    document = {} if info is None else {"distributedInfo": info}
    events = [op("record_param_comms", 0, 1, **args), *device()]
    document = {"traceEvents": events} | document
    document = document if late else dict(reversed(document.items()))
    (tmp_path / name).write_text(json.dumps(document))
    assert read_trace(tmp_path / name).ranks == [rank]


def test_no_rank_anywhere_is_rank_0_with_a_warning(tmp_path):
    with pytest.warns(TraceWarning, match=r"t\.json: no rank in .*; taken as rank 0"):
        assert read_trace(write(tmp_path / "t.json", device())).ranks == [0]


def test_two_files_of_one_rank_are_refused(tmp_path):
    for name in ("a.json", "b.json"):
        write(tmp_path / name, device(), distributedInfo={"rank": 1})
    with refused_line("a.json b.json both rank 1"):
        read_trace(tmp_path)
    assert read_trace(tmp_path / "b.json").ranks == [1]


BASE_S = 1_700_000_000


def recorded(
    folder: Path, rank: int, begin_s: float, step=0, pid=40, op_names=(), **envelope
) -> Path:
    """A trace that begins so many seconds after some moment, of a process, with a step
    where one is given.
    """
    host = [(f"aten::{name}", 0, 1, "cpu_op") for name in op_names]
    host += [(f"ProfilerStep#{step}", 0, 300, "user_annotation")] if step else []
    host += [("cudaLaunchKernel", 5, 1, "cuda_runtime")]
    events = [row(*event, 1, pid) for event in host] + device()
    info = {"distributedInfo": {"rank": rank, "world_size": 2}}
    info |= {"baseTimeNanoseconds": int((BASE_S + begin_s) * 1e9)}
    path = folder / f"host_{pid}.{int(begin_s * 1e3)}_{rank}.pt.trace.json"
    return write(path, events, **info | envelope)


@pytest.mark.parametrize(("cycle", "step"), [(None, 7), (0, 3), (1, 7)])
def test_of_several_cycles_one_is_read(cycle, step, tmp_path, recwarn):
    """As schedule(repeat=2) and tensorboard_trace_handler leave them."""
    warnings.simplefilter("always")
    for rank in (0, 1):
        for begin_s, number in ((0, 3), (2, 7)):
            recorded(tmp_path, rank, begin_s + rank / 10, number, pid=40 + rank)
    timeline = read_trace(tmp_path, iteration=cycle)
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == (cycle is None)
    words = "2 cycles are recorded; reading the last, number 1 from 0"
    assert not said or words in said[0]
    assert timeline.ranks == [0, 1] and timeline.steps == [step]
    assert breakdown(timeline)["total_s"].tolist() == pytest.approx([220e-6] * 2)
    with refused_line("cycle 2 0, 1"):
        read_trace(tmp_path, iteration=2)


OTHER = [f"other_{number}" for number in range(20)]
H200, B200 = ({"deviceProperties": [{"name": f"NVIDIA {name}"}]} for name in ("H200", "B200"))  # fmt: skip
OF_EIGHT = {"distributedInfo": {"rank": 1, "world_size": 8}}
JOBS = {
    "world size": (OF_EIGHT, "have the world sizes 2 and 8"),
    "device": (B200, "have the devices NVIDIA H200 and NVIDIA B200"),
    "operators": ({"op_names": OTHER}, "have hardly an operator in common"),
    "time": ({"begin_s": 42}, r"were recorded 42(\.0)? s apart"),
    "steps": ({"step": 9}, "have no step in common"),
    "process": ({"rank": 0, "pid": 50}, "are both rank 0"),
}


@pytest.mark.parametrize("case", JOBS)
def test_several_jobs_are_refused(case, tmp_path):
    second, message = JOBS[case]
    usual = {**H200, "op_names": [f"op_{number}" for number in range(20)], "step": 3}
    other = {"rank": 1, "begin_s": 1e-3, **usual, **second}
    files = [recorded(tmp_path, 0, 0, **usual), recorded(tmp_path, **other)]
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path)
    if case in ("time", "steps"):  # clocks may differ: whoever names the files knows
        with pytest.warns(TraceWarning, match=message):
            assert read_trace(files).ranks == [0, 1]
    for rank in (0, 1):
        recorded(tmp_path / "one", rank, rank * 1e-3, pid=40 + rank, **usual)
    for source in (tmp_path / "one", str(tmp_path / "o*" / "*.json")):
        assert read_trace(source).ranks == [0, 1]


@pytest.fixture
def run(tmp_path):
    """A run directory: torchtitan's iteration folders of two ranks, and other files
    beside them.
    """
    for iteration, rank in product((2, 10), (0, 1)):
        folder = tmp_path / "run" / "profile_traces" / f"iteration_{iteration}"
        events = device() + device()[: iteration % 3]
        write(folder / f"rank{rank}_trace.json", events)
    (folder / "metrics.json").write_text('[{"loss": 2.5}, {"loss": 2.25}]')
    (folder / "config.json").write_text('{"lr": 0.1}')
    (folder / "log.gz").write_bytes(gzip.compress(b"step 1"))
    (folder / "notes.txt").write_text("no trace")
    return tmp_path / "run"


@pytest.mark.parametrize(("iteration", "spans"), [(None, 4), (10, 4), (2, 5)])
@pytest.mark.parametrize("below", ["", "profile_traces"])
@pytest.mark.filterwarnings("always")
def test_iterations_of_torchtitan(run, below, iteration, spans, recwarn):
    timeline = read_trace(run / below, iteration=iteration)
    said = (
        f"{run / below}: 2 iterations are recorded; reading the newest, 10; "
        "pass iteration= or its folder to choose another"
    )
    heard = [str(warning.message) for warning in recwarn]
    assert heard == ([] if iteration else [said])
    assert timeline.spans.groupby("rank").size().to_dict() == {0: spans, 1: spans}
    with refused_line("iteration_7 2, 10"):
        read_trace(run / below, iteration=7)
    # other JSON does not hide the traces
    (run / below / "job_config.json").write_text('{"lr": 0.1}')
    assert read_trace(run / below, iteration=iteration).ranks == [0, 1]


def test_sources_are_files_lists_and_directories_and_stay_untouched(run):
    folder = run / "profile_traces" / "iteration_10"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    files = [folder / "rank1_trace.json", str(folder / "rank0_trace.json")]
    for source in (folder, str(folder), files, tuple(files)):
        for hta_compatible in (False, True):
            assert read_trace(source, hta_compatible=hta_compatible).ranks == [0, 1]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


NO_TRACE = ["", " \n", "step,loss\n1,2.5\n", "{}", '{"lr": 0.1}', '{"traceEvents": 5}', "[[1, 2], [3, 4]]", "[1, 2]",
            '[{"loss": 2.5}]', "5", '"text"', "<html></html>"]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("text", NO_TRACE)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, text, packed):
    path = tmp_path / "file.json"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    for source in (path, [path], tmp_path):
        with refused_line(f"not a profiler trace {path}"):
            read_trace(source)


def test_absent_sources_are_named(tmp_path):
    for absent in (tmp_path / "missing.json", str(tmp_path / "no*" / "*.json")):
        with refused_line(f"{absent} no such file", FileNotFoundError):
            read_trace(absent)
    with refused_line(f"{tmp_path} no trace files"):
        read_trace(tmp_path)


LAUNCH, HOST = op("cudaLaunchKernel", 0, 5, cat="cuda_runtime"), op("aten::mm", 0, 9)
NAMELESS = row("k", 0, 9) | {"cat": None}
COUNTER = {"ph": "C", "name": "queue", "pid": 1, "tid": 0, "ts": 1, "args": {"n": 2}}
SILENT = [
    ([LAUNCH, HOST], {}, "no row of a device is recorded"),
    ([HOST], B200, "no row of a device, NVIDIA B200, is"),
    ([HOST, NAMELESS], {}, "host's; 1 rows without a category are left out"),
    ([op("x", 0, 9, cat="dtu")], {}, "no row of a known category: nothing to analyse"),
    ([LAUNCH], {}, "no row of a device is recorded: nothing is at work"),
    ([COUNTER, COUNTER], {}, "none of its 2 events is of a known kind"),
]


@pytest.mark.parametrize(("events", "envelope", "said"), SILENT)
def test_a_trace_without_a_device_row_says_so(events, envelope, said, tmp_path):
    with pytest.warns(TraceWarning, match=said):
        read_trace(write(tmp_path / "rank0.json", events, **envelope))
    # of a CPU, nothing is missing
    alone = read_trace(write(tmp_path / "rank1.json", [HOST]))
    assert times_us(alone)["compute"] == pytest.approx(9)


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
@pytest.mark.parametrize("name", ["hta/cupti", "flowmatch/pytorch_trace"])
def test_real_traces_without_device_rows_say_so(name):
    with pytest.warns(TraceWarning, match="no row of a device"):
        read_trace(local_or_skip(f"traces/more/{name}.json.gz"))


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
def test_ascends_own_analysis_agrees():
    path = local_or_skip("traces/more/ascend/trace_view.json.gz")
    rows = [e for e in json.loads(gzip.decompress(path.read_bytes())) if e["ph"] == "X"]
    computing_us, free_us = (
        sum(e["dur"] for e in rows if e["name"] == name)
        for name in ("Computing", "Free")
    )
    times = times_us(read_trace(path))
    # 274 of them, to the nanosecond
    assert times["compute"] == pytest.approx(computing_us, abs=0.3)
    assert times["idle"] + times["memory"] == pytest.approx(free_us, abs=0.3)
