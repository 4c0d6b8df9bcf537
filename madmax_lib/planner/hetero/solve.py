"""Which plan trains a model fastest on GPUs of several types? Stages, groups, degrees and layer cuts, exactly.

The correct counterpart of Metis [Um et al., USENIX ATC 2024]: `plan` finds the cheapest plan by the cost that
`hetero.cost` defines, by dynamic programming over layers and ranks under thresholds for the cost's maxima. `cost` is
that cost, for any plan, Metis' own included. Prices come from profiles in Metis' format or from the simulator.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.planner.hetero import costs
from madmax_lib.planner.hetero.grid import Layout
from madmax_lib.planner.hetero.model import clusters_of, nodes_of, simulated_prices
from madmax_lib.planner.hetero.nodes import Node, load_cluster
from madmax_lib.planner.hetero.prices import Fleet, Prices, fleets, prices_of
from madmax_lib.planner.hetero.profiles import Profiles, load_profiles
from madmax_lib.planner.hetero.stage_plan import DEFECTS, HeteroPlan, Rules
from madmax_lib.planner.hetero.stages import Space
from madmax_lib.planner.hetero.sweep import Sweeper
from madmax_lib.planner.hetero.thresholds import Outcome, search
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.specs import Cluster, Model

__all__ = ["DEFECTS", "HeteroPlan", "Planned", "Problem", "Rules", "cost", "cost_of", "group_sizes", "plan", "plan_of",
           "planned_of", "problem"]  # fmt: skip

_EVERY_SIZE = 32  # GPUs up to which groups of every size are tried
_OPEN = (np.inf, np.inf, np.inf)


@dataclass(frozen=True, eq=False)
class Problem:
    """Prices, the nodes, the cluster in every order of its types, and the rules: what `plan` and `cost` look at."""

    prices: Prices
    nodes: tuple[Node, ...]
    fleets: tuple[Fleet, ...]
    rules: Rules

    def fleet(self, order: Sequence[str]) -> Fleet:
        """The cluster in one order of its types. Raises ValueError for other types."""
        for found in self.fleets:
            if found.types == tuple(order):
                return found
        raise ValueError(f"node_sequence {', '.join(order)} is no order of {', '.join(self.fleets[0].types)}")


@dataclass(frozen=True, eq=False)
class Planned:
    """The cheapest plan, its cost and what it is made of.

    cost_ms: `cost` of the plan. bound_ms: no plan of the search space costs less. gap: share of the cost between the
    two. stopped: the search was interrupted. sweeps and cpu_s: its effort. terms: the cost's terms in ms. stages,
    memory: tables by stage, see `hetero.cost`. samples: of a micro-batch, of each replica of each stage. problem: what
    was searched.
    """

    plan: HeteroPlan
    cost_ms: float
    bound_ms: float
    gap: float
    stopped: bool
    sweeps: int
    cpu_s: float
    terms: dict[str, float]
    stages: pd.DataFrame
    memory: pd.DataFrame
    samples: tuple[list[int], ...]
    problem: Problem

    @property
    def provenance(self) -> dict:
        """What a picture or timeline of the plan was made from."""
        return {"plan": json.dumps(self.plan.as_dict()), "global_batch": self.problem.rules.global_batch}


def plan(
    *,
    profiles: Profiles | str | Path | None = None,
    model: Model | None = None,
    hostfile: str | Path | None = None,
    clusterfile: str | Path | None = None,
    cluster: Cluster | Sequence[Cluster | Node] | None = None,
    layers: int | None = None,
    global_batch: int,
    groups: Sequence[int] | None = None,
    gap: float = 1e-9,
    progress: bool = True,
    **rules,
) -> Planned:
    """The cheapest plan over all orders of GPU types, stages, groups, (dp, tp), layer cuts and micro-batches.

    profiles (a folder or `Profiles`) or model: where prices come from. hostfile and clusterfile, or cluster (a Cluster,
    several, or nodes): the GPUs, all of which are used. layers: with embedding and head; all there are if None. groups:
    sizes of device groups, `group_sizes` if None. gap: share of the cost within which the answer is proven; 1e-9 is
    exact. rules: memory_factor (default 1: memory as the table says; 0: no limit), tp_in_node (default: False for
    profiles, True for a model), hidden, sequence, bytes_per_element (4096, 1024 and 2 for profiles), and for a model
    recompute (default none and full, chosen per stage), dtype and parameters. A KeyboardInterrupt returns the best
    plan so far. Raises ValueError for bad input, and where no plan is feasible, with the reason.
    """
    given = problem(profiles=profiles, model=model, hostfile=hostfile, clusterfile=clusterfile, cluster=cluster,
                    layers=layers, global_batch=global_batch, **rules)  # fmt: skip
    return plan_of(given, groups=groups, gap=gap, progress=progress)


def plan_of(
    given: Problem, *, groups: Sequence[int] | None = None, gap: float = 1e-9, progress: bool = True
) -> Planned:
    """As `plan`, for a problem at hand."""
    if not 0 <= gap < 1:
        raise ValueError(f"gap={gap} is not in 0..1")
    started = time.process_time()
    fleet = given.fleets[0]
    sizes = group_sizes(given) if groups is None else groups
    if not sizes or min(sizes) < 1 or max(sizes) > fleet.size:
        raise ValueError(f"groups={list(sizes)} must be sizes from 1 to the {fleet.size} GPUs of the cluster")
    layout = Layout(fleet.size, sizes, given.prices)
    outcome = _search(given, layout, gap, progress, deep=False)
    if outcome.chain is not None and not _fits(given, outcome.chain.plan):
        outcome = _search(given, layout, gap, progress, deep=True)
    if outcome.chain is None:
        if outcome.stopped:
            raise KeyboardInterrupt("interrupted before a first plan was found")
        raise ValueError(_reason(given, layout))
    found = planned_of(outcome.chain.plan, given)
    return replace(found, bound_ms=min(outcome.bound_ms, found.cost_ms), gap=outcome.gap, stopped=outcome.stopped,
                   sweeps=outcome.sweeps, cpu_s=time.process_time() - started)  # fmt: skip


def planned_of(plan: HeteroPlan | dict, given: Problem) -> Planned:
    """A plan of one's own with its cost, terms and tables; nothing is proven of it."""
    plan = HeteroPlan.read(plan).repaired(given.prices.layers)
    about = (plan, given.prices, given.fleet(plan.node_sequence), given.rules)
    return Planned(plan, cost_of(plan, given), 0.0, 1.0, False, 0, 0.0, costs.cost_terms(*about),
                   costs.stage_table(*about), costs.memory_table(*about),
                   costs.replica_samples(*about), given)  # fmt: skip


def cost(
    plan: HeteroPlan | dict,
    *,
    profiles: Profiles | str | Path | None = None,
    model: Model | None = None,
    hostfile: str | Path | None = None,
    clusterfile: str | Path | None = None,
    cluster: Cluster | Sequence[Cluster | Node] | None = None,
    layers: int | None = None,
    global_batch: int,
    **rules,
) -> float:
    """The correct cost of a plan in ms: the one that `plan` minimises, infinite where a GPU lacks memory.

    plan: a HeteroPlan, or a mapping or table row with its fields, such as those that Metis proposes; one that loses
    layers or has empty stages is repaired first (`HeteroPlan.repaired`). Other arguments as in `plan`. Raises
    ValueError for a plan that does not fit cluster or batch, and for a missing profile.
    """
    given = problem(profiles=profiles, model=model, hostfile=hostfile, clusterfile=clusterfile, cluster=cluster,
                    layers=layers, global_batch=global_batch, **rules)  # fmt: skip
    return cost_of(plan, given)


def cost_of(plan: HeteroPlan | dict, given: Problem) -> float:
    """As `cost`, for a problem at hand."""
    plan = HeteroPlan.read(plan).repaired(given.prices.layers)
    fleet = given.fleet(plan.node_sequence)
    terms = costs.cost_terms(plan, given.prices, fleet, given.rules)
    fits = costs.fits(plan, given.prices, fleet, given.rules)
    return float(sum(terms.values())) if fits else float("inf")


def problem(
    *,
    profiles: Profiles | str | Path | None = None,
    model: Model | None = None,
    hostfile: str | Path | None = None,
    clusterfile: str | Path | None = None,
    cluster: Cluster | Sequence[Cluster | Node] | None = None,
    layers: int | None = None,
    global_batch: int,
    **rules,
) -> Problem:
    """Inputs of `plan` and `cost`, read and checked once. Raises ValueError or OSError."""
    if (profiles is None) == (model is None):
        raise ValueError("give either profiles or model")
    if (cluster is None) == (hostfile is None or clusterfile is None):
        raise ValueError("give either hostfile and clusterfile, or cluster")
    nodes = load_cluster(hostfile, clusterfile) if cluster is None else _nodes(cluster, rules.get("parameters"))
    if profiles is not None:
        prices = prices_of(profiles if isinstance(profiles, Profiles) else load_profiles(profiles))
        known = Rules(global_batch, **rules)
    else:
        own = {name: rules.pop(name) for name in ("dtype", "recompute", "parameters") if name in rules}
        sequence = rules.pop("sequence", None) or getattr(model, "sequence", None)
        types = {c.device.name: c for c in _clusters(cluster)} or clusters_of(nodes)
        prices = simulated_prices(model, types, global_batch=global_batch, sequence=sequence, **own)
        known = Rules(global_batch, **{"hidden": model.hidden, "sequence": sequence, "tp_in_node": True} | rules)
    if layers is not None and layers != prices.layers:
        raise ValueError(f"layers={layers}, but there are prices for {prices.layers} layers, ends included")
    orders = tuple(fleets(nodes))
    for name in orders[0].types:
        if name not in prices.optimizer_ms:
            raise ValueError(f"no profile for {name}; there are {', '.join(prices.optimizer_ms)}")
    return Problem(prices, tuple(nodes), orders, known)


def group_sizes(given: Problem) -> list[int]:
    """GPUs of the device groups that are tried by default.

    Up to 32 GPUs: every size. Beyond: powers of two from the smaller of a node and the mean group of stages of one
    layer, as Metis has them, and the GPUs of each type and of all.
    """
    fleet, layers = given.fleets[0], given.prices.layers
    if fleet.size <= _EVERY_SIZE:
        return list(range(1, fleet.size + 1))
    least = min(*(node.gpus for node in given.nodes), max(fleet.size // layers, 1))
    powers = [1 << k for k in range(fleet.size.bit_length()) if 1 << k >= least]
    return sorted({*powers, *np.diff(fleet.ends, prepend=0).tolist(), fleet.size})


def _clusters(cluster) -> list[Cluster]:
    given = [cluster] if isinstance(cluster, Cluster) else cluster or []
    return [one for one in given if isinstance(one, Cluster)]


def _nodes(cluster, parameters: Parameters | None) -> tuple[Node, ...]:
    clusters = _clusters(cluster)
    return nodes_of(clusters, parameters) if clusters else tuple(cluster)


def _search(given: Problem, layout: Layout, gap: float, progress: bool, *, deep: bool) -> Outcome:
    """deep: activations of all micro-batches in flight count; else of one, which bounds the cost from below."""
    most = min(layout.layers, given.fleets[0].size // int(layout.sizes[0]))
    batches = [b for b in range(1, given.rules.global_batch + 1) if given.rules.global_batch % b == 0]
    makers, weights = [], []
    for count in batches:
        for fleet in given.fleets:
            makers.append(partial(_sweeper, given, fleet, count, layout, min(count, most) if deep else 1))
            weights.append(np.array([count - 1.0, 1.0, 1.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's advice on widgets
        from tqdm.auto import tqdm
    with tqdm(desc="planning", unit="sweep", disable=not progress, delay=1, leave=False) as bar:

        def tick(outcome: Outcome) -> None:
            bar.update()
            bar.set_postfix(best_ms=f"{outcome.cost_ms:.6g}", refresh=False)

        return search(makers, weights, gap=gap, tick=tick)


def _sweeper(given: Problem, fleet: Fleet, batches: int, layout: Layout, levels: int, lacking: bool = False) -> Sweeper:
    return Sweeper(Space(fleet, batches, given.prices, given.rules, layout), levels, lacking=lacking)


def _fits(given: Problem, found: HeteroPlan) -> bool:
    return costs.fits(found, given.prices, given.fleet(found.node_sequence), given.rules)


def _reason(given: Problem, layout: Layout) -> str:
    """Why no plan is feasible: the plan that lacks the least memory and where, or that none is covered at all."""
    best: tuple[float, HeteroPlan | None] = (np.inf, None)
    for count in range(1, given.rules.global_batch + 1):
        for fleet in given.fleets if given.rules.global_batch % count == 0 else ():
            chain = _sweeper(given, fleet, count, layout, 1, lacking=True).chain(_OPEN, bottleneck=True)
            if chain is not None and chain.total < best[0]:
                best = chain.total, chain.plan
    if best[1] is None:
        known = sorted({key[0] for key in given.prices.table})
        covered = "; ".join(f"{name} tp {_listed(given, name, 1)} batch {_listed(given, name, 3)}" for name in known)
        return f"no feasible plan: no groups, degrees and micro-batches are covered by the profiles ({covered})"
    fleet = given.fleet(best[1].node_sequence)
    table = costs.memory_table(best[1], given.prices, fleet, given.rules)
    worst = table.loc[(table["used_mb"] - table["capacity_mb"]).idxmax()]
    lacking = worst["used_mb"] - worst["capacity_mb"]
    return (
        f"no feasible plan: at least {lacking * 2**20:.0f} bytes ({lacking:.0f} MB) are missing on a {worst['device']} "
        f"of {worst['capacity_mb']:.0f} MB, in stage {worst['stage']} of {len(best[1].device_groups)} with "
        f"{best[1].batches} micro-batches"
    )


def _listed(given: Problem, device: str, place: int) -> str:
    return ",".join(map(str, sorted({key[place] for key in given.prices.table if key[0] == device})))
