"""What beats a recipe, by how much, how surely and why, in one, two or three changes?

Two plans on one machine err together, so their ratio is surer than either step: with
C the covariance of their log errors (`answer.errors_of`),

    Var(log ratio) = C[0, 0] + C[j, j] - 2 C[0, j],

and a plan is faster than the recipe with probability Phi(log ratio / its root).
"""

from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import ndtr

from madmax_lib.plan import Plan
from madmax_lib.planner.answer import described, errors_of, parts_in_words
from madmax_lib.planner.changes import changes, in_words
from madmax_lib.planner.evaluate import SearchProblem, evaluate
from madmax_lib.planner.space import SEARCHED, Degrees
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import plans_peak_bytes, usable_bytes
from madmax_lib.simulator.steady.step_time import step_s

_KEPT = 5  # sets of changes of each number
_SIGMAS = 1.645  # half-width of a 90 % interval in standard deviations


def beats(problem: SearchProblem, degrees: list[Degrees]) -> pd.DataFrame:
    """The recipe, which is the plan of the problem's case, and what is faster than it,
    best first: up to five sets of changes of each number. If it does not fit by our
    count, what fits comes first, faster or not.

    Columns of a search's table, and changes (in words), count, fits (the device), saves
    (share of the recipe's step) with saves_low and saves_high (90 %), probability (of
    being faster) and why (the part in which it saves most).
    """
    recipe = problem.case.plan
    searched = [_recipe_row(problem)]
    # a recipe was run, so what takes no more memory than it may run too
    usable = usable_bytes(problem.case.device)
    most_bytes = max(usable, searched[0]["memory_bytes"][0])
    problem = replace(problem, objective="time", room_bytes=most_bytes)
    for most in range(1, problem.changes + 1):
        for room_bytes in {usable, most_bytes}:
            part = replace(problem, changes=most, room_bytes=room_bytes)
            best = evaluate(part, degrees).table
            searched.append(pd.DataFrame(best))
    rows = pd.concat(searched, ignore_index=True)
    rows = rows.drop_duplicates(list(SEARCHED))
    plans = described(problem, {name: rows[name].to_numpy() for name in rows})
    table = plans.table
    texts = [Plan.parse(text) for text in table["plan"]]
    table["changes"] = [in_words(plan, recipe) for plan in texts]
    table["count"] = [int(changes(plan, recipe)) for plan in texts]
    # compared are steps as launched, if the recipe is
    seconds = table["step_s"]
    launched_s = table.get("launched_s", seconds)
    if not np.isnan(launched_s[0]):
        seconds = launched_s
    table = table.join(_gains(plans, seconds, problem))
    table["fits"] = table["memory_bytes"] <= usable
    # beside itself the recipe has no gain; where it does not fit, what does is worth
    # knowing though slower
    faster = table["saves"] > 0
    roomier = table["fits"] > table["fits"][0]
    # what fits first
    rivals = table[faster | roomier]
    order = seconds[rivals.index].sort_values(kind="stable")
    rivals = rivals.loc[order.index]
    rivals = rivals.sort_values("fits", ascending=False, kind="stable")
    # of plans that differ in what comes with a change the best stands for all
    alone = rivals["changes"].str.replace(" with [^,]*", "", regex=True)
    rivals = rivals[~alone.duplicated()]
    rivals = rivals.groupby("count").head(_KEPT)
    return pd.concat([table.head(1), rivals], ignore_index=True)


def _gains(plans, seconds, problem):
    """Saved share of the first plan's step, how surely and why, of the plans after it."""
    # the first plan is the one beside which all others stand
    step_s = seconds.to_numpy()
    covariance = errors_of(plans, problem)
    variance = np.diag(covariance) + covariance[0, 0] - 2 * covariance[0]
    # of two plans that differ in nothing that is priced rounding may leave less than 0
    variance = np.maximum(variance, np.finfo(float).tiny)
    spread = np.sqrt(variance)
    log_gain = np.log(step_s[0] / step_s)
    parts_s = parts_in_words(plans)
    saved = (parts_s.iloc[0] - parts_s) / parts_s.iloc[0].sum()
    most = saved.max(axis=1).map("{:.0%}".format)
    gains = pd.DataFrame({"saves": 1 - np.exp(-log_gain)})
    gains["saves_low"] = 1 - np.exp(_SIGMAS * spread - log_gain)
    gains["saves_high"] = 1 - np.exp(-_SIGMAS * spread - log_gain)
    gains["probability"] = ndtr(log_gain / spread)
    why = "saves " + most + " in " + saved.idxmax(axis=1)
    gains["why"] = why.where(most != "0%", "the stack that launches it is faster")
    return gains.drop(index=0)


def _recipe_row(problem):
    """Columns of a search for the recipe itself, whether it fits or not."""
    # arrays of one plan
    seconds = np.max(step_s(Steps.of(problem.case), problem.parameters))
    usd_per_s = problem.case.cluster.world_size * problem.usd_per_hour / 3600
    row = pd.DataFrame([vars(problem.case.plan)])[list(SEARCHED)]
    return row.assign(
        step_s=seconds,
        cost_usd=seconds * usd_per_s,
        memory_bytes=np.max(plans_peak_bytes(problem.case)),
        position=0,
    )
