"""Work spread over any executor: whatever has a `submit` that returns futures.

Process and thread pools, loky and mpi4py.futures return futures of
`concurrent.futures`; those of dask and jobs of submitit are asked whether they are done.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, wait
from functools import partial

from madmax_lib.base.fields import short_repr

_RETRIES = 3  # of what was lost with a dask worker
_ASKED_EVERY_S = 0.02  # futures that cannot be waited for


def submitter(client) -> Callable:
    """Function that submits work to a client. Raises ValueError for what has no `submit`."""
    if not callable(getattr(client, "submit", None)):
        raise ValueError(
            f"client={short_repr(client)} must be an executor with submit, such as a "
            "ProcessPoolExecutor or a dask client"
        )
    if hasattr(client, "scheduler_info"):
        # dask; pure=False: a second task of the same is a task, not a cached result
        return partial(client.submit, retries=_RETRIES, pure=False)
    return client.submit


def workers_of(client) -> int:
    """Number of tasks that a client works on at a time, at least one."""
    if hasattr(client, "scheduler_info"):
        workers = len(client.scheduler_info()["workers"])
    else:
        names = ("_max_workers", "num_workers")  # of pools, of mpi4py
        sizes = [getattr(client, name, None) for name in names]
        workers = next((size for size in sizes if size), os.cpu_count())
    return max(workers or 1, 1)  # the first may come later


def first_ended(futures: Collection) -> set:
    """Futures that have ended, as soon as there is one."""
    if all(isinstance(future, Future) for future in futures):
        return wait(futures, return_when="FIRST_COMPLETED").done
    while not (done := {future for future in futures if future.done()}):
        time.sleep(_ASKED_EVERY_S)
    return done


def as_they_end(client, work: Callable, items: Mapping) -> Iterator[tuple]:
    """Pairs of a key of the items and `work` of its value, in the order in which a
    client's workers end them.

    What a pool leaves undone that breaks, since one of its processes died, is done
    here. Leaving the loop early cancels the rest.
    """
    submit = submitter(client)
    pending = {submit(work, item): key for key, item in items.items()}
    try:
        while pending:
            for future in first_ended(pending):
                key = pending.pop(future)
                try:
                    result = future.result()
                except BrokenExecutor:
                    result = work(items[key])
                yield key, result
    finally:
        for future in pending:
            future.cancel()
