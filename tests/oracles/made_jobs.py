"""Made jobs: data-parallel training whose time per step is known by construction.

A little simulator of its own, op by op: hosts launch kernels and gradient buckets and
run as far ahead as they like; streams run in order; a bucket is summed once its
gradients are there on all ranks, beside the backward pass. The same job with other
durations is run anew for the truth that a replay of its trace is asked for.
"""

from dataclasses import dataclass

import numpy as np
from support import make_timeline

from madmax_lib.timeline.timeline import Timeline

US = 1000
_CALL_US = 4.0
_START_US = 6.0  # from the begin of a launch to its kernel on an idle device
_GAP_US = 1.0  # between two kernels of a stream


@dataclass(frozen=True)
class Job:
    """A job: ranks, layers, mean kernel, bucket and host times in us, and its habits."""

    ranks: int = 2
    layers: int = 12
    kernel_us: float = 300.0
    host_us: float = 40.0  # between two launches
    bucket_us: float = 400.0  # an all-reduce, alone
    layers_per_bucket: int = 4
    late_rank_us: float = 0.0  # more per launch on the host of the last rank
    waits: bool = False  # the host for the loss, at the end of each step
    spread: float = 0.05  # of kernels and host work from step to step
    seed: int = 0


QUESTIONS = {
    "as it is": {},
    "compute x 2": {"compute": 2},
    "comm x 2": {"comm": 2},
    "no comm": {"comm": float("inf")},
    "half the network": {"comm": 0.5},
}
JOBS = {
    "host ahead": Job(),
    "host ahead, one rank": Job(ranks=1, bucket_us=1.0, seed=1),
    "host behind": Job(host_us=700.0, seed=2),
    "host ahead, four ranks": Job(ranks=4, seed=3),
    "host nearly as slow as the device": Job(host_us=330.0, seed=5),
    "one late host that stays behind": Job(ranks=4, late_rank_us=600.0, seed=6),
    "host waits for the loss": Job(waits=True, seed=7),
    "host waits, and is slow": Job(ranks=4, waits=True, host_us=300.0, seed=8),
    "buckets longer than backward": Job(bucket_us=6000.0, seed=9),
    "long buckets, slow host": Job(ranks=4, bucket_us=5000.0, host_us=500.0, seed=10),
    "a late host, device slower still": Job(ranks=3, late_rank_us=200.0, seed=11),
}


def run(job: Job, steps: int, compute: float = 1.0, comm: float = 1.0):
    """Spans (rank, stream, kind, name, start, dur in us, correlation, step) and the time
    (steps,) at which each step's device work ends; kernels and buckets so much faster.
    """
    random = np.random.default_rng(job.seed)
    host = np.zeros(job.ranks)
    free = {7: np.full(job.ranks, -1.0), 20: np.full(job.ranks, -1.0)}
    rows = []
    ends = []
    number = 0

    def call(name, correlation=-1):
        for rank in range(job.ranks):
            rows.append(
                (rank, -1, "cpu", name, host[rank], _CALL_US, correlation, step)
            )
        host[:] += _CALL_US

    def launch(stream, kind, name, us, after=None):
        nonlocal number
        number += 1
        begin = host.copy()
        call("cudaLaunchKernel", number)
        start = np.maximum(begin + _START_US, free[stream] + _GAP_US)
        if after is not None:
            start = np.maximum(start, after + _GAP_US)
        ready = start.max() if kind == "comm" else start
        end = ready + us
        for rank in range(job.ranks):
            dur = np.broadcast_to(end, job.ranks)[rank] - start[rank]
            rows.append((rank, stream, kind, name, start[rank], dur, number, step))
        free[stream] = np.broadcast_to(end, job.ranks).astype(float).copy()

    def varied(us):
        return us * random.uniform(1 - job.spread, 1 + job.spread, job.ranks)

    def works():
        more = np.zeros(job.ranks)
        more[-1] = job.late_rank_us
        host[:] += varied(job.host_us) + more

    for step in range(steps):
        begin = host.copy()
        for layer in range(job.layers):
            works()
            launch(7, "compute", f"forward_{layer}", varied(job.kernel_us) / compute)
        for layer in range(job.layers):
            works()
            us = 2 * varied(job.kernel_us) / compute
            launch(7, "compute", f"backward_{layer}", us)
            if (layer + 1) % job.layers_per_bucket == 0:
                call("cudaEventRecord")
                call("cudaStreamWaitEvent")
                us = job.bucket_us / comm
                launch(20, "comm", "ncclDevKernel_AllReduce", us, after=free[7].copy())
        works()
        call("cudaEventRecord")
        call("cudaStreamWaitEvent")
        us = varied(job.kernel_us) / compute
        launch(7, "compute", "optimizer", us, after=free[20].copy())
        if job.waits:
            before = host.copy()
            host[:] = np.maximum(host + _CALL_US, free[7] + 3.0)
            for rank in range(job.ranks):
                dur = host[rank] - before[rank]
                name = "cudaDeviceSynchronize"
                rows.append((rank, -1, "cpu", name, before[rank], dur, -1, step))
        works()
        for rank in range(job.ranks):
            label = (rank, -1, "annotation", f"ProfilerStep#{step}")
            rows.append((*label, begin[rank], host[rank] - begin[rank], -1, step))
        ends.append(free[7].max())
    return rows, np.array(ends)


def trace(job: Job, first: int = 12, steps: int = 4) -> Timeline:
    """Some steps as a profiler records them: with what ran on the device then."""
    rows = run(job, first + steps)[0]
    begin = min(row[4] for row in rows if row[7] == first and row[1] < 0)
    recorded = []
    for rank, stream, kind, name, start, dur, correlation, step in rows:
        left_over = stream >= 0 and step < first and start + dur > begin
        if left_over:
            correlation, step = -1, -1
        if left_over or step >= first:
            times = (round(start * US), round(dur * US))
            recorded.append((rank, stream, kind, name, *times, correlation, step))
    return make_timeline(recorded, world_size=job.ranks)


def step_s(job: Job, compute: float = 1.0, comm: float = 1.0, steps: int = 40) -> float:
    """The time of a step that the job settles to."""
    ends = run(job, steps, compute, comm)[1]
    return float(np.diff(ends)[steps // 2 :].mean() / 1e6)
