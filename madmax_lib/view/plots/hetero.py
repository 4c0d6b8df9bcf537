"""How is a model spread over GPUs of several types? Pictures of `planner.hetero`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.view.drawing import fill_of, keep_data, new_axes

__all__ = ["plot_alone", "plot_stage_memory", "plot_stages"]

_TYPES = ("#3b75af", "#e1812c", "#529d3f", "#8d6bb8", "#c44e52", "#937860")  # GPU types in alphabetical order


def plot_stages(planned: Planned, ax: Axes | None = None) -> Axes:
    """Which ranks hold which layers: a block per stage, its colour the GPU type, mixed groups in two."""
    table, fleet = planned.stages, planned.problem.fleet(planned.plan.node_sequence)
    ax = ax or new_axes(height=1.4 + 0.34 * len(table), width=7.0)
    for row in table.itertuples():
        kinds = fleet.type_of(np.arange(row.first_rank, row.first_rank + row.gpus))
        for kind in np.unique(kinds):
            ranks = row.first_rank + np.flatnonzero(kinds == kind)
            color = _color(fleet.types[kind], fleet.types)
            ax.add_patch(Rectangle((ranks[0], row.stage - 0.4), len(ranks), 0.8, color=color, lw=0))
        text = f"dp {row.dp} · tp {row.tp} · {_layers(row)}"
        text += "" if row.recompute == "none" else f" · recompute {row.recompute}"
        right = row.first_rank + row.gpus / 2 < fleet.size / 2
        edge = row.first_rank + row.gpus if right else row.first_rank
        ax.annotate(text, (edge, row.stage), (4 if right else -4, 0), textcoords="offset points", va="center",
                    ha="left" if right else "right", fontsize=7)  # fmt: skip
    ax.set(xlim=(0, fleet.size), ylim=(len(table) - 0.45, -0.55), xlabel="rank")
    if len(table) == 1:
        ax.texts[0].set(position=(0, 0), ha="center", color="white")
        ax.texts[0].xy = (fleet.size / 2, 0)
    ax.set_yticks(range(len(table)), [f"stage {stage}" for stage in table["stage"]])
    _type_legend(ax, fleet.types)
    ax.set_title(f"{_stages(len(table))} on {fleet.size} GPUs, {planned.plan.batches} micro-batches: "
                 f"{planned.cost_ms:,.0f} ms")  # fmt: skip
    return keep_data(ax, _with_origin(table, planned))


def plot_stage_memory(planned: Planned, ax: Axes | None = None) -> Axes:
    """Memory of the fullest GPU of each stage and type beside what it has."""
    table, types = planned.memory, planned.problem.fleet(planned.plan.node_sequence).types
    ax = ax or new_axes(height=1.2 + 0.3 * len(table), width=6.0)
    for place, row in enumerate(table.itertuples()):
        color = _color(row.device, types)
        ax.barh(place, row.capacity_mb / 1024, height=0.7, facecolor="none", edgecolor=color)
        ax.barh(place, row.used_mb / 1024, height=0.7, facecolor=color, hatch="////", edgecolor="white", lw=0)
        ax.annotate(f"{row.used_mb / row.capacity_mb:.0%}", (row.capacity_mb / 1024, place), (3, 0),
                    textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    ax.set_yticks(range(len(table)), [f"stage {row.stage} · {row.device}" for row in table.itertuples()])
    ax.set(ylim=(len(table) - 0.4, -0.6), xlabel="memory of one GPU [GiB]: needed (hatched) of what it has (outline)")
    ax.set_xlim(0, table["capacity_mb"].max() / 1024 * 1.12)
    fullest = table.loc[(table["used_mb"] / table["capacity_mb"]).idxmax()]
    share = fullest["used_mb"] / fullest["capacity_mb"]
    ax.set_title(f"Stage {fullest['stage']} on {fullest['device']} is the fullest: {share:.0%}")
    return keep_data(ax, _with_origin(table, planned))


def plot_alone(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Cost of the best plan of each GPU type alone and of all, see `hetero.alone`."""
    ax = ax or new_axes(height=1.0 + 0.4 * len(table), width=6.0)
    finite = table[np.isfinite(table["cost_ms"])]
    for place, row in enumerate(table.itertuples()):
        known = np.isfinite(row.cost_ms)
        length, text = (row.cost_ms, f"{row.cost_ms:,.0f} ms") if known else (0, "no feasible plan")
        ax.barh(place, length, height=0.6, **fill_of("compute", "simulated"))
        ax.annotate(text, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(table)), [f"{row.gpus} GPUs · {row.types}" for row in table.itertuples()])
    ax.set(ylim=(len(table) - 0.5, -0.5), xlabel="cost of the best plan [ms per step]")
    ax.set_xlim(0, finite["cost_ms"].max() * 1.15 if len(finite) else 1)
    ax.set_title(_verdict(finite, table["types"].iloc[-1]))
    return keep_data(ax, table.drop(columns="plan"), table)


def _with_origin(table: pd.DataFrame, planned: Planned) -> pd.DataFrame:
    table = table.copy()
    table.attrs["provenance"] = planned.provenance
    return table


def _verdict(finite: pd.DataFrame, every: str) -> str:
    best = finite[finite["types"] != every]["cost_ms"].min() if len(finite) else np.nan
    both = finite.loc[finite["types"] == every, "cost_ms"].min()
    if not np.isfinite(both):
        return "The types together have no feasible plan"
    if not np.isfinite(best):
        return "No type is enough alone, together they are"
    change = both / best - 1
    return f"All types together take {abs(change):.0%} {'less' if change < 0 else 'more'} time than the best one alone"


def _color(name: str, types: tuple[str, ...]) -> str:
    """The same for a type whatever its place in the plan."""
    return _TYPES[sorted(types).index(name) % len(_TYPES)]


def _layers(row) -> str:
    return "1 layer" if row.layers == 1 else f"{row.layers} layers"


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _type_legend(ax: Axes, types: tuple[str, ...]) -> None:
    handles = [Patch(color=_color(name, types), label=name) for name in types]
    below = -0.62 / ax.figure.get_figheight()
    ax.legend(handles=handles, ncols=len(handles), loc="upper right", bbox_to_anchor=(1.0, below))
