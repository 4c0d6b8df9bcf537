"""Pictures of where the time of each rank goes: a timeline, its breakdown, exposed
communication, waiting and advice.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import NS_PER_S, format_s
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import BUSY_KINDS, Timeline, busy_spans, ends_ns
from madmax_lib.view.drawing import (
    bar_chart,
    blocks,
    empty,
    finish,
    grid,
    kind_fills,
    kinds_key,
    lanes,
    new_axes,
    plural,
    rank_labels,
)

# causes of `advise` that are communication
_PARTS = {  # of a step: label and kind
    "compute": "compute",
    "exposed communication": "comm",
    "copies and other": "memcpy",
    "idle": "idle",
}
_HIDDEN = {"hidden under compute": "hidden", "exposed": "comm"}
_COPY_WIDTH = 3  # least width of copies: they are few and short, and would not show
_LEGIBLE = 0.08  # share of a bar above which a number fits on it


def plot_timeline(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    step: int | None = None,
    hosts: bool = False,
) -> Axes:
    """Rows by rank and stream, colour by kind, for one step (the first if none is
    given), in ms from its start.

    hosts: with what host threads do, as other work. Raises ValueError for a step that
    the timeline does not have.
    See also: mm.view_timeline, mm.save_figure.
    """
    require_type("timeline", timeline, Timeline)
    spans = timeline.spans
    if hosts:
        kind = spans["kind"].astype(object)
        spans = spans.assign(kind=kind.replace("cpu", "other"))
    spans = busy_spans(spans)
    # without steps all spans have step -1
    spans = spans[spans["step"].isin(timeline.one_step(step) or [-1])]
    if spans.empty:
        raise ValueError("nothing to draw: no span of kind " + ", ".join(BUSY_KINDS))
    spans = spans.assign(start_ns=spans["start_ns"] - spans["start_ns"].min())
    reach_ns = int(ends_ns(spans).max())
    rows = lanes(spans, timeline.meta)
    ax = ax or new_axes(height=0.9 + 0.24 * len(rows))
    fills = kind_fills(BUSY_KINDS, timeline.meta.source)
    widths_ns = dict.fromkeys(BUSY_KINDS, _COPY_WIDTH * reach_ns)
    widths_ns |= {"compute": reach_ns, "comm": reach_ns}
    drawn = blocks(
        ax, spans.merge(rows, on=["rank", "stream"]), fills, widths_ns
    ).merge(rows, on="place")
    numbers = set(spans["step"]) - {-1, 0}
    which = f"Step {min(numbers)}" if numbers else "One step"
    ranks = plural(spans["rank"].nunique(), "rank")
    # of a job that is larger, such as a rank per stage
    if timeline.meta.world_size > spans["rank"].nunique():
        ranks = f"{spans['rank'].nunique()} of {timeline.meta.world_size:,} ranks"
    columns = ["rank", "stream", "kind", "start_s", "dur_s"]
    return finish(
        ax,
        drawn[columns],
        f"{which} takes {format_s(reach_ns / NS_PER_S)} on {ranks}",
        x="time in the step [ms]",
        rows=rows["label"],
        reach=reach_ns / NS_PER_S * 1e3,
        key=kinds_key(spans["kind"]),
        origin=timeline,
    )


def breakdown_parts(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds of compute, exposed communication, copies and other work, and idle time:
    columns are kinds.
    """
    # non-compute is exposed communication and all that is neither, so
    #   copies and other = non-compute - exposed communication
    rest_s = table["non_compute_s"] - table["exposed_comm_s"]
    return pd.DataFrame(
        {
            "compute": table["compute_s"],
            "comm": table["exposed_comm_s"],
            "memcpy": rest_s.clip(lower=0),
            "idle": table["idle_s"],
        }
    )


def parts_key(parts: pd.DataFrame) -> dict[str, str]:
    """Legend entries of the parts that are there."""
    return {label: kind for label, kind in _PARTS.items() if parts[kind].sum() > 0}


def plot_breakdown(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Stacked bars of `breakdown`: compute, exposed communication, the remaining busy
    time, idle, per rank.
    """
    parts = breakdown_parts(table)
    # a rank without work has NaN shares, and no texts
    shares = parts.div(table["total_s"].where(table["total_s"] > 0), axis=0)
    texts = shares.map(lambda share: f"{share:.0%}" if share > _LEGIBLE else "")
    # weighted by time: a rank of a longer window counts for more
    mean = parts.sum() / max(table["total_s"].sum(), 1e-12)
    return bar_chart(
        ax,
        table,
        parts * 1e3,
        f"{mean['compute']:.0%} compute, {mean['comm']:.0%} exposed "
        f"communication, {mean['idle']:.0%} idle",
        x="time [ms]",
        rows=rank_labels(table["rank"]),
        key=parts_key(parts),
        inside=texts,
    )


def plot_overlap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Communication of each rank, split into hidden under compute and exposed, with the
    overlap as text.
    """
    exposed_s = table["exposed_comm_s"]
    parts = pd.DataFrame({"hidden": table["comm_s"] - exposed_s, "comm": exposed_s})
    overlap = table["overlap"]
    notes = overlap.map("{:.1%} hidden".format)
    notes = notes.where(overlap.notna(), "no communication")
    # all ranks together, without a division by zero where none communicates
    exposed = exposed_s.sum() / max(table["comm_s"].sum(), 1e-12)
    return bar_chart(
        ax,
        table,
        parts * 1e3,
        f"{exposed:.0%} of the communication is exposed",
        x="communication [ms]",
        rows=rank_labels(table["rank"]),
        key=_HIDDEN,
        notes=notes,
    )


def plot_exposed(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Exposed and hidden time by collective, mean over the ranks, of
    `exposed_by_collective`.
    """
    ranks = table["rank"].nunique()
    mean = table.groupby("collective")[["comm_s", "exposed_s"]].sum() / max(ranks, 1)
    mean = mean.sort_values("exposed_s", ascending=False)
    exposed_s = mean["exposed_s"]
    parts = pd.DataFrame({"comm": exposed_s, "hidden": mean["comm_s"] - exposed_s})
    names = [name.replace("_", "-") for name in mean.index]
    title = "No communication is exposed"
    if exposed_s.sum() > 0:
        share = exposed_s.iloc[0] / mean["comm_s"].iloc[0]
        most = format_s(exposed_s.iloc[0])
        title = f"Most exposed: {names[0]}, {most}, {share:.0%} of its time"
    return bar_chart(
        ax,
        mean.reset_index(),
        parts * 1e3,
        title,
        x=f"time per rank, mean of {plural(ranks, 'rank')} [ms]",
        rows=names,
        key=_HIDDEN,
    )


def plot_waiting(
    table: pd.DataFrame, ax: Axes | None = None, *, ranks: list[int] | None = None
) -> Axes:
    """Who waits for whom: rows wait, columns arrive last, of `waiting`; values in ms."""
    ranks = sorted({*table["rank"], *table["waits_for"]}) if ranks is None else ranks
    if table.empty:
        return empty(ax, table, "Nobody waits: no collective has two ranks here")
    if ax is None:
        ax = new_axes(height=1.4 + 0.32 * len(ranks), width=3.4 + 0.5 * len(ranks))
    # a matrix of ranks by ranks; who never waits for whom is a zero, not a gap
    wait_s = table.groupby(["rank", "waits_for"])["wait_s"].sum().unstack()
    wait_ms = wait_s.reindex(index=ranks, columns=ranks).fillna(0.0) * 1e3
    texts = wait_ms.map(lambda value: f"{value:.3g}" if value else "")
    grid(
        ax,
        wait_ms.set_axis(rank_labels(ranks)),
        texts=texts,
        limits=(0, None),
    )
    ax.set_aspect("equal")
    share = wait_ms.sum() / max(wait_ms.to_numpy().sum(), 1e-12)
    title = f"Rank {share.idxmax()} causes {share.max():.0%} of the waiting"
    if table.attrs.get("limits"):
        title += " seen: not all ranks are"
    return finish(
        ax,
        table,
        title,
        x="rank that arrives last",
        y="rank that waits, and how long [ms]",
    )
