"""Pictures of the memory wall: methods beside each other, largest models, energy, the
update on a CPU.

All of it is simulated but for `plot_adam`, which shows what was measured beside what
the simulator takes.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.simulator.offload.placement import ADAM_BYTES
from madmax_lib.view.drawing import (
    COLORS,
    DASHED,
    SERIES,
    areas,
    bar_chart,
    finish,
    lines,
    log_axis,
    mark_key,
    new_axes,
    note,
    plural,
    published,
)

_MARKERS = "os^Dv<>P"  # by method, or by way to update
_EXPOSED = {  # columns of `OffloadTimes`: name, kind
    "passes_s": ("passes wait for weights", "memcpy"),
    "drain_s": ("gradients drain", "comm"),
    "update_s": ("update on the device", "compute"),
    "host_s": ("host takes longer", "other"),
}


def plot_methods(table: pd.DataFrame) -> Axes:
    """Tokens per second of every model that a method can train. table: of
    `memory_wall.methods_table`, one machine.
    """
    ax = new_axes(height=3.6)
    fitting = table[table["fits"]]
    models = table.drop_duplicates("model")
    looks = zip(table["method"].unique(), _MARKERS, SERIES, strict=False)
    styles = {
        method: {"marker": marker, "color": color, "label": method}
        for method, marker, color in looks
    }
    style = {"ms": 5, "mfc": "white", "lw": 1.0}
    lines(
        ax,
        fitting,
        "parameters",
        "tokens_per_s",
        by="method",
        styles=styles,
        units=(1e9, 1),
        **style,
    )
    billions = models["parameters"] / 1e9  # ticks at the models, by their names
    title = "No method fits any model"
    ax.set_xscale("log")
    ax.set_xticks(billions, [_size(name) for name in models["model"]], fontsize=7)
    ax.minorticks_off()
    if len(fitting):
        log_axis(
            ax, "y", *fitting["tokens_per_s"].agg(["min", "max"]), "{:,.0f}".format
        )
        largest = fitting[fitting["parameters"] == fitting["parameters"].max()]
        methods = sorted(set(largest["method"]))
        names = (
            " and ".join(methods) if len(methods) <= 2 else f"{len(methods)} methods"
        )
        reach = f"{names} reach" if len(methods) > 1 else f"Only {names} reaches"
        title = f"{reach} {_size(largest['model'].iloc[0])}"
    x = "parameters, as the study names its shapes"
    y = "simulated throughput [tokens/s]"
    limits = 0.9 * billions.min(), 1.1 * billions.max()
    return finish(ax, table, title, x=x, y=y, where="beside", xlim=limits)


def plot_limits(table: pd.DataFrame) -> Axes:
    """Largest models: published beside ours. table: of `memory_wall.limits_table`."""
    ax = new_axes(height=1.2 + 0.42 * len(table))
    y = range(len(table))
    grey = COLORS["idle"]
    # a bar joins both marks, to show which is the larger
    ax.hlines(y, table["published"], table["ours"], color=grey, lw=2, zorder=1)
    ax.plot(table["ours"], y, "o", ms=6, color=COLORS["compute"])
    published(ax, table["published"], y)
    for number, row in enumerate(table.itertuples()):
        end = max(row.published, row.ours)
        note(ax, end, number, f"{row.ratio:.2f}x, {row.bound} full", dx=6)
    title = (
        f"Our limits are {table['ratio'].median():.2f}x of the published sizes "
        "in the median"
    )
    rows = [f"{row.system}\n{row.machine}" for row in table.itertuples()]
    key = [
        mark_key("published"),
        mark_key("simulated limit", "o", COLORS["compute"], hollow=False),
    ]
    x = "largest model [1e9 parameters]"
    limits = (0.7 * table["published"].min(), 3 * table["ours"].max())
    return finish(
        ax,
        table,
        title,
        x=x,
        rows=rows,
        key=key,
        where="upper right",
        xscale="log",
        xlim=limits,
    )


def plot_share(table: pd.DataFrame, best: float) -> Axes:
    """Exposed seconds by the share of states that leaves the device. table: share and
    the seconds of `OffloadTimes`.
    """
    ax = new_axes(height=3.2)
    names = {column: name for column, (name, _) in _EXPOSED.items()}
    fills = dict(_EXPOSED.values())
    parts = table.rename(columns=names)
    areas(ax, table["share"], parts, fills, source="simulated")
    ax.axvline(best, **DASHED, label="best that fits")
    title = f"Fastest that fits: {best:.0%} of the states leave the device"
    x = "share of the states that leaves the device"
    y = "simulated time beyond the passes [s]"
    limits = {"xlim": (0, 1), "ylim": (0, None)}
    return finish(ax, table, title, x=x, y=y, where="beside", **limits)


def plot_adam(table: pd.DataFrame) -> Axes:
    """Measured seconds of CPU Adam by model size, quartiles as bars. table: of
    `benchmarks/host.py`.
    """
    ax = new_axes(height=3.2)
    adam = table[table["what"] == "cpu adam"]
    ways = adam.groupby(["how", "threads"], sort=False)
    for number, ((how, threads), part) in enumerate(ways):
        median_s = part["median_s"]
        # errorbar takes lengths below and above, the table has the quartiles
        lengths = [median_s - part["low_s"], part["high_s"] - median_s]
        style = {"marker": _MARKERS[number], "ms": 4, "lw": 1, "capsize": 2}
        style["color"] = SERIES[number]
        style["label"] = f"{how}, {plural(threads, 'thread')}"
        ax.errorbar(part["size"], median_s, yerr=lengths, **style)
    # the fastest that memory allows: all bytes of an update at the rate of plain copies
    copies = table.loc[table["what"] == "host memory", "bytes_per_s"].max()
    ends = np.array([adam["size"].min(), adam["size"].max()])
    label = (
        f"{ADAM_BYTES} bytes per parameter at {copies / 1e9:.0f} GB/s, the best "
        "of copy and triad"
    )
    ax.plot(ends, ADAM_BYTES * ends / copies, **DASHED, label=label)
    largest = adam[adam["size"] == ends[1]].set_index("how")["median_s"]
    pace_ns = largest.min() / ends[1] * 1e9
    ratio = largest.max() / largest.min()
    title = f"A {largest.idxmin()} update takes {pace_ns:.2f} ns per parameter"
    title += f", {largest.idxmax()} {ratio:.0f} times as long"
    y = "measured time of an update [s]"
    scales = {"xscale": "log", "yscale": "log"}
    return finish(ax, table, title, x="parameters", y=y, where="upper left", **scales)


def plot_token_energy(table: pd.DataFrame) -> Axes:
    """Energy per token by method for one model, with its uncertainty. table: of
    `memory_wall.methods_table`.
    """
    fitting = table[table["fits"]].reset_index(drop=True)
    interval_mj = 1e3 * fitting["token_low_j"], 1e3 * fitting["token_high_j"]
    spread = fitting["token_j"].max() / fitting["token_j"].min() - 1
    title = (
        f"{_size(fitting['model'].iloc[0])}: methods differ by {spread:.0%} in energy"
    )
    # `simulator.power.ERROR` either way is wider than a difference of a quarter
    title += ", less than the model is sure of" if spread < 0.25 else ""
    x = "simulated energy per token, devices and processors [mJ]"
    notes = fitting["tokens_per_s"].map("{:,.0f} tokens/s".format)
    return bar_chart(
        None,
        table,
        1e3 * fitting["token_j"],
        title,
        x=x,
        rows=fitting["method"],
        source="simulated",
        error=interval_mj,
        notes=notes,
    )


def _size(model):
    """gpt2_10b is 10B."""
    return model.rpartition("_")[2].upper()
