"""What decides how long a step takes? Pictures of its critical path, of what the path
consists of, and of what-ifs.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import NS_PER_S, format_s
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.critical_path import PATH_KINDS
from madmax_lib.view import drawing as draw

__all__ = ["plot_path", "plot_path_share", "plot_what_if"]

_COLORS = draw.COLORS | {
    "host": "#6b4a32",
    "launch delay": "#8c1c2b",
    "wait": draw.COLORS["idle"],
}
_NAMES = {"comm": "communication", "memcpy": "copies"}


def plot_path(path: pd.DataFrame, timeline: Timeline, ax: Axes | None = None) -> Axes:
    """A `critical_path` over its timeline: rows by rank and stream, the path in full
    colour, all other work faded.
    """
    if not len(path):
        raise ValueError("nothing to draw: the path is empty")
    zero_ns = path.attrs["start_ns"]
    reach_ns = round(path.attrs["step_s"] * NS_PER_S)
    spans = timeline.spans[timeline.spans["kind"].isin([*BUSY_KINDS, "cpu"])]
    work = _within(spans.assign(start_ns=spans["start_ns"] - zero_ns), reach_ns)
    work = work.assign(kind=work["kind"].astype(object).replace("cpu", "host"))
    start_ns, dur_ns = (
        path[column].mul(NS_PER_S).round().astype("int64")
        for column in ("start_s", "dur_s")
    )
    on_path = _within(path.assign(start_ns=start_ns, dur_ns=dur_ns), reach_ns)
    columns = ["rank", "stream", "kind"]
    lanes = draw.lanes(
        pd.concat([work.loc[work["kind"] != "host", columns], path[columns]]),
        timeline.meta,
    )
    ax = ax or draw.new_axes(height=0.9 + 0.24 * len(lanes))
    drawn = []
    for part, table, height, alpha in (
        ("beside", work, 0.5, 0.25),
        ("path", on_path, 0.8, None),
    ):
        fills = {
            kind: draw.fill_of(_COLORS[kind], timeline.meta.source) | {"alpha": alpha}
            for kind in PATH_KINDS
        }
        placed = table.merge(lanes, on=["rank", "stream"])
        drawn.append(
            draw.blocks(ax, placed, fills, reach_ns=reach_ns, height=height).assign(
                part=part
            )
        )
    data = (
        pd.concat(drawn)
        .sort_values(["place", "part"], kind="stable")
        .merge(lanes, on="place")
    )
    data = data[["rank", "stream", "part", "kind", "start_s", "dur_s"]]
    shares = (path.groupby("kind")["dur_s"].sum() / path["dur_s"].sum()).sort_values(
        ascending=False
    )
    most = [
        f"{share:.0%} {_name(kind)}"
        for kind, share in shares[shares > 0.005].head(3).items()
    ]
    title = f"What decides {format_s(path.attrs['step_s'])}: {', '.join(most)}"
    key = {_name(kind): _COLORS[kind] for kind in PATH_KINDS if kind in shares}
    key["faded: not on the path"] = draw.faded("compute", alpha=0.25)
    ending = {
        "rows": lanes["label"],
        "reach": reach_ns / NS_PER_S * 1e3,
        "key": key,
        "origin": timeline,
    }
    return draw.finish(ax, data, title, x="time in the step [ms]", **ending)


def plot_path_share(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `path_share`: time of each kind on the path, beside all its time, on the
    path or not.
    """
    table = table.sort_values("path_s", ascending=False)
    ax = ax or draw.new_axes(height=1.1 + 0.45 * len(table))
    names = [_name(kind) for kind in table["kind"]]
    paints = [
        draw.fill_of(_COLORS[kind], table.attrs.get("source")) for kind in table["kind"]
    ]
    pale = [draw.faded(paint, alpha=0.35) for paint in paints]
    busy = table["busy_s"].map(lambda busy_s: "busy" if busy_s else "")
    draw.bars(
        ax,
        table["path_s"] * 1e3,
        paints,
        slot=(0, 2),
        notes=table["share"].map("{:.1%} of the path".format),
    )
    draw.bars(ax, table["busy_s"] * 1e3, pale, slot=(1, 2), height=0.26, notes=busy)
    title = (
        f"{table['share'].iloc[0]:.0%} of the step is decided by: {names[0]}"
        if names
        else "No path"
    )
    return draw.finish(
        ax, table, title, x="time in the step [ms]; busy: mean of the ranks", rows=names
    )


def plot_what_if(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `what_if`: the time of the step in each scenario, with the measured time
    as a line.
    """
    saved_s = (
        table.groupby("faster", sort=False)["saved_s"]
        .max()
        .sort_values(ascending=False)
    )
    now_s = float((table["step_s"] + table["saved_s"]).max()) if len(table) else 0.0
    group = table["faster"].map(list(saved_s.index).index)
    shown = table.assign(group=group).sort_values("group", kind="stable")
    paints = []
    notes = []
    rows = []
    for row in shown.itertuples():
        without = np.isinf(row.factor)
        paint = draw.fill_of(
            _COLORS.get(row.faster, "other"), table.attrs.get("source")
        )
        paints.append(paint if without else draw.faded(paint))
        gain = (
            f"-{row.saved_s / now_s:.0%}" if row.saved_s > 0.005 * now_s else "no gain"
        )
        notes.append(f"{format_s(row.step_s)} ({gain})")
        rows.append(
            f"no {_name(row.faster)}"
            if without
            else f"{_name(row.faster)} {row.factor:g}x faster"
        )
    title = "Nothing to gain"
    if now_s:
        title = (
            f"Most to gain: {_name(saved_s.index[0])}, up to "
            f"{saved_s.iloc[0] / now_s:.0%}"
        )
    ending = {
        "x": "time of the step, dotted: as it is [ms]",
        "rows": rows,
        "notes": notes,
    }
    ax = draw.bar_chart(ax, table, shown["step_s"] * 1e3, title, paints, **ending)
    ax.axvline(now_s * 1e3, color="black", linewidth=0.8, linestyle=":")
    return ax


def _within(spans: pd.DataFrame, reach_ns: int) -> pd.DataFrame:
    """The spans inside a window from 0, cut at its ends."""
    end_ns = (spans["start_ns"] + spans["dur_ns"]).clip(upper=reach_ns)
    start_ns = spans["start_ns"].clip(lower=0)
    return spans.assign(start_ns=start_ns, dur_ns=end_ns - start_ns)[start_ns < end_ns]


def _name(kind: str) -> str:
    return _NAMES.get(kind, kind)
