"""Trials until a plan is within 5 % of the best measured one: the tuner, the
simulator's order, no simulator, random.

    python benchmarks/tune.py [--seeds 3] [--software nanotron]

Cases: nanotron's sweep of two models on 8 to 512 H100, every layout of one model and
GPU count, in a random order. A trial is a row of the sweep; a plan that crashed or ran
out of memory is a trial too. The constants of the simulator are fitted without the rows
of the sweep. The simulator's order is that of its seconds, plans that it finds to fit
first; "no simulator" is the same tuner whose prior mean is one time for all plans, and
half of a chance to fit; random is the expected value, (plans + 1) / (good + 1).
Averages over the seeds, "worst" is the worst of all.
"""

import argparse
import time
from dataclasses import replace

import numpy as np
import pandas as pd

import madmax_lib as mm
from madmax_lib.calibration import fit, known_rows, read_rows
from madmax_lib.catalog import local_data
from madmax_lib.planner import Tuner

CLOSE = 1.05
PLAN = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "zero_stage": "zero",
    "micro_batch": "micro_batch",
}


def cases():
    """Model, cluster, batch, and seconds by plan (NaN if it failed) of each case; of
    repeats the fastest counts.
    """
    rows = pd.read_csv(local_data("published_more/layout_sweep.csv"))
    read = read_rows(rows)
    rows = (
        rows.assign(case=read["case"])
        .sort_values("iteration_time_s")
        .drop_duplicates(["model", "n_gpus", *PLAN])
    )
    for (name, gpus), part in rows.groupby(["model", "n_gpus"]):
        plans = [
            mm.Plan(**row)
            for row in part[list(PLAN)].rename(columns=PLAN).to_dict("records")
        ]
        case = part["case"].iloc[0]
        seconds = dict(zip(plans, part["iteration_time_s"], strict=True))
        yield name, gpus, case.model, case.cluster, case.global_batch, seconds


def parameters():
    """The constants of a fit that has not seen the sweep."""
    rows, near = known_rows(), mm.simulator.shipped()
    others = rows[~rows["repository"].str.contains("ultrascale-playbook")]
    print(f"constants of {len(others)} rows of other sources")
    shipped = {"residuals": near.residuals, "sensitivities": near.sensitivities}
    return replace(fit.fit(others, starts=1, near=near), **shipped)


def trials(tuner, seconds):
    """How many it takes, and the longest time of a call of ask."""
    best, longest_s = np.nanmin(list(seconds.values())), 0.0
    for count in range(1, len(seconds) + 1):
        start = time.perf_counter()
        plan = tuner.ask()
        longest_s = max(longest_s, time.perf_counter() - start)
        tuner.tell(plan, seconds[plan])
        if seconds[plan] <= CLOSE * best:
            return count, longest_s
    raise ValueError("no plan ran")


def in_order(table, seconds):
    """Trials in the simulator's order."""
    plans = {str(plan): value for plan, value in seconds.items()}
    best, table = np.nanmin(list(plans.values())), table[table["reason"] == ""]
    order = table.assign(out=table["memory_share"] > 1).sort_values(
        ["out", "simulated_s"]
    )["plan"]
    return 1 + next(
        place for place, plan in enumerate(order) if plans[plan] <= CLOSE * best
    )


def blinded(tuner):
    """The tuner without what the simulator says."""
    known = tuner._candidates
    flat = np.where(np.isfinite(known.log_s), np.nanmean(known.log_s), np.nan)
    tuner._candidates = replace(
        known, log_s=flat, log_room=np.zeros(len(flat)), shares=0 * known.shares
    )
    return tuner


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument(
        "--software", default="nanotron", help="as the tuner is told; none for no name"
    )
    arguments = arguments.parse_args()
    constants, rows, longest_s = parameters(), [], 0.0
    for name, gpus, model, cluster, batch, seconds in cases():
        run = {
            "global_batch": batch,
            "sequence": 4096,
            "software": arguments.software,
            "parameters": constants,
        }
        times = np.array(list(seconds.values()))
        good = int((times <= CLOSE * np.nanmin(times)).sum())
        row = {
            "model": name,
            "GPUs": gpus,
            "plans": len(times),
            "ran": int(np.isfinite(times).sum()),
            "good": good,
        }
        counts = {"ours": [], "no simulator": []}
        for seed in range(arguments.seeds):
            plans = list(seconds)
            np.random.default_rng(seed).shuffle(plans)
            tuners = [
                Tuner(model, cluster, plans=plans, seed=seed, **run) for _ in range(2)
            ]
            order = in_order(tuners[0].table, seconds)
            for tool, tuner in zip(
                counts, (tuners[0], blinded(tuners[1])), strict=True
            ):
                count, ask_s = trials(tuner, seconds)
                counts[tool].append(count)
                longest_s = max(longest_s, ask_s)
        row |= {tool: np.mean(count) for tool, count in counts.items()}
        row |= {
            "simulator": order,
            "random": (len(times) + 1) / (good + 1),
            "worst": max(counts["ours"]),
        }
        rows.append(row)
    table = pd.DataFrame(rows)
    tools = ["ours", "simulator", "no simulator", "random"]
    print(
        table[["model", "GPUs", "plans", "ran", "good", *tools, "worst"]]
        .round(1)
        .to_string(index=False)
    )
    print("\nmean: " + ", ".join(f"{tool} {table[tool].mean():.1f}" for tool in tools))
    print(
        "worst: "
        + ", ".join(f"{tool} {table[tool].max():.1f}" for tool in tools)
        + f"; ours {table['worst'].max()}"
    )
    print(f"longest ask(): {longest_s * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
