"""Where do bytes and time of an offloaded step go? Levers, places, moments and streams."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.simulator.schedule.streams import Stream
from madmax_lib.timeline import Timeline
from madmax_lib.units import NS_PER_S
from madmax_lib.view.drawing import DASHED, areas, bars, blocks, finish, line_key, new_axes, note, patch_key
from madmax_lib.view.plots.steps import COMPONENTS, OTHER

__all__ = ["plot_levers", "plot_moments", "plot_places", "plot_streams"]

_PLACES = {"device": "one device", "host": "host of a node", "nvme": "drives of a node"}
_KINDS = {"memcpy": "memcpy", "comm": "comm", "cpu": "other"}  # of what runs on a stream; others compute


def plot_levers(table: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """Memory of a device by lever; grey does not fit. table: of `lever_table`."""
    ax = ax or new_axes(height=1.2 + 0.32 * len(table))
    room_gb, fitting = room_bytes / 1e9, table[table["fits"]]
    ax.axvline(room_gb, **DASHED, zorder=0.5)
    kinds = table["fits"].map({True: "compute", False: "idle"})
    bars(ax, table["device_gb"], kinds, source="simulated")
    for row, lever in enumerate(table.itertuples()):
        elsewhere = {"host": lever.host_gb, "drives": lever.nvme_gb}
        beside = [f"{size:.0f} GB {place}" for place, size in elsewhere.items() if size]
        speed = f"{lever.step_s:.2f} s" if lever.fits else "does not fit"
        note(ax, lever.device_gb, row, ", ".join([speed, *beside]), box=True)
    title = f"{len(fitting)} of {len(table)} fit"
    if len(fitting):
        title += f", fastest: {fitting.loc[fitting['step_s'].idxmin(), 'lever']}"
    x = f"simulated memory of the fullest device [GB]; dashed: {room_gb:.0f} GB of room"
    return finish(ax, table, title, x=x, rows=table["lever"], reach=1.4 * table["device_gb"].max())


def plot_places(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Components of each place as a share of what it has; the dashed line is full. table: of `fits`."""
    places = table.drop_duplicates("place").set_index("place")
    ax = ax or new_axes(height=2.6 + 0.45 * len(places))
    shares = table.pivot_table(index="place", columns="component", values="size_bytes", aggfunc="sum", sort=False)
    shares = shares.loc[places.index].div(places["usable_bytes"], axis=0)
    fills = {name: COMPONENTS.get(name, OTHER) for name in dict.fromkeys(table["component"])}
    reach = bars(ax, shares.fillna(0.0), fills, source="simulated")
    used, margin = places["usable_bytes"] - places["margin_bytes"], places["margin_bytes"] / places["usable_bytes"]
    for row, (end, size, room) in enumerate(zip(reach, used, places["usable_bytes"], strict=True)):
        note(ax, max(end, 1.0), row, f"{size / 1e9:.1f} of {room / 1e9:.0f} GB")
    ax.axvline(1.0, **DASHED)
    tight = margin.idxmin()
    free, missing_gb = margin[tight], -places.at[tight, "margin_bytes"] / 1e9
    title = f"Tightest is {_PLACES[tight]}: " + (f"{free:.0%} left" if free >= 0 else f"{missing_gb:.1f} GB too little")
    x, rows = (
        "simulated bytes over the room for training, all moments of a step",
        [_PLACES[name] for name in places.index],
    )
    key = [patch_key(name, color) for name, color in fills.items()]
    return finish(ax, table, title, x=x, rows=rows, reach=1.25 * max(1.0, reach.max()), key=key, columns=4)


def plot_moments(table: pd.DataFrame, place: str = "device", ax: Axes | None = None) -> Axes:
    """Memory of a device or of its host over the moments of a step. table: of `moments`; place: device or host."""
    ax = ax or new_axes(height=2.8)
    if place == "device":
        what, room_gb = "One device", table["room_bytes"].iloc[0] / 1e9
        fills, columns = {"everything but the model": "comm", "model states": "compute"}, ["other_bytes", "model_bytes"]
    else:
        what, room_gb = "The host", table["host_room_bytes"].iloc[0] / 1e9
        fills, columns = {"model states and checkpoints": "memcpy"}, ["host_bytes"]
    size_gb = (table[columns] / 1e9).set_axis(list(fills), axis=1)
    held_gb = areas(ax, range(len(table)), size_gb, fills, source="simulated", step="mid")
    ax.axhline(room_gb, **DASHED)
    first = table.drop_duplicates("phase").set_index("phase").index
    begins = {
        phase: int((table["phase"] == phase).argmax()) for phase in first if phase in ("forward", "backward", "update")
    }
    ax.set_xticks(list(begins.values()), list(begins), ha="left")
    low, high = held_gb.min(), held_gb.max()
    title = f"{what} holds {low:.0f} to {high:.0f} GB" if high - low > 0.5 else f"{what} holds {high:.0f} GB"
    key = [patch_key(name, fill) for name, fill in fills.items()] + [line_key("room for training", **DASHED)]
    limits = {"xlim": (0, len(table) - 1), "ylim": (0, 1.15 * max(room_gb, high))}
    return finish(ax, table, title, x="layer by layer", y="simulated memory [GB]", key=key, **limits)


def plot_streams(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """What device, links and host of one rank do in an offloaded step. timeline: simulated, with offload."""
    spans = timeline.select(ranks=timeline.ranks[:1]).spans
    end_ns = spans["start_ns"] + spans["dur_ns"]
    busy = spans[spans["kind"] != "idle"]
    streams = [stream for stream in Stream if (busy["stream"] == stream).any()]
    ax = ax or new_axes(height=1.0 + 0.34 * len(streams))
    kind = busy.groupby("stream")["kind"].first().map(_KINDS).astype(object).fillna("compute")
    placed = busy.assign(place=busy["stream"].map(streams.index), kind=busy["stream"].map(kind))
    fills = {name: name for name in (*_KINDS.values(), "compute")}
    drawn = blocks(ax, placed, fills, reach_ns=int(end_ns.max()), source=timeline.meta.source, unit_s=1.0)
    drawn.insert(0, "row", [streams[place].label for place in drawn["place"]])
    passes = (spans["stream"] == Stream.COMPUTE) & (spans["name"] != "adam") & (spans["kind"] == "compute")
    passes_s, step_s = float(end_ns[passes].max()) / NS_PER_S, float(end_ns.max()) / NS_PER_S
    title = f"Passes end after {passes_s:.1f} s, the step after {step_s:.1f} s"
    data, rows = drawn.drop(columns=["place", "kind"]), [stream.label for stream in streams]
    return finish(ax, data, title, x="simulated time in the step [s]", rows=rows, reach=step_s, origin=timeline)
