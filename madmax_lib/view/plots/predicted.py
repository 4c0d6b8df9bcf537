"""What does a predicted step consist of? Its seconds by cause, and bytes by component,
place and moment.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import NS_PER_S
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.simulator.memory.memory import PHASES
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.view import drawing as draw

__all__ = [
    "plot_causes",
    "plot_components",
    "plot_moments",
    "plot_parts",
    "plot_places",
    "plot_streams",
]

_PARTS = {  # name: columns of `estimate`, kind
    "matrix products": (["gemm_s", "head_s"], "compute"),
    "attention": (["attention_s"], "compute"),
    "norms and activations": (["pointwise_s"], "compute"),
    "optimizer": (["optimizer_s"], "compute"),
    "tensor parallelism": (["tp_s"], "comm"),
    "context parallelism": (["cp_s"], "comm"),
    "experts' all-to-all": (["ep_s"], "comm"),
    "sharded weights": (["fsdp_s"], "comm"),
    "gradients": (["dp_s"], "comm"),
    "messages of the pipeline": (["pp_s"], "comm"),
    "pipeline bubble": (["bubble_s"], "idle"),
    "launches and host": (["launch_s", "overhead_s"], "idle"),
}
_CAUSES = {
    columns[0]: part for part, (columns, kind) in _PARTS.items() if kind == "comm"
}
_MOST_STAGES = 12
_PLACES = {"device": "one device", "host": "host of a node", "nvme": "drives of a node"}
_PASSES = ("forward", "backward", "update")
_KINDS = {
    "memcpy": "memcpy",
    "comm": "comm",
    "cpu": "other",
}  # of what runs on a stream; others compute


def plot_parts(row: pd.Series, ax: Axes | None = None) -> Axes:
    """Seconds of a step by cause; communication counts where nothing hides it. row: of
    `estimate`.
    """
    parts = [
        (part, kind, row[columns].sum()) for part, (columns, kind) in _PARTS.items()
    ]
    table = pd.DataFrame(parts, columns=["part", "kind", "seconds"])
    share = table["seconds"] / row["step_s"]
    shown = table[share > 5e-4]
    of_kind = share.groupby(table["kind"]).sum()
    computes = 1 - of_kind["comm"] - of_kind["idle"]
    title = (
        f"{computes:.0%} of the step computes, {of_kind['comm']:.0%} is "
        f"communication, {of_kind['idle']:.0%} waits"
    )
    ending = {
        "x": "simulated time that nothing hides [s]; beside it the share of the step",
        "rows": shown["part"],
    }
    ending |= {"notes": share[shown.index].map("{:.1%}".format), "source": "simulated"}
    return draw.bar_chart(ax, table, shown["seconds"], title, shown["kind"], **ending)


def plot_causes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Communication that nothing hides, by its cause, a bar per row of `estimate`; the
    index names the rows.
    """
    parts = table[list(_CAUSES)].clip(lower=0.0).rename(columns=_CAUSES)
    fills = {
        cause: fill
        for cause, fill in zip(parts, draw.SERIES, strict=False)
        if parts[cause].max() > 0
    }
    exposed_s = parts.sum(axis=1)
    title = f"Exposed communication: {exposed_s.min():.3g} s ({exposed_s.idxmin()})"
    title += f" to {exposed_s.max():.3g} s ({exposed_s.idxmax()})"
    notes = (exposed_s / table["step_s"]).map("{:.1%}".format) + table["step_s"].map(
        " of {:.3g} s".format
    )
    ending = {
        "x": (
            "simulated communication that nothing hides [s]; beside it its share of "
            "the step"
        )
    }
    ending |= {
        "rows": table.index,
        "notes": notes,
        "key": fills,
        "columns": 3,
        "source": "simulated",
    }
    data = parts.assign(step_s=table["step_s"]).rename_axis("step").reset_index()
    return draw.bar_chart(ax, data, parts[list(fills)], title, fills, **ending)


def plot_components(
    table: pd.DataFrame, room_bytes: float, ax: Axes | None = None
) -> Axes:
    """Bytes of each pipeline stage by component, and the memory of a device. table: of
    `mm.memory`.
    """
    stages = table["stage"].unique()
    shown = stages[:: -(-len(stages) // _MOST_STAGES)]
    size_gb = (
        table.pivot_table(
            index="stage", columns="component", values="size_bytes", sort=False
        )
        / 1e9
    )
    fills = draw.components_key(
        name for name in PHASES if name in size_gb and size_gb[name].max() > 0
    )
    largest = size_gb[list(fills)].max()
    title = f"Largest component: {largest.idxmax()}, {largest.max():.1f} GB on a device"
    key = [draw.patch_key(name, color) for name, color in fills.items()]
    key.append(draw.line_key(f"room: {room_bytes / 1e9:.0f} GB", **draw.DASHED))
    ending = {
        "x": "simulated memory [GB], all moments of a step",
        "key": key,
        "where": "beside",
    }
    ending |= {"rows": [f"stage {stage}" for stage in shown], "source": "simulated"}
    ax = ax or draw.new_axes(
        height=max(1.6 + 0.3 * len(shown), 2.4)
    )  # the legend needs some room
    ax = draw.bar_chart(ax, table, size_gb.loc[shown], title, fills, **ending)
    ax.axvline(room_bytes / 1e9, **draw.DASHED)
    return ax


def plot_places(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Components of each place as a share of what it has; the dashed line is full.
    table: of `fits`.
    """
    places = table.drop_duplicates("place").set_index("place")
    room = places["usable_bytes"]
    margin = places["margin_bytes"]
    shares = table.pivot_table(
        index="place",
        columns="component",
        values="size_bytes",
        aggfunc="sum",
        sort=False,
    )
    shares = shares.loc[places.index].div(room, axis=0).fillna(0.0)
    key = draw.components_key(table["component"])
    tight = (margin / room).idxmin()
    title = (
        f"Tightest is {_PLACES[tight]}: {margin[tight] / 1e9:.1f} of "
        f"{room[tight] / 1e9:.0f} GB are left"
    )
    notes = ((room - margin) / 1e9).map("{:.1f} of ".format) + (room / 1e9).map(
        "{:.0f} GB".format
    )
    ax = ax or draw.new_axes(height=2.6 + 0.45 * len(places))
    ending = {
        "x": "simulated bytes over the room for training, all moments of a step",
        "key": key,
        "columns": 4,
    }
    ending |= {"notes": notes, "rows": [_PLACES[name] for name in places.index]}
    ax = draw.bar_chart(ax, table, shares, title, key, source="simulated", **ending)
    ax.axvline(1.0, **draw.DASHED)
    return ax


def plot_moments(
    table: pd.DataFrame, place: str = "device", ax: Axes | None = None
) -> Axes:
    """Memory of a device or of its host over the moments of a step. table: of
    `moments`; place: device or host.
    """
    ax = ax or draw.new_axes(height=2.8)
    if place == "device":
        fills = {"everything but the model": "comm", "model states": "compute"}
        columns = ["other_bytes", "model_bytes"]
        room_gb = table["room_bytes"].iloc[0] / 1e9
    else:
        fills = {"model states and checkpoints": "memcpy"}
        columns = ["host_bytes"]
        room_gb = table["host_room_bytes"].iloc[0] / 1e9
    size_gb = (table[columns] / 1e9).set_axis(list(fills), axis=1)
    held_gb = draw.areas(
        ax, range(len(table)), size_gb, fills, source="simulated", step="mid"
    )
    ax.axhline(room_gb, **draw.DASHED)
    begins = {
        phase: (table["phase"] == phase).argmax()
        for phase in table["phase"].unique()
        if phase in _PASSES
    }
    ax.set_xticks(list(begins.values()), list(begins), ha="left")
    title = f"The {place} holds {held_gb.min():.0f} to {held_gb.max():.0f} GB"
    key = [draw.patch_key(name, fill) for name, fill in fills.items()]
    key.append(draw.line_key("room for training", **draw.DASHED))
    limits = {
        "xlim": (0, len(table) - 1),
        "ylim": (0, 1.15 * max(room_gb, held_gb.max())),
    }
    return draw.finish(
        ax,
        table,
        title,
        x="layer by layer",
        y="simulated memory [GB]",
        key=key,
        **limits,
    )


def plot_streams(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """What device, links and host of one rank do in an offloaded step. timeline:
    simulated, with offload.
    """
    spans = timeline.select(ranks=timeline.ranks[:1]).spans
    end_ns = spans["start_ns"] + spans["dur_ns"]
    busy = spans[spans["kind"] != "idle"]
    streams = [stream for stream in Stream if (busy["stream"] == stream).any()]
    ax = ax or draw.new_axes(height=1.0 + 0.34 * len(streams))
    kind = (
        busy.groupby("stream")["kind"]
        .first()
        .map(_KINDS)
        .astype(object)
        .fillna("compute")
    )
    placed = busy.assign(
        place=busy["stream"].map(streams.index), kind=busy["stream"].map(kind)
    )
    kinds = (*_KINDS.values(), "compute")
    drawn = draw.blocks(
        ax,
        placed,
        kinds,
        reach_ns=int(end_ns.max()),
        source=timeline.meta.source,
        unit_s=1.0,
    )
    drawn.insert(0, "row", [streams[place].label for place in drawn["place"]])
    passes = (
        (spans["stream"] == Stream.COMPUTE)
        & (spans["name"] != "adam")
        & (spans["kind"] == "compute")
    )
    passes_s = float(end_ns[passes].max()) / NS_PER_S
    step_s = float(end_ns.max()) / NS_PER_S
    title = f"Passes end after {passes_s:.1f} s, the step after {step_s:.1f} s"
    ending = {
        "rows": [stream.label for stream in streams],
        "reach": step_s,
        "origin": timeline,
    }
    data = drawn.drop(columns=["place", "kind"])
    return draw.finish(ax, data, title, x="simulated time in the step [s]", **ending)
