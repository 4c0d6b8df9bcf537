"""How do predictions of published runs look beside what was measured? Pictures of `calibration.validate`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import COLORS, fill_of, keep_data, new_axes

__all__ = ["plot_errors", "plot_predicted", "plot_vision"]

_WITHIN = 0.1


def plot_predicted(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Predicted against measured seconds per step, both axes logarithmic, with 90 % intervals where the table has them.

    table: measured_s, predicted_s, experts, and low_s, high_s or not; rows without one of the first two are left out.
    """
    shown = table.dropna(subset=["measured_s", "predicted_s"]).reset_index(drop=True)
    ax = ax or new_axes(height=5.0, width=5.6)
    measured, predicted = shown["measured_s"].to_numpy(float), shown["predicted_s"].to_numpy(float)
    for kind, mark, rows in (("compute", "o", shown["experts"] == 0), ("comm", "s", shown["experts"] > 0)):
        if rows.any() and "low_s" in shown:
            ax.vlines(measured[rows], shown.loc[rows, "low_s"], shown.loc[rows, "high_s"], color=COLORS[kind], lw=0.6,
                      alpha=0.5)  # fmt: skip
        ax.plot(measured[rows], predicted[rows], mark, ms=3, mfc="none", mew=0.8, color=COLORS[kind],
                label={"compute": "dense models", "comm": "mixtures of experts"}[kind])  # fmt: skip
    ends = np.array([measured.min(initial=1.0) / 1.5, measured.max(initial=1.0) * 1.5])
    ax.plot(ends, ends, color="#4a4a4a", lw=0.8)
    ax.fill_between(ends, ends * (1 - _WITHIN), ends * (1 + _WITHIN), color="#e8e8e8", zorder=0, label="within 10 %")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured [s per step]")
    ax.set_ylabel("simulated, not seen by the fit [s per step]")
    ax.legend(loc="upper left")
    close = np.mean(np.abs(predicted / measured - 1) <= _WITHIN) if len(shown) else 0.0
    ax.set_title(f"{close:.0%} of {len(shown)} published runs are predicted within 10 %")
    columns = ["source", "model", "gpu", "n_gpus", "measured_s", "predicted_s", "low_s", "high_s"]
    return keep_data(ax, shown[[column for column in columns if column in shown]], table)


def plot_errors(table: pd.DataFrame, ax: Axes | None = None, *, baseline: pd.Series | None = None) -> Axes:
    """Mean absolute error of each row of `errors`, largest first; baseline: the error of a simpler model as marks."""
    shown = table.sort_values("mape", ascending=False)
    ax = ax or new_axes(height=1.0 + 0.26 * len(shown))
    for place, row in enumerate(shown.itertuples()):
        ax.barh(place, row.mape * 100, height=0.7, **fill_of("compute", "simulated"))
        ax.annotate(f"{row.mape:.1%}", (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    if baseline is not None:
        ax.plot(baseline.reindex(shown.index) * 100, range(len(shown)), "|", color="#c44e52", ms=9, mew=1.5,
                label="one rate per GPU and precision")  # fmt: skip
        ax.legend(loc="upper right", bbox_to_anchor=(1, -0.5 / ax.figure.get_figheight()))
    names = [" · ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in shown.index]
    labels = [name if len(name) < 58 else f"…{name[-57:]}" for name in names]
    ax.set_yticks(
        range(len(shown)), [f"{name} ({_runs(rows)})" for name, rows in zip(labels, shown["rows"], strict=True)]
    )
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="mean absolute error of the predicted time [%]")
    ax.set_title(_verdict(shown, names, baseline))
    data = shown.reset_index()
    if baseline is not None:
        data = data.assign(baseline=baseline.reindex(shown.index).to_numpy())
    return keep_data(ax, data, table)


def plot_vision(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """MFU of the vision transformers of MAD-Max: measured, the paper's prediction and ours (`vision_errors`)."""
    ax = ax or new_axes(height=0.9 + 0.42 * len(table))
    styles = {"measured": {"facecolor": "#4a4a4a"}, "paper": {"facecolor": "white", "edgecolor": "#222222"},
              "ours": fill_of("compute", "simulated")}  # fmt: skip
    errors = {who: table[f"{who}_error"].abs().mean() for who in ("paper", "ours")}
    labels = {"measured": "measured", "paper": f"the paper's model, mean relative error {errors['paper']:.1%}",
              "ours": f"ours, fitted to the other runs: {errors['ours']:.1%}"}  # fmt: skip
    for k, (who, style) in enumerate(styles.items()):
        places = np.arange(len(table)) + (k - 1) * 0.27
        ax.barh(places, table[who] * 100, height=0.25, label=labels[who], **style)
        if who != "measured":
            for place, value, error in zip(places, table[who], table[f"{who}_error"], strict=True):
                ax.annotate(f"{error:+.0%}", (value * 100, place), (3, 0), textcoords="offset points", va="center",
                            fontsize=6)  # fmt: skip
    ax.set_yticks(range(len(table)), [f"{r.model}, {r.gpus} GPUs, batch {r.global_batch}" for r in table.itertuples()])
    ax.set(ylim=(len(table) - 0.45, -0.55), xlabel="MFU [% of 312 TFLOP/s]")
    ax.legend(loc="lower right")
    ax.set_title(f"Vision transformers: off by {errors['ours']:.0%}, the paper's own model by {errors['paper']:.0%}")
    return keep_data(ax, table.reset_index(drop=True), table)


def _verdict(shown: pd.DataFrame, names: list[str], baseline: pd.Series | None) -> str:
    if not names:
        return "No rows"
    if baseline is None:
        return f"Predicted worst: {names[0]}, {shown['mape'].iloc[0]:.0%} off"
    better = int((shown["mape"] < baseline.reindex(shown.index)).sum())
    reach = f"{shown['mape'].min():.0%} to {shown['mape'].max():.0%}"
    return f"Off by {reach}; nearer than one rate in {better} of {len(shown)}"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
