"""How is a model spread over GPUs of several types? Pictures of `planner.hetero`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.view import drawing as draw

__all__ = ["plot_alone", "plot_stage_memory", "plot_stages"]


def plot_stages(planned: Planned, ax: Axes | None = None) -> Axes:
    """Which ranks hold which layers: a block per stage, its colour the GPU type, mixed groups in two."""
    table, fleet = planned.stages, planned.problem.fleet(planned.plan.node_sequence)
    ax = ax or draw.new_axes(height=1.4 + 0.34 * len(table))
    for row in table.itertuples():
        kinds = fleet.type_of(np.arange(row.first_rank, row.first_rank + row.gpus))
        for kind in np.unique(kinds):
            ranks = row.first_rank + np.flatnonzero(kinds == kind)
            color = _color(fleet.types[kind], fleet.types)
            draw.bars(ax, [len(ranks)], color, places=[row.stage], left=ranks[0], height=0.8)
        text = f"dp {row.dp} · tp {row.tp} · {draw.plural(row.layers, 'layer')}"
        text += "" if row.recompute == "none" else f" · recompute {row.recompute}"
        if len(table) == 1:
            draw.note(ax, fleet.size / 2, row.stage, text, dx=0, ha="center", color="white")
        elif row.first_rank + row.gpus / 2 < fleet.size / 2:
            draw.note(ax, row.first_rank + row.gpus, row.stage, text)
        else:
            draw.note(ax, row.first_rank, row.stage, text, dx=-4, ha="right")
    key = {name: _color(name, fleet.types) for name in fleet.types}
    stages, batches = draw.plural(len(table), "stage"), planned.plan.batches
    title = f"{stages} on {fleet.size} GPUs, {batches} micro-batches: {planned.cost_ms:,.0f} ms"
    ending = {"rows": [f"stage {stage}" for stage in table["stage"]], "reach": fleet.size, "key": key}
    return draw.finish(ax, table, title, x="rank", origin=planned.provenance, **ending)


def plot_stage_memory(planned: Planned, ax: Axes | None = None) -> Axes:
    """Memory of the fullest GPU of each stage and type beside what it has."""
    table, types = planned.memory, planned.problem.fleet(planned.plan.node_sequence).types
    colors, share = [_color(name, types) for name in table["device"]], table["used_mb"] / table["capacity_mb"]
    ax = ax or draw.new_axes(height=1.2 + 0.3 * len(table), width=6.0)
    outlines = [{"facecolor": "none", "edgecolor": color} for color in colors]
    draw.bars(ax, table["capacity_mb"] / 1024, outlines, notes=share.map("{:.0%}".format))
    draw.bars(ax, table["used_mb"] / 1024, colors, source="simulated")
    rows = [f"stage {row.stage} · {row.device}" for row in table.itertuples()]
    title = f"The fullest GPU, {rows[share.argmax()]}, needs {share.max():.0%} of its memory"
    x = "memory of one GPU [GiB]: needed (hatched) of what it has (outline)"
    return draw.finish(ax, table, title, x=x, rows=rows, origin=planned.provenance)


def plot_alone(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Cost of the best plan of each GPU type alone and of all, see `hetero.alone`."""
    cost_ms = table["cost_ms"].where(np.isfinite(table["cost_ms"]))
    notes = cost_ms.map("{:,.0f} ms".format).where(cost_ms.notna(), "no feasible plan")
    title = "No plan is feasible"
    if cost_ms.notna().any():
        title = f"Cheapest: {table['types'][cost_ms.idxmin()]}, {cost_ms.min():,.0f} ms"
    ending = {"rows": [f"{row.gpus} GPUs · {row.types}" for row in table.itertuples()], "origin": table}
    ending |= {"notes": notes, "x": "cost of the best plan [ms per step]", "source": "simulated"}
    return draw.bar_chart(ax, table.drop(columns="plan"), cost_ms.fillna(0), title, **ending)


def _color(name: str, types: tuple[str, ...]) -> str:
    """The same for a type whatever its place in the plan."""
    return draw.SERIES[sorted(types).index(name) % len(draw.SERIES)]
