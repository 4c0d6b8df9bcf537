"""Pictures of what a planner has found: the front of time and memory, stages of a
mixed fleet.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    DASHED,
    GIB,
    SERIES,
    bars,
    finish,
    lines,
    new_axes,
    note,
    plural,
)

if TYPE_CHECKING:
    from madmax_lib.planner.hetero.planned import Planned


_SLOWEST = 5  # of the fastest step: slower plans of a front are not drawn


def plot_front(pareto: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """The plans that no other one beats in time and memory, up to five times the
    fastest step, which is as launched where no software was named. room_bytes: memory of
    a device.
    """
    ax = ax or new_axes(height=4.0)
    pareto = pareto.assign(step_s=pareto.get("launched_s", pareto["step_s"]))
    table = pareto[["plan", "step_s", "memory_bytes"]].reset_index(drop=True)
    points = table.assign(memory_gib=table["memory_bytes"] / GIB)
    # plans that save the last bytes may take a thousand times as long
    near = points[points["step_s"] <= _SLOWEST * points["step_s"].min()]
    look = {"lw": 0.8, "drawstyle": "steps-post", "marker": "o", "mec": SERIES[0]}
    lines(ax, near, "memory_gib", "step_s", color=SERIES[0], **look)
    room_gib = room_bytes / GIB
    ax.axvline(room_gib, **DASHED)
    title = "No plan fits"
    if len(near):
        step_s = near["step_s"]
        reach_s = 1.1 * step_s.max()
        ax.set_ylim(0, reach_s)
        left = {"dx": -4, "ha": "right"}
        note(ax, room_gib, 0.08 * reach_s, f"a device: {room_gib:.0f} GiB", **left)
        # the first, the middle and the last plan have room for their names
        for number in sorted({0, len(near) // 2, len(near) - 1}):
            row = near.iloc[number]
            side = {"dx": 6, "dy": 8}
            if row["memory_gib"] > 0.6 * room_gib:
                side = {"dx": 0, "dy": -10, "ha": "right"}
            note(ax, row["memory_gib"], row["step_s"], row["plan"], **side)
        # with half of what the front spans, how much slower is the fastest?
        most_gib = points["memory_gib"].max()
        less_gib = (points["memory_gib"].min() + most_gib) / 2
        within_s = points.loc[points["memory_gib"] <= less_gib, "step_s"].min()
        title = (
            f"Within {less_gib:.0f} GiB instead of {most_gib:.0f} the step takes "
            f"{within_s / step_s.min() - 1:.0%} longer"
        )
    slower = len(points) - len(near)
    x = "memory of the fullest device [GiB]"
    x += f"; {plural(slower, 'slower plan')} left out"
    y = "simulated step [s]"
    return finish(ax, table, title, x=x, y=y, reach=room_gib * 1.02)


def plot_stages(planned: "Planned", ax: Axes | None = None) -> Axes:
    """Ranks and layers of each stage: a block per stage, its colour the GPU type, mixed
    groups in two.
    """
    table = planned.stages
    fleet = planned.costs.fleet
    ax = ax or new_axes(height=1.4 + 0.34 * len(table))
    rows = []
    for stage in table.itertuples():
        types = fleet.type_of(
            np.arange(stage.first_rank, stage.first_rank + stage.gpus)
        )
        # a stage on GPUs of two types is two blocks
        for kind in np.unique(types):
            ranks = stage.first_rank + np.flatnonzero(types == kind)
            bars(
                ax,
                [len(ranks)],
                fill=_color(fleet.types[kind], fleet.types),
                places=[stage.stage],
                left=ranks[0],
                height=0.8,
            )
        layers = plural(stage.layers, "layer")
        text = f"stage {stage.stage}: {layers}, dp {stage.dp} · tp {stage.tp}"
        if stage.recompute != "none":
            text += f" · recompute {stage.recompute}"
        rows.append(text)
    return finish(
        ax,
        table,
        f"{plural(len(table), 'stage')} on {fleet.size} GPUs, "
        f"{planned.plan.batches} micro-batches: {planned.cost_ms:,.0f} ms",
        x="rank",
        rows=rows,
        reach=fleet.size,
        key={name: _color(name, fleet.types) for name in fleet.types},
        origin=planned.provenance,
    )


def _color(name, types):
    """The same for a type wherever it stands in the plan."""
    return SERIES[sorted(types).index(name) % len(SERIES)]
