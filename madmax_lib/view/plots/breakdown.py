"""Where does the time of each rank go? Pictures of a timeline, its breakdown, exposed communication and waiting."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.units import NS_PER_S, format_s
from madmax_lib.view.drawing import (
    bars,
    blocks,
    empty,
    finish,
    grid,
    kinds_key,
    new_axes,
    plural,
    rank_labels,
    row_label,
    rows_of,
)

__all__ = ["plot_advice", "plot_breakdown", "plot_exposed", "plot_overlap", "plot_timeline", "plot_waiting"]

_TALK = ("exposed communication", "small messages", "straggler rank")
_PARTS = {"compute": "compute_s", "comm": "exposed_comm_s", "memcpy": "rest_s", "idle": "idle_s"}
_WIDER = dict.fromkeys(set(BUSY_KINDS) - {"compute", "comm"}, 3)  # copies are few and short, and would not show
_HIDDEN = {"hidden": "hidden under compute", "comm": "exposed"}


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
    lanes = pd.DataFrame(rows, columns=["rank", "stream"]).assign(place=range(len(rows)))
    placed = spans.merge(lanes, on=["rank", "stream"]).assign(start_ns=lambda table: table["start_ns"] - zero_ns)
    drawn = blocks(ax, placed, BUSY_KINDS, reach_ns=reach_ns, source=timeline.meta.source, wider=_WIDER)
    drawn = drawn.merge(lanes, on="place")[["rank", "stream", "kind", "start_s", "dur_s"]]
    numbered = set(spans["step"]) - {-1, 0}
    which = f"Step {min(numbered)}" if numbered else "One step"
    title = f"{which} takes {format_s(reach_ns / NS_PER_S)} on {plural(spans['rank'].nunique(), 'rank')}"
    key = kinds_key(kind for kind in BUSY_KINDS if (spans["kind"] == kind).any())
    labels, reach_ms = [row_label(rank, stream) for rank, stream in rows], reach_ns / NS_PER_S * 1e3
    return finish(ax, drawn, title, x="time in the step [ms]", rows=labels, reach=reach_ms, key=key, origin=timeline)


def breakdown_parts(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds of compute, exposed communication, copies and other work, and idle time: columns are kinds."""
    rest_s = (table["non_compute_s"] - table["exposed_comm_s"]).clip(lower=0)
    seconds = table.assign(rest_s=rest_s)
    return pd.DataFrame({kind: seconds[column] for kind, column in _PARTS.items()})


def parts_key(parts: pd.DataFrame) -> list:
    """Legend entries of the parts that are there."""
    kinds = [kind for kind in parts if parts[kind].sum() > 0]
    return kinds_key(kinds, {"comm": "exposed communication", "memcpy": "copies and other"})


def plot_breakdown(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Stacked bars of `breakdown`: compute, exposed communication, the remaining busy time, idle, per rank."""
    ax = ax or new_axes(height=1.1 + 0.28 * len(table))
    parts = breakdown_parts(table)
    shares = parts.div(table["total_s"].where(table["total_s"] > 0), axis=0)
    texts = shares.map(lambda share: f"{share:.0%}" if share > 0.08 else "")
    bars(ax, parts * 1e3, source=table.attrs.get("source"), inside=texts)
    total_s = max(table["total_s"].sum(), 1e-12)
    names = {"compute": "compute", "comm": "exposed communication", "idle": "idle"}
    title = ", ".join(f"{parts[kind].sum() / total_s:.0%} {name}" for kind, name in names.items())
    return finish(ax, table, title, x="time [ms]", rows=rank_labels(table["rank"]), key=parts_key(parts))


def plot_overlap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Communication of each rank, split into hidden under compute and exposed, with the overlap as text."""
    ax = ax or new_axes(height=1.1 + 0.28 * len(table))
    parts = pd.DataFrame({"hidden": table["comm_s"] - table["exposed_comm_s"], "comm": table["exposed_comm_s"]})
    notes = table["overlap"].map("{:.1%} hidden".format).where(table["overlap"].notna(), "no communication")
    bars(ax, parts * 1e3, source=table.attrs.get("source"), notes=notes)
    exposed = table["exposed_comm_s"].sum() / max(table["comm_s"].sum(), 1e-12)
    title, reach_ms = f"{exposed:.0%} of the communication is exposed", 1.18e3 * table["comm_s"].max()
    rows, key = rank_labels(table["rank"]), kinds_key(_HIDDEN, _HIDDEN)
    return finish(ax, table, title, x="communication [ms]", rows=rows, reach=reach_ms, key=key)


def plot_exposed(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Exposed and hidden time by collective, mean over the ranks, of `exposed_by_collective`."""
    ranks = table["rank"].nunique()
    mean = table.groupby("collective")[["comm_s", "exposed_s"]].sum() / max(ranks, 1)
    mean = mean.sort_values("exposed_s", ascending=False)
    ax = ax or new_axes(height=1.2 + 0.32 * len(mean))
    parts = pd.DataFrame({"comm": mean["exposed_s"], "hidden": mean["comm_s"] - mean["exposed_s"]})
    bars(ax, parts * 1e3, source=table.attrs.get("source"))
    names = [name.replace("_", "-") for name in mean.index]
    title = "No communication is exposed" if len(mean) else "No communication"
    if mean["exposed_s"].sum() > 0:
        exposed_s, share = mean["exposed_s"].iloc[0], mean["exposed_s"].iloc[0] / mean["comm_s"].iloc[0]
        title = f"Most exposed: {names[0]}, {format_s(exposed_s)}, {share:.0%} of its time"
    x, key = f"time per rank, mean of {plural(ranks, 'rank')} [ms]", kinds_key(parts, _HIDDEN)
    return finish(ax, mean.reset_index(), title, x=x, rows=names, key=key, origin=table)


def plot_waiting(table: pd.DataFrame, ax: Axes | None = None, *, ranks: list[int] | None = None) -> Axes:
    """Who waits for whom: rows wait, columns arrive last, of `waiting`; values in ms."""
    ranks = sorted({*table["rank"], *table["waits_for"]}) if ranks is None else ranks
    if not len(table):
        return empty(ax, table, "Nobody waits: no collective has two ranks here")
    ax = ax or new_axes(height=1.4 + 0.32 * len(ranks), width=3.4 + 0.5 * len(ranks))
    wait_ms = table.pivot_table(index="rank", columns="waits_for", values="wait_s", aggfunc="sum", observed=False)
    wait_ms = wait_ms.reindex(index=ranks, columns=ranks).fillna(0.0) * 1e3
    texts = wait_ms.map(lambda value: f"{value:.3g}" if value else "")
    grid(ax, wait_ms, texts=texts, colors="Oranges", limits=(0, None))
    ax.set_aspect("equal")
    ax.set_yticks(ax.get_yticks(), [f"rank {rank}" for rank in ranks])
    last = wait_ms.sum()
    title = f"Rank {last.idxmax()} causes {last.max() / max(last.sum(), 1e-12):.0%} of the waiting [ms]"
    return finish(ax, table, title, x="rank that arrives last", y="rank that waits")


def plot_advice(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 10) -> Axes:
    """What each fix of `traces.advise` would gain at most per step, the largest `count` of them."""
    shown = table.head(count)
    if not len(shown):
        return empty(ax, shown, "No cause of lost time was found", table)
    ax = ax or new_axes(height=1.1 + 0.34 * len(shown))
    kinds = ["comm" if cause in _TALK else "memcpy" if "copies" in cause else "idle" for cause in shown["cause"]]
    gain_ms = shown["gain_s"] * 1e3
    bars(ax, gain_ms, kinds, source=table.attrs.get("source"), notes=shown["share"].map("{:.1%}".format))
    title, x = (
        f"{shown['cause'].iloc[0].capitalize()} costs most",
        "gain per step, at most [ms]; as text: share of the step",
    )
    rows = [f"{row.cause}: {row.where}"[:60] for row in shown.itertuples()]
    return finish(ax, shown, title, x=x, rows=rows, reach=gain_ms.max() * 1.12, origin=table)


def _one_step(timeline: Timeline, step: int | None) -> Timeline:
    if step is not None and step not in timeline.steps:
        raise ValueError(f"step {step} is not in the timeline; it has {timeline.steps or 'no steps'}")
    busy = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    steps = sorted(set(busy["step"]) - {-1})[:1] if step is None else [step]
    return timeline.select(steps=steps) if steps else timeline
