"""How do two timelines differ? Pictures of `traces.diff`: one above the other, kind by kind, operation by operation.

`a` is drawn above `b`, measured filled, simulated hatched, so that each bar tells where it comes from.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from madmax_lib.intervals import pack
from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.diff import align_ranks, align_steps, compare, op_names
from madmax_lib.units import NS_PER_S, format_s
from madmax_lib.view.drawing import COLORS, LABELS, fill_of, keep_data, kind_legend, new_axes, visible_blocks

__all__ = ["plot_compare", "plot_ops", "plot_pair"]

_QUANTITIES = {"compute_s": ("compute", "compute"), "comm_s": ("comm", "communication"),
               "exposed_comm_s": ("comm", "exposed communication"), "memory_s": ("memcpy", "copies"),
               "idle_s": ("idle", "idle"), "total_s": ("total", "step")}  # fmt: skip
_NOTHING = "nothing to draw: one of the timelines has no span of kind " + ", ".join(BUSY_KINDS)
_COLORS = COLORS | {"total": "#7f7f7f"}


def plot_pair(a: Timeline, b: Timeline, ax: Axes | None = None, *, labels: tuple[str, str] | None = None) -> Axes:
    """The first aligned step of the first aligned rank of both, `a` above `b`, each from the start of its step.

    One row per kind of work, because streams and threads of two timelines need not correspond. `select` ranks and steps
    beforehand to see others. Raises ValueError if one of them has no device work.
    """
    table = compare(a, b, labels=labels)
    cells = _first_cells(a, b)
    parts = [_busy(timeline.select(ranks=[rank], steps=[step])) for timeline, rank, step in cells]
    reach_ns = [int(part["end_ns"].max()) if len(part) else 0 for part in parts]
    kinds = [kind for kind in BUSY_KINDS if any((part["kind"] == kind).any() for part in parts)]
    if not kinds:
        raise ValueError(_NOTHING)
    ax = ax or new_axes(height=1.6 + 0.5 * len(kinds))
    drawn, ticks = [], []
    for side, (part, (timeline, rank, step)) in enumerate(zip(parts, cells, strict=True)):
        top = side * (len(kinds) + 0.9)
        about = f"{table.attrs['labels'][side]}: step {step} of rank {rank}, {format_s(reach_ns[side] / NS_PER_S)}"
        ax.annotate(about, (0, top - 0.5), (2, 1), textcoords="offset points", va="bottom", fontsize=8)
        for place, kind in enumerate(kinds):
            bars = _bars(part[part["kind"] == kind], max(reach_ns))
            ax.broken_barh(bars * 1e3, (top + place - 0.4, 0.8), **fill_of(kind, timeline.meta.source))
            drawn += [("ab"[side], kind, start_s, dur_s) for start_s, dur_s in bars]
            ticks.append((top + place, LABELS[kind]))
        ax.vlines(reach_ns[side] / NS_PER_S * 1e3, top - 0.45, top + len(kinds) - 0.55, color="black", linewidth=0.8)
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.set(ylim=(ticks[-1][0] + 0.6, -1.2), xlim=(0, max(reach_ns) / NS_PER_S * 1.01e3))
    ax.set(xlabel="time from the start of the step [ms]")
    ax.set_title(_change_message(table.attrs["labels"], *reach_ns) + " in this step")
    return keep_data(ax, pd.DataFrame(drawn, columns=["side", "kind", "start_s", "dur_s"]), table)


def plot_compare(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Grouped bars of `compare`: each quantity in `a` above `b`, with the difference as text; lines from min to max."""
    table = table[table["quantity"].isin(list(_QUANTITIES))].set_index("quantity").reindex(list(_QUANTITIES))
    shown = table[(table[["a", "b"]].fillna(0) > 0).any(axis=1)]
    ax = ax or new_axes(height=1.3 + 0.45 * max(len(shown), 1))
    longest_ms = float(np.nan_to_num(shown[["a_max", "b_max"]].to_numpy()).max(initial=1e-9)) * 1e3
    for place, (quantity, row) in enumerate(shown.iterrows()):
        for side, offset in (("a", -0.2), ("b", 0.2)):
            fill = _side_fill(_QUANTITIES[quantity][0], table.attrs, side)
            ax.barh(place + offset, row[side] * 1e3, height=0.38, **fill)
            span_ms = row[[f"{side}_min", f"{side}_max"]].astype(float) * 1e3
            ax.plot(span_ms, [place + offset] * 2, color="black", linewidth=0.8)
        end_ms = np.nanmax(row[["a_max", "b_max"]].astype(float)) * 1e3
        ax.annotate(_change(row), (end_ms, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(shown)), [_QUANTITIES[quantity][1] for quantity in shown.index])
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, longest_ms * 1.3), xlabel="time per step and rank [ms]")
    ax.set_title(_compare_message(table))
    _sides_legend(ax, table.attrs)
    return keep_data(ax, shown.reset_index(), table)


def plot_ops(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The operations of `compare_ops` that differ most: bars to the right take longer in `b`, colour by kind."""
    top = table[table["difference_s"] != 0].head(count)
    ax = ax or new_axes(height=1.3 + 0.34 * max(len(top), 1))
    width_ms = max(float(top["difference_s"].abs().max() * 1e3) if len(top) else 0.0, 1e-9)
    for place, row in enumerate(top.itertuples()):
        fill = fill_of(row.kind if row.kind in COLORS else "other", table.attrs["source"])
        ax.barh(place, row.difference_s * 1e3, height=0.7, **fill)
        side = 1 if row.difference_s > 0 else -1
        ax.annotate(_told(row), (row.difference_s * 1e3, place), (4 * side, 0), textcoords="offset points", va="center",
                    ha="left" if side > 0 else "right", fontsize=7)  # fmt: skip
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(top)), [_short(name) for name in top["name"]])
    label_a, label_b = table.attrs["labels"]
    ax.set(ylim=(len(top) - 0.4, -0.6), xlim=(-2.1 * width_ms, 2.1 * width_ms))
    ax.set(xlabel=f"time per step and rank: {label_b} minus {label_a} [ms]", title=_ops_message(table))
    kind_legend(ax, [kind for kind in LABELS if (top["kind"] == kind).any()])
    return keep_data(ax, top, table)


def _first_cells(a: Timeline, b: Timeline) -> list[tuple[Timeline, int, int]]:
    """Timeline, rank and step to draw, of both."""
    steps, ranks = align_steps(a, b), align_ranks(a, b)
    if not len(steps):
        raise ValueError(_NOTHING)
    first = [(t, s, int(steps[f"step_{s}"].iloc[0])) for s, t in (("a", a), ("b", b))]
    return [(t, int(ranks[f"rank_{s}"].iloc[0]) if len(ranks) else t.ranks[0], step) for t, s, step in first]


def _busy(timeline: Timeline) -> pd.DataFrame:
    """Spans of device work from the first of them."""
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    start_ns = spans["start_ns"] - spans["start_ns"].min()
    return spans.assign(start_ns=start_ns, end_ns=start_ns + spans["dur_ns"])


def _bars(spans: pd.DataFrame, reach_ns: int) -> np.ndarray:
    """Start and length in s, (n, 2); blocks are drawn a little wider than elsewhere, so that short copies show."""
    blocks = visible_blocks(pack(spans["start_ns"], spans["dur_ns"]), 3 * reach_ns)
    return np.stack([blocks[:, 0], blocks[:, 1] - blocks[:, 0]], axis=1) / NS_PER_S


def _side_fill(kind: str, attrs: dict, side: str) -> dict:
    """b paler than a, so that the two can be told apart when both are measured."""
    source = attrs["sources"]["ab".index(side)]
    hatch = "////" if source == "simulated" else None
    return {"facecolor": _COLORS[kind], "edgecolor": "white", "linewidth": 0, "hatch": hatch,
            "alpha": 1.0 if side == "a" or hatch else 0.55}  # fmt: skip


def _sides_legend(ax: Axes, attrs: dict) -> None:
    handles = [Patch(label=label, **_side_fill("total", attrs, side))
               for side, label in zip("ab", attrs["labels"], strict=True)]  # fmt: skip
    below = -0.75 / ax.figure.get_figheight()
    ax.legend(handles=handles, ncols=2, loc="upper right", bbox_to_anchor=(1.0, below))


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_s(abs(seconds))


def _change(row: pd.Series) -> str:
    if not np.isfinite(row["difference"]):
        return ""
    return _signed(row["difference"]) + (f" ({row['ratio'] - 1:+.0%})" if np.isfinite(row["ratio"]) else "")


def _told(row) -> str:
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
    told = f": {_QUANTITIES[most][1]} {_signed(parts[most])}" if parts[most] else ""
    return _change_message(table.attrs["labels"], total["a"], total["b"]) + told


def _ops_message(table: pd.DataFrame) -> str:
    if not len(table) or not table["difference_s"].iloc[0]:
        return "No operation differs"
    return f"{_short(table['name'].iloc[0])} differs most"


def _short(name: str) -> str:
    """A name that fits beside a bar: long ones without their arguments."""
    short = name if len(name) <= 40 else op_names([name])[0]
    short = short.replace("evaluate_function: ", "")
    return short if len(short) <= 40 else short[:38] + "..."
