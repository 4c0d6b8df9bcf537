"""What has a planner found? The front of time and memory, the best plans, trials of a
tuning, a mixed fleet.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.view import drawing as draw

__all__ = [
    "plot_front",
    "plot_parallel",
    "plot_stage_memory",
    "plot_stages",
    "plot_trials",
]

_CHOICES = ("tp", "pp", "dp", "cp", "zero", "micro_batch", "interleave")
_RECOMPUTE = {
    "none": {"color": draw.COLORS["compute"], "ls": "-"},
    "selective": {"color": draw.COLORS["memcpy"], "ls": "--"},
    "full": {"color": draw.COLORS["comm"], "ls": ":"},
}


def plot_front(pareto: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """The plans that no other one beats in time and memory. room_bytes: memory of a
    device.
    """
    ax = ax or draw.new_axes(height=4.0)
    table = pareto[["plan", "step_s", "memory_bytes"]].reset_index(drop=True)
    room_gb = room_bytes / 1e9
    style = {
        "marker": "o",
        "ms": 4,
        "mfc": "white",
        "lw": 0.8,
        "drawstyle": "steps-post",
    }
    draw.lines(
        ax,
        table,
        "memory_bytes",
        "step_s",
        units=(1e9, 1),
        color=draw.COLORS["compute"],
        **style,
    )
    ax.axvline(room_gb, **draw.DASHED)
    style = {"ha": "right", "va": "top", "rotation": 90, "fontsize": 7}
    ax.text(
        room_gb,
        0.98,
        "memory of a device ",
        transform=ax.get_xaxis_transform(),
        **style,
    )
    for row in table.loc[
        sorted({0, len(table) // 2, len(table) - 1} & set(table.index))
    ].itertuples():
        right = row.memory_bytes > 0.6 * room_bytes
        place = {"dx": 0, "dy": -10, "ha": "right"} if right else {"dx": 6, "dy": 8}
        draw.note(ax, row.memory_bytes / 1e9, row.step_s, row.plan, **place)
    title = "No plan fits"
    step_s = table["step_s"]
    memory_gb = table["memory_bytes"] / 1e9
    if len(table):
        ax.set_ylim(0.5 * step_s.min(), 1.3 * step_s.max())
        longer = (
            step_s[memory_gb <= (less := memory_gb.agg(["min", "max"]).mean())].min()
            / step_s.min()
            - 1
        )
        title = (
            f"Within {less:.0f} GB instead of {memory_gb.max():.0f} the step "
            f"takes {longer:.0%} longer"
        )
    x = "memory of the fullest device [GB]"
    y = "simulated step [s]"
    return draw.finish(
        ax, table, title, x=x, y=y, reach=room_gb * 1.05, origin=pareto, yscale="log"
    )


def plot_parallel(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The choices of the best plans as lines from axis to axis, the best thick; colour
    and dashes: recompute.
    """
    ax = ax or draw.new_axes(height=4.0, width=8.0)
    shown = table[[*_CHOICES, "recompute", "step_s"]].reset_index(drop=True)
    ranks = shown[list(_CHOICES)].rank(method="dense") - 1
    heights = ranks / ranks.max().clip(lower=1)
    shift = 0.03 * (shown.index.to_numpy() / max(len(shown) - 1, 1) - 0.5)
    for place in shown.index[::-1]:
        weight = {"lw": 3} if place == 0 else {"lw": 0.9, "alpha": 0.6}
        ax.plot(
            heights.loc[place].to_numpy() + shift[place],
            **_RECOMPUTE[shown["recompute"][place]],
            **weight,
        )
    for number, name in enumerate(_CHOICES):
        for value, height in dict(zip(shown[name], heights[name], strict=True)).items():
            draw.note(ax, number, height, str(value), dx=5, box=True, fontsize=8)
    ax.set_xticks(range(len(_CHOICES)), [name.replace("_", "-") for name in _CHOICES])
    kinds = [kind for kind in _RECOMPUTE if kind in set(shown["recompute"])]
    key = [draw.line_key(f"recompute {kind}", **_RECOMPUTE[kind]) for kind in kinds]
    within = shown["step_s"].max() / shown["step_s"].min() - 1
    title = f"The best {len(shown)} plans are within {within:.1%} of each other"
    limits = {"yticks": [], "xlim": (-0.2, len(_CHOICES) - 0.5), "ylim": (-0.15, 1.15)}
    return draw.finish(ax, shown, title, key=key, origin=table, **limits)


def plot_trials(step_s: Mapping[str, pd.Series], ax: Axes | None = None) -> Axes:
    """How much slower than the best of all the best plan so far is, by trial, for
    several orders of trying plans.

    step_s: by name of the order, seconds of its trials, NaN for a plan that failed;
    until one ran there is no line.
    """
    ax = ax or draw.new_axes(height=3.4)
    parts = [
        pd.DataFrame({"order": name, "step_s": part.to_numpy()})
        for name, part in step_s.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    orders = table.groupby("order", sort=False)
    table.insert(1, "trial", orders.cumcount() + 1)
    soonest = orders["step_s"].transform(lambda part: part.cummin().ffill())
    table["slower"] = soonest / table["step_s"].min() - 1
    styles = dict(zip(step_s, draw.SERIES, strict=False))
    labels = {name: name for name in step_s}
    style = {
        "styles": styles,
        "labels": labels,
        "units": (1, 0.01),
        "drawstyle": "steps-post",
        "lw": 1.5,
    }
    draw.lines(ax, table, "trial", "slower", by="order", **style)
    ax.axhline(5, **draw.DASHED)
    draw.legend(ax)
    close = table[table["slower"] <= 0.05].groupby("order")["trial"].min()
    counts = ", ".join(
        f"{name} {close[name]}" if name in close else f"{name} never" for name in step_s
    )
    ticks = [
        tick
        for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500)
        if tick <= table["trial"].max()
    ]
    limits = {
        "xscale": "log",
        "xticks": ticks,
        "xticklabels": ticks,
        "ylim": (-1, min(105 * table["slower"].max(), 50)),
    }
    ending = {
        "x": "trials",
        "y": "best so far slower than the best [%]",
        "origin": parts[0],
        **limits,
    }
    return draw.finish(
        ax, table, f"Trials until within 5 % of the best: {counts}", **ending
    )


def plot_stages(planned: Planned, ax: Axes | None = None) -> Axes:
    """Which ranks hold which layers: a block per stage, its colour the GPU type, mixed
    groups in two.
    """
    table = planned.stages
    fleet = planned.costs.fleet
    ax = ax or draw.new_axes(height=1.4 + 0.34 * len(table))
    rows = []
    for row in table.itertuples():
        kinds = fleet.type_of(np.arange(row.first_rank, row.first_rank + row.gpus))
        for kind in np.unique(kinds):
            ranks = row.first_rank + np.flatnonzero(kinds == kind)
            color = _color(fleet.types[kind], fleet.types)
            draw.bars(
                ax, [len(ranks)], color, places=[row.stage], left=ranks[0], height=0.8
            )
        again = "" if row.recompute == "none" else f" · recompute {row.recompute}"
        rows.append(
            f"stage {row.stage}: {draw.plural(row.layers, 'layer')}, dp {row.dp} · "
            f"tp {row.tp}{again}"
        )
    key = {name: _color(name, fleet.types) for name in fleet.types}
    stages = draw.plural(len(table), "stage")
    batches = planned.plan.batches
    title = (
        f"{stages} on {fleet.size} GPUs, {batches} micro-batches: "
        f"{planned.cost_ms:,.0f} ms"
    )
    ending = {
        "x": "rank",
        "rows": rows,
        "reach": fleet.size,
        "key": key,
        "origin": planned.provenance,
    }
    return draw.finish(ax, table, title, **ending)


def plot_stage_memory(planned: Planned, ax: Axes | None = None) -> Axes:
    """Memory of the fullest GPU of each stage and type beside what it has."""
    table = planned.memory
    types = planned.costs.fleet.types
    colors = [_color(name, types) for name in table["device"]]
    share = table["used_mb"] / table["capacity_mb"]
    ax = ax or draw.new_axes(height=1.2 + 0.3 * len(table), width=6.0)
    outlines = [{"facecolor": "none", "edgecolor": color} for color in colors]
    draw.bars(
        ax, table["capacity_mb"] / 1024, outlines, notes=share.map("{:.0%}".format)
    )
    draw.bars(ax, table["used_mb"] / 1024, colors, source="simulated")
    rows = [f"stage {row.stage} · {row.device}" for row in table.itertuples()]
    title = (
        f"The fullest GPU, {rows[share.argmax()]}, needs {share.max():.0%} of "
        "its memory"
    )
    x = "memory of one GPU [GiB]: needed (hatched) of what it has (outline)"
    return draw.finish(ax, table, title, x=x, rows=rows, origin=planned.provenance)


def _color(name: str, types: tuple[str, ...]) -> str:
    """The same for a type whatever its place in the plan."""
    return draw.SERIES[sorted(types).index(name) % len(draw.SERIES)]
