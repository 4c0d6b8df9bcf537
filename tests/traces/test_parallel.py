"""Many ranks: in this process, in local processes and on a real dask cluster, where
files fail and workers die.
"""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.catalog.datasets import dataset
from madmax_lib.traces.read import kineto, parallel
from madmax_lib.traces.read.events import TraceWarning

distributed = pytest.importorskip("distributed")

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


@pytest.fixture(params=["here", "processes", "dask"])
def place(request, monkeypatch):
    """A client or None; small files are spread over processes too."""
    if request.param == "processes":
        monkeypatch.setattr(parallel, "_WORTH_A_PROCESS_BYTES", 1)
        monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda _: {0, 1})
    return request.getfixturevalue("dask_client") if request.param == "dask" else None


def test_results_come_in_the_order_of_the_files_and_failures_beside_them(
    tmp_path, place
):
    paths = files(tmp_path, "a", "bad", "c")
    results = parallel.read_all(length_or_fail, paths, place)
    assert list(results) == paths and results[paths[0]] == 1 and results[paths[2]] == 3
    assert isinstance(results[paths[1]], ValueError) and "bad: broken" in str(
        results[paths[1]]
    )


def test_a_cluster_without_workers_does_not_hang(tmp_path, monkeypatch):
    from distributed import Client, LocalCluster

    monkeypatch.setattr(parallel, "_PATIENCE_S", 0.05)
    with (
        LocalCluster(n_workers=0, dashboard_address=":0", processes=False) as cluster,
        Client(cluster) as client,
    ):
        results = parallel.read_all(length, files(tmp_path, "a", "b"), client)
    assert {str(reason) for reason in results.values()} == {"no dask worker for 0.05 s"}


class LosingClient:
    """A client whose workers are idle, and whose executor never starts the first task
    of a file called lost.
    """

    def __init__(self):
        self.lost = []

    def scheduler_info(self):
        return {"workers": {"tcp://a": {"metrics": {"task_counts": {"memory": 2}}}}}

    def get_executor(self, **_):
        return self

    def submit(self, function, *args):
        future = Future()
        if args[1].name == "lost" and args[1] not in self.lost:
            self.lost.append(args[1])
        else:
            future.set_result(function(*args))
        return future


def test_a_task_that_no_worker_does_is_given_up_and_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "_PATIENCE_S", 0.01)
    client, paths = LosingClient(), files(tmp_path, "a", "lost", "c")
    assert parallel.read_all(length, paths, client) == dict(
        zip(paths, (1, 2, 3), strict=True)
    )
    assert client.lost == [paths[1]]


def test_read_trace_is_the_same_everywhere_and_reports_a_failing_rank(tmp_path, place):
    whole = mm.read_trace(dataset("gpt-ddp"))
    for path in dataset("gpt-ddp").glob("*.json.gz"):
        shutil.copy(path, tmp_path)
    (tmp_path / "rank2.json.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.warns(
        TraceWarning,
        match=r"rank2.json.gz: skipped, the others were read: .*truncated gzip",
    ):
        timeline = mm.read_trace(tmp_path, client=place)
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
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda _: set(range(8)))
    assert parallel._local_workers(paths) == 1  # not worth it
    for path in paths:
        parallel.os.truncate(path, 1 << 30)  # sparse
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
        "parallel._WORTH_A_PROCESS_BYTES = 1\nparallel.os.sched_getaffinity = lambda "
        "_: {0, 1}\n"
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
        timeline = kineto.read_trace(tmp_path, client=place)
    assert (
        len(timeline) == 2
        and len([w for w in caught if "truncated JSON" in str(w.message)]) == 2
    )


@pytest.mark.parametrize("place", ["processes", "dask"], indirect=True)
def test_a_killed_process_costs_at_most_its_own_file(tmp_path, place):
    """The last here: workers that died may take longer than the patience with a cluster
    to come back.
    """
    paths = files(tmp_path, "a", "once", "die", "d")
    results = parallel.read_all(length_or_die, paths, place)
    assert [results[path] for path in (paths[0], paths[1], paths[3])] == [1, 2, 4]
    assert isinstance(results[paths[2]], Exception) and (tmp_path / "die.mark").exists()
