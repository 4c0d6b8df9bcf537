"""Pictures of what decides how long a step takes: its critical path, what the path
consists of, and what-ifs.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import NS_PER_S, format_s
from madmax_lib.timeline import BUSY_KINDS, Timeline, clipped
from madmax_lib.traces.critical_path import PATH_KINDS
from madmax_lib.view.drawing import (
    COLORS,
    LABELS,
    bar_chart,
    blocks,
    faded,
    fill_of,
    finish,
    lanes,
    new_axes,
)

_COLORS = COLORS | {
    "host": COLORS["other"],
    "launch delay": "#8c1c2b",
    "wait": COLORS["idle"],
}
_LEAST_SHARE = 0.005  # of the step; a smaller one is not worth a word
_FADED = 0.25  # opacity of work that is not on the path


def plot_path(path: pd.DataFrame, timeline: Timeline, ax: Axes | None = None) -> Axes:
    """A `critical_path` over its timeline: rows by rank and stream, the path in full
    colour, all other work pale.
    """
    if path.empty:
        raise ValueError("nothing to draw: the path is empty")
    # the window of the path: from its first work to the end of the step
    reach_ns = round(path.attrs["step_s"] * NS_PER_S)
    work = _work(timeline, path.attrs["start_ns"], reach_ns)
    times_ns = (path[["start_s", "dur_s"]] * NS_PER_S).round().astype("int64")
    times_ns = times_ns.set_axis(["start_ns", "dur_ns"], axis=1)
    on_path = clipped(path.assign(**times_ns), 0, reach_ns)
    # host threads have a row only where the path runs through them
    columns = ["rank", "stream", "kind"]
    on_device = work.loc[work["kind"] != "host", columns]
    rows = lanes(pd.concat([on_device, path[columns]]), timeline.meta)
    ax = ax or new_axes(height=0.9 + 0.24 * len(rows))
    fills = {kind: fill_of(_COLORS[kind], timeline.meta.source) for kind in PATH_KINDS}
    pale = {kind: fill | {"alpha": _FADED} for kind, fill in fills.items()}
    work = work.merge(rows, on=["rank", "stream"])
    on_path = on_path.merge(rows, on=["rank", "stream"])
    # all work thin and pale, the path over it
    drawn = [
        blocks(ax, work, pale, reach_ns, height=0.5).assign(part="beside"),
        blocks(ax, on_path, fills, reach_ns).assign(part="path"),
    ]
    data = pd.concat(drawn).sort_values(["place", "part"], kind="stable")
    data = data.merge(rows, on="place")
    # the pieces of the path follow each other and add up to the step
    by_kind = path.groupby("kind")["dur_s"].sum().sort_values(ascending=False)
    shares = by_kind / path["dur_s"].sum()
    most = shares[shares > _LEAST_SHARE].head(3)
    texts = [f"{share:.0%} {kind}" for kind, share in most.rename(LABELS).items()]
    key = {
        LABELS.get(kind, kind): _COLORS[kind] for kind in PATH_KINDS if kind in shares
    }
    key["faded: not on the path"] = faded("compute", alpha=_FADED)
    columns = ["rank", "stream", "part", "kind", "start_s", "dur_s"]
    return finish(
        ax,
        data[columns],
        f"What decides {format_s(path.attrs['step_s'])}: {', '.join(texts)}",
        x="time in the step [ms]",
        rows=rows["label"],
        reach=reach_ns / NS_PER_S * 1e3,
        key=key,
        origin=timeline,
    )


def _work(timeline, start_ns, reach_ns):
    """Work of devices and hosts in the window of a step, from 0."""
    spans = timeline.spans[timeline.spans["kind"].isin([*BUSY_KINDS, "cpu"])]
    kind = spans["kind"].astype(object).replace("cpu", "host")
    spans = spans.assign(start_ns=spans["start_ns"] - start_ns, kind=kind)
    return clipped(spans, 0, reach_ns)


def plot_what_if(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `what_if`: the time of the step in each scenario, with the measured time
    as a line.
    """
    most_saved_s = table.groupby("faster", sort=False)["saved_s"].max()
    now_s = float((table["step_s"] + table["saved_s"]).max()) if len(table) else 0.0
    # the scenarios of a kind together, kinds in order of what they can save
    rank = -table["faster"].map(most_saved_s)
    scenarios = table.iloc[rank.argsort(kind="stable")]
    fills = []
    notes = []
    rows = []
    for row in scenarios.itertuples():
        name = LABELS.get(row.faster, row.faster)
        fill = fill_of(_COLORS.get(row.faster, "other"), table.attrs.get("source"))
        # infinitely faster: without it
        if np.isinf(row.factor):
            fills.append(fill)
            rows.append(f"no {name}")
        else:
            fills.append(faded(fill))
            rows.append(f"{name} {row.factor:g}x faster")
        gain = row.saved_s / now_s if now_s else 0.0
        text = f"-{gain:.0%}" if gain > _LEAST_SHARE else "no gain"
        notes.append(f"{format_s(row.step_s)} ({text})")
    title = "Nothing to gain"
    if now_s:
        kind = most_saved_s.idxmax()
        saved = most_saved_s.max() / now_s
        title = f"Most to gain: {LABELS.get(kind, kind)}, up to {saved:.0%}"
    ax = bar_chart(
        ax,
        table,
        scenarios["step_s"] * 1e3,
        title,
        x="time of the step, dotted: as it is [ms]",
        rows=rows,
        fill=fills,
        notes=notes,
    )
    ax.axvline(now_s * 1e3, color="black", linewidth=0.8, linestyle=":")
    return ax
