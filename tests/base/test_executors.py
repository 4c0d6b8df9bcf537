"""Work spread over whatever has a `submit`."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import loky
import pytest

import madmax_lib as mm
from madmax_lib.base.executors import as_they_end, submitter, workers_of
from madmax_lib.planner import Space


class Job:
    """As of submitit: it is asked whether it is done, twice in vain."""

    def __init__(self, work, *values):
        self.answers = iter([False, False])
        self.result = partial(work, *values)

    def done(self):
        return next(self.answers, True)


class Jobs:
    """An executor whose futures are not those of `concurrent.futures`."""

    submit = staticmethod(Job)


def numbered(count):
    return {number: number for number in range(count)}


def square(number):
    return number * number


def killed_once(flag, number):
    """Kills its process the first time."""
    if number == 3 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return square(number)


@pytest.fixture(scope="module")
def processes():
    with loky.ProcessPoolExecutor(2) as pool:
        yield pool


def test_every_item_once(processes):
    for client in (ThreadPoolExecutor(2), processes, Jobs()):
        assert dict(as_they_end(client, square, numbered(5))) == {
            number: number**2 for number in range(5)
        }


def test_work_of_a_killed_process_is_done_again(tmp_path):
    with loky.ProcessPoolExecutor(2) as pool:
        work = partial(killed_once, tmp_path / "flag")
        assert dict(as_they_end(pool, work, numbered(6)))[3] == 9


def test_the_part_of_a_killed_worker_is_done_again(dask_client, tmp_path):
    work = partial(killed_once, tmp_path / "flag")
    assert dict(as_they_end(dask_client, work, numbered(5)))[3] == 9
    assert (tmp_path / "flag").exists()


def test_what_was_not_begun_is_cancelled():
    with ThreadPoolExecutor(1) as pool:
        results = as_they_end(pool, square, numbered(1000))
        next(results)
        results.close()
        assert pool._work_queue.qsize() < 1000


def test_workers():
    assert workers_of(ThreadPoolExecutor(3)) == 3
    assert workers_of(Jobs()) >= 1
    with pytest.raises(ValueError, match="must be an executor with submit"):
        submitter("localhost:8786")


def test_a_search_is_the_same_on_any_of_them(processes):
    asked = {"space": Space.quick(), "top": 5, "progress": False}
    tables = [
        mm.search("gpt2-xl", mm.cluster("dgx-a100"), 64, client=client, **asked).table
        for client in (None, processes, Jobs())
    ]
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])


def test_tuning_on_a_pool():
    seconds = {"dp8": 0.4, "dp8.z1": 0.3, "dp8.z2": None, "dp8.z3": 0.5}
    tuner = mm.tune(
        "gpt2-large",
        "dgx-a100",
        global_batch=64,
        plans=list(seconds),
        launch=lambda plan: seconds[str(plan)],
        client=ThreadPoolExecutor(2),
        progress=False,
    )
    assert str(tuner.best) == "dp8.z1" and len(tuner.trials) == 4
