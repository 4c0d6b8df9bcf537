"""Pictures of the memory wall: methods beside each other, simulated, and the update on
a CPU, measured.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.simulator.offload.placement import ADAM_BYTES
from madmax_lib.view.drawing import (
    DASHED,
    SERIES,
    finish,
    lines,
    log_axis,
    new_axes,
    plural,
)

_MARKERS = "os^Dv<>P"  # by method, or by way to update


def plot_methods(table: pd.DataFrame) -> Axes:
    """Tokens per second of every model that a method can train. table: of
    `memory_wall.methods_table`, one machine.
    """
    ax = new_axes(height=3.6)
    fitting = table[table["fits"]].assign(billions=table["parameters"] / 1e9)
    models = table.drop_duplicates("model")
    look = {"hue": "method", "style": "method", "markers": True, "dashes": False}
    look["palette"] = SERIES[: fitting["method"].nunique()]
    lines(ax, fitting, "billions", "tokens_per_s", **look)
    billions = models["parameters"] / 1e9  # ticks at the models, by their names
    title = "No method fits any model"
    ax.set_xscale("log")
    ax.set_xticks(billions, [_size(name) for name in models["model"]], fontsize=7)
    ax.minorticks_off()
    if len(fitting):
        speeds = fitting["tokens_per_s"]
        log_axis(ax, "y", speeds.min(), speeds.max(), "{:,.0f}".format)
        largest = fitting[fitting["parameters"] == fitting["parameters"].max()]
        methods = plural(len(largest), "method")
        if len(largest) <= 2:
            methods = " and ".join(sorted(largest["method"]))
        size = _size(largest["model"].iloc[0])
        title = f"The largest model, {size}, fits with {methods}"
    x = "parameters, as the study names its shapes"
    y = "simulated throughput [tokens/s]"
    limits = 0.9 * billions.min(), 1.1 * billions.max()
    return finish(ax, table, title, x=x, y=y, where="beside", xlim=limits)


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


def _size(model):
    """gpt2_10b is 10B."""
    return model.rpartition("_")[2].upper()
