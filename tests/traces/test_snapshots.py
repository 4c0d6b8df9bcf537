"""Memory snapshots: a drawn allocator whose every byte is known, real files, and
pickles that want to do harm.
"""

import copyreg
import gzip
import json
import lzma
import pickle
import re
import runpy
import struct
from collections import Counter

import numpy as np
import pytest
from support import local_or_skip, refused_line, shows

from madmax_lib.__main__ import main
from madmax_lib.traces import (
    fragmentation,
    out_of_memory,
    read_snapshot,
    snapshot_diff,
    snapshot_held,
    snapshot_peak,
    snapshot_timeline,
)
from madmax_lib.traces.forensics.plain_pickles import load_plain
from madmax_lib.traces.read.kineto import TraceWarning
from madmax_lib.view import plot_memory
from madmax_lib.view.drawing import figure_data

MIB = 1 << 20
LEVELS = ["reserved", "requested", "active"]
SITES = ["forward", "backward", "step", "__init__", "wait"]
TOLD = ["forward", "backward", "optimizer", "initialization", "other"]
PHASES = dict(zip(SITES, TOLD, strict=True))


@pytest.fixture(scope="module")
def maker():
    return runpy.run_path(str(local_or_skip("snapshots/make.py")))


@pytest.fixture(scope="module")
def made(maker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshots")
    maker["main"](folder)
    return folder


def drawn(maker, seed: int, *, expandable=False, events=400):
    """An allocator after random requests of all pools and two streams, and the sizes
    that live in it by site.
    """
    random, frames = np.random.default_rng(seed), maker["frames"]
    options = {"expandable": expandable, "device": 0, "base": 0x7F0000000000}
    allocator = maker["Allocator"](1 << 36, **options)
    live, pending = {}, []
    while len(allocator.events) < events:
        move = random.random()
        if move < 0.55 or not live:
            site = SITES[random.integers(len(SITES))]
            size, stream = int(2 ** random.uniform(0, 26)), int(random.random() < 0.2)
            live[allocator.alloc(size, frames(site, "main"), stream=stream)] = site
        elif move < 0.97:
            address = list(live)[random.integers(len(live))]
            other = bool(random.random() < 0.2)
            allocator.free(address, frames("wait"), other_stream=other)
            pending += [address] * other
            del live[address]
        elif pending:
            allocator.complete(pending.pop(0))
        else:
            allocator.release()
    return allocator, live


def levels(snapshot, device=0):
    table = snapshot_timeline(snapshot)
    table = table[table["device"] == f"cuda:{device}"]
    table = table.assign(active_bytes=table["requested_bytes"] + table["pending_bytes"])
    return {name: table[f"{name}_bytes"].tolist() for name in [*LEVELS, "allocated"]}


def adds_up(levels, truth):
    """Whether all is exact but the rests that are not split off, of which none are at the end."""
    allocated, series = levels.pop("allocated"), dict(truth["series"])
    rests = np.subtract(series.pop("allocated"), allocated)
    assert levels == series and (rests >= 0).all() and rests[-1] == 0
    return (rests <= 0.1 * np.array(levels["reserved"])).all()


def truth_of(folder, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("keep", [None, 150])
@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_history_is_told_but_for_rests_of_blocks(
    maker, tmp_path, seed, keep, expandable, protocol
):
    """Whether it was recorded from the beginning or the ring buffer kept the end of it."""
    allocator, live = drawn(maker, seed + 10 * protocol, expandable=expandable)
    maker["write"](tmp_path, "drawn", [allocator], keep=keep, protocol=protocol)
    snapshot = read_snapshot(tmp_path / "drawn.pickle")
    told = levels(snapshot)
    assert adds_up(told.copy(), truth_of(tmp_path, "drawn")["0"])
    peak, held = snapshot_peak(snapshot).iloc[0], snapshot_held(snapshot, top=None)
    highest = held["size_bytes"].sum()
    assert peak["peak_bytes"] == highest >= max(told["allocated"])
    if not keep:
        _check_the_end(snapshot, allocator, live)


def _check_the_end(snapshot, allocator, live):
    """Holders by phase and the free blocks, against the blocks that the allocator has."""
    blocks = [block for segment in allocator.segments for block in segment["blocks"]]
    expected = Counter()
    for address, size, _, state, _ in blocks:
        if state == "active_allocated":
            expected[PHASES[live[address]]] += size
    held = snapshot_held(snapshot, "phase", "end").set_index("phase")["size_bytes"]
    assert held.to_dict() == expected
    table = fragmentation(snapshot)
    sums = table.sum(numeric_only=True)
    free = [block[1] for block in blocks if block[3] == "inactive"]
    assert sums["free_bytes"] == sum(free)
    assert table["largest_free_bytes"].max() == max(free)
    parts = table["active_bytes"] + table["free_bytes"]
    assert (parts == table["reserved_bytes"]).all()
    assert sums["reserved_bytes"] == allocator.reserved()
    unused = sum(
        segment["total_size"]
        for segment in allocator.segments
        if {block[3] for block in segment["blocks"]} == {"inactive"}
    )
    assert sums["releasable_bytes"] == unused


VERSIONS = ["train-torch20", "train-torch29", "record-stream", "two-devices", "oom"]


@pytest.mark.parametrize("name", VERSIONS)
def test_files_of_other_versions_and_devices(made, name):
    snapshot = read_snapshot(made / f"{name}.pickle")
    for device, truth in truth_of(made, name).items():
        assert adds_up(levels(snapshot, device), truth)


PACKED = [("snapshot_0", "", bytes), ("000001_step_10", ".gz", gzip.compress), ("rank2_memory_snapshot", ".xz", lzma.compress)]  # fmt: skip


def test_ranks_of_a_directory_are_told_by_name_and_packed_files_too(maker, tmp_path):
    for seed, (name, suffix, pack) in enumerate(PACKED):
        maker["write"](tmp_path / ".", name, [drawn(maker, seed, events=50 + seed)[0]])
        path = tmp_path / f"{name}.pickle"
        content = pack(path.read_bytes())
        path.unlink()
        path.with_name(path.name + suffix).write_bytes(content)
    snapshot = read_snapshot(tmp_path)
    assert snapshot.events.groupby("rank").size().to_dict() == {0: 50, 1: 51, 2: 52}
    alone = read_snapshot(tmp_path / "rank2_memory_snapshot.pickle.xz")
    assert alone.events["rank"].unique().tolist() == [2]
    last, only = (snapshot_peak(s)["peak_bytes"].tolist() for s in (snapshot, alone))
    assert last[2:] == only
    first = (tmp_path / "snapshot_0.pickle").read_bytes()
    (tmp_path / "snapshot_2.pickle").write_bytes(first)
    with refused_line("two snapshots of rank 2"):
        read_snapshot(tmp_path)


def test_a_bad_file_costs_its_own_rank_and_ranks_that_no_name_tells_are_said(
    made, tmp_path
):
    whole = (made / "train.pickle").read_bytes()
    none = pickle.dumps({"segments": [{}]})
    for rank, content in enumerate((whole[:-200], whole, pickle.dumps(5), none)):
        (tmp_path / f"rank{rank}.pickle").write_bytes(content)
    with pytest.warns(TraceWarning) as said:
        snapshot = read_snapshot(tmp_path)
    assert list(snapshot.files) == ["1"]
    assert snapshot.events["rank"].unique().tolist() == [1]
    for warning, rank in zip(said, (0, 2, 3), strict=True):
        words = rf".*/rank{rank}\.pickle: not .*; skipped, the others were read"
        assert re.fullmatch(words, str(warning.message))
    with refused_line("rank0.pickle: not a record of plain values"):
        read_snapshot([tmp_path / "rank0.pickle", tmp_path / "rank2.pickle"])
    files = [tmp_path / "rank1.pickle", tmp_path / "dump.pickle"]
    files[1].write_bytes(whole)
    numbered = "no rank in the name: files are numbered in order"
    with pytest.warns(TraceWarning, match=rf"/dump\.pickle: {numbered}"):
        assert list(read_snapshot(files).files) == ["0", "1"]


def test_of_two_moments_the_difference_is_what_was_allocated_between(maker, tmp_path):
    allocator, _ = drawn(maker, 1)
    maker["write"](tmp_path, "a", [allocator])
    for _ in range(3):
        allocator.alloc(5 * MIB, maker["frames"]("forward", "main"))
    maker["write"](tmp_path, "b", [allocator])
    a, b = (read_snapshot(tmp_path / f"{name}.pickle") for name in "ab")
    table = snapshot_diff(a, b, "phase", "end").set_index("phase")["difference_bytes"]
    a_bytes, b_bytes = (snapshot_held(s, at="end")["size_bytes"].sum() for s in (a, b))
    assert table.pop("forward") == b_bytes - a_bytes >= 15 * MIB
    assert not table.any() and not snapshot_diff(a, a)["difference_bytes"].any()


def test_an_oom_is_full_or_fragmented(maker, made, tmp_path):
    snapshot, truth = read_snapshot(made / "oom.pickle"), truth_of(made, "oom")["0"]
    (event, size, free) = (truth["oom"][0][k] for k in ("event", "size", "device_free"))
    # 18.9 MB of the device and 1.9 MB of a small segment for 4 MB
    expected = f"""
        event    asked_bytes  device_free_bytes  cause
        {event}  {size}       {free}             fragmented
    """
    table = out_of_memory(snapshot)
    shows(table, expected)
    held = snapshot_held(snapshot, at="oom")["size_bytes"].sum()
    active = table["active_bytes"].item()
    assert held == active == levels(snapshot)["allocated"][event]
    allocator, frames = maker["Allocator"](30 * MIB), maker["frames"]
    assert allocator.alloc(15 * MIB, frames("forward"))
    assert allocator.alloc(25 * MIB, frames("backward", "main")) is None
    maker["write"](tmp_path, "full", [allocator])
    full = out_of_memory(read_snapshot(tmp_path / "full.pickle"))
    assert full["cause"].tolist() == ["full"]
    with refused_line("rank 0, cuda:0 did not run out of memory"):
        snapshot_held(read_snapshot(made / "train.pickle"), at="oom")


REAL = {"cs336-train-step": (13_628_553_216, 54_597_857_284, 54_802_667_524, 19_335),
        "ftcourse-old": (1_095_725_248, 2_285_408_452, 5_876_132_840, 3_697)}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_real_training_step_adds_up(name):
    """Blocks at the end have their size, requested bytes are those of an independent reading."""
    snapshot = read_snapshot(local_or_skip(f"snapshots/{name}.pickle.gz"))
    table, peak = snapshot.replays[0, 0].levels, snapshot_peak(snapshot).iloc[0]
    requested = table["requested_bytes"]
    highest = requested + table["pending_bytes"]
    ends = requested.iloc[0], requested.iloc[-1]
    assert (*ends, highest.max(), highest.argmax() - 1) == REAL[name]
    live = snapshot.blocks[snapshot.blocks["state"] == "active_allocated"]
    at_end = table["allocated_bytes"].iloc[-1]
    assert at_end == live["size_bytes"].sum()
    for by in ("site", "module", "phase"):
        held = snapshot_held(snapshot, by, top=3)["size_bytes"]
        assert held.sum() == peak["peak_bytes"]


@pytest.mark.parametrize("lost", ["free_requested", "free_completed", "alloc"])
def test_a_history_without_some_actions_is_refused(made, tmp_path, lost):
    content = pickle.loads((made / "train.pickle").read_bytes())
    for trace in content["device_traces"]:
        trace[:] = [event for event in trace if event["action"] != lost]
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(content))
    snapshot = read_snapshot(tmp_path / "x.pickle")
    if lost == "free_requested":  # what is free was let go then at the latest
        assert levels(snapshot)["requested"][-1] == 72_000_060
    else:
        with refused_line("rank 0, cuda:0: lacks actions (skip_actions)"):
            snapshot_peak(snapshot)


def _calls() -> dict[str, bytes]:
    """Ways of a pickle to call os.system, or to get at what could."""
    command = b"\x8c\x08touch /x"
    system = {
        "GLOBAL": b"cos\nsystem\n", "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93", "PERSID": b"Pos.system\n",
        "BINPERSID": b"\x8c\x09os.system\x51", "EXT1": b"\x82\xf0", "EXT2": b"\x83\xf0\0", "EXT4": b"\x84\xf0\0\0\0",
    }  # fmt: skip
    calls = {
        "REDUCE": command + b"\x85R",
        "NEWOBJ": command + b"\x85\x81",
        "BUILD": b")R}b",
    }
    calls |= {
        "NEWOBJ_EX": command + b"\x85}\x92",
        "memo": b"\x940" + b"h\x00" + command + b"\x85R",
    }
    forms = {
        f"{name}-{call}": system[name] + calls[call]
        for name in system
        for call in calls
    }
    forms |= {
        "INST": b"(" + command + b"ios\nsystem\n",
        "OBJ": b"(cos\nsystem\n" + command + b"o",
    }
    forms |= {
        f"{call} of a text": b"\x8c\x02os" + calls[call]
        for call in ("REDUCE", "NEWOBJ", "BUILD", "NEWOBJ_EX")
    }
    size = struct.pack("<Q", 1 << 62)
    return forms | {
        "frame": b"\x95" + size, "text": b"\x8d" + size, "bytes": b"\x8e" + size, "bytearray": b"\x96" + size,
        "short text": b"X\xff\xff\xff\x7f", "long": b"\x8b\xff\xff\xff\x7f", "number": b"L" + b"9" * 9999 + b"L\n",
        "get": b"j\xff\xff\xff\xff", "buffer": b"\x97", "set": b"\x8f(N\x90",
        "laughs": b"]" + b"\x94(" + b"h\x00" * 9 + b"e2a",
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("form", _calls())
def test_a_pickle_that_calls_or_is_no_record_is_refused(tmp_path, form, protocol):
    # what an extension would get without any import
    copyreg._extension_cache[0xF0] = print
    path = tmp_path / "hostile.pickle"
    path.write_bytes(b"\x80%c" % protocol + _calls()[form] + b".")
    words = r"not a record of plain values|not a memory snapshot"
    try:
        with pytest.raises(ValueError, match=words) as error:
            read_snapshot(path)
    finally:
        copyreg.clear_extension_cache()
    assert "\n" not in str(error.value) and str(path) in str(error.value)


class _Calls:
    def __reduce__(self):
        return print, ("executed",)


def _own(depth: int = 0) -> list:
    """A list in itself, or lists that grow by a factor of ten a level when they are
    walked.
    """
    inner: list = []
    for _ in range(depth):
        inner = [inner] * 10
    return inner or [inner]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_only_looks_like_a_snapshot_is_refused(made, tmp_path, capsys, protocol):
    path, own = tmp_path / "x.pickle", _own()
    own.append(own)
    event = {"action": "alloc", "addr": 1, "size": 1}
    others = [
        {"segments": [], "device_traces": [[event | {"frames": [_Calls()]}]]},
        {"segments": own, "device_traces": []},
        {"segments": [], "device_traces": own},
        {"segments": [], "device_traces": [own]},
        {"segments": [], "device_traces": _own(9)},
        {"segments": [], "device_traces": [_own(9)]},
        {"segments": [], "device_traces": [[event | {"frames": _own(9)}]]},
        {"segments": [], "device_traces": [[event | {"frames": own}]]},
        {"segments": [], "device_traces": [[event]] * 1000},
        {"segments": [{"blocks": own}] * 1000, "device_traces": []},
        {"segments": [], "device_traces": [[event | {"size": 1 << 70}]]},
        {"segments": [], "device_traces": [[event | {"size": "1"}]]},
        {"segments": [{"total_size": 1}], "device_traces": []},
        {"segments": [], "device_traces": [[]]},
        {"entries": []}, [1], None, 7,
    ]  # fmt: skip
    for other in others:
        path.write_bytes(pickle.dumps(other, protocol))
        with pytest.raises(ValueError, match=r"x\.pickle: "):
            read_snapshot(path)
    content = (made / "train.pickle").read_bytes()
    for cut in range(0, len(content), 397):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="not a record of plain values"):
            read_snapshot(path)
    assert "executed" not in capsys.readouterr().out


def test_a_plain_record_of_any_blocks_is_what_pickle_makes_of_it(tmp_path):
    random = np.random.default_rng(0)
    record = {}
    for number in random.integers(-(1 << 40), 1 << 40, 50_000).tolist():
        kinds = [number, str(number), [number], {"n": number % 300}, (number, None)]
        kinds += [number / 7, "x" * (number % 700), ()]
        record[number] = kinds[number % len(kinds)]
    for protocol in range(2, 6):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(record, protocol))
        assert path.stat().st_size > 5 << 19 and load_plain(path) == record


def test_the_command_says_who_holds_the_peak_and_what_has_come_since(made, capsys):
    paths = [str(made / f"{name}.pickle") for name in ("train", "oom")]
    assert main(["snapshot", *paths, "--by", "phase", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    summary, rows = answer["summary"], answer["rows"]
    held = sum(row["size_bytes"] for row in rows if row["rank"] == 0)
    assert summary["peaks"][0]["peak_bytes"] == held
    assert [row["rank"] for row in summary["out_of_memory"]] == [1]
    assert len(answer["inputs"]) == 2
    assert main(["snapshot", paths[0], "--beside", paths[0], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert not any(row["difference_bytes"] for row in rows)
    assert main(["snapshot", str(made / "hostile.pickle")]) == 2


@pytest.mark.parametrize(
    ("name", "axis"), [("train", "time [ms]"), ("train-torch20", "event")]
)
def test_the_picture_reaches_the_peak(made, name, axis):
    snapshot = read_snapshot(made / f"{name}.pickle")
    ax = plot_memory(snapshot)
    peak = snapshot_peak(snapshot)["peak_bytes"].item()
    assert figure_data(ax)["allocated_bytes"].max() == peak
    assert ax.get_xlabel() == axis


BAD = [
    ({"by": "line"}, "by='line'"),
    ({"at": "now"}, "at='now'"),
    ({"top": 0}, "top=0"),
]


@pytest.mark.parametrize(("wrong", "words"), BAD)
def test_bad_requests_are_said_in_one_line(made, wrong, words):
    with refused_line(words):
        snapshot_held(read_snapshot(made / "train.pickle"), **wrong)


def test_absent_snapshots_are_named(made, tmp_path):
    (tmp_path / "step_10").mkdir()
    whole = (made / "train.pickle").read_bytes()
    (tmp_path / "step_10" / "a.pickle").write_bytes(whole)
    with refused_line("no memory snapshots directory folders step_10 have some"):
        read_snapshot(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "none.pickle")
    with refused_line("empty list"):
        read_snapshot([])
