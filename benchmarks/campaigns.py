"""A sweep of thousands of campaigns: here, in a pool of processes and by dask.

    python benchmarks/campaigns.py [--campaigns 10000] [--workers 2] [--by dask pool]
                                   [--compared 40] [-o FILE.csv]

A campaign: which plan trains a model on so many tokens on so many devices, and in how
many days? The sweep runs over models, clusters, numbers of devices, batches and tokens.
The first `--compared` campaigns are answered here, by threads, by a pool and by dask,
and must give one table to the bit; all of them by those of `--by`. Prints campaigns per
second, CPU seconds per campaign, and the memory of this process and its largest child.

With -o, answers are written to a file as they end, each with its CPU seconds; a sweep
that was stopped goes on where it stopped.
"""

import argparse
import csv
import itertools
import resource
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from madmax_lib.base import as_they_end
from madmax_lib.planner import campaign

MODELS = ["llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "gpt3-175b"]
CLUSTERS = ["dgx-a100", "dgx-h100"]
DEVICES = [8 * n for n in range(1, 17)]
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


def timed_answer(case: tuple) -> dict:
    """`answer`, and the CPU seconds of this process that it took."""
    before_s = time.process_time()
    row = answer(case)
    return row | {"cpu_s": round(time.process_time() - before_s, 4)}


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


def sweep(name: str, workers: int, todo: list[tuple], path: Path) -> pd.DataFrame:
    """Answers of all campaigns, of which a file has some; the others are added to it."""
    columns = ["campaign", *COLUMNS, "reason", "cpu_s"]
    if not path.exists():
        path.write_text(",".join(columns) + "\n")
    answered = set(pd.read_csv(path)["campaign"])
    missing = {n: case for n, case in enumerate(todo) if n not in answered}
    print(
        f"{name}: {len(answered):,} answered before, {len(missing):,} to go", flush=True
    )
    with EXECUTORS[name](workers) as client, path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        for number, row in as_they_end(client, timed_answer, missing):
            writer.writerow({"campaign": number} | row)
            file.flush()
    return pd.read_csv(path)


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
    parser.add_argument("-o", "--output", type=Path, help="answers; goes on in it")
    options = parser.parse_args()
    if options.output and len(options.by) > 1:
        parser.error("-o takes the answers of one executor")
    few = cases(options.compared)
    first = table_by("here", 1, few)
    for name in EXECUTORS:
        same = table_by(name, options.workers, few).equals(first)
        print(f"{name}: {len(few)} campaigns {'the same' if same else 'DIFFERENT'}")
    todo = cases(options.campaigns)
    for name in options.by:
        start, (before_s, _) = time.perf_counter(), used()
        if options.output:
            table = sweep(name, options.workers, todo, options.output)
        else:
            table = table_by(name, options.workers, todo)
        seconds, (after_s, peak_mb) = time.perf_counter() - start, used()
        unanswered = table["reason"].notna().sum() if "reason" in table else 0
        each_s = (after_s - before_s) / len(table)
        speed = f" in {seconds:,.0f} s, {len(table) / seconds:.1f} a second"
        if options.output:
            each_s, speed = table["cpu_s"].mean(), ""
        print(
            f"{name}: {len(table):,} campaigns{speed}, {each_s:.2f} CPU s each, "
            f"peak {peak_mb:,.0f} MB; {unanswered} without a plan"
        )


if __name__ == "__main__":
    main()
