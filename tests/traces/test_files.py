"""Traces are found in folders and archives as people have them."""

import bz2
import gzip
import lzma
import shutil

import pytest
from support import refused

from madmax_lib.catalog import datasets
from madmax_lib.traces import read_trace
from madmax_lib.traces.read.events import TraceWarning

SOURCE = datasets.PROJECT / "traces/gpt-ddp"
PACKED = [(SOURCE / f"rank{rank}.json.gz").read_bytes() for rank in (0, 1)]
TEXT = [gzip.decompress(data) for data in PACKED]
BARE = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "pid": 0, "tid": 7}]}'


def laid_out(folder, files: dict[str, bytes]):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


LAYOUTS = [
    ("a folder per rank", ["rank_0/trace.json.gz", "rank_1/trace.json.gz"], "those of rank_0, rank_1"),
    ("two levels down", ["run/rank0/t.json.gz", "run/rank1/t.json.gz"], "run/rank0, run/rank1"),
    ("TensorBoard", ["plugins/profile/2026_01_02/a.json.gz", "plugins/profile/2026_01_02/b.json.gz"], "2026_01_02"),
    ("its log folder", ["exp/plugins/profile/1/a.json.gz", "exp/plugins/profile/1/b.json.gz"], "exp/plugins"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "words"), [case[1:] for case in LAYOUTS], ids=[case[0] for case in LAYOUTS])  # fmt: skip
def test_folders_below_are_read_and_named(names, words, tmp_path):
    laid_out(tmp_path, dict(zip(names, PACKED, strict=True)))
    with pytest.warns(TraceWarning, match=words):
        assert read_trace(tmp_path).ranks == [0, 1]


def test_names_of_folders_are_ranks_where_nothing_else_tells(tmp_path):
    laid_out(tmp_path, {"rank_3/trace.json": BARE, "rank_10/trace.json": BARE})
    with pytest.warns(TraceWarning, match="rank_10, rank_3"):
        assert read_trace(tmp_path).ranks == [3, 10]


def test_runs_side_by_side_are_not_one(tmp_path):
    laid_out(tmp_path, {f"{run}/rank0.json": BARE for run in ("before", "after")})
    with refused("its folders after, before have some: name one"):
        read_trace(tmp_path)


@pytest.mark.parametrize("kind", ["zip", "tar", "gztar", "bztar", "xztar"])
def test_archives(kind, tmp_path):
    folder = laid_out(tmp_path / "all", {"rank0.json.gz": PACKED[0], "rank1.json": TEXT[1], "run.json": b"{}"})  # fmt: skip
    path = shutil.make_archive(str(tmp_path / "packed" / "traces"), kind, folder)
    assert read_trace(path).ranks == read_trace(tmp_path / "packed").ranks == [0, 1]


@pytest.mark.parametrize("name", ["traces.zip", "traces.tar.gz", "traces.tgz"])
def test_a_damaged_archive(name, tmp_path):
    (tmp_path / name).write_bytes(PACKED[0][:99])
    with refused(name, "damaged archive"):
        read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("pack", "suffix"), [(bz2.compress, "bz2"), (lzma.compress, "xz")]
)
def test_other_packers(pack, suffix, tmp_path):
    laid_out(tmp_path, {f"rank0.json.{suffix}": pack(TEXT[0])})
    assert len(read_trace(tmp_path)) == len(read_trace(SOURCE / "rank0.json.gz"))
    cut = tmp_path / "rank0.json"
    cut.write_bytes(pack(TEXT[0] * 2)[:-2000])
    with pytest.warns(TraceWarning, match="damaged file"):
        read_trace(cut)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [("a.xplane.pb", b"\n\x05abcde", "open it with xprof"), ("results.db", b"SQLite format 3\0", "rocpd convert"),
     ("rank0.json", b"7z\xbc\xaf\x27", "unpack it first")],
)  # fmt: skip
def test_what_is_no_trace_says_what_it_is(name, data, words, tmp_path):
    laid_out(tmp_path, {name: data})
    for source in (tmp_path, tmp_path / name):
        with refused(name, words):
            read_trace(source)


def test_a_link_to_nothing_is_named(tmp_path):
    laid_out(tmp_path, {"rank0.json.gz": PACKED[0]})
    (tmp_path / "rank1.json.gz").symlink_to(tmp_path / "gone.json.gz")
    with pytest.warns(TraceWarning, match=r"rank1.json.gz: a link to a file that is not there.*gone"):  # fmt: skip
        assert read_trace(tmp_path).ranks == [0]
