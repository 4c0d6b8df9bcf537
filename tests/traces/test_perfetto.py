"""`.pftrace`: the same window as JSON and as packets gives equal tables."""

import gzip
import json
import warnings

import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.traces import calls, counters
from madmax_lib.traces.read.events import NotATrace, TraceWarning
from tests.support import local_or_skip

COLUMNS = ["rank", "stream", "kind", "name", "start_ns", "dur_ns", "step"]
COLUMNS += ["correlation", "group", "size_bytes"]


def both(name):
    """A recording read from JSON and from packets."""
    folder = local_or_skip("logs_2026") / name.split("/")[0]
    stem = name.split("/")[1]
    packets = next(folder.glob(f"{stem}*.pftrace*"))
    return mm.read_trace(folder / f"{stem}_trace.json.gz"), mm.read_trace(packets)


def rows(timeline):
    """Spans in an order that both formats have."""
    spans = timeline.spans[COLUMNS].copy()
    for column in ("kind", "name", "group"):
        spans[column] = spans[column].astype(object).fillna("")
    return spans.sort_values(
        ["start_ns", "dur_ns", "name", "stream"], ignore_index=True
    )


@pytest.mark.parametrize(
    "name", ["cuspy/rank0", "cuspy/rank1", "cuspy-copyengine/rank0"]
)
def test_json_and_packets_give_equal_tables(name):
    of_json, of_packets = both(name)
    pd.testing.assert_frame_equal(rows(of_json), rows(of_packets))
    pd.testing.assert_frame_equal(mm.breakdown(of_json), mm.breakdown(of_packets))
    pd.testing.assert_frame_equal(counters(of_json), counters(of_packets))
    for table in ("operators", "calls", "syncs", "counters"):
        tables = of_json.side_tables[table], of_packets.side_tables[table]
        assert len(tables[0]) == len(tables[1])


def test_times_are_those_of_the_key():

    key = json.loads((local_or_skip("logs_2026") / "key.json").read_text())
    for planted, name in (
        (key["cuspy"][0], "cuspy/rank0"),
        (key["cuspy-copyengine"], "cuspy-copyengine/rank0"),
    ):
        for timeline in both(name):
            row = mm.breakdown(timeline).iloc[0]
            comm_ns = planted["comm_union_ns"] + planted["copy_engine_comm_union_ns"]
            assert row["comm_s"] * 1e9 == pytest.approx(comm_ns, abs=0.5)
            compute_ns = planted["compute_union_ns"]
            assert row["compute_s"] * 1e9 == pytest.approx(compute_ns, abs=0.5)
            samples = timeline.side_tables["counters"]
            assert len(samples) == planted["counter_samples"]
            power_w = samples.loc[samples["name"] == "Power (W)", "value"].mean()
            assert power_w == pytest.approx(planted["mean_power_w"], abs=1e-3)


def test_a_replayed_graph():
    of_json, of_packets = both("cuspy-graphs/rank0")
    pd.testing.assert_frame_equal(
        mm.breakdown(of_json), mm.breakdown(of_packets), atol=1e-9
    )
    # the writer cut two kernels at the next start, JSON keeps them
    assert (rows(of_json)["dur_ns"] != rows(of_packets)["dur_ns"]).sum() == 2


def test_collectives_of_a_graph_are_told_by_its_annotations():
    """JSON text in JSON here, extra data there; what is no such text is left alone."""
    told = [
        calls(each)[["collective", "group", "group_size", "dtype", "size_bytes"]]
        for each in both("cuspy-graphs/rank0")
    ]
    pd.testing.assert_frame_equal(*told)
    assert (told[0]["size_bytes"] > 0).all() and set(told[0]["group"]) == {"0 [0]"}


@pytest.mark.parametrize("text", ["", "[]", "[1]", '{"Seq": 1}', "[{", 5, [{"a": 1}]])
def test_an_annotation_that_is_no_list_of_them_says_nothing(text, tmp_path):
    args = {"stream": 7, "device": 0, "bytes": 8, "annotation": text}
    row = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 1}
    events = [row | {"dur": 1, "pid": 0, "tid": 7, "args": args}]
    content = {"traceEvents": events, "distributedInfo": {"rank": 0}}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(content))
    spans = mm.read_trace(path).spans
    assert spans["size_bytes"].tolist() == [8] and spans["stream"].tolist() == [7]


def test_energy_is_power_times_the_time_at_work():
    _, timeline = both("cuspy/rank0")
    table = counters(timeline)
    power = table[table["counter"] == "Power (W)"]
    busy = timeline.spans[(timeline.spans["stream"] >= 0).to_numpy()]
    busy = busy[busy["kind"].isin(["compute", "comm", "memcpy"])]
    first = busy[busy["step"] == 10]
    end_ns = (first["start_ns"] + first["dur_ns"]).max()
    expected = power["mean"].iloc[0] * (end_ns - first["start_ns"].min()) / 1e9
    assert power["energy_j"].iloc[0] == pytest.approx(expected)
    assert table.loc[table["counter"] == "SM Active (%)", "energy_j"].isna().all()
    assert counters(mm.read_trace(mm.dataset("vit-ddp"))).empty


def test_kernels_of_perfetto_s_own_files():
    folder = local_or_skip("logs_2026/perfetto-tests")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no rank, no device
        spans = mm.read_trace(folder / "gpu_compute_kernel.pftrace").spans
    assert spans["start_ns"].tolist() == [100, 200, 400]
    assert spans["dur_ns"].tolist() == [50, 100, 50]
    names = spans["name"].astype(str).str.split("(").str[0]
    assert names.tolist() == ["vectorAdd", "matMul", "vectorAdd"]


def test_a_cut_file_keeps_what_came_before(tmp_path):
    folder = local_or_skip("logs_2026/cuspy")
    data = gzip.decompress((folder / "rank0_trace.pftrace.gz").read_bytes())
    part = tmp_path / "rank0.pftrace"
    part.write_bytes(data[: len(data) * 9 // 10])
    with pytest.warns(TraceWarning, match="truncated packets"):
        spans = mm.read_trace(part).spans
    assert 100 < len(spans) < 369


@pytest.mark.parametrize("data", [b"\n\x05ab", b"\n" + b"x" * 50])
def test_what_holds_no_packet_is_no_trace(tmp_path, data):
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(data)
    with pytest.raises(NotATrace, match="no packets"):
        mm.read_trace(path)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("results.db", b"SQLite format 3\x00" + b"\0" * 99, "a database"),
        ("a", b"PK\x03\x04" + b"\0" * 99, "a zip archive: call it .zip"),
        ("host.xplane.pb", b"\x0a\x00\x01", "XPlane"),
        ("other.xplane.pb", b"\x12\x00\x01", "XPlane"),
    ],
)
def test_other_profilers_are_named(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(NotATrace, match=words):
        mm.read_trace(path)


@pytest.mark.filterwarnings("ignore:.*no rank")
def test_a_kernel_recorded_too_long_ends_where_the_next_begins():
    folder = local_or_skip("logs_2026/overlong")
    with pytest.warns(TraceWarning, match="1 kernels .* cut at its start, 1.59 s"):
        overlong = mm.breakdown(mm.read_trace(folder / "mi355-like.json"))
    assert overlong["compute_s"].iloc[0] == pytest.approx(28.8e-3, abs=1e-6)
    # programmatic dependent launches overlap, and are left alone
    launched = mm.read_trace(folder / "pdl.json")
    assert mm.breakdown(launched)["compute_s"].iloc[0] == pytest.approx(140e-6)


@pytest.mark.parametrize("ending", [".pftrace", ".pftrace.gz"])
@pytest.mark.parametrize("name", ["vit-h100", "gpt-ddp", "dlrm-8xv100", "simulated"])
def test_what_is_written_as_packets_reads_back(name, ending, tmp_path):
    if name == "simulated":
        timeline = mm.simulate("gpt2-large", "dgx-a100", "dp2.tp2.pp2", global_batch=8)
    else:
        timeline = mm.read_trace(mm.dataset(name))
    paths = mm.export_trace(timeline, tmp_path / f"step{ending}")
    stems = [f"step_rank{rank}" for rank in timeline.ranks]
    stems = stems if len(stems) > 1 else ["step"]
    assert [path.name for path in paths] == [f"{stem}{ending}" for stem in stems]
    again = mm.read_trace(paths)
    of_json = mm.read_trace(mm.export_trace(timeline, tmp_path / "json"))
    ordered = [rows(each).drop(columns="stream") for each in (of_json, again)]
    pd.testing.assert_frame_equal(*ordered)
    pd.testing.assert_frame_equal(mm.breakdown(of_json), mm.breakdown(again))
    assert again.meta.source == timeline.meta.source
    assert again.meta.world_size == timeline.meta.world_size
    assert len(again.side_tables["operators"]) == len(of_json.side_tables["operators"])
    mm.export_trace(timeline, tmp_path / f"step{ending}")  # over what is there


def test_packets_are_read_by_perfetto_s_own_protos(tmp_path):
    """Each row is a slice that ends or a render stage, with its args."""
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    timeline = mm.read_trace(mm.dataset("vit-h100"))
    (path,) = mm.export_trace(timeline, tmp_path / "step.pftrace")
    trace = protos.Trace.FromString(path.read_bytes())
    stages = [p for p in trace.packet if p.HasField("gpu_render_stage_event")]
    events = [p.track_event.type for p in trace.packet if p.HasField("track_event")]
    assert events.count(1) == events.count(2)
    assert len(stages) + events.count(1) == len(timeline)
