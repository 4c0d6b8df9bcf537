"""Picture of vTrain's design space; the published number is a hollow diamond."""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    PAPER,
    SERIES,
    finish,
    new_axes,
    note,
    published,
)

_TP = {  # colour and mark by tensor parallelism
    4: (SERIES[0], "o"),
    8: (SERIES[1], "s"),
    16: (SERIES[2], "^"),
    32: (SERIES[3], "D"),
}


def plot_space(space: pd.DataFrame, quoted: float) -> Axes:
    """Utilisation over the number of GPUs, a colour and mark per tp, larger marks for
    more stages.

    space: of `design_space`. quoted: the published utilisation of (16, 16, 105).
    """
    space = space[["tp", "dp", "pp", "gpus", "step_s", "utilisation"]]
    ax = new_axes(height=3.8)
    for tp, part in space.groupby("tp"):
        color, mark = _TP[tp]
        style = {
            "marker": mark,
            "facecolors": "none",
            "edgecolors": color,
            "linewidths": 0.8,
            "label": f"tp {tp}",
        }
        ax.scatter(
            part["gpus"], 100 * part["utilisation"], s=4 + 0.6 * part["pp"], **style
        )
    line = {"arrowstyle": "-", "lw": 0.6, "color": PAPER}
    plans = space.set_index(["tp", "dp", "pp"])[["gpus", "utilisation"]]
    places = {(8, 8, 35): (-130, -70), (8, 12, 21): (12, 26), (16, 16, 105): (-80, -16)}
    for plan, (dx, dy) in places.items():
        gpus, share = plans.loc[plan]
        ax.plot(gpus, 100 * share, "o", ms=4, color=PAPER)
        note(ax, gpus, 100 * share, str(plan), dx=dx, dy=dy, arrowprops=line)
    published(ax, gpus, 100 * quoted, label="published, (16, 16, 105)")
    axes = {
        "x": "GPUs (A100); larger marks: more stages",
        "y": "model FLOPs over peak [%]",
        "xscale": "log",
        "ylim": (0, None),
    }
    title = (
        f"MT-NLG: more GPUs cost utilisation; (16, 16, 105) reaches {share:.0%}, "
        f"published {quoted:.0%}"
    )
    return finish(ax, space, title, **axes, where="upper right", columns=2)
