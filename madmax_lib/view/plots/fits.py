"""What has a fit found, and how far are predictions from measurements? Pictures of
`calibration`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.calibration.judge.identifiability import STATES, scaled
from madmax_lib.view import drawing as draw

__all__ = ["plot_constants", "plot_errors", "plot_measured_overlap", "plot_predicted"]

_STATE_COLORS = ("#3b75af", "#8d6bb8", "#e1812c", "#9a9a9a", "#c44e52")
_STATE_STYLES = {
    state: style for state, *style in zip(STATES, _STATE_COLORS, "osDx^", strict=True)
}
_INSIDE = 1.645  # standard deviations of a 90 % interval
_WITHIN = 10  # per cent, shaded
_RED = "#c44e52"
_PRIOR = {"color": "#dedede", "lw": 6}
_FACTS = {  # of `overlap_facts`: label, fill
    "overlap": ("communication that is hidden", "hidden"),
    "exposed_share": ("step that is exposed communication", "comm"),
    "comm_share": ("kernel time that is communication", "other"),
    "compute_slowdown": ("compute slowed down beside communication", "compute"),
    "speed_ratio": ("gain of speed by the switch", "memcpy"),
}


def plot_constants(
    table: pd.DataFrame, sigma: pd.Series, ax: Axes | None = None
) -> Axes:
    """Every fitted constant between its bounds, in the scale of the fit: prior (grey),
    90 % interval, fitted value.

    table: `identifiability.constants_of`; sigma: prior widths by name. Colours: the
    states.
    """
    low = scaled(table, "low")
    span = scaled(table, "high") - scaled(table, "low")
    at = {
        name: (scaled(table, name) - low) / span
        for name in ("start", "fitted", "interval_low", "interval_high")
    }
    prior = _INSIDE * sigma.reindex(table.index).to_numpy(float) / span
    ax = ax or draw.new_axes(height=1.2 + 0.165 * len(table))
    places = np.arange(len(table))
    colors = [_STATE_STYLES[state][0] for state in table["state"]]
    ax.hlines(
        places,
        np.clip(at["start"] - prior, 0, 1),
        np.clip(at["start"] + prior, 0, 1),
        **_PRIOR,
    )
    ax.plot(at["start"], places, "|", color="#7a7a7a", ms=7)
    ax.hlines(places, at["interval_low"], at["interval_high"], color=colors, lw=1.6)
    counts = table["state"].value_counts().reindex(list(_STATE_STYLES), fill_value=0)
    for state, (color, mark) in _STATE_STYLES.items():
        rows = np.flatnonzero(table["state"] == state)
        label = f"{state} ({counts[state]})"
        ax.plot(
            np.asarray(at["fitted"])[rows],
            rows,
            mark,
            color=color,
            ms=4.5,
            zorder=3,
            label=label,
        )
    for place, value in zip(places, table["fitted"], strict=True):
        draw.note(ax, 1.02, place, f"{value:.3g}", dx=0, fontsize=6.5)
    key = [*ax.get_legend_handles_labels()[0], draw.line_key("prior, 90 %", **_PRIOR)]
    title = (
        f"The rows fix {counts['fixed by rows']} of {len(table)} constants, "
        f"{counts['at a bound']} end at a bound"
    )
    columns = [
        "start",
        "low",
        "high",
        "fitted",
        "interval_low",
        "interval_high",
        "moved",
        "learned",
        "state",
    ]
    data = table[columns].rename_axis("constant").reset_index()
    ax.set_xticks([0, 0.5, 1], ["lower bound", "scale of the fit", "upper bound"])
    ax.tick_params(axis="y", labelsize=6.5)
    return draw.finish(
        ax,
        data,
        title,
        rows=table.index,
        key=key,
        columns=3,
        xlim=(-0.02, 1.1),
        origin=table,
    )


def plot_predicted(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Predicted against measured seconds per step, both axes logarithmic, with 90 %
    intervals where the table has them.

    table: measured_s, predicted_s, kind, and low_s, high_s or not; rows without one of
    the first two are left out.
    """
    shown = table.dropna(subset=["measured_s", "predicted_s"]).reset_index(drop=True)
    shown = shown.assign(
        kind=np.where(shown["kind"] == "mixture", "mixtures of experts", "dense models")
    )
    ax = ax or draw.new_axes(height=5.0, width=5.6)
    styles = {
        "dense models": (draw.COLORS["compute"], "o"),
        "mixtures of experts": (draw.COLORS["comm"], "s"),
    }
    for kind, (color, mark) in styles.items():
        part = shown[shown["kind"] == kind]
        measured_s = part["measured_s"].astype(float)
        if "low_s" in part:
            ax.vlines(
                measured_s,
                part["low_s"],
                part["high_s"],
                color=color,
                lw=0.6,
                alpha=0.5,
            )
        if len(part):
            ax.plot(
                measured_s,
                part["predicted_s"],
                mark,
                ms=4,
                mfc="none",
                mew=0.8,
                color=color,
                label=kind,
            )
    ends = (
        np.array([shown["measured_s"].min() / 1.5, shown["measured_s"].max() * 1.5])
        if len(shown)
        else [0.1, 10]
    )
    ax.plot(ends, ends, color=draw.DARK, lw=0.8, zorder=0)
    shade = {"color": "#e8e8e8", "zorder": 0, "label": f"within {_WITHIN} %"}
    ax.fill_between(
        ends,
        np.multiply(ends, 1 - _WITHIN / 100),
        np.multiply(ends, 1 + _WITHIN / 100),
        **shade,
    )
    draw.legend(ax, where="upper left")
    error = (shown["predicted_s"] / shown["measured_s"] - 1).abs()
    close = (error <= _WITHIN / 100).sum() / max(len(shown), 1)
    title = (
        f"{close:.0%} of {len(shown)} published runs are predicted within {_WITHIN} %"
    )
    columns = [
        "source",
        "model",
        "gpu",
        "n_gpus",
        "measured_s",
        "predicted_s",
        "low_s",
        "high_s",
    ]
    data = shown[[column for column in columns if column in shown]]
    labels = {
        "x": "measured [s per step]",
        "y": "simulated, not seen by the fit [s per step]",
    }
    return draw.finish(
        ax,
        data,
        title,
        origin=table,
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        **labels,
    )


def plot_errors(
    table: pd.DataFrame, ax: Axes | None = None, *, baseline: pd.Series | None = None
) -> Axes:
    """Mean absolute error of each row of `errors`, largest first; baseline: the error
    of a simpler model as marks.
    """
    shown = table.sort_values("mape", ascending=False)
    data = shown.reset_index()
    key = None
    title = "No rows"
    if len(shown):
        title = (
            f"Predictions are off by {shown['mape'].min():.0%} to "
            f"{shown['mape'].max():.0%}"
        )
    if baseline is not None:
        simple = baseline.reindex(shown.index)
        data = data.assign(baseline=simple.to_numpy())
        key = [
            draw.mark_key("one rate per GPU and precision", "|", _RED, ms=9, mew=1.5)
        ]
        title += (
            f"; nearer than one rate in {(shown['mape'] < simple).sum()} of "
            f"{len(shown)}"
        )
    names = [
        " · ".join(map(str, name)) if isinstance(name, tuple) else str(name)
        for name in shown.index
    ]
    counts = [draw.plural(count, "run") for count in shown["rows"]]
    rows = [
        f"{draw.shorten(name, 58, keep_end=True)} ({count})"
        for name, count in zip(names, counts, strict=True)
    ]
    ending = {
        "x": "mean absolute error of the predicted time [%]",
        "rows": rows,
        "key": key,
        "origin": table,
    }
    ax = draw.bar_chart(
        ax, data, shown["mape"] * 100, title, source="simulated", **ending
    )
    if baseline is not None:
        ax.plot(simple * 100, range(len(shown)), "|", color=_RED, ms=9, mew=1.5)
    for place, error in enumerate(shown["mape"]):
        ax.text(
            1.01,
            place,
            f"{error:.1%}",
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=7,
        )
    return ax


def plot_measured_overlap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Measured facts about overlap (filled) and ours (hatched); those of one
    configuration as their mean.

    table: `calibration.overlap_facts`.
    """
    gains = 1.0 * (table["what"] == "speed_ratio")
    percent = 100 * table[["measured", "predicted"]].sub(gains, axis=0)
    order = table["what"].map(list(_FACTS).index)
    keys = [order.rename("order"), table["what"], table["run"]]
    shown = (
        percent.groupby(keys, sort=False)
        .mean()
        .reset_index()
        .sort_values("order", kind="stable")
    )
    fills = [_FACTS[what][1] for what in shown["what"]]
    ax = ax or draw.new_axes(height=1.6 + 0.3 * len(shown))
    for place, (who, source) in enumerate(
        {"measured": None, "predicted": "simulated"}.items()
    ):
        notes = shown[who].map("{:.0f}".format)
        draw.bars(ax, shown[who], fills, source=source, slot=(place, 2), notes=notes)
    key = [draw.patch_key(label, fill) for label, fill in _FACTS.values()]
    key.append(
        draw.patch_key(
            "ours, below what was measured", draw.fill_of(draw.GREY, "simulated")
        )
    )
    off = table["error"].abs().groupby(table["what"]).mean() * 100
    title = (
        f"Overlap is off by {off['overlap']:.0f} points, exposed shares by "
        f"{off['exposed_share']:.0f}"
    )
    title += f", speed ratios by {off['speed_ratio']:.0f} %"
    rows = [draw.shorten(run, 72) for run in shown["run"]]
    data = shown.drop(columns="order")
    return draw.finish(
        ax, data, title, x="per cent", rows=rows, key=key, columns=2, origin=table
    )
