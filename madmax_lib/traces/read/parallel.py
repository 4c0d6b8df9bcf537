"""Traces of many ranks read at once, in local processes or by the workers of a dask
cluster.

One code path: the executor is a process pool bounded by cores and memory, or the
client's. A file that fails, or whose process dies, costs its own rank only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from madmax_lib.base.progress import bar

if TYPE_CHECKING:
    from distributed import Client

Result = TypeVar("Result")
# of JSON text for each process; to start one costs as much as to read half of that
_WORTH_A_PROCESS_BYTES = 192 << 20
_GZIP_RATIO = 18  # of profiler traces, seen 11 to 30
_PEAK_BYTES = 250 << 20  # of a reading process: imports and one piece
_PEAK_PER_BYTE = 0.3  # and what it keeps, per byte of JSON text
_RETRIES = 2  # of a file whose process died
_PATIENCE_S = 60  # without any dask worker


class _LostError(TimeoutError):
    """No worker executes the task of a file, though there are workers."""


def read_all(
    read: Callable[[Path], Result], paths: Sequence[Path], client: Client | None = None
) -> dict[Path, Result | Exception]:
    """Result of `read` for each path, or the exception that it raised, in order of the
    paths.

    read: a function that can be pickled. client: a dask client, or another executor
    of `concurrent.futures`, whose workers see the same files.
    """
    workers = len(paths) if client is not None else _local_workers(paths)
    if workers <= 1:
        return {path: _outcome(read, path) for path in _progress(paths, len(paths))}
    if client is not None:
        if not hasattr(client, "get_executor"):  # not dask
            return _gather(client, read, paths)
        executor = client.get_executor(retries=_RETRIES, pure=False)
        results = _gather(executor, read, paths, client)
        # dask blames every task of a worker that dies, and may lose one
        for path in _whose_process_died(results):
            results |= _gather(executor, read, [path], client)
        return results
    # unlike multiprocessing it neither forks a threaded process nor runs the caller's
    # script again
    import loky

    with loky.ProcessPoolExecutor(workers) as pool:
        results = _gather(pool, read, paths)
    for _ in range(_RETRIES):
        for path in _whose_process_died(results):
            # one process that dies takes its whole pool along: each file gets a pool
            with loky.ProcessPoolExecutor(1) as single:
                results |= _gather(single, read, [path])
    return results


def _whose_process_died(results: dict):
    # by name: what they come from is imported where it is used
    deaths = {"BrokenProcessPool", _LostError.__name__, "KilledWorker"}
    return [
        path
        for path, result in results.items()
        if deaths & {kind.__name__ for kind in type(result).__mro__}
    ]


def _gather(
    executor: Executor, read, paths: Sequence[Path], client: Client | None = None
):
    futures = {executor.submit(_outcome, read, path): path for path in paths}
    results = dict.fromkeys(paths)  # in order of the paths, not in that of their ends
    for future in _progress(_as_they_end(set(futures), client), len(paths)):
        try:
            result = future.result()
        except CancelledError:
            if client.scheduler_info()["workers"]:
                result = _LostError(f"no dask worker at work for {_PATIENCE_S} s")
            else:
                result = TimeoutError(f"no dask worker for {_PATIENCE_S} s")
        except Exception as reason:
            # the process is gone, or its result does not travel
            result = reason
        results[futures[future]] = result
    return results


def _as_they_end(pending: set, client: Client | None):
    """Futures in the order in which they end; those that no worker does are cancelled."""
    while pending:
        # a local pool always ends: its processes finish or break it
        timeout = _PATIENCE_S if client else None
        done, pending = wait(pending, timeout, return_when="FIRST_COMPLETED")
        if not done and not _at_work(client):
            for future in pending:
                future.cancel()
            done = pending
            pending = set()
        yield from done


def _at_work(client: Client):
    """Whether a worker is executing anything: dask may wait for ever for a task whose
    worker died and came back.
    """
    workers = client.scheduler_info()["workers"].values()
    counts = [worker["metrics"].get("task_counts", {}) for worker in workers]
    return any(
        count.get(state) for count in counts for state in ("executing", "long-running")
    )


def _outcome(read: Callable[[Path], Result], path: Path):
    # returned, not raised: what a pool raises is then its own trouble alone
    try:
        return read(path)
    except Exception as reason:
        return reason


def _local_workers(paths: Sequence[Path]):
    """Processes that cores and free memory allow, 1 where starting them would not pay."""
    sizes = []  # of the JSON text, guessed where it is packed
    for path in paths:
        with contextlib.suppress(OSError):
            ratio = _GZIP_RATIO if path.suffix == ".gz" else 1
            sizes.append(path.stat().st_size * ratio)
    # a daemon, such as a worker of multiprocessing, may not have children
    if len(paths) < 2 or multiprocessing.current_process().daemon:
        return 1
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # fewer in a container or a job of Slurm
        cores = len(os.sched_getaffinity(0))
    in_memory = _free_bytes() / (_PEAK_BYTES + _PEAK_PER_BYTE * max(sizes, default=0))
    worthwhile = sum(sizes) // _WORTH_A_PROCESS_BYTES
    return max(min(cores, len(paths), int(in_memory), worthwhile), 1)


def _free_bytes():
    """Free memory of the machine, unlimited where it does not tell."""
    # MemAvailable counts the page cache that can be dropped; in kiB. Linux only.
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        free_kib = int(line.split()[1])
        return 1024.0 * free_kib
    return float("inf")


def _progress(items, count: int):
    """The items, of several behind a bar."""
    if count < 2:
        return items
    return bar(items, total=count, desc="reading traces", unit="rank")
