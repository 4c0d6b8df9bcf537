"""What `find_late` sees in logs that are made here: detection, false alarms, scale.

python benchmarks/logs.py [--seeds 100] [--ranks 512] [--steps 10000]: the power of
detection on made matrices of seconds, then CPU seconds and memory of the analysis, then
the speed of the reader on a file in torchtitan's format. Nothing here was measured on a
GPU.

The made job: a synchronous step as long as the slowest rank's work. Medians of healthy
ranks differ by 0.3 to 0.65 % (standard deviation; --apart), single steps by 0.75 %, one
in 100 runs over by 2 % and more, and each rank wanders slowly by 0.2 %.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from madmax_lib.traces import Log, find_late, read_log

STEP_S = 0.43
PARTS = {"fetching_batch": 0.01, "fwd_bwd": 0.93, "optim": 0.05}


def made(ranks, steps, seed, apart=0.005, slow=None):
    """A log, and the row of the slow rank. slow: phase, share of a step, first step."""
    rng = np.random.default_rng(seed)
    phases = {}
    for name, share in PARTS.items():
        own = rng.normal(0, apart, (ranks, 1))
        steps_apart = 0.0075 * rng.standard_normal((ranks, steps), np.float32)
        # an autocorrelated wandering of 0.2 %, correlated over some 500 steps
        noise = rng.standard_normal((ranks, steps // 50 + 1))
        wander = lfilter([1], [1, -0.9], noise, axis=1) * 0.002 * np.sqrt(1 - 0.9**2)
        wander = np.repeat(wander, 50, axis=1)[:, :steps]
        over = rng.random((ranks, steps), np.float32) < 0.01
        late = over * (0.02 + rng.exponential(0.02, (ranks, steps)))
        values = 1 + own + steps_apart + wander + late
        phases[name] = (STEP_S * share * values).astype(np.float32)
    row = int(rng.integers(ranks))
    if slow:
        name, share, first = slow
        phases[name][row, first:] += STEP_S * share
    work = sum(phases.values())
    pace = work.max(axis=0)
    # hosts end a step some ms apart
    own_pace = pace + rng.normal(0, 0.004, work.shape).astype(np.float32)
    own_pace[work == pace] = np.broadcast_to(pace, work.shape)[work == pace]
    hosts = [f"node{rank // 8:03}" for rank in range(ranks)]
    units = pd.DataFrame({"rank": range(ranks), "host": hosts})
    log = Log(
        source="made",
        units=units.assign(file="made"),
        steps=np.arange(1, steps + 1),
        own_pace_s=own_pace,
        tags=np.full(steps, "", dtype=object),
        phases={("", name): part for name, part in phases.items()},
        together=True,
    )
    return log, row


def detection(options):
    """Prints shares of seeds in which the slow rank is found, and false alarms."""
    cases = {"none": None, "from the start": 0, "from the middle": options.steps // 2}
    for apart in options.apart:
        for name, first in cases.items():
            slow = None if first is None else ("fwd_bwd", options.slow, first)
            found = alarms = 0
            for seed in range(options.seeds):
                log, row = made(options.ranks, options.steps, seed, apart, slow)
                ranks = list(find_late(log)["rank"])
                found += row in ranks
                alarms += bool(set(ranks) - {row} if slow else ranks)
            print(
                f"apart {apart:.2%}, straggler {options.slow:.0%} {name}: found "
                f"{found}/{options.seeds}, others named {alarms}/{options.seeds}",
                flush=True,
            )


def scale(ranks=1024, steps=10_000):
    """Prints CPU seconds and memory of the analysis of a day."""
    log, row = made(ranks, steps, 0, slow=("fwd_bwd", 0.03, steps // 2))
    begin = time.process_time()
    table = find_late(log)
    seconds = time.process_time() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{ranks} ranks x {steps} steps: {seconds:.1f} CPU s, {memory:.2f} GiB at most"
    )
    print(table.to_string(), "\nslow rank", row)


def reader(steps=20_000):
    """Prints the speed of the reader on a file of about 100 MB."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.global_rank_0.20261120-011512-ABCDEF.jsonl"
        with path.open("w") as file:
            for step in range(1, steps + 1):
                for name in ("fetching_batch", "fwd_bwd", "optim", "step"):
                    file.writelines(lines(name, step))
        begin = time.process_time()
        log = read_log(path)
        seconds = time.process_time() - begin
        size = path.stat().st_size / 1e6
        rate = size / seconds
        print(f"reader: {size:.0f} MB, {len(log.steps)} steps, {rate:.0f} MB per CPU s")


def lines(name, step):
    """The lines of a span as torchtitan 0.3.0 writes them."""
    for what in ("start", "end"):
        us = 1_795_102_135_409_698 + step * 430_000
        line = {"delta_ms": 0.06, "tid": 20000, "rank": 0, "global_rank": 0}
        line |= {"local_rank": 0, "source": "training", "host_name": "node00.cluster"}
        line |= {"pid": 20000, "step": step, "relative_step": step}
        line |= {"time": us // 10**6, "time_ms": us // 1000, "time_us": us}
        line |= {"log_type": "event", "log_type_name": f"{name}_{what}"}
        line |= {"event_name": None} | ({"value": 100.0} if what == "end" else {})
        line |= {"caller": "torchtitan/trainer.py:918:train_step"}
        line |= {"log_file": "trainer.py", "log_function": "train_step"}
        line |= {"log_level": "INFO", "logger_name": "torchtitan.structured_logger"}
        line |= {"seq_id": step, "message": f"[step {step}] {name} {name}_{what}"}
        yield json.dumps(line) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--slow", type=float, default=0.03)
    parser.add_argument(
        "--apart", type=float, nargs="*", default=[0.003, 0.005, 0.0065]
    )
    options = parser.parse_args()
    if options.seeds:
        detection(options)
    scale()
    reader()
