"""Does `mm.search(..., like=RECIPE)` name what beats a recipe?

    python benchmarks/like.py [--seeds 3]

Cases: nanotron's sweep of two models on 8 to 512 H100, with constants of a fit that has
not seen it (as benchmarks/tune.py). Pairs: of two plans of a case that ran and lie at
most three changes and at least 5 % apart, how often is the faster one ranked first, in
all and where the answer is 90 % sure? Regret: a plan of a case that ran is the recipe;
of the plans measured within three changes the three with the best predicted step are
tried. Regret is the best time so far over the best of the sweep, minus one. Recipes are
5 % to 100 % slower than the best: nobody runs what is slower still.
"""

import argparse
from itertools import combinations

import numpy as np
import pandas as pd
from scipy.special import ndtr
from tune import cases, parameters

import madmax_lib as mm
from madmax_lib import planner
from madmax_lib.plan import Case

CLOSE = 1.05
CHANGES = 3
TRIALS = 3
SURE = 0.9


def predicted(model, cluster, batch, seconds, constants):
    """Seconds of the plans that ran, log errors' covariance, and the measured ones."""
    plans = [plan for plan, step_s in seconds.items() if np.isfinite(step_s)]
    run = {"global_batch": batch, "sequence": 4096, "software": "nanotron"}
    table = mm.estimate(model, cluster, plans, **run, parameters=constants)
    legal = table["step_s"].notna().to_numpy()
    plans = [plan for plan, runs in zip(plans, legal, strict=True) if runs]
    case = Case.of_step(model, cluster, mm.Plan(), batch, 4096, "bf16", "nanotron")
    problem = planner.evaluate.SearchProblem(
        case, planner.Space(), "time", 1, constants, np.nan, 0.0, (case.software,)
    )
    columns = pd.DataFrame(
        [{n: getattr(p, n) for n in planner.space.SEARCHED} for p in plans]
    )
    columns["step_s"] = table["step_s"].to_numpy()[legal]
    columns = columns.assign(cost_usd=np.nan, memory_bytes=0.0, position=0, ties=0)
    answer = planner.answer.described(
        problem, {name: columns[name].to_numpy() for name in columns}
    )
    measured = np.array([seconds[plan] for plan in plans])
    return plans, answer, planner.answer.errors_of(answer, problem), measured


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3)
    seeds = arguments.parse_args().seeds
    constants = parameters()
    pairs = []
    starts = []
    for name, gpus, model, cluster, batch, seconds in cases():
        plans, answer, covariance, measured = predicted(
            model, cluster, batch, seconds, constants
        )
        ours = answer.times["step_s"]
        apart = np.array(
            [[planner.changes(one, two) for two in plans] for one in plans]
        )
        for i, j in combinations(range(len(plans)), 2):
            gap = np.log(measured[i] / measured[j])
            if apart[i, j] <= CHANGES and abs(gap) > np.log(CLOSE):
                variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
                log_gain = np.log(ours[i] / ours[j])
                sure = ndtr(abs(log_gain) / np.sqrt(variance))
                pairs.append((f"{name} {gpus}", gap * log_gain > 0, sure))
        best = measured.min()
        rng = np.random.default_rng(0)
        poor = np.flatnonzero((measured > CLOSE * best) & (measured < 2 * best))
        for start in rng.choice(poor, min(10 * seeds, len(poor)), replace=False):
            near = np.flatnonzero((apart[start] <= CHANGES) & (ours < ours[start]))
            tried = near[np.argsort(ours[near])][:TRIALS]
            reached = min(measured[start], *measured[tried], np.inf)
            reachable = measured[apart[start] <= CHANGES].min()
            starts.append(
                (
                    f"{name} {gpus}",
                    measured[start] / best - 1,
                    reached / best - 1,
                    reachable / best - 1,
                )
            )
    pairs = pd.DataFrame(pairs, columns=["case", "right", "sure"])
    starts = pd.DataFrame(starts, columns=["case", "before", "after", "reachable"])
    starts["halved"] = starts["after"] <= starts["before"] / 2
    print(pairs.groupby("case")["right"].agg(["size", "mean"]).round(3).to_string())
    sure = pairs[pairs["sure"] >= SURE]
    print(
        f"{len(pairs):,} pairs, the faster one first in {pairs['right'].mean():.1%}; "
        f"{len(sure):,} are {SURE:.0%} sure: {sure['right'].mean():.1%}"
    )
    print(starts.groupby("case").mean(numeric_only=True).round(3).to_string())
    print(
        f"{len(starts)} starts: regret {starts['before'].median():.1%} -> "
        f"{starts['after'].median():.1%} (median; within reach "
        f"{starts['reachable'].median():.1%}); halved in {starts['halved'].mean():.1%}"
    )


if __name__ == "__main__":
    main()
