"""Pictures of the report on Metis: costs by enumeration order, search times, and data
beside tensor parallelism.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.papers.origin import with_origin
from madmax_lib.view.drawing import (
    PAPER,
    SERIES,
    bars,
    finish,
    lines,
    mark_key,
    new_axes,
    patch_key,
    published,
)

# the colours that these GPU types have in every plan
_ORDERS = {"A100 first": SERIES[0], "V100 first": SERIES[1]}
_MODES = {"base": "Metis", "strategy": "Ours"}


def plot_orders(runs: pd.DataFrame) -> Axes:
    """Best cost of each row of table 1 in both orders of the GPU types, beside the two
    published columns.
    """
    case = ["row", "layers", "gpus", "mode"]
    costs = ["our_cost_ms", "cost_ms"]
    table = runs[[*case, "node_order", *costs]].reset_index(drop=True)
    first = table.drop_duplicates(["row", "mode"]).reset_index(drop=True)
    ax = new_axes(height=0.9 + 0.42 * len(first))
    for slot, (order, fill) in enumerate(_ORDERS.items()):
        costs = table.loc[table["node_order"] == order, "our_cost_ms"]
        notes = costs.map("   {:,.2f}".format)
        bars(ax, costs, fill=fill, source="simulated", slot=(slot, 2), notes=notes)
    # the published cost stands at the bar of the order that comes nearer
    error = (table["our_cost_ms"] - table["cost_ms"]).abs()
    near = table.loc[error.groupby([table["row"], table["mode"]], sort=False).idxmin()]
    second = near["node_order"].eq("V100 first").to_numpy()
    rows = first.index + 0.4 * second - 0.2
    published(ax, near["cost_ms"], rows)
    title = "The cost column follows the order of GPU types, not the method"
    rows = [
        f"{row.layers} layers, {row.gpus} GPUs, “{_MODES[row.mode]}”"
        for row in first.itertuples()
    ]
    key = [patch_key(order, fill, "simulated") for order, fill in _ORDERS.items()]
    key.append(mark_key("published"))
    reach = 1.16 * table["our_cost_ms"].max()  # room for the notes
    table = _from_files(table, "profiles", "table1")
    x = "cost of the best plan [ms]"
    return finish(ax, table, title, x=x, rows=rows, reach=reach, key=key)


def plot_search_time(points: pd.DataFrame, rows: pd.DataFrame) -> Axes:
    """Figure 1: search time over layers, beside the search times of table 1 without and
    with the fork's strategy. points, rows: published tables.
    """
    rows = rows.assign(search_s=rows["search_ms"] / 1e3)
    table = pd.concat([points.assign(mode="figure 1"), rows], ignore_index=True)
    table = table[["mode", "layers", "gpus", "search_s"]]
    ax = new_axes(height=3.4)
    of_mode = dict(tuple(table.groupby("mode")))
    look = {"marker": "D", "mfc": "none", "lw": 0.8}
    curve = of_mode["figure 1"]
    look["label"] = "figure 1, 32 GPUs"
    lines(ax, curve, "layers", "search_s", color=PAPER, mec=PAPER, **look)
    # the rows of table 1 have other numbers of GPUs each: no curve
    for color, (mode, name) in zip(SERIES, _MODES.items(), strict=False):
        look["label"] = f"table 1, 32 to 256, “{name}”"
        look["mec"] = color
        lines(ax, of_mode[mode], "layers", "search_s", color=color, ls="", **look)
    title = "The search takes longer in figure 1 than in table 1"
    table = _from_files(table, "search_time", "table1")
    axes = {"x": "layers", "y": "published search time [s]", "yscale": "log"}
    return finish(ax, table, title, **axes, where="lower right")


def plot_loss(training: pd.DataFrame) -> Axes:
    """Figure 3: loss over time of two runs on two P100, smoothed as there: weight 0.1
    for the last iteration. training: the published table.
    """
    of_run = training.groupby("strategy", sort=False)
    time_s = of_run["iteration_ms"].cumsum() / 1e3
    smooth = of_run["loss"].transform(lambda loss: loss.ewm(alpha=0.1).mean())
    table = training.assign(time_s=time_s, smooth=smooth).drop(columns="source")
    ax = new_axes(height=3.4)
    palette = dict(zip(("DP", "TP"), SERIES, strict=False))
    lines(ax, table, "time_s", "smooth", hue="strategy", palette=palette, lw=1.5)
    median_ms = of_run["iteration_ms"].median()
    title = (
        "Two P100: an iteration takes tensor parallelism "
        f"{median_ms['TP'] / median_ms['DP']:.2f}x as long as data parallelism"
    )
    table = _from_files(table, "training")
    axes = {"x": "time [s]", "y": "loss, smoothed"}
    return finish(ax, table, title, **axes, where="upper right")


def _from_files(table, *files):
    names = [f"metis/{file}" for file in files]
    return with_origin(table, *names, rules="Metis as released")
