"""What decides how long a step takes? Pictures of its critical path, of what the path consists of, and of what-ifs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from madmax_lib.intervals import intersection, pack
from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.critical_path import PATH_KINDS
from madmax_lib.units import NS_PER_S, format_s
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, new_axes, row_label, rows_of, visible_blocks

__all__ = ["plot_path", "plot_path_share", "plot_what_if"]

_COLORS = COLORS | {"host": "#6b4a32", "launch delay": "#8c1c2b", "wait": COLORS["idle"]}
_NAMES = {"comm": "communication", "memcpy": "copies"}


def plot_path(path: pd.DataFrame, timeline: Timeline, ax: Axes | None = None) -> Axes:
    """A `critical_path` over its timeline: rows by rank and stream, the path in full colour, all other work faded."""
    zero_ns, reach_ns = path.attrs["start_ns"], round(path.attrs["step_s"] * NS_PER_S)
    if not len(path):
        raise ValueError("nothing to draw: the path is empty")
    work = timeline.spans[timeline.spans["kind"].isin([*BUSY_KINDS, "cpu"])]
    work = work[(work["start_ns"] < zero_ns + reach_ns) & (work["start_ns"] + work["dur_ns"] > zero_ns)]
    work = work.assign(kind=work["kind"].astype(object).replace("cpu", "host"))
    begin_ns = path["start_s"].mul(NS_PER_S).round().astype("int64")
    on_path = path.assign(start_ns=begin_ns + zero_ns, dur_ns=path["dur_s"].mul(NS_PER_S).round().astype("int64"))
    shown = pd.concat([work.loc[work["kind"] != "host", ["rank", "stream", "kind"]], path[["rank", "stream", "kind"]]])
    rows = rows_of(shown)
    ax = ax or new_axes(height=0.9 + 0.24 * len(rows))
    drawn = []
    for place, (rank, stream) in enumerate(rows):
        for spans, share in ((work, "beside"), (on_path, "path")):
            lane = spans[(spans["rank"] == rank) & (spans["stream"] == stream)]
            for kind in [kind for kind in PATH_KINDS if (lane["kind"] == kind).any()]:
                of_kind = lane[lane["kind"] == kind]
                times = intersection(pack(of_kind["start_ns"] - zero_ns, of_kind["dur_ns"]), np.array([[0, reach_ns]]))
                bars = np.diff(visible_blocks(times, reach_ns), prepend=0, axis=1) / NS_PER_S
                height = 0.8 if share == "path" else 0.5
                style = _paint(kind, timeline.meta.source) | ({} if share == "path" else {"alpha": 0.25})
                ax.broken_barh(bars * 1e3, (place - height / 2, height), **style)
                drawn += [(rank, stream, share, kind, start_s, dur_s) for start_s, dur_s in bars]
    ax.set_yticks(range(len(rows)), [row_label(rank, stream) for rank, stream in rows])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, reach_ns / NS_PER_S * 1e3), xlabel="time in the step [ms]")
    shares = (path.groupby("kind")["dur_s"].sum() / path["dur_s"].sum()).sort_values(ascending=False)
    message = ", ".join(
        f"{share:.0%} {_NAMES.get(kind, kind)}" for kind, share in shares[shares > 0.005].head(3).items()
    )
    ax.set_title(f"What decides {format_s(path.attrs['step_s'])}: {message}")
    _kinds_legend(ax, shares.index)
    return keep_data(ax, pd.DataFrame(drawn, columns=["rank", "stream", "part", "kind", "start_s", "dur_s"]), timeline)


def plot_path_share(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `path_share`: time of each kind on the path, beside all its time, on the path or not."""
    table = table.sort_values("path_s", ascending=False)
    ax = ax or new_axes(height=1.1 + 0.45 * len(table))
    source = table.attrs.get("source")
    for place, row in enumerate(table.itertuples()):
        ax.barh(place - 0.18, row.path_s * 1e3, height=0.36, **_paint(row.kind, source))
        ax.barh(place + 0.2, row.busy_s * 1e3, height=0.26, alpha=0.35, **_paint(row.kind, source))
        texts = [(f"{row.share:.1%} of the path", row.path_s, -0.18), ("busy", row.busy_s, 0.2)]
        for text, value_s, shift in texts if row.busy_s else texts[:1]:
            ax.annotate(
                text, (value_s * 1e3, place + shift), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    reach_ms = max([*table["path_s"], *table["busy_s"], 1e-9]) * 1e3
    ax.set_yticks(range(len(table)), [_NAMES.get(kind, kind) for kind in table["kind"]])
    ax.set(
        ylim=(len(table) - 0.4, -0.6),
        xlim=(0, reach_ms * 1.25),
        xlabel="time in the step [ms]; busy: mean of the ranks",
    )
    first = table.iloc[0] if len(table) else None
    title = (
        "No path" if first is None else f"{_NAMES.get(first.kind, first.kind)} decides {first.share:.0%} of the step"
    )
    ax.set_title(title[0].upper() + title[1:])
    return keep_data(ax, table)


def plot_what_if(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bars of `what_if`: the time of the step in each scenario, with the measured time as a line."""
    groups = table.groupby("faster", sort=False)["saved_s"].max().sort_values(ascending=False)
    ax = ax or new_axes(height=1.2 + 0.22 * len(table))
    source, places = table.attrs.get("source"), []
    now_s = float((table["step_s"] + table["saved_s"]).max()) if len(table) else 0.0
    for name in groups.index:
        for row in table[table["faster"] == name].itertuples():
            place = (places[-1][0] + 1 if places else 0) + (0.5 if places and places[-1][1] != name else 0)
            without = np.isinf(row.factor)
            kind = name if name in _COLORS else "other"
            ax.barh(place, row.step_s * 1e3, height=0.85, alpha=1 if without else 0.55, **_paint(kind, source))
            gain = f"-{row.saved_s / now_s:.0%}" if row.saved_s > 0.005 * now_s else "no gain"
            label = f"{format_s(row.step_s)} ({gain})"
            ax.annotate(label, (row.step_s * 1e3, place), (4, 0), textcoords="offset points", va="center", fontsize=7,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
            shown = _NAMES.get(name, name)
            places.append((place, name, f"no {shown}" if without else f"{shown} {row.factor:g}x faster"))
    ax.axvline(now_s * 1e3, color="black", linewidth=0.8, linestyle=":")
    ax.set_yticks([place for place, *_ in places], [label for *_, label in places])
    ax.set(ylim=((places[-1][0] if places else 0) + 0.7, -0.7), xlim=(0, max(now_s * 1e3 * 1.3, 1e-9)))
    ax.set_xlabel("time of the step, dotted: as it is [ms]")
    best = f"{_NAMES.get(groups.index[0], groups.index[0])}, up to {groups.iloc[0] / now_s:.0%}" if now_s else "nothing"
    ax.set_title(f"Most to gain: {best}")
    return keep_data(ax, table)


def _paint(kind: str, source: str | None) -> dict:
    return fill_of("other", source) | {"facecolor": _COLORS[kind]}


def _kinds_legend(ax: Axes, kinds) -> None:
    handles = [Patch(color=_COLORS[kind], label=_NAMES.get(kind, kind)) for kind in PATH_KINDS if kind in set(kinds)]
    handles.append(Patch(color=COLORS["compute"], alpha=0.25, label="faded: not on the path"))
    ax.legend(handles=handles, ncols=len(handles), loc="upper right",
              bbox_to_anchor=(1.0, -0.75 / ax.figure.get_figheight()))  # fmt: skip
