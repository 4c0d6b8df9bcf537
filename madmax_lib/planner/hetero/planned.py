"""The planner's answer: tables of a plan, JSON for a launcher, and the timeline of a
step.

In ms and MB for its readers. The timeline is one 1F1B step with the planner's own
prices, one rank per stage, laid out by `simulator.events.engine`. A third of a
stage's time is its forward pass. Every micro-batch is sent, there and back, beside
computing, of which the cost is an upper bound.

The fastest plan on GPUs of several types: stages, groups, degrees and layer cuts,
exactly.

The correct counterpart of Metis [Um et al., USENIX ATC 2024]: `plan` finds the cheapest
plan by the cost that `hetero.costs` defines, by dynamic programming over layers and
ranks under thresholds for the cost's maxima. Prices come from profiles in Metis' format
or from the simulator.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.base import is_whole, require_number, require_type
from madmax_lib.base.atomic import write_text
from madmax_lib.base.progress import bar
from madmax_lib.planner.hetero.costs import PlanCost
from madmax_lib.planner.hetero.fleets import HeteroProblem, fleets, problem_from
from madmax_lib.planner.hetero.prices import MB_BYTES
from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.planner.hetero.stages import Grid
from madmax_lib.planner.hetero.sweep import Sweeper
from madmax_lib.planner.hetero.thresholds import Search
from madmax_lib.simulator.costs.schedules import turns
from madmax_lib.simulator.events.engine import Program, Stream, to_timeline
from madmax_lib.timeline import Meta, Timeline

_MOST_STAGES = 8  # in a repr
_IN_REPR = ["gpus", "types", "dp", "tp", "first_layer", "layers", "stage_ms"]
# share of forward and backward together: the backward pass multiplies twice as much
_FORWARD = 1 / 3
_FLOAT = "{:.4g}".format


@dataclass(frozen=True, eq=False, repr=False)
class Planned:
    """A plan with its cost; nothing is proven of it by default.

    costs: the plan, its problem, and what it is charged for in seconds.
    bound_ms: no plan of the search space costs less.
    stopped: whether the search was interrupted.
    sweeps: effort of the search.
    """

    costs: PlanCost
    bound_ms: float = 0.0
    stopped: bool = False
    sweeps: int = 0

    @classmethod
    def of(cls, plan: HeteroPlan | Mapping, problem: HeteroProblem) -> "Planned":
        """A plan of one's own, repaired as in `cost`, with its cost, terms and tables."""
        plan = HeteroPlan.read(plan).repaired(problem.prices.layers)
        return cls(PlanCost(plan, problem))

    def __repr__(self):
        samples = self.problem.rules.global_batch
        batches = self.plan.batches
        layers = self.problem.prices.layers
        headline = (
            f"{self.cost_ms:,.4g} ms for {samples:,} samples in {batches} "
            f"micro-batches, {layers} layers with ends"
        )
        if self.bound_ms and self.gap < 1e-6:
            headline += "; none is cheaper"
        elif self.bound_ms:
            headline += f"; the cheapest is at most {self.gap:.2%} below"
        if self.stopped:
            headline += "; interrupted, the best so far"
        table = self.stages[_IN_REPR]
        text = table.to_string(index=False, float_format=_FLOAT, max_rows=_MOST_STAGES)
        return f"{headline}\n{text}"

    @property
    def plan(self) -> HeteroPlan:
        """The plan itself."""
        return self.costs.plan

    @property
    def problem(self) -> HeteroProblem:
        """The problem that was searched."""
        return self.costs.problem

    @cached_property
    def cost_ms(self) -> float:
        """Cost of the plan, as `cost` gives it."""
        return 1e3 * self.costs.total_s()

    @property
    def gap(self) -> float:
        """Share of the cost that a better plan could save at most."""
        return 1 - self.bound_ms / self.cost_ms

    @cached_property
    def terms(self) -> dict[str, float]:
        """Terms of the cost in ms."""
        return {
            f"{name.removesuffix('_s')}_ms": 1e3 * float(value)
            for name, value in self.costs.terms().items()
        }

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per stage: ranks, GPU types, degrees, layers, samples of its
        replicas, its times.
        """
        costs = self.costs
        sends_s = costs.sends_s()
        rows = []
        for number, stage in enumerate(costs.stages):
            types = [costs.fleet.types[kind] for kind in stage.distinct_types]
            rows.append(
                {
                    "stage": number,
                    "first_rank": stage.start,
                    "gpus": stage.end - stage.start,
                    "types": "+".join(types),
                    "dp": stage.dp,
                    "tp": stage.tp,
                    "recompute": stage.recompute,
                    "first_layer": stage.layers.start,
                    "layers": stage.layer_count,
                    "least_samples": min(stage.samples),
                    "most_samples": max(stage.samples),
                    "stage_ms": 1e3 * costs.stage_s(stage),
                    "send_ms": 1e3 * sends_s[number],
                    "gradients_ms": 1e3 * costs.gradients_s(stage),
                    "optimizer_ms": 1e3 * costs.optimizer_s(stage),
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The fullest GPU of each type in each stage: stage, device, used_mb,
        capacity_mb.
        """
        table = self.costs.memory_table()
        used_mb = table["used_bytes"] / MB_BYTES
        capacity_mb = table["capacity_bytes"] / MB_BYTES
        return table[["stage", "device"]].assign(
            used_mb=used_mb, capacity_mb=capacity_mb
        )

    @property
    def provenance(self) -> dict:
        """Origin of a picture or timeline: the plan and its batch."""
        return {
            "plan": json.dumps(asdict(self.plan)),
            "global_batch": self.problem.rules.global_batch,
        }


def cost(
    plan: HeteroPlan | Mapping, problem: HeteroProblem | None = None, **inputs
) -> float:
    """The correct cost of a plan in ms: the one that `hetero.plan` minimises, infinite
    where a GPU lacks memory.

    plan: a HeteroPlan, or a mapping or table row with its fields, such as those that
    Metis proposes; one that loses layers or has empty stages is repaired first
    (`HeteroPlan.repaired`). problem: if None, that of the inputs of `hetero.problem`.
    Raises ValueError for a plan that does not fit cluster or batch, and for a missing
    profile.
    """
    return Planned.of(plan, problem_from(problem, inputs)).cost_ms


def as_json(planned: Planned) -> dict:
    """The plan for a launcher, plain values.

    stages: ranks with the types of their GPUs, degrees, layers (first, end), and samples
    of a micro-batch that each replica takes. Ranks count GPUs in the order of
    node_sequence.
    """
    plan = planned.plan
    fleet = planned.costs.fleet
    stages = []
    for number, stage in enumerate(planned.costs.stages):
        ranks = list(range(stage.start, stage.end))
        stages.append(
            {
                "stage": number,
                "ranks": ranks,
                "types": [fleet.types[kind] for kind in fleet.type_of(ranks)],
                "dp": stage.dp,
                "tp": stage.tp,
                "recompute": stage.recompute,
                "layers": [stage.layers.start, stage.layers.stop],
                "samples": stage.samples,
            }
        )
    return {
        "global_batch": planned.problem.rules.global_batch,
        "micro_batches": plan.batches,
        "cost_ms": planned.cost_ms,
        "node_sequence": list(plan.node_sequence),
        "world_size": fleet.size,
        "stages": stages,
    }


def save_plan(planned: Planned, path: str | Path) -> Path:
    """Write `as_json` to a file, whole or not at all."""
    write_text(path, json.dumps(as_json(planned), indent=1))
    return Path(path)


def timeline(planned: Planned) -> Timeline:
    """One simulated step: streams 0 compute, 2 gradients, 3 activations; a rank per
    stage, its first.
    """
    costs = planned.costs
    stages = costs.stages
    program = Program()
    last = _add_passes(program, planned)
    tied_s = costs.terms()["tied_s"]
    for number, stage in enumerate(stages):
        rank = stage.start
        after = [last[number]]
        if tied_s and number in (0, len(stages) - 1):
            # both ends add up the gradients of the table that they share
            after = [
                program.op(
                    Stream.PIPELINE,
                    "comm",
                    "all_reduce shared table",
                    tied_s,
                    [last[0], last[-1]],
                    rank=rank,
                    group="pp",
                )
            ]
        if stage.dp > 1:
            reduce_s = costs.gradients_s(stage)
            name = "all_reduce gradients"
            after.append(
                program.op(
                    Stream.DATA, "comm", name, reduce_s, after, rank=rank, group="dp"
                )
            )
        update_s = costs.optimizer_s(stage)
        program.op(Stream.COMPUTE, "compute", "optimizer", update_s, after, rank=rank)
    meta = Meta(
        source="simulated",
        world_size=costs.fleet.size,
        # a rank stands for all of its stage
        represents={
            stage.start: list(range(stage.start, stage.end)) for stage in stages
        },
        device="+".join(planned.plan.node_sequence),
        provenance=planned.provenance,
    )
    return to_timeline(program, meta)


def _add_passes(program, planned):
    """Add all passes of a step and their messages; the number of the last of each stage
    is returned.
    """
    costs = planned.costs
    stages = costs.stages
    pp = len(stages)
    generator_s = costs.generator_s(stages[0])
    sync_s = costs.sync_s(stages[-1])
    times_s = [costs.stage_s(stage) for stage in stages]
    sends_s = costs.sends_s()
    sends = {}  # numbers of messages by (stage, slot) of their sender
    last = [0] * pp
    for number, slot, message, _ in turns("1f1b", pp, planned.plan.batches):
        direction, _, batch = slot
        forward = direction == "forward"
        rank = stages[number].start
        if forward and number == 0 and generator_s:
            name = "batch generator"
            program.op(Stream.COMPUTE, "other", name, generator_s, rank=rank)
        pass_s = times_s[number] * (_FORWARD if forward else 1 - _FORWARD)
        if not forward and number == pp - 1:
            pass_s += sync_s  # the end of all passes of a micro-batch
        after = [sends[message]] if message else []
        name = f"{direction} {batch}"
        last[number] = program.op(
            Stream.COMPUTE, "compute", name, pass_s, after, rank=rank
        )
        # activations cross the border behind a stage, gradients the one before it
        border = number if forward else number - 1
        if 0 <= border < pp - 1:
            sends[number, slot] = program.op(
                Stream.PIPELINE,
                "comm",
                f"send {direction}",
                sends_s[border],
                [last[number]],
                rank=rank,
                group="pp",
            )
    return last


_EVERY_SIZE = 32  # GPUs up to which groups of every size are tried


def plan(
    problem: HeteroProblem | None = None,
    *,
    groups: Sequence[int] | None = None,
    gap: float = 1e-9,
    progress: bool = True,
    **inputs,
) -> Planned:
    """The cheapest plan over all orders of GPU types, stages, groups, (dp, tp), layer
    cuts and micro-batches.

    With at most 24 orders of the nodes all of these, so that stages of one type need
    not be neighbours.

    problem: if None, that of the inputs of `hetero.problem`, such as profiles, hostfile,
    clusterfile, layers and global_batch. groups: GPUs that a device group may
    have; if None any number up to 32 GPUs, beyond: powers of two, all of a type and
    all. gap: share of the cost within which the answer is proven; 1e-9 is exact. A
    KeyboardInterrupt returns the best plan so far. Raises ValueError for bad input, and
    where no plan is feasible, with the reason.
    """
    problem = problem_from(problem, inputs)
    if not 1e-12 <= require_number("gap", gap) < 1:
        raise ValueError(f"gap={gap} is not in 1e-12..1")
    gpus = problem.fleets[0].size
    sizes = require_type("groups", groups, Sequence, lambda: _default_sizes(problem))
    if not sizes or not all(is_whole(size, 1) for size in sizes) or max(sizes) > gpus:
        raise ValueError(
            f"groups={list(sizes)} must be sizes from 1 to the {gpus} GPUs of the "
            "cluster"
        )
    grid = Grid(gpus, sizes, problem.prices)
    # Activations of one micro-batch in flight bound those of all from below: if the
    # best plan fits with all of them too, it is the best of the problem.
    best = _search(problem, grid, gap, progress, deep=False)
    if best.chain is not None and not PlanCost(best.chain.plan, problem).fits():
        best = _search(problem, grid, gap, progress, deep=True)
    if best.chain is None:
        if best.stopped:
            raise KeyboardInterrupt("interrupted before a first plan was found")
        raise ValueError(_reason(problem, grid, gap))
    costs = PlanCost(best.chain.plan, problem)
    return Planned(
        costs,
        # rounding may put the bound a bit above the cost
        bound_ms=1e3 * min(best.bound_s, costs.total_s()),
        stopped=best.stopped,
        sweeps=best.sweeps,
    )


def alone(best: Planned) -> pd.DataFrame:
    """The best plan of each GPU type alone, and last the given one of all: types, gpus,
    cost_ms, stages, plan, reason.

    Where no plan is feasible cost_ms is infinite and reason says why.
    """
    problem = best.problem
    types = problem.fleets[0].types

    def row(names, gpus, planned, reason=""):
        return {
            "types": names,
            "gpus": gpus,
            "cost_ms": planned.cost_ms if planned else math.inf,
            "stages": len(planned.stages) if planned else 0,
            "plan": planned,
            "reason": reason,
        }

    rows = []
    for name in types:
        nodes = tuple(node for node in problem.nodes if node.device == name)
        part = replace(problem, nodes=nodes, fleets=tuple(fleets(nodes)))
        gpus = part.fleets[0].size
        try:
            rows.append(row(name, gpus, plan(part, progress=False)))
        except ValueError as error:
            rows.append(row(name, gpus, None, str(error)))
    rows.append(row("+".join(types), problem.fleets[0].size, best))
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = best.provenance
    return table


def _default_sizes(problem):
    """Sizes of groups: on few GPUs all; else those of a type, all, and powers of two from
    the smaller of a node and the mean group of stages of one layer, as Metis has them.
    """
    fleet = problem.fleets[0]
    layers = problem.prices.layers
    if fleet.size <= _EVERY_SIZE:
        return list(range(1, fleet.size + 1))
    least = min(*(node.gpus for node in problem.nodes), max(fleet.size // layers, 1))
    powers = [1 << k for k in range(fleet.size.bit_length()) if 1 << k >= least]
    return sorted({*powers, *np.diff(fleet.ends, prepend=0).tolist(), fleet.size})


def _search(problem, grid, gap, progress, *, deep):
    """Search over all orders of types and numbers of micro-batches.

    deep: activations of all micro-batches in flight count; else of one, which bounds
    the cost from below.
    """
    most_stages = min(grid.layers, problem.fleets[0].size // int(grid.sizes[0]))
    spaces = []
    for batches, fleet in problem.spaces():
        # a stage has as many micro-batches in flight as stages are left, at most all
        levels = min(batches, most_stages) if deep else 1
        sweeper = partial(Sweeper, problem, grid, batches, fleet, levels)
        # how often each maximum counts: periods, gradients, optimizer
        spaces.append((sweeper, np.array([batches - 1.0, 1.0, 1.0])))
    with bar(desc="planning", unit="sweep", show=progress) as done:

        def tick(search):
            done.update()
            done.set_postfix(best_ms=f"{1e3 * search.cost_s:.6g}", refresh=False)

        return Search(spaces, gap, tick).run()


def _reason(problem, grid, gap):
    """Why no plan is feasible: what memory the fastest plan lacks and where, or that none
    is covered at all.
    """
    rules = replace(problem.rules, memory_factor=0)
    best = _search(replace(problem, rules=rules), grid, gap, False, deep=False)
    if best.chain is None:
        prices = problem.prices
        names = sorted({key[0] for key in prices.table})
        there = ". ".join(f"{name}: {prices.covered(name)}" for name in names)
        return (
            "no feasible plan: no groups, degrees and micro-batches are covered "
            f"by the profiles ({there})"
        )
    fastest = best.chain.plan
    table = PlanCost(fastest, problem).memory_table()
    worst = table.loc[(table["used_bytes"] - table["capacity_bytes"]).idxmax()]
    lacking_bytes = worst["used_bytes"] - worst["capacity_bytes"]
    return (
        f"no feasible plan: the fastest lacks {lacking_bytes / MB_BYTES:.0f} MB on a "
        f"{worst['device']} of {worst['capacity_bytes'] / MB_BYTES:.0f} MB, in stage "
        f"{worst['stage']} of "
        f"{len(fastest.device_groups)} with {fastest.batches} micro-batches"
    )
