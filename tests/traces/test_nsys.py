"""Exports of Nsight Systems: one real file against its reference sums, and made ones
for what it lacks.
"""

import gzip
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from support import local_or_skip

from madmax_lib.base.intervals import pack, total
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.traces import calls, launches, operators, read_trace
from madmax_lib.traces.read.kineto import TraceWarning

_PROCESS = [(1 << 48) + (pid << 24) for pid in (100, 101)]
_TABLES = {
    "StringIds": "id, value",
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start, end, deviceId, streamId, correlationId, globalPid, demangledName"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind"
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "start, end, deviceId, streamId, correlationId, globalPid, syncType"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start, end, deviceId, streamId, correlationId, globalPid, graphId"
    ),
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
    "TARGET_INFO_GPU": "name",
    "META_DATA_EXPORT": "name, value",
}
_STRINGS = [
    (1, "gemm"),
    (2, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)"),
    (3, "cudaLaunchKernel_v7000"),
    (4, "step 7"),
]


@pytest.fixture
def export(tmp_path):
    """Writes an export with these rows by table name."""

    def write(name="two.sqlite", **rows):
        with closing(sqlite3.connect(tmp_path / name)) as base, base:
            for table, values in ({"StringIds": _STRINGS} | rows).items():
                base.execute(f"CREATE TABLE {table} ({_TABLES[table]})")
                base.executemany(
                    f"INSERT INTO {table} VALUES ({','.join('?' * len(values[0]))})",
                    values,
                )
        return tmp_path / name

    return write


def two_ranks():
    """Two processes that use the same correlation ids: a product, an all-reduce that
    half hides, a copy.
    """
    kernels, copies, calls, ranges = [], [], [], []
    for device, process in enumerate(_PROCESS):
        late, thread = 10 * device, process + 5
        kernels += [
            (100 + late, 200 + late, device, 7, 1, process, 1),
            (150, 250 + late, device, 20, 2, process, 2),
        ]
        copies += [(300, 310, device, 7, 3, process, 4096, 1)]
        calls += [(90 + i, 91 + i, thread, i + 1, 3) for i in range(3)]
        ranges += [
            (80, 400, 59, None, 4, thread),
            (
                85,
                95,
                59,
                "aten::mm, seq = 3, op_id = 9, sizes = [[4, 8], [8, 2]]",
                None,
                thread,
            ),
        ]
        ranges += [
            (96, None, 59, "open", None, thread),
            (97, 98, 34, "a mark", None, thread),
        ]
    return {
        "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
        "CUPTI_ACTIVITY_KIND_MEMCPY": copies,
        "CUPTI_ACTIVITY_KIND_RUNTIME": calls,
        "NVTX_EVENTS": ranges,
    }


@pytest.mark.parametrize(
    "text", ["aten::mm, op_id = 9", "aten::mm, op_id = 9, sizes = [[4, 8]]", None]
)
def test_ranges_without_sequence_or_text_are_read_without_a_word(export, text):
    """pandas' warnings are errors here."""
    rows = two_ranks()
    rows["NVTX_EVENTS"] = [
        (85, 95, 59, text, None, process + 5) for process in _PROCESS
    ]
    with pytest.warns(TraceWarning, match="it names no ranks"):
        timeline = read_trace(export(**rows))
    operators = timeline.side_tables["operators"]
    assert operators["sequence"].tolist() == ([] if text is None else [-1, -1])


def test_a_real_export_gives_its_reference_sums(tmp_path):
    path = tmp_path / "two_gpus.sqlite"
    path.write_bytes(
        gzip.decompress(local_or_skip("nsys/two_gpus_pipeline.sqlite.gz").read_bytes())
    )
    with pytest.warns(TraceWarning, match="it names no ranks"):
        timeline = read_trace(path)
    # kernels, their sum, union without NCCL, NCCL's, copies, of all; first start and
    # last end
    expected = {
        0: (
            1993,
            270_875_926,
            253_690_832,
            17_172_652,
            2_844_479,
            273_817_787,
            60_111_541_307,
            60_411_390_119,
        ),
        1: (
            2017,
            264_324_724,
            256_095_624,
            8_229_100,
            2_847_608,
            267_275_916,
            None,
            None,
        ),
    }
    epoch_ns = 1_779_782_330_176_752_435
    for rank, (
        count,
        summed,
        compute,
        comm,
        copies,
        whole,
        first,
        last,
    ) in expected.items():
        spans = timeline.spans[
            (timeline.spans["rank"] == rank) & (timeline.spans["stream"] >= 0)
        ]
        end = spans["start_ns"] + spans["dur_ns"]
        is_copy, is_wait = spans["kind"] == "memcpy", spans["kind"] == "idle"
        kernel = ~is_copy & ~is_wait
        measured = [int(kernel.sum()), int(spans["dur_ns"][kernel].sum())]
        of_copies = spans["name"].str.startswith("Memcpy")
        for rows in (
            kernel & (spans["kind"] == "compute"),
            kernel & (spans["kind"] == "comm"),
            of_copies,
            ~is_wait,
        ):
            measured.append(
                total(
                    pack(
                        spans["start_ns"][rows].to_numpy(),
                        spans["dur_ns"][rows].to_numpy(),
                    )
                )
            )
        assert measured == [count, summed, compute, comm, copies, whole], rank
        if first is not None:
            assert (
                spans["start_ns"][~is_wait].min() - epoch_ns,
                end[~is_wait].max() - epoch_ns,
            ) == (first, last)
    spans = timeline.spans
    kernels = np.flatnonzero(
        (spans["stream"] >= 0) & spans["kind"].isin(["compute", "comm"])
    )
    # launched before the window
    assert len(set(kernels) - set(launches(timeline)["row"])) == 24
    assert (timeline.meta.clock, timeline.meta.world_size) == ("unix", 2)
    assert operators(timeline)["name"].iloc[0] == "flash_attn::_flash_attn_forward"


def test_launches_are_joined_within_their_process(export):
    with pytest.warns(TraceWarning, match="names no ranks"):
        timeline = read_trace(export(**two_ranks()))
    assert (
        timeline.ranks == [0, 1]
        and timeline.steps == [7]
        and timeline.meta.clock == "relative"
    )
    table = breakdown(timeline).set_index("rank")
    assert table["exposed_comm_s"].tolist() == pytest.approx([50e-9, 50e-9])
    assert table["overlap"].tolist() == pytest.approx([0.5, 60 / 110])
    spans = timeline.spans
    # until the last row
    assert spans.loc[spans["name"] == "open", "dur_ns"].tolist() == [304, 304]
    assert "a mark" not in set(spans["name"]) and "cudaLaunchKernel" in set(
        spans["name"]
    )
    assert spans.loc[spans["name"] == "Memcpy HtoD", "size_bytes"].tolist() == [
        4096,
        4096,
    ]
    products = operators(timeline, by_shape=True).query("name == 'aten::mm'")
    assert products["shapes"].tolist() == ["[[4, 8], [8, 2]]"] * 2 and products[
        "device_s"
    ].tolist() == pytest.approx([220e-9, 210e-9])


def test_ranks_go_on_from_file_to_file_and_a_name_tells_one(export, tmp_path):
    one = {name: rows[: len(rows) // 2] for name, rows in two_ranks().items()}
    for node in (0, 1):
        export(f"node{node}.sqlite", **one)
    assert read_trace(tmp_path).ranks == [0, 1]
    assert read_trace(export("rank3.sqlite", **one)).ranks == [3]
    # a database beside traces is not one of them
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    with pytest.warns(TraceWarning, match="no events"):
        assert read_trace(tmp_path).ranks == [0]
    with pytest.raises(ValueError, match="give the files of one of them"):
        read_trace([tmp_path / "rank0.json", tmp_path / "node0.sqlite"])


def test_facts_of_the_export_are_kept(export):
    kernels = [(100, 200, 0, 7, 1, _PROCESS[0], 1)]
    path = export(
        CUPTI_ACTIVITY_KIND_KERNEL=kernels,
        CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[(300, 350, 0, 7, 2, _PROCESS[0], 5)],
        CUPTI_ACTIVITY_KIND_SYNCHRONIZATION=[
            (210, 300, 0, 7, 3, _PROCESS[0], 2),
            (210, 300, 0, 2**32 - 1, 4, _PROCESS[0], 4),
        ],
        TARGET_INFO_SESSION_START_TIME=[(10**18,)],
        TARGET_INFO_GPU=[("NVIDIA H100 80GB HBM3",)],
        META_DATA_EXPORT=[("EXPORT_SCHEMA_VERSION", "3.25.0")],
    )
    with pytest.warns(TraceWarning, match="cuda-graph-trace=node"):
        timeline = read_trace(path)
    assert (timeline.meta.device, timeline.meta.clock) == (
        "NVIDIA H100 80GB HBM3",
        "unix",
    )
    assert timeline.meta.provenance["files"]["0"]["schema"] == "3.25.0"
    assert timeline.spans["name"].tolist() == [
        "gemm",
        "Stream Wait Event",
        "CUDA graph 5",
    ]
    assert np.array_equal(timeline.spans["start_ns"] - 10**18, [100, 210, 300])


def test_what_is_no_export_is_refused_in_a_line(export, tmp_path):
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as base, base:
        base.execute("CREATE TABLE users (id)")
    (tmp_path / "run.nsys-rep").write_bytes(b"closed")
    calls = [(1, 2, _PROCESS[0] + 5, 1, 3)]
    cases = {
        "text.sqlite": "not an SQLite export",
        "other.sqlite": "no table StringIds",
        "run.nsys-rep": "nsys export --type sqlite",
    }
    cases[export("cpu.sqlite", CUPTI_ACTIVITY_KIND_RUNTIME=calls).name] = (
        "no work of a GPU"
    )
    kernels = [(2**62, 2**62 + 5, 0, 7, 1, _PROCESS[0], 1)]
    cases[export("late.sqlite", CUPTI_ACTIVITY_KIND_KERNEL=kernels).name] = (
        "beyond the year 2116"
    )
    kernels = [
        (100 * at, 100 * at + 50, 0, 7, at, _PROCESS[0], 1) for at in range(2000)
    ]
    hurt = export("hurt.sqlite", CUPTI_ACTIVITY_KIND_KERNEL=kernels)
    hurt.write_bytes(hurt.read_bytes()[:20_000] + bytes(range(256)) * 200)
    cases[hurt.name] = "not an SQLite export"
    for name, reason in cases.items():
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            read_trace(tmp_path / name)


def test_collectives_of_an_own_table_are_kept(export, tmp_path):
    kinds = tmp_path / "kinds.csv"
    kinds.write_text("kind,collective,pattern\ncomm,broadcast,AllReduce\n")
    with pytest.warns(TraceWarning, match="names no ranks"):
        timeline = read_trace(export("run.sqlite", **two_ranks()), kinds=kinds)
    assert set(calls(timeline)["collective"]) == {"broadcast"}


def test_rows_without_a_time_are_left_out(export):
    times = [(100, 200), (None, 300), (400, None), (500, 600)]
    kernels = [(*both, 0, 7, at, _PROCESS[0], 1) for at, both in enumerate(times)]
    assert read_trace(export(CUPTI_ACTIVITY_KIND_KERNEL=kernels)).spans[
        "start_ns"
    ].tolist() == [100, 500]


def test_hta_reads_no_exports(export, tmp_path):
    export("cpu.sqlite", CUPTI_ACTIVITY_KIND_KERNEL=[(1, 2, 0, 7, 1, _PROCESS[0], 1)])
    with pytest.raises(ValueError, match="HTA cannot read exports"):
        read_trace(tmp_path / "cpu.sqlite", hta_compatible=True)
