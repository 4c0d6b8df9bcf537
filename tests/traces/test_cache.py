"""The cache of read traces: same result, never stale, rebuilt when damaged, harmless
when it cannot be written.
"""

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import loky
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.catalog.datasets import dataset
from madmax_lib.timeline.side_tables import SIDE_TABLES
from madmax_lib.traces.read import cache, kineto
from madmax_lib.traces.read.events import TraceWarning


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MADMAX_NO_CACHE", "0")
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "timelines"


@pytest.fixture
def trace(tmp_path) -> Path:
    return Path(
        shutil.copy(dataset("gpt-fsdp") / "rank1.json.gz", tmp_path / "rank1.json.gz")
    )


@pytest.fixture
def no_decoder(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("decoded again")

    return lambda: monkeypatch.setattr(kineto, "read_file", refuse)


def same(a, b) -> None:
    pd.testing.assert_frame_equal(a.spans, b.spans)
    assert a.meta == b.meta
    for name in SIDE_TABLES:
        pd.testing.assert_frame_equal(a.side_tables[name], b.side_tables[name])


def test_the_second_reading_decodes_nothing_and_is_equal(folder, trace, no_decoder):
    first = mm.read_trace(trace)
    assert len(first.side_tables["operators"]) > 100
    no_decoder()
    trace_as_before = mm.read_trace(trace)
    trace.unlink()  # side tables come from the cache too
    same(trace_as_before, first)
    assert len(list(folder.iterdir())) == 2


def test_an_entry_is_named_by_content_not_by_path(folder, trace, no_decoder):
    mm.read_trace(trace)
    renamed = trace.rename(trace.with_name("worker1.json.gz"))
    no_decoder()
    assert (
        mm.read_trace(renamed).meta.provenance["files"]["1"]["name"]
        == "worker1.json.gz"
    )
    trace.write_bytes(gzip.compress(gzip.decompress(renamed.read_bytes()) + b" "))
    with pytest.raises(AssertionError, match="decoded again"):
        mm.read_trace(trace)


READ = """
import os, sys, madmax_lib as mm
timeline = mm.read_trace(sys.argv[1])
dict(timeline.side_tables)
print(*(m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "madmax_lib"))
"""


def test_the_fingerprint_covers_every_module_that_reading_imports(folder, trace):
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder.parent),
        "PYTHONPATH": str(cache._PACKAGE.parent),
    }
    run = subprocess.run(
        [sys.executable, "-c", READ, trace],
        capture_output=True,
        text=True,
        env=environment,
    )
    imported = {Path(path) for path in run.stdout.split()}
    assert len(imported) > 15 and imported <= set(cache._reader_sources(cache._PACKAGE))


@pytest.mark.parametrize("change", ["edited", "moved", "added", "removed"])
@pytest.mark.parametrize(
    "name", ["kinds.py", "traces/read/chrome.py", "traces/comm/alignment.py"]
)
def test_the_fingerprint_follows_the_source(tmp_path, name, change):
    package = Path(
        shutil.copytree(
            cache._PACKAGE,
            tmp_path / "copy",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    )
    before, path = cache._fingerprint(package), package / name
    if change == "edited":
        path.write_text(path.read_text() + "\n")
    elif change == "moved":
        path.rename(path.with_name("elsewhere.py"))
    elif change == "added":
        path.with_name("new.py").touch()
    else:
        path.unlink()
    assert cache._fingerprint(package) != before


def test_rules_and_user_kinds_have_entries_of_their_own(folder, trace, tmp_path):
    exact = mm.read_trace(trace)
    (tmp_path / "mine.csv").write_text("kind,pattern\nother,^gloo\n")
    assert (
        mm.read_trace(trace, kinds=tmp_path / "mine.csv")
        .spans["kind"]
        .ne(exact.spans["kind"])
        .any()
    )
    assert mm.read_trace(trace, hta_compatible=True).meta.provenance["rules"] == "hta"
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9, 0.97, 0.995, 1.0])
def test_a_corrupt_entry_is_made_anew(folder, trace, place):
    whole = mm.read_trace(trace)
    (entry,) = folder.iterdir()
    content = bytearray(entry.read_bytes())
    at = min(int(len(content) * place), len(content) - 1)
    content[at : at + 8] = bytes(b ^ 0x5A for b in content[at : at + 8])
    for damaged in (bytes(content), entry.read_bytes()[:at], b""):
        entry.write_bytes(damaged)
        pd.testing.assert_frame_equal(mm.read_trace(trace).spans, whole.spans)
        assert entry.read_bytes()[:4] == b"PAR1"


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    trace, tmp_path, monkeypatch
):
    monkeypatch.setenv("MADMAX_NO_CACHE", "0")
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "cache")
    assert len(mm.read_trace(trace)) > 100


def test_it_can_be_turned_off(folder, trace, monkeypatch):
    monkeypatch.setenv("MADMAX_NO_CACHE", "1")
    mm.read_trace(trace)
    assert not folder.exists()


def test_warnings_are_given_again(folder, tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(
        '[{"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1, "args": '
        '{"stream": 7}}, {"ph"'
    )
    for _ in range(2):
        with pytest.warns(TraceWarning, match=r"rank0.json: truncated JSON"):
            mm.read_trace(path)


def test_details_of_a_file_that_has_changed_are_refused(trace, monkeypatch):
    timeline, gone = mm.read_trace(trace), mm.read_trace(trace)
    trace.write_bytes(trace.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="has changed since it was read"):
        timeline.side_tables["operators"]
    trace.unlink()
    with pytest.raises(FileNotFoundError):
        gone.side_tables["operators"]


def read_in(folder: str, path: Path):
    cache.cache_folder = lambda: Path(folder)
    return mm.read_trace(path).spans


def test_two_processes_may_read_and_write_at_once(trace, folder, tmp_path):
    with loky.ProcessPoolExecutor(2) as pool:
        found = list(pool.map(read_in, [str(folder.parent)] * 6, [trace] * 6))
    for spans in found[1:]:
        pd.testing.assert_frame_equal(spans, found[0])
    assert [path.suffix for path in folder.iterdir()] == [".parquet"]
