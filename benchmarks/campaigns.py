"""A sweep of thousands of campaigns: here, in a pool of processes and by dask.

    python benchmarks/campaigns.py [--campaigns 10000] [--workers 2] [--by dask pool]
                                   [--compared 40]

A campaign: which plan trains a model on so many tokens on so many devices, and in how
many days? The sweep runs over models, clusters, numbers of devices, batches and tokens.
The first `--compared` campaigns are answered here, by threads, by a pool and by dask,
and must give one table to the bit; all of them by those of `--by`. Prints campaigns per
second, CPU seconds per campaign, and the memory of this process and its largest child.
"""

import argparse
import itertools
import resource
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager

import pandas as pd

from madmax_lib.base import as_they_end
from madmax_lib.planner import campaign

MODELS = ["llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "gpt3-175b"]
CLUSTERS = ["dgx-a100", "dgx-h100"]
DEVICES = [64 * n for n in range(1, 17)]
BATCHES = [None, 512, 1024, 2048]
TOKENS = [(1 + n) * 1e11 for n in range(16)]
COLUMNS = ["devices", "plan", "step_s", "days", "days_low", "days_high", "mwh"]


def answer(case: tuple) -> dict:
    """The best row of a campaign, or the reason why there is none."""
    model, cluster, devices, batch, tokens = case
    try:
        row = campaign(
            *(model, tokens, cluster),
            devices=devices,
            global_batch=batch,
            software="megatron-core",
        ).best
    except ValueError as error:
        return {"reason": str(error)}
    return {name: row[name] for name in COLUMNS if name in row}


def cases(count: int) -> list[tuple]:
    """The first campaigns of the product, models changing fastest."""
    reversed_product = itertools.product(TOKENS, BATCHES, DEVICES, CLUSTERS, MODELS)
    return [case[::-1] for case in itertools.islice(reversed_product, count)]


@contextmanager
def dask_client(workers: int):
    from dask.distributed import Client, LocalCluster

    cluster = LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=None
    )
    with cluster, Client(cluster) as client:
        yield client


EXECUTORS = {
    "threads": lambda workers: ThreadPoolExecutor(workers),
    "pool": lambda workers: ProcessPoolExecutor(workers),
    "dask": dask_client,
}


def table_by(name: str, workers: int, todo: list[tuple]) -> pd.DataFrame:
    """Answers in the order of the campaigns."""
    if name == "here":
        return pd.DataFrame([answer(case) for case in todo])
    with EXECUTORS[name](workers) as client:
        found = dict(as_they_end(client, answer, dict(enumerate(todo))))
    return pd.DataFrame([found[number] for number in range(len(todo))])


def used() -> tuple[float, float]:
    """CPU seconds of this process and its children, and the peak of the larger, MB."""
    both = [resource.getrusage(resource.RUSAGE_SELF)]
    both.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in both)
    return cpu_s, max(usage.ru_maxrss for usage in both) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--campaigns", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--by", nargs="*", default=["dask"], choices=[*EXECUTORS])
    parser.add_argument("--compared", type=int, default=40)
    options = parser.parse_args()
    few = cases(options.compared)
    first = table_by("here", 1, few)
    for name in EXECUTORS:
        same = table_by(name, options.workers, few).equals(first)
        print(f"{name}: {len(few)} campaigns {'the same' if same else 'DIFFERENT'}")
    todo = cases(options.campaigns)
    for name in options.by:
        start, (before_s, _) = time.perf_counter(), used()
        table = table_by(name, options.workers, todo)
        seconds, (after_s, peak_mb) = time.perf_counter() - start, used()
        unanswered = table["reason"].notna().sum() if "reason" in table else 0
        print(
            f"{name}: {len(table):,} campaigns in {seconds:,.0f} s, "
            f"{len(table) / seconds:.1f} a second, "
            f"{(after_s - before_s) / len(table):.2f} CPU s each, peak {peak_mb:,.0f} MB; "
            f"{unanswered} without a plan"
        )


if __name__ == "__main__":
    main()
