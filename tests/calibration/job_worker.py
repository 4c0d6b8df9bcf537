"""Traces of layouts, one start for all: python job_worker.py FOLDER [[MODEL, PLAN], ...]."""

import json
import sys
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from runs import runs_worker
from runs.test_parallel import MODELS
from torch.multiprocessing import start_processes

from madmax_lib.plan.plan import Plan
from madmax_lib.runs.measure.profiler import profiler
from madmax_lib.runs.parallel import mesh, trainer
from madmax_lib.runs.settings import Settings


def work(rank, jobs, folder, number):
    """One rank of jobs with the same groups."""
    ranks = Plan.parse(jobs[0][1]).world_size
    store = dist.FileStore(str(folder / f"store-{number}"), ranks)
    mesh.join("cpu", store=store, rank=rank, world_size=ranks)
    for model, plan in jobs:
        name, sizes = MODELS[model]
        settings = Settings(
            global_batch=runs_worker.BATCH, sequence=runs_worker.SEQUENCE
        )
        place = {"sizes": sizes, "device": "cpu"}
        job = trainer.parallelize(name, Plan.parse(plan), settings, **place)
        place = folder / f"{model}-{plan}"
        place.mkdir(exist_ok=True)
        with profiler(place / f"trace_rank{rank}.json.gz", "cpu") as recorder:
            for step in range(5):
                job.step(runs_worker.batch(job, step))
                recorder.step()
        dist.barrier()


def layout(job):
    """What decides the process groups of a job."""
    return runs_worker.layout(["", "", job[1]])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, jobs = Path(sys.argv[1]), sorted(json.loads(sys.argv[2]), key=layout)
    for number, (groups, same) in enumerate(groupby(jobs, key=layout)):
        start_processes(
            work, (list(same), folder, number), nprocs=groups[0], start_method="fork"
        )
