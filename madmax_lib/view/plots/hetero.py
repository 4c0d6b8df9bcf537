"""How is a model spread over GPUs of several types? Pictures of `planner.hetero`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.view.drawing import SERIES, bars, finish, new_axes, note, patch_key, plural

__all__ = ["plot_alone", "plot_stage_memory", "plot_stages"]


def plot_stages(planned: Planned, ax: Axes | None = None) -> Axes:
    """Which ranks hold which layers: a block per stage, its colour the GPU type, mixed groups in two."""
    table, fleet = planned.stages, planned.problem.fleet(planned.plan.node_sequence)
    ax = ax or new_axes(height=1.4 + 0.34 * len(table))
    for row in table.itertuples():
        kinds = fleet.type_of(np.arange(row.first_rank, row.first_rank + row.gpus))
        for kind in np.unique(kinds):
            ranks = row.first_rank + np.flatnonzero(kinds == kind)
            color = _color(fleet.types[kind], fleet.types)
            bars(ax, [len(ranks)], color, places=[row.stage], left=ranks[0], height=0.8)
        text = f"dp {row.dp} · tp {row.tp} · {plural(row.layers, 'layer')}"
        text += "" if row.recompute == "none" else f" · recompute {row.recompute}"
        if len(table) == 1:
            note(ax, fleet.size / 2, row.stage, text, dx=0, ha="center", color="white")
        elif row.first_rank + row.gpus / 2 < fleet.size / 2:
            note(ax, row.first_rank + row.gpus, row.stage, text)
        else:
            note(ax, row.first_rank, row.stage, text, dx=-4, ha="right")
    key = [patch_key(name, _color(name, fleet.types)) for name in fleet.types]
    stages, batches = plural(len(table), "stage"), planned.plan.batches
    title = f"{stages} on {fleet.size} GPUs, {batches} micro-batches: {planned.cost_ms:,.0f} ms"
    rows = [f"stage {stage}" for stage in table["stage"]]
    source = planned.provenance
    return finish(ax, table, title, x="rank", rows=rows, reach=fleet.size, key=key, origin=source)


def plot_stage_memory(planned: Planned, ax: Axes | None = None) -> Axes:
    """Memory of the fullest GPU of each stage and type beside what it has."""
    table, types = planned.memory, planned.problem.fleet(planned.plan.node_sequence).types
    ax = ax or new_axes(height=1.2 + 0.3 * len(table), width=6.0)
    colors, share = [_color(name, types) for name in table["device"]], table["used_mb"] / table["capacity_mb"]
    outlines = [{"facecolor": "none", "edgecolor": color} for color in colors]
    bars(ax, table["capacity_mb"] / 1024, outlines, notes=share.map("{:.0%}".format))
    bars(ax, table["used_mb"] / 1024, colors, source="simulated")
    fullest = table.loc[share.idxmax()]
    title = f"Stage {fullest['stage']} on {fullest['device']} is the fullest: {share.max():.0%}"
    rows = [f"stage {row.stage} · {row.device}" for row in table.itertuples()]
    x, reach = "memory of one GPU [GiB]: needed (hatched) of what it has (outline)", table["capacity_mb"].max() / 1024
    return finish(ax, table, title, x=x, rows=rows, reach=1.12 * reach, origin=planned.provenance)


def plot_alone(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Cost of the best plan of each GPU type alone and of all, see `hetero.alone`."""
    ax = ax or new_axes(height=1.0 + 0.4 * len(table), width=6.0)
    cost_ms = table["cost_ms"].where(np.isfinite(table["cost_ms"]))
    notes = cost_ms.map("{:,.0f} ms".format).where(cost_ms.notna(), "no feasible plan")
    bars(ax, cost_ms.fillna(0), source="simulated", notes=notes)
    rows = [f"{row.gpus} GPUs · {row.types}" for row in table.itertuples()]
    title, reach = _verdict(table, table["types"].iloc[-1]), 1.15 * cost_ms.max() if cost_ms.notna().any() else 1
    x = "cost of the best plan [ms per step]"
    return finish(ax, table.drop(columns="plan"), title, x=x, rows=rows, reach=reach, origin=table)


def _verdict(table: pd.DataFrame, every: str) -> str:
    alone, together = (table.loc[part, "cost_ms"].min() for part in (table["types"] != every, table["types"] == every))
    if not np.isfinite(together):
        return "The types together have no feasible plan"
    if not np.isfinite(alone):
        return "No type is enough alone, together they are"
    change = together / alone - 1
    return f"All types together take {abs(change):.0%} {'less' if change < 0 else 'more'} time than the best one alone"


def _color(name: str, types: tuple[str, ...]) -> str:
    """The same for a type whatever its place in the plan."""
    return SERIES[sorted(types).index(name) % len(SERIES)]
