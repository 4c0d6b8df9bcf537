"""How does a table look? One function per picture: tidy table or Timeline in, Axes out, data kept for saving.

Colours mean the same everywhere: compute blue, communication orange, hidden communication light orange, copies green,
idle grey. Measured data is drawn filled, simulated data hatched.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.intervals import pack
from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.units import NS_PER_S, format_s
from madmax_lib.view.drawing import (
    COLORS,
    fill_of,
    keep_data,
    kind_legend,
    new_axes,
    rank_axis,
    row_label,
    rows_of,
    visible_blocks,
)

__all__ = [
    "COLORS",
    "plot_advice",
    "plot_breakdown",
    "plot_exposed",
    "plot_overlap",
    "plot_timeline",
    "plot_waiting",
]

_TALK = ("exposed communication", "small messages", "straggler rank")


def plot_timeline(timeline: Timeline, ax: Axes | None = None, *, step: int | None = None) -> Axes:
    """Rows by rank and stream, colour by kind, for one step (the first if none is given), in ms from its start.

    Raises ValueError for a step that the timeline does not have.
    """
    part = _one_step(timeline, step)
    spans = part.spans[part.spans["kind"].isin(BUSY_KINDS)]
    if not len(spans):
        raise ValueError("nothing to draw: no span of kind " + ", ".join(BUSY_KINDS))
    zero_ns = spans["start_ns"].min()
    reach_ns = int((spans["start_ns"] + spans["dur_ns"]).max() - zero_ns)
    rows = rows_of(spans)
    ax = ax or new_axes(height=0.9 + 0.24 * len(rows))
    drawn = []
    for place, (rank, stream) in enumerate(rows):
        row = spans[(spans["rank"] == rank) & (spans["stream"] == stream)]
        for kind in BUSY_KINDS:
            of_kind = row[row["kind"] == kind]
            wider = 1 if kind in ("compute", "comm") else 3  # copies are few and short, and would not show
            blocks = visible_blocks(pack(of_kind["start_ns"] - zero_ns, of_kind["dur_ns"]), wider * reach_ns)
            bars = np.stack([blocks[:, 0], blocks[:, 1] - blocks[:, 0]], axis=1) / NS_PER_S
            ax.broken_barh(bars * 1e3, (place - 0.4, 0.8), **fill_of(kind, timeline.meta.source))
            drawn += [(rank, stream, kind, start_s, dur_s) for start_s, dur_s in bars]
    ax.set_yticks(range(len(rows)), [row_label(rank, stream) for rank, stream in rows])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, reach_ns / NS_PER_S * 1e3), xlabel="time in the step [ms]")
    numbered = set(spans["step"]) - {-1, 0}
    which = f"Step {min(numbered)}" if numbered else "One step"
    ranks = spans["rank"].nunique()
    ax.set_title(f"{which} takes {format_s(reach_ns / NS_PER_S)} on {ranks} rank{'s' if ranks > 1 else ''}")
    kind_legend(ax, [kind for kind in BUSY_KINDS if (spans["kind"] == kind).any()])
    return keep_data(ax, pd.DataFrame(drawn, columns=["rank", "stream", "kind", "start_s", "dur_s"]), timeline)


def plot_breakdown(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Stacked bars of `breakdown`: compute, exposed communication, the remaining busy time, idle, per rank."""
    ax = ax or new_axes(height=1.1 + 0.28 * len(table))
    other_s = (table["non_compute_s"] - table["exposed_comm_s"]).clip(lower=0)
    parts = {"compute": table["compute_s"], "comm": table["exposed_comm_s"], "memcpy": other_s, "idle": table["idle_s"]}
    left, source = np.zeros(len(table)), table.attrs.get("source")
    for kind, value_s in parts.items():
        ax.barh(range(len(table)), value_s * 1e3, left=left, height=0.75, **fill_of(kind, source))
        for place, (start, width, total) in enumerate(zip(left, value_s * 1e3, table["total_s"] * 1e3, strict=True)):
            if total and width / total > 0.08:
                ink = {"color": "white" if kind == "compute" else "black", "fontsize": 7}
                ax.text(start + width / 2, place, f"{width / total:.0%}", ha="center", va="center", **ink)
        left = left + value_s.to_numpy() * 1e3
    rank_axis(ax, table["rank"])
    ax.set(xlabel="time [ms]", title=_breakdown_message(table))
    shown = [kind for kind, value_s in parts.items() if value_s.sum() > 0]
    kind_legend(ax, shown, {"comm": "exposed communication", "memcpy": "copies and other"})
    return keep_data(ax, table)


def plot_overlap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Communication of each rank, split into hidden under compute and exposed, with the overlap as text."""
    ax = ax or new_axes(height=1.1 + 0.28 * len(table))
    hidden_ms = (table["comm_s"] - table["exposed_comm_s"]) * 1e3
    source, exposed_ms = table.attrs.get("source"), table["exposed_comm_s"] * 1e3
    ax.barh(range(len(table)), hidden_ms, height=0.75, **fill_of("hidden", source))
    ax.barh(range(len(table)), exposed_ms, left=hidden_ms, height=0.75, **fill_of("comm", source))
    for place, (comm_s, overlap) in enumerate(zip(table["comm_s"], table["overlap"], strict=True)):
        text = "no communication" if np.isnan(overlap) else f"{overlap:.1%} hidden"
        ax.annotate(text, (comm_s * 1e3, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    rank_axis(ax, table["rank"])
    ax.set(xlabel="communication [ms]", xlim=(0, max(table["comm_s"].max() * 1e3 * 1.18, 1e-6)))
    exposed = table["exposed_comm_s"].sum() / max(table["comm_s"].sum(), 1e-12)
    ax.set_title(f"{exposed:.0%} of the communication is exposed")
    kind_legend(ax, ["hidden", "comm"], {"hidden": "hidden under compute", "comm": "exposed"})
    return keep_data(ax, table)


def plot_exposed(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Exposed and hidden time by collective, mean over the ranks, of `exposed_by_collective`."""
    ranks = table["rank"].nunique()
    mean = table.groupby("collective")[["comm_s", "exposed_s"]].sum() / max(ranks, 1)
    mean = mean.sort_values("exposed_s", ascending=False)
    ax = ax or new_axes(height=1.2 + 0.32 * len(mean))
    hidden_ms = (mean["comm_s"] - mean["exposed_s"]) * 1e3
    source, exposed_ms = table.attrs.get("source"), mean["exposed_s"] * 1e3
    ax.barh(range(len(mean)), exposed_ms, height=0.7, **fill_of("comm", source))
    ax.barh(range(len(mean)), hidden_ms, left=exposed_ms, height=0.7, **fill_of("hidden", source))
    ax.set_yticks(range(len(mean)), [name.replace("_", "-") for name in mean.index])
    ax.set(ylim=(len(mean) - 0.4, -0.6), xlabel=f"time per rank, mean of {ranks} rank{'s' if ranks > 1 else ''} [ms]")
    if mean["exposed_s"].sum() > 0:
        first = mean.iloc[0]
        told = f"{format_s(first['exposed_s'])}, {first['exposed_s'] / first['comm_s']:.0%} of its time"
        ax.set_title(f"Most exposed: {first.name.replace('_', '-')}, {told}")
    else:
        ax.set_title("No communication is exposed" if len(mean) else "No communication")
    kind_legend(ax, ["comm", "hidden"], {"hidden": "hidden under compute", "comm": "exposed"})
    return keep_data(ax, mean.reset_index(), table)


def plot_waiting(table: pd.DataFrame, ax: Axes | None = None, *, ranks: list[int] | None = None) -> Axes:
    """Who waits for whom: rows wait, columns arrive last, of `waiting`; values in ms."""
    import seaborn as sns  # late: it brings scipy.stats, a second of every start

    ranks = sorted({*table["rank"], *table["waits_for"]}) if ranks is None else ranks
    ax = ax or new_axes(height=1.4 + 0.32 * len(ranks), width=3.4 + 0.5 * len(ranks))
    if not len(table):
        ax.set(title="Nobody waits: no collective has two ranks here", xticks=[], yticks=[])
        return keep_data(ax, table)
    grid = table.pivot_table(index="rank", columns="waits_for", values="wait_s", aggfunc="sum", observed=False)
    grid = grid.reindex(index=ranks, columns=ranks).fillna(0.0) * 1e3
    texts = grid.map(lambda wait_ms: f"{wait_ms:.3g}" if wait_ms else "")
    style = {"cmap": "Oranges", "vmin": 0, "cbar": False, "square": True, "annot_kws": {"fontsize": 7}}
    sns.heatmap(grid, ax=ax, annot=texts, fmt="", linewidths=0.5, **style)
    ax.set_yticklabels([f"rank {rank}" for rank in ranks], rotation=0)
    last = grid.sum()
    share = last.max() / max(last.sum(), 1e-12)
    ax.set(xlabel="rank that arrives last", ylabel="rank that waits")
    ax.set_title(f"Rank {last.idxmax()} causes {share:.0%} of the waiting [ms]")
    return keep_data(ax, table)


def plot_advice(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 10) -> Axes:
    """What each fix of `traces.advise` would gain at most per step, the largest `count` of them."""
    shown = table.head(count)
    ax = ax or new_axes(height=1.1 + 0.34 * max(len(shown), 1))
    if not len(shown):
        ax.set(title="No cause of lost time was found", xticks=[], yticks=[])
        return keep_data(ax, shown, table)
    kinds = ["comm" if cause in _TALK else "memcpy" if "copies" in cause else "idle" for cause in shown["cause"]]
    for place, (kind, gain_s, share) in enumerate(zip(kinds, shown["gain_s"], shown["share"], strict=True)):
        ax.barh(place, gain_s * 1e3, height=0.7, **fill_of(kind, table.attrs.get("source")))
        ax.annotate(f"{share:.1%}", (gain_s * 1e3, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(shown)), [f"{row.cause}: {row.where}"[:60] for row in shown.itertuples()])
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, shown["gain_s"].max() * 1e3 * 1.12))
    ax.set(xlabel="gain per step, at most [ms]; as text: share of the step")
    ax.set_title(f"{shown['cause'].iloc[0].capitalize()} costs most")
    return keep_data(ax, shown, table)


def _one_step(timeline: Timeline, step: int | None) -> Timeline:
    if step is not None and step not in timeline.steps:
        raise ValueError(f"step {step} is not in the timeline; it has {timeline.steps or 'no steps'}")
    busy = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    steps = sorted(set(busy["step"]) - {-1})[:1] if step is None else [step]
    return timeline.select(steps=steps) if steps else timeline


def _breakdown_message(table: pd.DataFrame) -> str:
    total_s = max(table["total_s"].sum(), 1e-12)
    shares = {"compute": table["compute_s"], "exposed communication": table["exposed_comm_s"], "idle": table["idle_s"]}
    return ", ".join(f"{values.sum() / total_s:.0%} {name}" for name, values in shares.items())
