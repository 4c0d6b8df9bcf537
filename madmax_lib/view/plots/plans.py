"""Pictures of what a planner has found: the front of time and memory, the best plans,
trials of a tuning, a mixed fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    COLORS,
    DASHED,
    SERIES,
    WHITE,
    bars,
    finish,
    line_key,
    lines,
    new_axes,
    note,
    plural,
)

if TYPE_CHECKING:
    from madmax_lib.planner.hetero.planned import Planned


_CHOICES = ("tp", "pp", "dp", "cp", "zero", "micro_batch", "interleave")
_RECOMPUTE = {
    "none": {"color": COLORS["compute"], "ls": "-"},
    "selective": {"color": COLORS["memcpy"], "ls": "--"},
    "full": {"color": COLORS["comm"], "ls": ":"},
}
_CLOSE = 0.05  # of the best step: as near as this is found
_TRIALS = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # ticks
_SPREAD = 0.03  # of the axis, over which lines that coincide are shifted


def plot_front(pareto: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """The plans that no other one beats in time and memory. room_bytes: memory of a
    device.
    """
    ax = ax or new_axes(height=4.0)
    table = pareto[["plan", "step_s", "memory_bytes"]].reset_index(drop=True)
    room_gb = room_bytes / 1e9
    memory_gb = table["memory_bytes"] / 1e9
    step_s = table["step_s"]
    ax.plot(
        memory_gb,
        step_s,
        color=COLORS["compute"],
        lw=0.8,
        drawstyle="steps-post",
        marker="o",
        ms=4,
        mfc="white",
    )
    ax.axvline(room_gb, **DASHED)
    # x in GB, y in shares of the axes
    text = {"transform": ax.get_xaxis_transform(), "rotation": 90, "fontsize": 7}
    ax.text(room_gb, 0.98, "memory of a device ", ha="right", va="top", **text)
    # the first, the middle and the last plan have room for their names
    rows = {0, len(table) // 2, len(table) - 1} & set(table.index)
    for row in table.loc[sorted(rows)].itertuples():
        side = {"dx": 6, "dy": 8}
        if row.memory_bytes > 0.6 * room_bytes:
            side = {"dx": 0, "dy": -10, "ha": "right"}
        note(ax, row.memory_bytes / 1e9, row.step_s, row.plan, **side)
    title = "No plan fits"
    if len(table):
        ax.set_ylim(0.5 * step_s.min(), 1.3 * step_s.max())
        # with half of what the front spans, how much slower is the fastest?
        less_gb = (memory_gb.min() + memory_gb.max()) / 2
        longer = step_s[memory_gb <= less_gb].min() / step_s.min() - 1
        title = (
            f"Within {less_gb:.0f} GB instead of {memory_gb.max():.0f} the step "
            f"takes {longer:.0%} longer"
        )
    return finish(
        ax,
        table,
        title,
        x="memory of the fullest device [GB]",
        y="simulated step [s]",
        reach=room_gb * 1.05,
        yscale="log",
    )


def plot_parallel(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The choices of the best plans as lines from axis to axis, the best thick; colour
    and dashes: recompute.
    """
    ax = ax or new_axes(height=4.0, width=8.0)
    best = table[[*_CHOICES, "recompute", "step_s"]].reset_index(drop=True)
    # the values of each choice at equal distances from 0 to 1
    ranks = best[list(_CHOICES)].rank(method="dense") - 1
    heights = ranks / ranks.max().clip(lower=1)
    shift = _SPREAD * (best.index.to_numpy() / max(len(best) - 1, 1) - 0.5)
    for row in best.index[::-1]:  # the best one on top
        weight = {"lw": 3} if row == 0 else {"lw": 0.9, "alpha": 0.6}
        style = _RECOMPUTE[best["recompute"][row]]
        ax.plot(heights.loc[row].to_numpy() + shift[row], **style, **weight)
    # each value of a choice is written once, where its lines pass
    for number, name in enumerate(_CHOICES):
        labels = dict(zip(best[name], heights[name], strict=True))
        for value, height in labels.items():
            style = {"dx": 5, "fontsize": 8, "bbox": WHITE}
            note(ax, number, height, str(value), **style)
    ax.set_xticks(range(len(_CHOICES)), [name.replace("_", "-") for name in _CHOICES])
    ax.set_yticks([])
    # only what occurs has an entry
    kinds = [kind for kind in _RECOMPUTE if kind in set(best["recompute"])]
    within = best["step_s"].max() / best["step_s"].min() - 1
    return finish(
        ax,
        best,
        f"The best {len(best)} plans are within {within:.1%} of each other",
        xlim=(-0.2, len(_CHOICES) - 0.5),
        ylim=(-0.15, 1.15),
        key=[line_key(f"recompute {kind}", **_RECOMPUTE[kind]) for kind in kinds],
    )


def plot_trials(step_s: Mapping[str, pd.Series], ax: Axes | None = None) -> Axes:
    """Distance of the best plan so far from the best of all, by trial, for several
    orders of trying plans.

    step_s: by name of the order, seconds of its trials, NaN for a plan that failed;
    until one ran there is no line.
    """
    ax = ax or new_axes(height=3.4)
    parts = [
        pd.DataFrame({"order": name, "step_s": part.to_numpy()})
        for name, part in step_s.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    # numbered from 1 within each order
    orders = table.groupby("order", sort=False)
    table.insert(1, "trial", orders.cumcount() + 1)
    # a trial that failed is no progress, but costs a trial
    best_so_far_s = orders["step_s"].transform(lambda part: part.cummin().ffill())
    table["slower"] = best_so_far_s / table["step_s"].min() - 1
    lines(
        ax,
        table,
        "trial",
        "slower",
        by="order",
        styles=dict(zip(step_s, SERIES, strict=False)),
        labels={name: name for name in step_s},
        units=(1, 0.01),
        drawstyle="steps-post",
        lw=1.5,
    )
    ax.axhline(100 * _CLOSE, **DASHED)
    first_close = table[table["slower"] <= _CLOSE].groupby("order")["trial"].min()
    counts = ", ".join(f"{name} {first_close.get(name, 'never')}" for name in step_s)
    ticks = [tick for tick in _TRIALS if tick <= table["trial"].max()]
    ax.set_xscale("log")
    ax.set_xticks(ticks, ticks)
    return finish(
        ax,
        table,
        f"Trials until within 5 % of the best: {counts}",
        x="trials",
        y="best so far slower than the best [%]",
        where="below",
        ylim=(-1, min(105 * table["slower"].max(), 50)),
        origin=parts[0],
    )


def plot_stages(planned: Planned, ax: Axes | None = None) -> Axes:
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


def plot_stage_memory(planned: Planned, ax: Axes | None = None) -> Axes:
    """Memory of the fullest GPU of each stage and type beside what it has."""
    table = planned.memory
    types = planned.costs.fleet.types
    colors = [_color(name, types) for name in table["device"]]
    share = table["used_mb"] / table["capacity_mb"]
    ax = ax or new_axes(height=1.2 + 0.3 * len(table), width=6.0)
    outlines = [{"facecolor": "none", "edgecolor": color} for color in colors]
    bars(
        ax,
        table["capacity_mb"] / 1024,
        fill=outlines,
        notes=share.map("{:.0%}".format),
    )
    bars(ax, table["used_mb"] / 1024, fill=colors, source="simulated")
    rows = [f"stage {row.stage} · {row.device}" for row in table.itertuples()]
    fullest = rows[share.argmax()]
    return finish(
        ax,
        table,
        f"The fullest GPU, {fullest}, needs {share.max():.0%} of its memory",
        x="memory of one GPU [GiB]: needed (hatched) of what it has (outline)",
        rows=rows,
        origin=planned.provenance,
    )


def _color(name, types):
    """The same for a type wherever it stands in the plan."""
    return SERIES[sorted(types).index(name) % len(SERIES)]
