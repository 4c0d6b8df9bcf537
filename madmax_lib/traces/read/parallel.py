"""Traces of many ranks read at once, in local processes or by an executor.

A pool is bounded by cores and memory. A file that fails, or whose process dies, costs
its own rank only.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

from madmax_lib.base.executors import as_they_end
from madmax_lib.base.progress import bar

Result = TypeVar("Result")
# of JSON text for each process; to start one costs as much as to read half of that
_WORTH_A_PROCESS_BYTES = 192 << 20
_GZIP_RATIO = 18  # of profiler traces, seen 11 to 30
_PEAK_BYTES = 250 << 20  # of a reading process: imports and one piece
_PEAK_PER_BYTE = 0.3  # and what it keeps, per byte of JSON text
_RETRIES = 2  # of a file whose process died


def read_all(
    read: Callable[[Path], Result], paths: Sequence[Path], client=None
) -> dict[Path, Result | Exception]:
    """Result of `read` for each path, or the exception that it raised, in order of the
    paths.

    read: a function that can be pickled. client: an executor whose workers see the
    same files.
    """
    if client is not None:
        files = dict(zip(paths, paths, strict=True))
        results = dict(as_they_end(client, partial(_outcome, read), files))
        return {path: results[path] for path in paths}
    workers = _local_workers(paths)
    if workers <= 1:
        return {path: _outcome(read, path) for path in _progress(paths, len(paths))}
    # unlike multiprocessing it neither forks a threaded process nor runs the caller's
    # script again
    import loky

    with loky.ProcessPoolExecutor(workers) as pool:
        results = _gather(pool, read, paths)
    for _ in range(_RETRIES):
        broken = loky.process_executor.BrokenProcessPool
        for path in [key for key, each in results.items() if isinstance(each, broken)]:
            # one process that dies takes its whole pool along: each file gets a pool
            with loky.ProcessPoolExecutor(1) as single:
                results |= _gather(single, read, [path])
    return results


def _gather(executor, read, paths):
    futures = {executor.submit(_outcome, read, path): path for path in paths}
    results = dict.fromkeys(paths)  # in order of the paths, not in that of their ends
    for future in _progress(as_completed(futures), len(paths)):
        # where the process is gone, or its result does not travel
        results[futures[future]] = future.exception() or future.result()
    return results


def _outcome(read, path):
    # returned, not raised: what a pool raises is then its own trouble alone
    try:
        return read(path)
    except Exception as reason:
        return reason


def _local_workers(paths):
    """Processes that cores and free memory allow, 1 where starting them would not pay."""
    sizes = []  # of the JSON text, guessed where it is packed
    for path in paths:
        with contextlib.suppress(OSError):
            ratio = _GZIP_RATIO if path.suffix == ".gz" else 1
            sizes.append(path.stat().st_size * ratio)
    # a daemon, such as a worker of multiprocessing, may not have children
    if len(paths) < 2 or multiprocessing.current_process().daemon:
        return 1
    import loky

    in_memory = _free_bytes() / (_PEAK_BYTES + _PEAK_PER_BYTE * max(sizes, default=0))
    worthwhile = sum(sizes) // _WORTH_A_PROCESS_BYTES
    return max(min(loky.cpu_count(), len(paths), int(in_memory), worthwhile), 1)


def _free_bytes():
    """Free memory of the machine, unlimited where it does not tell."""
    # MemAvailable counts the page cache that can be dropped; in kiB. Linux only.
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        free_kib = int(line.split()[1])
        return 1024.0 * free_kib
    return float("inf")


def _progress(items, count):
    """The items, of several behind a bar."""
    if count < 2:
        return items
    return bar(items, total=count, desc="reading traces", unit="rank")
