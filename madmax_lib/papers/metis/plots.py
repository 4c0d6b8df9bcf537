"""Picture of the report on Metis: costs by enumeration order."""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    SERIES,
    bars,
    finish,
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
    x = "cost of the best plan [ms]"
    return finish(ax, table, title, x=x, rows=rows, reach=reach, key=key)
