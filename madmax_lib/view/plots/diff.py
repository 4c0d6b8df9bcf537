"""Pictures of how two timelines differ, of `traces.diff`: one above the other, kind by
kind, operation by operation.

`a` is drawn above `b`, measured filled, simulated hatched, so that each bar tells where
it comes from.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import NS_PER_S, format_s
from madmax_lib.catalog import data_file
from madmax_lib.timeline import BUSY_KINDS, Timeline, busy_spans, ends_ns
from madmax_lib.traces.diff import align_ranks, align_steps, compare, op_names
from madmax_lib.view.drawing import (
    COLORS,
    LABELS,
    PLAIN,
    bar_chart,
    bars,
    blocks,
    faded,
    fill_of,
    finish,
    kind_fills,
    kinds_key,
    new_axes,
    note,
    short_name,
)

# of `compare`, and step_s of `gate`
_QUANTITIES = pd.read_csv(data_file("view/quantities.csv"), index_col="quantity")
_NOTHING = "nothing to draw: one of the timelines has no span of kind " + ", ".join(
    BUSY_KINDS
)
_LEAST_WIDTH = 3  # times the usual one, so that short copies show
_GAP = 0.9  # rows between the two sides of a pair
_LONGEST_NAME = 40  # letters; of longer names of kernels only the operation is shown


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
    labels = table.attrs["labels"]
    names, sides = zip(*_first_steps(a, b), strict=True)
    here = pd.concat(sides)["kind"]
    kinds = [kind for kind in BUSY_KINDS if (here == kind).any()]
    if not kinds:
        raise ValueError(_NOTHING)
    ax = ax or new_axes(height=1.6 + 0.5 * len(kinds))
    lasts_ns = [int(ends_ns(side).max()) if len(side) else 0 for side in sides]
    reach_ns = max(lasts_ns)
    drawn = []
    ticks = []
    for number, side in enumerate(sides):
        # a row for each kind, below those of the other side
        top = number * (len(kinds) + _GAP)
        rows = {kind: top + row for row, kind in enumerate(kinds)}
        ticks += rows.values()
        end_s = lasts_ns[number] / NS_PER_S
        text = f"{labels[number]}: {names[number]}, {format_s(end_s)}"
        note(ax, 0, top - 0.5, text, dx=2, dy=1, va="bottom", fontsize=8)
        placed = side.assign(place=side["kind"].astype(object).map(rows))
        fills = kind_fills(kinds, table.attrs["sources"][number])
        part = blocks(ax, placed, fills, _LEAST_WIDTH * reach_ns)
        drawn.append(part.assign(side="ab"[number]))
        ends = (top - 0.45, ticks[-1] + 0.45)
        ax.vlines(end_s * 1e3, *ends, color="black", linewidth=0.8)
    ax.set_yticks(ticks, [LABELS[kind] for kind in kinds] * 2)
    return finish(
        ax,
        pd.concat(drawn)[["side", "kind", "start_s", "dur_s"]],
        f"{_change(labels, *lasts_ns)} in this step",
        x="time from the start of the step [ms]",
        reach=1.01e3 * reach_ns / NS_PER_S,
        ylim=(ticks[-1] + 0.6, -1.2),
        origin=table,
    )


def _first_steps(a, b):
    """Name and spans, from 0, of the first pair of steps and ranks that correspond."""
    steps = align_steps(a, b)
    ranks = align_ranks(a, b)
    if steps.empty:
        raise ValueError(_NOTHING)
    for name, timeline in (("a", a), ("b", b)):
        rank = ranks[f"rank_{name}"].iloc[0] if len(ranks) else timeline.ranks[0]
        step = steps[f"step_{name}"].iloc[0]
        # ranks and steps of two runs have numbers of their own
        spans = busy_spans(timeline.select(ranks=[rank], steps=[step]).spans)
        start_ns = spans["start_ns"] - spans["start_ns"].min()
        yield f"step {step} of rank {rank}", spans.assign(start_ns=start_ns)


def plot_compare(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Grouped bars of `compare`: each quantity in `a` above `b`, with the difference as
    text; lines from min to max.
    """
    quantities = table.set_index("quantity").reindex(_QUANTITIES.index)
    # the title is about the step, whatever has a row
    total = quantities.loc["total_s"]
    # what neither side has, such as copies, has no row
    present = (quantities[["a", "b"]].fillna(0) > 0).any(axis=1)
    quantities = quantities[present]
    ax = ax or new_axes(height=1.3 + 0.45 * max(len(quantities), 1))
    labels = table.attrs["labels"]
    growth = (quantities["ratio"] - 1).map(" ({:+.0%})".format)
    texts = quantities["difference"].map(_signed) + growth
    # a ratio to nothing says nothing
    meaningful = np.isfinite(quantities["difference"] * quantities["ratio"])
    texts = texts.where(meaningful, "")
    key = {}
    for number, (side, label) in enumerate(zip("ab", labels, strict=True)):
        fills = _QUANTITIES["fill"][quantities.index]
        ends = (quantities[f"{side}_min"] * 1e3, quantities[f"{side}_max"] * 1e3)
        bars(
            ax,
            quantities[side] * 1e3,
            fill=[_side_fill(fill, table.attrs, number) for fill in fills],
            slot=(number, 2),
            error=ends,
            notes=texts if side == "b" else None,
        )
        key[label] = _side_fill(PLAIN, table.attrs, number)
    return finish(
        ax,
        quantities.reset_index(),
        _change(labels, total["a"], total["b"]),
        x="time per step and rank [ms]",
        rows=_QUANTITIES["name"][quantities.index],
        key=key,
    )


def plot_ops(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The operations of `compare_ops` that differ most: bars to the right take longer
    in `b`, colour by kind.
    """
    top = table[table["difference_s"] != 0].head(count)
    names = [
        short_name(name if len(name) <= _LONGEST_NAME else op_names([name])[0])
        for name in top["name"]
    ]
    title = f"{names[0]} differs most" if names else "No operation differs"
    label_a, label_b = table.attrs["labels"]
    most_s = top["difference_s"].abs().max() if len(top) else 0.0
    # twice the longest bar to each side, for the texts beside them
    reach_ms = 2.1e3 * max(most_s, 1e-12)
    # calls on the host have kinds without a colour
    kinds = top["kind"].astype(str).where(top["kind"].isin(COLORS), "other")
    lengths_ms = top["difference_s"] * 1e3
    ax = bar_chart(
        ax,
        top,
        lengths_ms,
        title,
        x=f"time per step and rank: {label_b} minus {label_a} [ms]",
        xlim=(-reach_ms, reach_ms),
        rows=names,
        key=kinds_key(top["kind"]),
        fill=list(kinds),
    )
    for row, op in enumerate(top.itertuples()):
        text = _signed(op.difference_s)
        if op.status in ("more", "fewer"):
            text += f", {op.count_a:.3g} to {op.count_b:.3g} calls"
        elif op.status != "both":
            text += f", {op.status}"
        side = {"dx": -4, "ha": "right"}
        if op.difference_s > 0:
            side = {"dx": 4, "ha": "left"}
        note(ax, op.difference_s * 1e3, row, text, **side)
    ax.axvline(0, color="black", linewidth=0.8)
    return ax


def _side_fill(color, attrs, number):
    """Fill of side a (0) or b (1): b paler than a where it is measured, so that two
    measured sides can be told apart.
    """
    source = attrs["sources"][number]
    if number == 1 and source != "simulated":
        return faded(color)
    return fill_of(color, source)


def _signed(seconds):
    return ("-" if seconds < 0 else "+") + format_s(abs(seconds))


def _change(labels, a, b):
    if not a > 0:
        return f"{labels[0]} has no work"
    way = "longer" if b > a else "less"
    return f"{labels[1]} takes {abs(b / a - 1):.0%} {way} than {labels[0]}"
