"""Pictures of `calibration`: what a fit has found, and how far predictions are from
measurements.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.calibration.judge.intervals import STATES
from madmax_lib.calibration.scale import scaled
from madmax_lib.view.drawing import (
    DARK,
    GREY,
    SERIES,
    bar_chart,
    finish,
    line_key,
    log_axis,
    new_axes,
    plural,
    shorten,
)

_INSIDE = 1.645  # standard deviations of a 90 % interval
_WITHIN = 0.1  # relative error, shaded
_PRIOR = {"color": "#dedede", "lw": 6}
_MODELS = {False: "dense models", True: "mixtures of experts"}


def plot_constants(
    table: pd.DataFrame, sigma: pd.Series, ax: Axes | None = None
) -> Axes:
    """Every fitted constant between its bounds, in the scale of the fit: prior (grey),
    90 % interval, fitted value.

    table: `calibration.constants_of`; sigma: prior widths by name. Colours: the
    states.
    """
    import seaborn  # late: it brings scipy.stats, a second of every start

    # 0 is the lower bound of a constant and 1 its upper one, so that all share an axis
    low = scaled(table, "low")
    span = scaled(table, "high") - low
    names = ("start", "fitted", "interval_low", "interval_high")
    at = pd.DataFrame({name: (scaled(table, name) - low) / span for name in names})
    at = at.set_axis(table.index).assign(row=range(len(table)))
    prior = _INSIDE * sigma.reindex(table.index) / span
    ends = np.clip([at["start"] - prior, at["start"] + prior], 0, 1)
    ax = ax or new_axes(height=1.2 + 0.165 * len(table))
    ax.hlines(at["row"], *ends, **_PRIOR)
    ax.plot(at["start"], at["row"], "|", color="#7a7a7a", ms=7)
    # every state has an entry in the legend, with 0 too
    states = pd.Categorical(table["state"], STATES)
    counts = states.value_counts()
    labels = [f"{state} ({count})" for state, count in counts.items()]
    at["state"] = states.rename_categories(labels)
    colors = at["state"].map(dict(zip(labels, SERIES, strict=False)))
    ax.hlines(at["row"], at["interval_low"], at["interval_high"], colors, lw=1.6)
    look = {"hue": "state", "style": "state", "palette": SERIES[: len(labels)]}
    seaborn.scatterplot(at, x="fitted", y="row", **look, s=25, zorder=3, ax=ax)
    ax.set(xlabel="", ylabel="")
    ax.set_xticks([0, 0.5, 1], ["lower bound", "scale of the fit", "upper bound"])
    ax.tick_params(axis="y", labelsize=6.5)
    columns = ["start", "low", "high", *names[1:], "moved", "learned", "state"]
    return finish(
        ax,
        table[columns].rename_axis("constant").reset_index(),
        f"The rows fix {counts['fixed by rows']} of {len(table)} constants, "
        f"{counts['at a bound']} at a bound",
        rows=table.index + table["fitted"].map(": {:.3g}".format),
        key=[
            *ax.get_legend_handles_labels()[0],
            line_key("prior, 90%", **_PRIOR),
        ],
        columns=3,
        xlim=(-0.02, 1.02),
    )


def plot_predicted(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Predicted against measured seconds per step, both axes logarithmic, with 90 %
    intervals where the table has them.

    table: measured_s, predicted_s, kind, and low_s, high_s or not; rows without one of
    the first two are left out.
    """
    import seaborn  # late: it brings scipy.stats, a second of every start

    pairs = table.dropna(subset=["measured_s", "predicted_s"], ignore_index=True)
    kinds = pairs["kind"].eq("mixture").map(_MODELS)
    ax = ax or new_axes(height=5.0, width=5.6)
    if "low_s" in pairs:
        interval = pairs[["measured_s", "low_s", "high_s"]].astype(float)
        ax.vlines(*interval.to_numpy().T, color=GREY, lw=0.6)
    drawn = pairs[["measured_s", "predicted_s"]].astype(float).assign(kind=kinds)
    look = {"hue": "kind", "style": "kind", "s": 16, "ax": ax}
    look["palette"] = dict(zip(_MODELS.values(), SERIES, strict=False))
    seaborn.scatterplot(drawn, x="measured_s", y="predicted_s", **look)
    ends_s = pairs["measured_s"].agg(["min", "max"]).fillna(1.0)
    for which in "xy":
        log_axis(ax, which, *ends_s, "{:g}".format)
    ends = np.array(ax.get_xlim())
    ax.plot(ends, ends, color=DARK, lw=0.8, zorder=0)  # predicted = measured
    within = f"within {_WITHIN:.0%}"
    ax.fill_between(
        ends,
        ends * (1 - _WITHIN),
        ends * (1 + _WITHIN),
        color="#e8e8e8",
        zorder=0,
        label=within,
    )
    error = (pairs["predicted_s"] / pairs["measured_s"] - 1).abs()
    close = (error <= _WITHIN).sum() / max(len(pairs), 1)
    columns = ["source", "model", "gpu", "n_gpus", "measured_s", "predicted_s"]
    return finish(
        ax,
        pairs.filter([*columns, "low_s", "high_s"]),
        f"{close:.0%} of {len(pairs)} published runs are predicted {within}",
        x="measured [s per step]",
        y="simulated, not seen by the fit [s per step]",
        where="upper left",
    )


def plot_errors(
    table: pd.DataFrame, ax: Axes | None = None, *, baseline: pd.Series | None = None
) -> Axes:
    """Mean absolute error of each row of `errors`, largest first; baseline: the error
    of a simpler model, one rate per GPU and precision, as text.
    """
    ranked = table.sort_values("mape", ascending=False)
    error = ranked["mape"]
    data = ranked.reset_index()
    title = "No rows"
    if len(error):
        title = f"Predictions are off by {error.min():.0%} to {error.max():.0%}"
    texts = error.map("{:.1%}".format)
    if baseline is not None:
        # in the order of the bars
        simple = baseline.reindex(error.index)
        data["baseline"] = simple.to_numpy()
        title += f", one rate per GPU by {simple.min():.0%} to {simple.max():.0%}"
        texts += simple.map("; one rate: {:.0%}".format)
    rows = []
    for name, count in ranked["rows"].items():
        text = " · ".join(map(str, name)) if isinstance(name, tuple) else str(name)
        text = shorten(text, 58, keep_end=True)
        rows.append(f"{text} ({plural(count, 'run')})")
    return bar_chart(
        ax,
        data,
        error * 100,
        title,
        x="mean absolute error of the predicted time [%]",
        rows=rows,
        source="simulated",
        notes=texts,
    )
