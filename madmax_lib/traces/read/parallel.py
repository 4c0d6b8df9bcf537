"""How are the traces of many ranks read at once? In local processes, or by the workers
of a dask cluster.

One code path: the executor is a process pool bounded by cores and memory, or the
client's. A file that fails, or whose process dies, costs its own rank only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from madmax_lib.base.progress import bar

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["read_all"]

Result = TypeVar("Result")
_WORTH_A_PROCESS_BYTES = (
    192 << 20
)  # of JSON text for each; to start one costs as much as to read half of that
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
    """What `read` gives for each path, or the exception that it raised, in order of the
    paths.

    read: a function that can be pickled. client: a dask.distributed client whose
    workers see the same files.
    """
    workers = len(paths) if client is not None else _local_workers(paths)
    if workers <= 1:
        return {path: _outcome(read, path) for path in _progress(paths, len(paths))}
    if client is not None:
        executor = client.get_executor(retries=_RETRIES, pure=False)
        results = _gather(executor, read, paths, client)
        for path in _whose_process_died(
            results
        ):  # dask blames every task of a worker that dies, and may lose one
            results |= _gather(executor, read, [path], client)
        return results
    # unlike multiprocessing it neither forks a threaded process nor runs the caller's
    # script again
    import loky

    with loky.ProcessPoolExecutor(workers) as pool:
        results = _gather(pool, read, paths)
    for _ in range(_RETRIES):
        for path in _whose_process_died(results):
            with loky.ProcessPoolExecutor(
                1
            ) as own:  # one process that dies takes its whole pool along
                results |= _gather(own, read, [path])
    return results


def _whose_process_died(results: dict) -> list[Path]:
    def died(result) -> bool:
        return (
            isinstance(result, (BrokenProcessPool, _LostError))
            or type(result).__name__ == "KilledWorker"
        )  # dask's

    return [path for path, result in results.items() if died(result)]


def _gather(
    executor: Executor, read, paths: Sequence[Path], client: Client | None = None
) -> dict:
    futures = {executor.submit(_outcome, read, path): path for path in paths}
    results = dict.fromkeys(paths)
    for future in _progress(_as_they_end(set(futures), client), len(paths)):
        try:
            results[futures[future]] = future.result()
        except CancelledError:
            none = not client.scheduler_info()["workers"]
            kind, what = (
                (TimeoutError, "no dask worker")
                if none
                else (_LostError, "no dask worker at work")
            )
            results[futures[future]] = kind(f"{what} for {_PATIENCE_S} s")
        except (
            Exception
        ) as reason:  # the process is gone, or its result does not travel
            results[futures[future]] = reason
    return results


def _as_they_end(pending: set, client: Client | None) -> Iterator:
    """Futures in the order in which they end; those that no worker does are cancelled."""
    while pending:
        done, pending = wait(
            pending,
            timeout=_PATIENCE_S if client else None,
            return_when="FIRST_COMPLETED",
        )
        if not done and not _at_work(client):
            for future in pending:
                future.cancel()
            done = pending
            pending = set()
        yield from done


def _at_work(client: Client) -> bool:
    """Whether a worker is executing anything: dask may wait for ever for a task whose
    worker died and came back.
    """
    counts = [
        worker["metrics"].get("task_counts", {})
        for worker in client.scheduler_info()["workers"].values()
    ]
    return any(
        count.get(state) for count in counts for state in ("executing", "long-running")
    )


def _outcome(read: Callable[[Path], Result], path: Path) -> Result | Exception:
    try:
        return read(path)
    except Exception as reason:
        return reason


def _local_workers(paths: Sequence[Path]) -> int:
    """Processes that cores and free memory allow, 1 where starting them would not pay."""
    sizes = [_text_bytes(path) for path in paths]
    if len(paths) < 2 or multiprocessing.current_process().daemon:
        return 1
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    room = _free_bytes() / (_PEAK_BYTES + _PEAK_PER_BYTE * max(sizes))
    return max(
        min(cores, len(paths), int(room), sum(sizes) // _WORTH_A_PROCESS_BYTES), 1
    )


def _text_bytes(path: Path) -> int:
    """Length of a trace's JSON text, guessed where it is packed."""
    with contextlib.suppress(OSError):
        return path.stat().st_size * (_GZIP_RATIO if path.suffix == ".gz" else 1)
    return 0


def _free_bytes() -> float:
    """Free memory of the machine, unlimited where it does not tell."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        text = Path("/proc/meminfo").read_text()
        return 1024.0 * int(
            next(
                line.split()[1]
                for line in text.splitlines()
                if line.startswith("MemAvailable")
            )
        )
    return float("inf")


def _progress(items, count: int):
    """The items, of several behind a bar."""
    return (
        items
        if count < 2
        else bar(items, total=count, desc="reading traces", unit="rank")
    )
