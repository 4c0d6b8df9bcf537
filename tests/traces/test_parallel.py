"""Many ranks: in this process and in local ones, where files fail and processes die."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import loky
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.catalog.datasets import dataset
from madmax_lib.traces.read import kineto, parallel
from madmax_lib.traces.read.events import TraceWarning

pytestmark = pytest.mark.slow


def length(path: Path) -> int:
    return path.stat().st_size


def length_or_fail(path: Path) -> int:
    if "bad" in path.name:
        raise ValueError(f"{path.name}: broken")
    return length(path)


def length_or_die(path: Path) -> int:
    """Dies on a file called die; on one called once only the first time."""
    mark = path.with_suffix(".mark")
    if path.name == "die" or (path.name == "once" and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return length(path)


def files(folder: Path, *names: str) -> list[Path]:
    for number, name in enumerate(names):
        (folder / name).write_bytes(b"x" * (number + 1))
    return [folder / name for name in names]


@pytest.fixture(params=["here", "processes"])
def place(request, monkeypatch):
    """Small files are spread over processes too."""
    if request.param == "processes":
        monkeypatch.setattr(parallel, "_WORTH_A_PROCESS_BYTES", 1)
        monkeypatch.setattr(loky, "cpu_count", lambda: 2)


def test_any_executor_reads(tmp_path):
    paths = files(tmp_path, "a", "bad", "c")
    with ThreadPoolExecutor(2) as client:
        results = parallel.read_all(length_or_fail, paths, client)
    assert list(results) == paths and results[paths[2]] == 3
    assert isinstance(results[paths[1]], ValueError)


def test_results_come_in_the_order_of_the_files_and_failures_beside_them(
    tmp_path, place
):
    paths = files(tmp_path, "a", "bad", "c")
    results = parallel.read_all(length_or_fail, paths)
    assert list(results) == paths and results[paths[0]] == 1 and results[paths[2]] == 3
    assert isinstance(results[paths[1]], ValueError) and "bad: broken" in str(
        results[paths[1]]
    )


def test_read_trace_is_the_same_everywhere_and_reports_a_failing_rank(tmp_path, place):
    whole = mm.read_trace(dataset("gpt-ddp"))
    for path in dataset("gpt-ddp").glob("*.json.gz"):
        shutil.copy(path, tmp_path)
    (tmp_path / "rank2.json.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.warns(
        TraceWarning,
        match=r"rank2.json.gz: skipped, the others were read: [^/]*truncated gzip",
    ):
        timeline = mm.read_trace(tmp_path)
    pd.testing.assert_frame_equal(timeline.spans, whole.spans)
    assert list(timeline.meta.provenance["unread"]) == ["rank2.json.gz"]
    assert (
        len(timeline.side_tables["operators"])
        == len(whole.side_tables["operators"])
        > 0
    )


def test_a_list_with_a_failing_file_is_refused(tmp_path):
    (tmp_path / "rank1.json").write_text("")
    good = next(dataset("gpt-ddp").glob("*.json.gz"))
    with pytest.raises(ValueError, match=r"rank1.json: empty file"):
        mm.read_trace([good, tmp_path / "rank1.json"])


def test_processes_are_bounded_by_cores_files_and_memory(tmp_path, monkeypatch):
    paths = files(tmp_path, "a", "b", "c")
    monkeypatch.setattr(loky, "cpu_count", lambda: 8)
    assert parallel._local_workers(paths) == 1  # not worth it
    for path in paths:
        os.truncate(path, 1 << 30)  # sparse
    monkeypatch.setattr(parallel, "_free_bytes", lambda: 1e12)
    assert (
        parallel._local_workers(paths) == 3 and parallel._local_workers(paths[:1]) == 1
    )
    monkeypatch.setattr(parallel, "_free_bytes", lambda: 1.3e9)
    assert parallel._local_workers(paths) == 2
    monkeypatch.setattr(parallel, "_free_bytes", lambda: 0.0)
    assert parallel._local_workers(paths) == 1


def test_a_script_needs_no_guard_to_read_in_processes(tmp_path):
    """multiprocessing would run the script again in every process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, madmax_lib as mm\nfrom madmax_lib.traces.read import parallel\n"
        "import loky\nparallel._WORTH_A_PROCESS_BYTES = 1\nloky.cpu_count = lambda: 2\n"
        "print(len(mm.read_trace(sys.argv[1]).ranks))\n"
    )
    run = subprocess.run(
        [sys.executable, script, dataset("gpt-ddp")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "2\n"


def test_warnings_of_a_reading_process_reach_the_caller(tmp_path, place):
    for rank in (0, 1):
        text = (
            '[{"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1, '
            '"args": {"stream": 7}}, {"ph"'
        )
        (tmp_path / f"rank{rank}.json").write_text(text)
    with pytest.warns(TraceWarning) as caught:
        timeline = kineto.read_trace(tmp_path)
    assert (
        len(timeline) == 2
        and len([w for w in caught if "truncated JSON" in str(w.message)]) == 2
    )


@pytest.mark.parametrize("place", ["processes"], indirect=True)
def test_a_killed_process_costs_at_most_its_own_file(tmp_path, place):
    paths = files(tmp_path, "a", "once", "die", "d")
    results = parallel.read_all(length_or_die, paths)
    assert [results[path] for path in (paths[0], paths[1], paths[3])] == [1, 2, 4]
    assert isinstance(results[paths[2]], Exception) and (tmp_path / "die.mark").exists()
