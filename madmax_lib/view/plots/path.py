"""What decides how long a step takes? Pictures of its critical path, of what the path consists of, and of what-ifs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.critical_path import PATH_KINDS
from madmax_lib.units import NS_PER_S, format_s
from madmax_lib.view.drawing import (
    COLORS,
    bars,
    blocks,
    faded,
    fill_of,
    finish,
    new_axes,
    note,
    patch_key,
    row_label,
    rows_of,
)

__all__ = ["plot_path", "plot_path_share", "plot_what_if"]

_COLORS = COLORS | {"host": "#6b4a32", "launch delay": "#8c1c2b", "wait": COLORS["idle"]}
_NAMES = {"comm": "communication", "memcpy": "copies"}


def plot_path(path: pd.DataFrame, timeline: Timeline, ax: Axes | None = None) -> Axes:
    """A `critical_path` over its timeline: rows by rank and stream, the path in full colour, all other work faded."""
    if not len(path):
        raise ValueError("nothing to draw: the path is empty")
    zero_ns, reach_ns = path.attrs["start_ns"], round(path.attrs["step_s"] * NS_PER_S)
    spans = timeline.spans[timeline.spans["kind"].isin([*BUSY_KINDS, "cpu"])]
    work = _within(spans.assign(start_ns=spans["start_ns"] - zero_ns), reach_ns)
    work = work.assign(kind=work["kind"].astype(object).replace("cpu", "host"))
    start_ns, dur_ns = (path[column].mul(NS_PER_S).round().astype("int64") for column in ("start_s", "dur_s"))
    on_path = _within(path.assign(start_ns=start_ns, dur_ns=dur_ns), reach_ns)
    columns = ["rank", "stream", "kind"]
    rows = rows_of(pd.concat([work.loc[work["kind"] != "host", columns], path[columns]]))
    lanes = pd.DataFrame(rows, columns=["rank", "stream"]).assign(place=range(len(rows)))
    ax, drawn = ax or new_axes(height=0.9 + 0.24 * len(rows)), []
    for part, table, height, alpha in (("beside", work, 0.5, 0.25), ("path", on_path, 0.8, None)):
        fills = {kind: fill_of(_COLORS[kind], timeline.meta.source) | {"alpha": alpha} for kind in PATH_KINDS}
        placed = table.merge(lanes, on=["rank", "stream"])
        drawn.append(blocks(ax, placed, fills, reach_ns=reach_ns, height=height).assign(part=part))
    data = pd.concat(drawn).sort_values(["place", "part"], kind="stable").merge(lanes, on="place")
    data = data[["rank", "stream", "part", "kind", "start_s", "dur_s"]]
    shares = (path.groupby("kind")["dur_s"].sum() / path["dur_s"].sum()).sort_values(ascending=False)
    most = [f"{share:.0%} {_name(kind)}" for kind, share in shares[shares > 0.005].head(3).items()]
    title = f"What decides {format_s(path.attrs['step_s'])}: {', '.join(most)}"
    key = [patch_key(_name(kind), _COLORS[kind]) for kind in PATH_KINDS if kind in shares]
    key.append(patch_key("faded: not on the path", faded("compute", alpha=0.25)))
    labels, reach_ms = [row_label(rank, stream) for rank, stream in rows], reach_ns / NS_PER_S * 1e3
    return finish(ax, data, title, x="time in the step [ms]", rows=labels, reach=reach_ms, key=key, origin=timeline)


def plot_path_share(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `path_share`: time of each kind on the path, beside all its time, on the path or not."""
    table = table.sort_values("path_s", ascending=False)
    ax = ax or new_axes(height=1.1 + 0.45 * len(table))
    source, names = table.attrs.get("source"), [_name(kind) for kind in table["kind"]]
    paints = [fill_of(_COLORS[kind], source) for kind in table["kind"]]
    on_path = table["share"].map("{:.1%} of the path".format)
    busy = ["busy" if busy_s else "" for busy_s in table["busy_s"]]
    bars(ax, table["path_s"] * 1e3, paints, slot=(0, 2), notes=on_path)
    bars(
        ax, table["busy_s"] * 1e3, [faded(paint, alpha=0.35) for paint in paints], slot=(1, 2), height=0.26, notes=busy
    )
    title = "No path"
    if names:
        title = f"{names[0][0].upper()}{names[0][1:]} decides {table['share'].iloc[0]:.0%} of the step"
    reach_ms = 1.25e3 * table[["path_s", "busy_s"]].max(axis=None) if names else None
    x = "time in the step [ms]; busy: mean of the ranks"
    return finish(ax, table, title, x=x, rows=names, reach=reach_ms)


def plot_what_if(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `what_if`: the time of the step in each scenario, with the measured time as a line."""
    saved_s = table.groupby("faster", sort=False)["saved_s"].max().sort_values(ascending=False)
    ax = ax or new_axes(height=1.2 + 0.22 * len(table))
    now_s = float((table["step_s"] + table["saved_s"]).max()) if len(table) else 0.0
    shown = table.sort_values("faster", key=lambda names: names.map(list(saved_s.index).index), kind="stable")
    paints, notes, labels = [], [], []
    for row in shown.itertuples():
        without = np.isinf(row.factor)
        paint = fill_of(_COLORS.get(row.faster, COLORS["other"]), table.attrs.get("source"))
        paints.append(paint if without else faded(paint))
        gain = f"-{row.saved_s / now_s:.0%}" if row.saved_s > 0.005 * now_s else "no gain"
        notes.append(f"{format_s(row.step_s)} ({gain})")
        labels.append(f"no {_name(row.faster)}" if without else f"{_name(row.faster)} {row.factor:g}x faster")
    places = np.arange(len(shown)) + 0.5 * shown["faster"].map(list(saved_s.index).index).to_numpy()
    ends = bars(ax, shown["step_s"] * 1e3, paints, places=places, height=0.85)
    for place, end, text in zip(places, ends, notes, strict=True):
        note(ax, end, place, text, box=True)
    ax.axvline(now_s * 1e3, color="black", linewidth=0.8, linestyle=":")
    ax.set_yticks(places, labels)
    title = (
        f"Most to gain: {_name(saved_s.index[0])}, up to {saved_s.iloc[0] / now_s:.0%}" if now_s else "Nothing to gain"
    )
    limits = {"ylim": (places.max(initial=0) + 0.7, -0.7)}
    return finish(ax, table, title, x="time of the step, dotted: as it is [ms]", reach=1.3e3 * now_s, **limits)


def _within(spans: pd.DataFrame, reach_ns: int) -> pd.DataFrame:
    """The spans inside a window from 0, cut at its ends."""
    end_ns = (spans["start_ns"] + spans["dur_ns"]).clip(upper=reach_ns)
    start_ns = spans["start_ns"].clip(lower=0)
    return spans.assign(start_ns=start_ns, dur_ns=end_ns - start_ns)[start_ns < end_ns]


def _name(kind: str) -> str:
    return _NAMES.get(kind, kind)
