"""Where does the memory wall stand? Bytes by place, moments of a step, methods beside each other, shares and limits.

All of it is simulated but for `plot_adam`, which shows what was measured beside what the simulator takes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, StrMethodFormatter

from madmax_lib.intervals import pack
from madmax_lib.simulator.schedule.streams import Stream
from madmax_lib.timeline import Timeline
from madmax_lib.units import NS_PER_S
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, new_axes, visible_blocks
from madmax_lib.view.plots.steps import COMPONENTS, OTHER

__all__ = ["plot_adam", "plot_launch_gain", "plot_levers", "plot_limits", "plot_methods", "plot_moments", "plot_places",
           "plot_power", "plot_share", "plot_streams", "plot_token_energy"]  # fmt: skip

_LINES = ("#3b75af", "#e1812c", "#529d3f", "#8d6bb8", "#b5433f", "#4a4a4a", "#c49a2c", "#2f9c95")
_NAMES = {"device": "one device", "host": "host of a node", "nvme": "drives of a node"}


def plot_places(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Components of each place as a share of what it has; the dashed line is full. table: of `fits`."""
    places = table.drop_duplicates("place")
    ax = ax or new_axes(height=2.6 + 0.45 * len(places))
    components = list(dict.fromkeys(table["component"]))
    for row, place in enumerate(places.itertuples()):
        part, left = table[table["place"] == place.place], 0.0
        for one in part.itertuples():
            width = one.size_bytes / place.usable_bytes
            color = COMPONENTS.get(one.component, OTHER)
            ax.barh(row, width, left=left, height=0.6, color=color, hatch="////", edgecolor="white", linewidth=0)
            left += width
        used = place.usable_bytes - place.margin_bytes
        text = f"{used / 1e9:.1f} of {place.usable_bytes / 1e9:.0f} GB"
        ax.annotate(text, (max(left, 1.0), row), (4, 0), textcoords="offset points", va="center", fontsize=7)
    ax.axvline(1.0, color="#4a4a4a", lw=0.9, ls="--")
    ax.set_yticks(range(len(places)), [_NAMES[place] for place in places["place"]])
    ax.set(ylim=(len(places) - 0.5, -0.5), xlabel="simulated bytes over the room for training, all moments of a step")
    ax.set_xlim(0, 1.25 * max(1.0, (table.groupby("place")["size_bytes"].sum() / places.set_index("place")[
        "usable_bytes"]).max()))  # fmt: skip
    handles = [Patch(color=COMPONENTS.get(name, OTHER), label=name) for name in components]
    ax.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.75 / ax.figure.get_figheight()),
              fontsize=7, frameon=False)  # fmt: skip
    tight = places.loc[(places["margin_bytes"] / places["usable_bytes"]).idxmin()]
    free = tight["margin_bytes"] / tight["usable_bytes"]
    how = f"{free:.0%} left" if free >= 0 else f"{-tight['margin_bytes'] / 1e9:.1f} GB too little"
    ax.set_title(f"Tightest is {_NAMES[tight['place']]}: {how}")
    return keep_data(ax, table)


def plot_moments(table: pd.DataFrame, place: str = "device", ax: Axes | None = None) -> Axes:
    """Memory of a device or of its host over the moments of a step. table: of `moments`; place: device or host."""
    ax = ax or new_axes(height=2.8)
    x = np.arange(len(table))
    if place == "device":
        parts = {"everything but the model": table["other_bytes"], "model states": table["model_bytes"]}
        room = table["room_bytes"].iloc[0]
    else:
        parts, room = {"model states and checkpoints": table["host_bytes"]}, table["host_room_bytes"].iloc[0]
    colors = (COLORS["comm"], COLORS["compute"]) if place == "device" else (COLORS["memcpy"],)
    bottom = np.zeros(len(table))
    for (name, size), color in zip(parts.items(), colors, strict=True):
        top = bottom + size.to_numpy() / 1e9
        ax.fill_between(x, bottom, top, step="mid", color=color, alpha=0.75, lw=0, label=name)
        bottom = top
    ax.axhline(room / 1e9, color="#4a4a4a", lw=0.9, ls="--", label="room for training")
    first = table.groupby("phase", sort=False).apply(lambda part: part.index[0], include_groups=False)
    shown = {name: at for name, at in first.items() if name in ("forward", "backward", "update")}
    ax.set_xticks(list(shown.values()), list(shown), ha="left")
    ax.set(xlim=(0, len(table) - 1), ylim=(0, 1.15 * max(room / 1e9, bottom.max())), ylabel="simulated memory [GB]",
           xlabel="layer by layer")  # fmt: skip
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=7, frameon=False)
    low, high = bottom.min(), bottom.max()
    what = "One device" if place == "device" else "The host"
    ax.set_title(f"{what} holds {low:.0f} to {high:.0f} GB" if high - low > 0.5 else f"{what} holds {high:.0f} GB")
    return keep_data(ax, table)


def plot_methods(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Tokens per second of every model that a method can train. table: of `memory_wall.methods_table`, one machine."""
    ax = ax or new_axes(height=3.6)
    fitting = table[table["fits"]]
    for number, (method, part) in enumerate(table.groupby("method", sort=False)):
        part = part[part["fits"]]
        if len(part):
            ax.plot(part["parameters"] / 1e9, part["tokens_per_s"], marker="os^Dv<>P"[number % 8], ms=5, mfc="white",
                    color=_LINES[number % 8], lw=1.0, label=method)  # fmt: skip
    ticks = table.drop_duplicates("model")
    ax.set(xscale="log", yscale="log", xlabel="parameters, as the study names its shapes")
    ax.set_ylabel("simulated throughput [tokens/s]")
    ax.set_xticks(ticks["parameters"] / 1e9, [_size(name) for name in ticks["model"]], fontsize=7)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.minorticks_off()
    ax.set_xlim(0.9 * ticks["parameters"].min() / 1e9, 1.1 * ticks["parameters"].max() / 1e9)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7, frameon=False)
    if len(fitting):
        last = fitting.loc[fitting["parameters"].idxmax()]
        methods = sorted(set(fitting.loc[fitting["parameters"] == last["parameters"], "method"]))
        names = " and ".join(methods) if len(methods) <= 2 else f"{len(methods)} methods"
        reach = f"{names} reach" if len(methods) > 1 else f"Only {names} reaches"
        ax.set_title(f"{reach} {_size(last['model'])}")
    return keep_data(ax, table, table)


def plot_limits(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Largest models: published beside ours. table: of `memory_wall.limits_table`."""
    ax = ax or new_axes(height=1.2 + 0.42 * len(table))
    for place, row in enumerate(table.itertuples()):
        ax.plot([row.published, row.ours], [place, place], color=COLORS["idle"], lw=2, zorder=1)
        ax.plot(row.published, place, "o", ms=6, color=COLORS["comm"])
        ax.plot(row.ours, place, "D", ms=5, mfc="white", mec=COLORS["compute"])
        ax.annotate(f"{row.ratio:.2f}x, {row.bound} full", (max(row.ours, row.published), place), (6, 0),
                    textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    labels = [f"{row.system}\n{row.machine}" for row in table.itertuples()]
    ax.set_yticks(range(len(table)), labels, fontsize=7)
    ax.set(ylim=(len(table) - 0.5, -0.5), xscale="log", xlabel="largest model [1e9 parameters]")
    ax.set_xlim(0.7 * table["published"].min(), 3 * table["ours"].max())
    ax.plot([], [], "o", color=COLORS["comm"], label="published")
    ax.plot([], [], "D", mfc="white", mec=COLORS["compute"], label="simulated limit", ls="")
    ax.legend(loc="upper right", fontsize=7)
    ax.set_title(f"Our limits are {table['ratio'].median():.2f}x of the published sizes in the median")
    return keep_data(ax, table)


def plot_share(table: pd.DataFrame, best: float, ax: Axes | None = None) -> Axes:
    """Exposed seconds by the share of states that leaves the device. table: share and the seconds of `OffloadTimes`."""
    ax = ax or new_axes(height=3.2)
    causes = {"passes_s": "passes wait for weights", "drain_s": "gradients drain", "update_s": "update on the device",
              "host_s": "host takes longer"}  # fmt: skip
    colors = (COLORS["memcpy"], COLORS["comm"], COLORS["compute"], COLORS["other"])
    stacked = [table[name].to_numpy(float) for name in causes]
    ax.stackplot(table["share"], *stacked, labels=list(causes.values()), colors=colors, alpha=0.8)
    ax.axvline(best, color="#4a4a4a", lw=1.0, ls="--", label="best that fits")
    ax.set(
        xlabel="share of the states that leaves the device", ylabel="simulated time beyond the passes [s]", xlim=(0, 1)
    )
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7, frameon=False)
    ax.set_title(f"Fastest that fits: {best:.0%} of the states leave the device")
    return keep_data(ax, table)


def plot_adam(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Measured seconds of CPU Adam by model size, quartiles as bars. table: of `benchmarks/host.py`."""
    ax = ax or new_axes(height=3.2)
    adam = table[table["what"] == "cpu adam"]
    for number, ((how, threads), part) in enumerate(adam.groupby(["how", "threads"], sort=False)):
        spread = [part["median_s"] - part["low_s"], part["high_s"] - part["median_s"]]
        ax.errorbar(part["size"], part["median_s"], yerr=spread, marker="os^Dv"[number], ms=4, lw=1, capsize=2,
                    color=_LINES[number], label=f"{how}, {threads} thread{'s' if threads > 1 else ''}")  # fmt: skip
    copies = table.loc[table["what"] == "host memory", "bytes_per_s"].max()
    sizes = np.array([adam["size"].min(), adam["size"].max()])
    label = f"28 bytes per parameter at {copies / 1e9:.0f} GB/s, the best of copy and triad"
    ax.plot(sizes, 28 * sizes / copies, color="#4a4a4a", ls="--", lw=1, label=label)
    ax.set(xscale="log", yscale="log", xlabel="parameters", ylabel="measured time of an update [s]")
    ax.legend(fontsize=7)
    largest = adam[adam["size"] == adam["size"].max()].set_index("how")["median_s"]
    fastest = largest.idxmin()
    ax.set_title(f"A {fastest} update takes {largest.min() / sizes[1] * 1e9:.2f} ns per parameter, "
                 f"{largest.idxmax()} {largest.max() / largest.min():.0f} times as long")  # fmt: skip
    return keep_data(ax, table)


def plot_token_energy(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Energy per token by method for one model, with its uncertainty. table: of `memory_wall.methods_table`."""
    shown = table[table["fits"]].reset_index(drop=True)
    ax = ax or new_axes(height=1.2 + 0.34 * len(shown))
    for place, row in enumerate(shown.itertuples()):
        error = [[1e3 * (row.token_j - row.token_low_j)], [1e3 * (row.token_high_j - row.token_j)]]
        ax.barh(place, 1e3 * row.token_j, height=0.6, xerr=error, error_kw={"lw": 0.8, "capsize": 2},
                **fill_of("compute", "simulated"))  # fmt: skip
        ax.annotate(f"{row.tokens_per_s:,.0f} tokens/s", (1e3 * row.token_high_j, place), (4, 0),
                    textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    ax.set_yticks(range(len(shown)), list(shown["method"]))
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="simulated energy per token, devices and processors [mJ]")
    ax.set_xlim(0, 1.35e3 * shown["token_high_j"].max())
    spread = shown["token_j"].max() / shown["token_j"].min() - 1
    name = _size(shown["model"].iloc[0])
    ax.set_title(f"{name}: methods differ by {spread:.0%} in energy, less than the model is sure of"
                 if spread < 0.25 else f"{name}: methods differ by {spread:.0%} in energy")  # fmt: skip
    return keep_data(ax, table)


def plot_power(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Power of a device over the phases of a step, with its uncertainty. table: of `power.power_phases`."""
    ax = ax or new_axes(height=2.6)
    start = np.r_[0.0, np.cumsum(table["seconds"])]
    kinds = ("compute", "comm", "idle")
    for begin, row, kind in zip(start, table.itertuples(), kinds, strict=False):
        ax.bar(begin, row.power_w, width=row.seconds, align="edge", **fill_of(kind, "simulated"))
        middle = begin + row.seconds / 2
        error = [[row.power_w - row.low_w], [row.high_w - row.power_w]]
        ax.errorbar(middle, row.power_w, yerr=error, color="#4a4a4a", lw=0.8, capsize=2)
    handles = [Patch(color=COLORS[kind], label=name) for kind, name in zip(kinds, table["phase"], strict=False)]
    ax.legend(handles=handles, ncols=3, loc="upper right", fontsize=7)
    ax.set(xlim=(0, start[-1]), ylim=(0, 1.3 * table["high_w"].max()), ylabel="simulated power of a device [W]",
           xlabel="time in the step, phase by phase [s]")  # fmt: skip
    mean = table["energy_j"].sum() / table["seconds"].sum()
    ax.set_title(f"A device draws {mean:.0f} W on average")
    return keep_data(ax, table)


def plot_levers(table: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """Memory of a device by lever; grey does not fit. table: of `memory_levers.lever_table`."""
    ax = ax or new_axes(height=1.2 + 0.32 * len(table))
    for place, row in enumerate(table.itertuples()):
        ax.barh(place, row.device_gb, height=0.6, **fill_of("compute" if row.fits else "idle", "simulated"))
        beside = [f"{size:.0f} GB {what}" for size, what in ((row.host_gb, "host"), (row.nvme_gb, "drives")) if size]
        text = ", ".join([*([f"{row.step_s:.2f} s"] if row.fits else ["does not fit"]), *beside])
        ax.annotate(text, (row.device_gb, place), (4, 0), textcoords="offset points", va="center", fontsize=7,
                    bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"})  # fmt: skip
    room_gb = room_bytes / 1e9
    ax.axvline(room_gb, color="#4a4a4a", lw=0.9, ls="--", zorder=0.5)
    ax.set_yticks(range(len(table)), list(table["lever"]))
    ax.set(ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.4 * table["device_gb"].max()))
    ax.set_xlabel(f"simulated memory of the fullest device [GB]; dashed: {room_gb:.0f} GB of room")
    fitting = table[table["fits"]]
    title = f"{len(fitting)} of {len(table)} fit"
    if len(fitting):
        title += f", fastest: {fitting.loc[fitting['step_s'].idxmin(), 'lever']}"
    ax.set_title(title)
    return keep_data(ax, table)


def plot_streams(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """What device, links and host of one rank do in an offloaded step. timeline: simulated, with offload."""
    spans = timeline.select(ranks=timeline.ranks[:1]).spans
    reach_ns = int((spans["start_ns"] + spans["dur_ns"]).max())
    busy = spans[spans["kind"] != "idle"]
    rows = {stream.label: busy[busy["stream"] == stream] for stream in Stream if (busy["stream"] == stream).any()}
    ax, drawn = ax or new_axes(height=1.0 + 0.34 * len(rows)), []
    for place, (label, part) in enumerate(rows.items()):
        kind = {"memcpy": "memcpy", "comm": "comm", "cpu": "other"}.get(part["kind"].iloc[0], "compute")
        blocks = visible_blocks(pack(part["start_ns"], part["dur_ns"]), reach_ns)
        bars = np.stack([blocks[:, 0], blocks[:, 1] - blocks[:, 0]], axis=1) / NS_PER_S
        ax.broken_barh(bars, (place - 0.4, 0.8), **fill_of(kind, timeline.meta.source))
        drawn += [(label, start_s, dur_s) for start_s, dur_s in bars]
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, reach_ns / NS_PER_S), xlabel="simulated time in the step [s]")
    passes = spans[(spans["stream"] == Stream.COMPUTE) & (spans["name"] != "adam") & (spans["kind"] == "compute")]
    end_s = float((passes["start_ns"] + passes["dur_ns"]).max()) / NS_PER_S
    ax.set_title(f"Passes end after {end_s:.1f} s, the step after {reach_ns / NS_PER_S:.1f} s")
    return keep_data(ax, pd.DataFrame(drawn, columns=["row", "start_s", "dur_s"]), timeline)


def plot_launch_gain(tables: dict[str, pd.DataFrame], ax: Axes | None = None) -> Axes:
    """Measured steps, and replayed with cheaper launches. tables: of `launch_gain`, by the name of the trace."""
    shown = pd.concat([table.assign(trace=name) for name, table in tables.items()], ignore_index=True)
    shown.attrs.clear()
    known = {name: table.attrs.get("provenance", {}).get("files", {}) for name, table in tables.items()}
    of_all = {f"{name} {key}": about for name, part in known.items() for key, about in part.items()}
    shown.attrs["provenance"] = {"files": of_all}
    ax = ax or new_axes(height=1.1 + 0.3 * len(shown))
    for place, row in shown.iterrows():
        measured = row["scenario"] == "as measured"
        ax.barh(place, 1e3 * row["step_s"], height=0.65, **fill_of("compute", "measured" if measured else "simulated"))
        text = "" if measured else f"{row['speedup']:.2f}x"
        ax.annotate(text, (1e3 * row["step_s"], place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(shown)), [f"{row['trace']}: {row['scenario']}" for _, row in shown.iterrows()], fontsize=7)
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="step [ms]; hatched: replayed, not measured")
    ax.set_xlim(0, 1.15e3 * shown["step_s"].max())
    best = shown.loc[shown["speedup"].idxmax()]
    ax.set_title(f"A host that is always ahead would gain at most {best['speedup']:.2f}x")
    return keep_data(ax, shown)


def _size(model: str) -> str:
    """gpt2_10b is 10B."""
    return model.rpartition("_")[2].upper()
