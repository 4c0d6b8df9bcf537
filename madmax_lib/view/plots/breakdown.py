"""Where does the time of each rank go? Pictures of a timeline, its breakdown, exposed
communication and waiting.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.fields import require_type
from madmax_lib.base.units import NS_PER_S, format_s
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.view import drawing as draw

__all__ = [
    "plot_advice",
    "plot_breakdown",
    "plot_exposed",
    "plot_overlap",
    "plot_timeline",
    "plot_waiting",
]

_TALK = ("exposed communication", "small messages", "straggler rank")
_PARTS = {
    "compute": "compute",
    "exposed communication": "comm",
    "copies and other": "memcpy",
    "idle": "idle",
}
_WIDER = dict.fromkeys(
    set(BUSY_KINDS) - {"compute", "comm"}, 3
)  # copies are few and short, and would not show
_HIDDEN = {"hidden under compute": "hidden", "exposed": "comm"}


def plot_timeline(
    timeline: Timeline, ax: Axes | None = None, *, step: int | None = None
) -> Axes:
    """Rows by rank and stream, colour by kind, for one step (the first if none is
    given), in ms from its start.

    Raises ValueError for a step that the timeline does not have.
    See also: mm.view_timeline, mm.view_in_perfetto, mm.save_figure.
    """
    require_type("timeline", timeline, Timeline)
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    spans = spans[spans["step"].isin(timeline.one_step(step) or [-1])]
    if not len(spans):
        raise ValueError("nothing to draw: no span of kind " + ", ".join(BUSY_KINDS))
    spans = spans.assign(start_ns=spans["start_ns"] - spans["start_ns"].min())
    reach_ns = int((spans["start_ns"] + spans["dur_ns"]).max())
    lanes = draw.lanes(spans, timeline.meta)
    ax = ax or draw.new_axes(height=0.9 + 0.24 * len(lanes))
    placed = spans.merge(lanes, on=["rank", "stream"])
    drawn = draw.blocks(
        ax,
        placed,
        BUSY_KINDS,
        reach_ns=reach_ns,
        source=timeline.meta.source,
        wider=_WIDER,
    )
    drawn = drawn.merge(lanes, on="place")[
        ["rank", "stream", "kind", "start_s", "dur_s"]
    ]
    numbered = set(spans["step"]) - {-1, 0}
    which = f"Step {min(numbered)}" if numbered else "One step"
    title = (
        f"{which} takes {format_s(reach_ns / NS_PER_S)} on "
        f"{draw.plural(spans['rank'].nunique(), 'rank')}"
    )
    ending = {
        "rows": lanes["label"],
        "reach": reach_ns / NS_PER_S * 1e3,
        "key": draw.kinds_key(spans["kind"]),
    }
    return draw.finish(
        ax, drawn, title, x="time in the step [ms]", origin=timeline, **ending
    )


def breakdown_parts(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds of compute, exposed communication, copies and other work, and idle time:
    columns are kinds.
    """
    parts = table[["compute_s", "exposed_comm_s", "non_compute_s", "idle_s"]].set_axis(
        list(_PARTS.values()), axis=1
    )
    return parts.assign(memcpy=(parts["memcpy"] - parts["comm"]).clip(lower=0))


def parts_key(parts: pd.DataFrame) -> dict[str, str]:
    """Legend entries of the parts that are there."""
    return {label: kind for label, kind in _PARTS.items() if parts[kind].sum() > 0}


def plot_breakdown(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Stacked bars of `breakdown`: compute, exposed communication, the remaining busy
    time, idle, per rank.
    """
    parts = breakdown_parts(table)
    shares = parts.div(table["total_s"].where(table["total_s"] > 0), axis=0)
    texts = shares.map(lambda share: f"{share:.0%}" if share > 0.08 else "")
    whole = parts.sum() / max(table["total_s"].sum(), 1e-12)
    title = (
        f"{whole['compute']:.0%} compute, {whole['comm']:.0%} exposed "
        f"communication, {whole['idle']:.0%} idle"
    )
    ending = {"rows": draw.rank_labels(table["rank"]), "key": parts_key(parts)}
    return draw.bar_chart(
        ax, table, parts * 1e3, title, inside=texts, x="time [ms]", **ending
    )


def plot_overlap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Communication of each rank, split into hidden under compute and exposed, with the
    overlap as text.
    """
    parts = pd.DataFrame(
        {
            "hidden": table["comm_s"] - table["exposed_comm_s"],
            "comm": table["exposed_comm_s"],
        }
    )
    notes = (
        table["overlap"]
        .map("{:.1%} hidden".format)
        .where(table["overlap"].notna(), "no communication")
    )
    exposed = table["exposed_comm_s"].sum() / max(table["comm_s"].sum(), 1e-12)
    title = f"{exposed:.0%} of the communication is exposed"
    rows = draw.rank_labels(table["rank"])
    return draw.bar_chart(
        ax,
        table,
        parts * 1e3,
        title,
        notes=notes,
        x="communication [ms]",
        rows=rows,
        key=_HIDDEN,
    )


def plot_exposed(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Exposed and hidden time by collective, mean over the ranks, of
    `exposed_by_collective`.
    """
    ranks = table["rank"].nunique()
    mean = table.groupby("collective")[["comm_s", "exposed_s"]].sum() / max(ranks, 1)
    mean = mean.sort_values("exposed_s", ascending=False)
    parts_ms = (
        pd.DataFrame(
            {"comm": mean["exposed_s"], "hidden": mean["comm_s"] - mean["exposed_s"]}
        )
        * 1e3
    )
    names = [name.replace("_", "-") for name in mean.index]
    title = "No communication is exposed"
    if mean["exposed_s"].sum() > 0:
        exposed_s = mean["exposed_s"].iloc[0]
        comm_s = mean["comm_s"].iloc[0]
        title = (
            f"Most exposed: {names[0]}, {format_s(exposed_s)}, "
            f"{exposed_s / comm_s:.0%} of its time"
        )
    x = f"time per rank, mean of {draw.plural(ranks, 'rank')} [ms]"
    return draw.bar_chart(
        ax,
        mean.reset_index(),
        parts_ms,
        title,
        x=x,
        rows=names,
        key=_HIDDEN,
        origin=table,
    )


def plot_waiting(
    table: pd.DataFrame, ax: Axes | None = None, *, ranks: list[int] | None = None
) -> Axes:
    """Who waits for whom: rows wait, columns arrive last, of `waiting`; values in ms."""
    ranks = sorted({*table["rank"], *table["waits_for"]}) if ranks is None else ranks
    if not len(table):
        return draw.empty(ax, table, "Nobody waits: no collective has two ranks here")
    ax = ax or draw.new_axes(
        height=1.4 + 0.32 * len(ranks), width=3.4 + 0.5 * len(ranks)
    )
    wait_ms = table.pivot_table(
        index="rank",
        columns="waits_for",
        values="wait_s",
        aggfunc="sum",
        observed=False,
    )
    wait_ms = wait_ms.reindex(index=ranks, columns=ranks).fillna(0.0) * 1e3
    texts = wait_ms.map(lambda value: f"{value:.3g}" if value else "")
    draw.grid(
        ax,
        wait_ms.set_axis(draw.rank_labels(ranks)),
        texts=texts,
        colors="Oranges",
        limits=(0, None),
    )
    ax.set_aspect("equal")
    share = wait_ms.sum() / max(wait_ms.to_numpy().sum(), 1e-12)
    title = f"Rank {share.idxmax()} causes {share.max():.0%} of the waiting [ms]"
    return draw.finish(
        ax, table, title, x="rank that arrives last", y="rank that waits"
    )


def plot_advice(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What each fix of `traces.advise` would gain at most per step, the ten largest."""
    shown = table.head(10)
    if not len(shown):
        return draw.empty(ax, shown, "No cause of lost time was found", table)
    kinds = [
        "comm" if cause in _TALK else "memcpy" if "copies" in cause else "idle"
        for cause in shown["cause"]
    ]
    ending = {
        "x": "gain per step, at most [ms]; as text: share of the step",
        "origin": table,
    }
    title = f"{shown['cause'].iloc[0].capitalize()} costs most"
    notes = shown["share"].map("{:.1%}".format)
    rows = [f"{row.cause}: {row.where}"[:60] for row in shown.itertuples()]
    return draw.bar_chart(
        ax, shown, shown["gain_s"] * 1e3, title, kinds, notes=notes, rows=rows, **ending
    )
