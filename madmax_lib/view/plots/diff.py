"""How do two timelines differ? Pictures of `traces.diff`: one above the other, kind by
kind, operation by operation.

`a` is drawn above `b`, measured filled, simulated hatched, so that each bar tells where
it comes from.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import NS_PER_S, format_s
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.diff import align_ranks, align_steps, compare, op_names
from madmax_lib.traces.gate import GateResult
from madmax_lib.view import drawing as draw

__all__ = ["plot_compare", "plot_gate", "plot_ops", "plot_pair"]

_QUANTITIES = {  # of `compare`: colour, name
    "compute_s": (draw.COLORS["compute"], "compute"),
    "comm_s": (draw.COLORS["comm"], "communication"),
    "exposed_comm_s": (draw.COLORS["comm"], "exposed communication"),
    "memory_s": (draw.COLORS["memcpy"], "copies"),
    "idle_s": (draw.COLORS["idle"], "idle"),
    "total_s": ("#7f7f7f", "step"),
}
_VERDICTS = {
    "slower": "#c44e52",
    "cannot tell": draw.COLORS["idle"],
    "fine": draw.COLORS["compute"],
}
_NOTHING = "nothing to draw: one of the timelines has no span of kind " + ", ".join(
    BUSY_KINDS
)


def plot_pair(
    a: Timeline,
    b: Timeline,
    ax: Axes | None = None,
    *,
    labels: tuple[str, str] | None = None,
) -> Axes:
    """The first aligned step of the first aligned rank of both, `a` above `b`, each
    from the start of its step.

    One row per kind of work, because streams and threads of two timelines need not
    correspond. `select` ranks and steps beforehand to see others. Raises ValueError if
    one of them has no device work.
    """
    table = compare(a, b, labels=labels)
    steps = align_steps(a, b)
    ranks = align_ranks(a, b)
    if not len(steps):
        raise ValueError(_NOTHING)
    sides = []
    for side, timeline in (("a", a), ("b", b)):
        rank = ranks[f"rank_{side}"].iloc[0] if len(ranks) else timeline.ranks[0]
        step = steps[f"step_{side}"].iloc[0]
        spans = timeline.select(ranks=[rank], steps=[step]).spans
        spans = spans[spans["kind"].isin(BUSY_KINDS)]
        spans = spans.assign(start_ns=spans["start_ns"] - spans["start_ns"].min())
        sides.append((f"step {step} of rank {rank}", timeline.meta.source, spans))
    kinds = [
        kind
        for kind in BUSY_KINDS
        if any((spans["kind"] == kind).any() for _, _, spans in sides)
    ]
    if not kinds:
        raise ValueError(_NOTHING)
    ax = ax or draw.new_axes(height=1.6 + 0.5 * len(kinds))
    ends_ns = [
        int((spans["start_ns"] + spans["dur_ns"]).max()) if len(spans) else 0
        for _, _, spans in sides
    ]
    # so that short copies show
    drawn = []
    wider = dict.fromkeys(kinds, 3)
    for number, ((about, source, spans), end_s) in enumerate(
        zip(sides, np.divide(ends_ns, NS_PER_S), strict=True)
    ):
        top = number * (len(kinds) + 0.9)
        label = table.attrs["labels"][number]
        draw.note(
            ax,
            0,
            top - 0.5,
            f"{label}: {about}, {format_s(end_s)}",
            dx=2,
            dy=1,
            va="bottom",
            fontsize=8,
        )
        placed = spans.assign(place=top + spans["kind"].astype(object).map(kinds.index))
        of_side = draw.blocks(
            ax, placed, kinds, reach_ns=max(ends_ns), source=source, wider=wider
        )
        drawn.append(of_side.assign(side="ab"[number]))
        ax.vlines(
            end_s * 1e3,
            top - 0.45,
            top + len(kinds) - 0.55,
            color="black",
            linewidth=0.8,
        )
    places = np.add.outer([0, len(kinds) + 0.9], np.arange(len(kinds))).ravel()
    ax.set_yticks(places, [draw.LABELS[kind] for kind in kinds] * 2)
    data = pd.concat(drawn)[["side", "kind", "start_s", "dur_s"]]
    limits = {
        "reach": 1.01e3 * max(ends_ns) / NS_PER_S,
        "ylim": (places[-1] + 0.6, -1.2),
    }
    title = _change(table.attrs["labels"], *ends_ns) + " in this step"
    return draw.finish(
        ax,
        data,
        title,
        x="time from the start of the step [ms]",
        origin=table,
        **limits,
    )


def plot_compare(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Grouped bars of `compare`: each quantity in `a` above `b`, with the difference as
    text; lines from min to max.
    """
    shown = table.set_index("quantity").reindex(list(_QUANTITIES))
    total = shown.loc["total_s"]
    shown = shown[(shown[["a", "b"]].fillna(0) > 0).any(axis=1)]
    ax = ax or draw.new_axes(height=1.3 + 0.45 * max(len(shown), 1))
    difference = shown["difference"].map(_signed) + (shown["ratio"] - 1).map(
        " ({:+.0%})".format
    )
    key = {}
    for number, (side, label) in enumerate(
        zip("ab", table.attrs["labels"], strict=True)
    ):
        fills = [
            _side_fill(_QUANTITIES[quantity][0], table.attrs, number)
            for quantity in shown.index
        ]
        notes = (
            difference.where(np.isfinite(shown["difference"] * shown["ratio"]), "")
            if side == "b"
            else None
        )
        spread = (shown[f"{side}_min"] * 1e3, shown[f"{side}_max"] * 1e3)
        draw.bars(
            ax, shown[side] * 1e3, fills, slot=(number, 2), error=spread, notes=notes
        )
        key[label] = _side_fill("#7f7f7f", table.attrs, number)
    rows = [_QUANTITIES[quantity][1] for quantity in shown.index]
    title = _change(table.attrs["labels"], total["a"], total["b"])
    data = shown.reset_index()
    x = "time per step and rank [ms]"
    return draw.finish(ax, data, title, x=x, rows=rows, key=key, origin=table)


def plot_ops(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The operations of `compare_ops` that differ most: bars to the right take longer
    in `b`, colour by kind.
    """
    top = table[table["difference_s"] != 0].head(count)
    names = [
        draw.short_name(name if len(name) <= 40 else op_names([name])[0])
        for name in top["name"]
    ]
    title = f"{names[0]} differs most" if names else "No operation differs"
    (label_a, label_b) = table.attrs["labels"]
    width_ms = 2.1e3 * max(top["difference_s"].abs().max() if len(top) else 0.0, 1e-12)
    ending = {
        "x": f"time per step and rank: {label_b} minus {label_a} [ms]",
        "xlim": (-width_ms, width_ms),
    }
    ending |= {"rows": names, "key": draw.kinds_key(top["kind"]), "origin": table}
    kinds = top["kind"].astype(str).where(top["kind"].isin(draw.COLORS), "other")
    ax = draw.bar_chart(
        ax, top, top["difference_s"] * 1e3, title, list(kinds), **ending
    )
    for place, row in enumerate(top.itertuples()):
        side = (
            {"dx": 4, "ha": "left"}
            if row.difference_s > 0
            else {"dx": -4, "ha": "right"}
        )
        times = (
            f"{row.count_a:g} to {row.count_b:g} times"
            if row.status in ("more", "fewer")
            else row.status
        )
        text = _signed(row.difference_s) + (
            "" if row.status == "both" else f", {times}"
        )
        draw.note(ax, row.difference_s * 1e3, place, text, **side)
    ax.axvline(0, color="black", linewidth=0.8)
    return ax


def plot_gate(result: GateResult, ax: Axes | None = None) -> Axes:
    """How much each quantity of `gate` grew, with its 90 % interval, beside the
    threshold; colour by verdict.
    """
    table = result.table
    limit = result.threshold
    growth, low, high = (100 * (table[name] - 1) for name in ("ratio", "low", "high"))
    slower = table[table["verdict"] == "slower"].set_index("quantity")["ratio"] - 1
    title = f"Nothing is surely slower by {draw.percent(limit)}"
    if len(slower):
        title = (
            f"{draw.short_name(slower.index[0])} grew by {draw.percent(slower.iloc[0])}"
        )
    if "step_s" in slower:
        title = f"A step takes {draw.percent(slower['step_s'])} longer"
    reach = max(np.nanmax(np.abs([low, high])), 150 * limit)
    ending = {
        "rows": [draw.short_name(name) for name in table["quantity"]],
        "xlim": (-1.05 * reach, 1.05 * reach),
    }
    ending |= {
        "key": {
            verdict: _VERDICTS[verdict]
            for verdict in _VERDICTS
            if (table["verdict"] == verdict).any()
        }
    }
    x = "growth from a to b, with its 90 % interval [%]"
    ax = draw.bar_chart(
        ax,
        table,
        growth,
        title,
        list(table["verdict"].map(_VERDICTS)),
        error=(low, high),
        x=x,
        **ending,
    )
    ax.axvline(0, color="black", linewidth=0.8)
    ax.axvline(100 * limit, **draw.DASHED)
    return ax


def _side_fill(color: str, attrs: dict, number: int) -> dict:
    """b paler than a where it is measured, so that two measured sides can be told
    apart.
    """
    source = attrs["sources"][number]
    return (
        draw.faded(color)
        if number and source != "simulated"
        else draw.fill_of(color, source)
    )


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_s(abs(seconds))


def _change(labels: tuple[str, str], a: float, b: float) -> str:
    if not a > 0:
        return f"{labels[0]} has no work"
    return (
        f"{labels[1]} takes {abs(b / a - 1):.0%} {'longer' if b > a else 'less'} "
        f"than {labels[0]}"
    )
