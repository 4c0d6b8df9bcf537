"""How do two timelines differ? Pictures of `traces.diff`: one above the other, kind by kind, operation by operation.

`a` is drawn above `b`, measured filled, simulated hatched, so that each bar tells where it comes from.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.diff import align_ranks, align_steps, compare, op_names
from madmax_lib.units import NS_PER_S, format_s
from madmax_lib.view.drawing import (
    COLORS,
    LABELS,
    bars,
    blocks,
    faded,
    fill_of,
    finish,
    kinds_key,
    new_axes,
    note,
    patch_key,
    shorten,
)

__all__ = ["plot_compare", "plot_ops", "plot_pair"]

_QUANTITIES = {  # of `compare`: colour, name
    "compute_s": (COLORS["compute"], "compute"),
    "comm_s": (COLORS["comm"], "communication"),
    "exposed_comm_s": (COLORS["comm"], "exposed communication"),
    "memory_s": (COLORS["memcpy"], "copies"),
    "idle_s": (COLORS["idle"], "idle"),
    "total_s": ("#7f7f7f", "step"),
}
_NOTHING = "nothing to draw: one of the timelines has no span of kind " + ", ".join(BUSY_KINDS)


def plot_pair(a: Timeline, b: Timeline, ax: Axes | None = None, *, labels: tuple[str, str] | None = None) -> Axes:
    """The first aligned step of the first aligned rank of both, `a` above `b`, each from the start of its step.

    One row per kind of work, because streams and threads of two timelines need not correspond. `select` ranks and steps
    beforehand to see others. Raises ValueError if one of them has no device work.
    """
    table = compare(a, b, labels=labels)
    cells = _first_cells(a, b)
    sides = [_busy(timeline.select(ranks=[rank], steps=[step])) for timeline, rank, step in cells]
    reach_ns = [int((spans["start_ns"] + spans["dur_ns"]).max()) if len(spans) else 0 for spans in sides]
    kinds = [kind for kind in BUSY_KINDS if any((spans["kind"] == kind).any() for spans in sides)]
    if not kinds:
        raise ValueError(_NOTHING)
    ax = ax or new_axes(height=1.6 + 0.5 * len(kinds))
    drawn, rows, wider = [], np.arange(len(kinds)), dict.fromkeys(kinds, 3)  # so that short copies show
    for side, (spans, (timeline, rank, step)) in enumerate(zip(sides, cells, strict=True)):
        top, end_s = side * (len(kinds) + 0.9), reach_ns[side] / NS_PER_S
        about = f"{table.attrs['labels'][side]}: step {step} of rank {rank}, {format_s(end_s)}"
        note(ax, 0, top - 0.5, about, dx=2, dy=1, va="bottom", fontsize=8)
        placed = spans.assign(place=top + spans["kind"].astype(object).map(kinds.index))
        of_side = blocks(ax, placed, kinds, reach_ns=max(reach_ns), source=timeline.meta.source, wider=wider)
        drawn.append(of_side.assign(side="ab"[side]))
        ax.vlines(end_s * 1e3, top - 0.45, top + len(kinds) - 0.55, color="black", linewidth=0.8)
    places = np.concatenate([rows, rows + len(kinds) + 0.9])
    ax.set_yticks(places, [LABELS[kind] for kind in kinds] * 2)
    data = pd.concat(drawn)[["side", "kind", "start_s", "dur_s"]]
    title, limits = _change_message(table.attrs["labels"], *reach_ns) + " in this step", (places[-1] + 0.6, -1.2)
    x, reach_ms = "time from the start of the step [ms]", 1.01e3 * max(reach_ns) / NS_PER_S
    return finish(ax, data, title, x=x, reach=reach_ms, ylim=limits, origin=table)


def plot_compare(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Grouped bars of `compare`: each quantity in `a` above `b`, with the difference as text; lines from min to max."""
    table = table[table["quantity"].isin(list(_QUANTITIES))].set_index("quantity").reindex(list(_QUANTITIES))
    shown = table[(table[["a", "b"]].fillna(0) > 0).any(axis=1)]
    ax = ax or new_axes(height=1.3 + 0.45 * max(len(shown), 1))
    for number, side in enumerate("ab"):
        fills = [_side_fill(_QUANTITIES[quantity][0], table.attrs, side) for quantity in shown.index]
        bars(ax, shown[side] * 1e3, fills, slot=(number, 2))
        places = np.arange(len(shown)) - 0.2 + 0.4 * number
        ax.hlines(places, shown[f"{side}_min"] * 1e3, shown[f"{side}_max"] * 1e3, color="black", linewidth=0.8)
    end_ms = shown[["a_max", "b_max"]].max(axis=1) * 1e3
    for place, (row, end) in enumerate(zip(shown.itertuples(), end_ms, strict=True)):
        note(ax, end, place, _change(row))
    rows = [_QUANTITIES[quantity][1] for quantity in shown.index]
    labels = table.attrs["labels"]
    key = [patch_key(labels["ab".index(side)], _side_fill("#7f7f7f", table.attrs, side)) for side in "ab"]
    x, reach_ms = "time per step and rank [ms]", 1.3 * np.nan_to_num(end_ms).max(initial=0)
    title = _compare_message(table)
    return finish(ax, shown.reset_index(), title, x=x, rows=rows, reach=reach_ms, key=key, origin=table)


def plot_ops(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The operations of `compare_ops` that differ most: bars to the right take longer in `b`, colour by kind."""
    top = table[table["difference_s"] != 0].head(count)
    ax = ax or new_axes(height=1.3 + 0.34 * max(len(top), 1))
    kinds = top["kind"].astype(str).where(top["kind"].isin(COLORS), "other")
    bars(ax, top["difference_s"] * 1e3, list(kinds), source=table.attrs["source"])
    for place, row in enumerate(top.itertuples()):
        side = {"dx": 4, "ha": "left"} if row.difference_s > 0 else {"dx": -4, "ha": "right"}
        note(ax, row.difference_s * 1e3, place, _op_change(row), **side)
    ax.axvline(0, color="black", linewidth=0.8)
    label_a, label_b = table.attrs["labels"]
    width_ms = 2.1e3 * max(top["difference_s"].abs().max() if len(top) else 0.0, 1e-12)
    title = f"{_short(top['name'].iloc[0])} differs most" if len(top) else "No operation differs"
    x = f"time per step and rank: {label_b} minus {label_a} [ms]"
    key = kinds_key(kind for kind in LABELS if (top["kind"] == kind).any())
    rows = [_short(name) for name in top["name"]]
    return finish(ax, top, title, x=x, rows=rows, key=key, xlim=(-width_ms, width_ms), origin=table)


def _first_cells(a: Timeline, b: Timeline) -> list[tuple[Timeline, int, int]]:
    """Timeline, rank and step to draw, of both."""
    steps, ranks = align_steps(a, b), align_ranks(a, b)
    if not len(steps):
        raise ValueError(_NOTHING)
    cells = []
    for side, timeline in (("a", a), ("b", b)):
        rank = int(ranks[f"rank_{side}"].iloc[0]) if len(ranks) else timeline.ranks[0]
        cells.append((timeline, rank, int(steps[f"step_{side}"].iloc[0])))
    return cells


def _busy(timeline: Timeline) -> pd.DataFrame:
    """Spans of device work, in time from the first of them."""
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    return spans.assign(start_ns=spans["start_ns"] - spans["start_ns"].min())


def _side_fill(color: str, attrs: dict, side: str) -> dict:
    """b paler than a where it is measured, so that two measured sides can be told apart."""
    source = attrs["sources"]["ab".index(side)]
    return fill_of(color, source) if side == "a" or source == "simulated" else faded(color)


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_s(abs(seconds))


def _change(row) -> str:
    if not np.isfinite(row.difference):
        return ""
    return _signed(row.difference) + (f" ({row.ratio - 1:+.0%})" if np.isfinite(row.ratio) else "")


def _op_change(row) -> str:
    """Difference of an operation and how often it runs, where that changes."""
    if row.status in ("more", "fewer"):
        return f"{_signed(row.difference_s)}, {row.count_a:g} to {row.count_b:g} times"
    return _signed(row.difference_s) + ("" if row.status == "both" else f", {row.status}")


def _change_message(labels: tuple[str, str], a: float, b: float) -> str:
    if not a or a == b:
        return f"{labels[1]} takes as long as {labels[0]}" if a == b else f"{labels[0]} has no work"
    return f"{labels[1]} takes {abs(b / a - 1):.0%} {'longer' if b > a else 'less'} than {labels[0]}"


def _compare_message(table: pd.DataFrame) -> str:
    total, parts = table.loc["total_s"], table.drop(index=["total_s", "comm_s"])["difference"].dropna()
    if not np.isfinite(total["difference"]) or not len(parts):
        return "Nothing to compare: no device work"
    most = parts.abs().idxmax()
    largest = f": {_QUANTITIES[most][1]} {_signed(parts[most])}" if parts[most] else ""
    return _change_message(table.attrs["labels"], total["a"], total["b"]) + largest


def _short(name: str) -> str:
    """A name that fits beside a bar: long ones without their arguments."""
    short = name if len(name) <= 40 else op_names([name])[0]
    return shorten(short.replace("evaluate_function: ", ""), 40)
