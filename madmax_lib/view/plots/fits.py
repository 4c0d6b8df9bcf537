"""What has a fit found, and what has it not? Constants with intervals, residuals, correlated constants."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from madmax_lib.calibration.identifiability import STATES, scaled
from madmax_lib.view.drawing import COLORS, keep_data, new_axes

__all__ = ["plot_constants", "plot_correlations", "plot_residuals", "plot_spread"]

_STATE_COLORS = dict(zip(STATES, ("#3b75af", "#8d6bb8", "#e1812c", "#9a9a9a", "#c44e52"), strict=True))
_INSIDE = 1.645  # standard deviations of a 90 % interval
_STATE_MARKS = dict(zip(STATES, "osDx^", strict=True))
_FAMILIES = {"ampere": ("#3b75af", "o"), "hopper": ("#e1812c", "s"), "blackwell": ("#529d3f", "^")}
_WITHIN = 10  # per cent, shaded
_PLURAL = {"gpu": "GPUs"}


def plot_constants(table: pd.DataFrame, sigma: pd.Series, ax: Axes | None = None) -> Axes:
    """Every fitted constant between its bounds, in the scale of the fit: prior (grey), 90 % interval, fitted value.

    table: `identify.constants_of`; sigma: prior widths by name. Colours are the states; the value is written beside.
    """
    shown = table.assign(sigma=sigma.reindex(table.index).astype(float))
    low, span = scaled(shown, "low"), scaled(shown, "high") - scaled(shown, "low")
    at = {name: (scaled(shown, name) - low) / span for name in ("start", "fitted", "interval_low", "interval_high")}
    reach = _INSIDE * shown["sigma"].to_numpy() / span
    ax = ax or new_axes(height=1.2 + 0.165 * len(shown), width=7.0)
    places, colors = np.arange(len(shown)), shown["state"].map(_STATE_COLORS)
    ax.hlines(places, np.clip(at["start"] - reach, 0, 1), np.clip(at["start"] + reach, 0, 1), color="#dedede", lw=6)
    ax.plot(at["start"], places, "|", color="#7a7a7a", ms=7)
    ax.hlines(places, at["interval_low"], at["interval_high"], color=colors, lw=1.6)
    for state, mark in _STATE_MARKS.items():
        rows = np.flatnonzero(shown["state"] == state)
        ax.plot(np.asarray(at["fitted"])[rows], rows, mark, color=_STATE_COLORS[state], ms=4.5, zorder=3)
    for place, value in zip(places, shown["fitted"], strict=True):
        ax.annotate(f"{value:.3g}", (1.02, place), va="center", fontsize=6.5)
    ax.set_yticks(places, shown.index, fontsize=6.5)
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlim=(-0.02, 1.1), xticks=[0, 0.5, 1])
    ax.set_xticklabels(["lower bound", "scale of the fit", "upper bound"])
    counts = shown["state"].value_counts()
    handles = [Line2D([], [], marker=_STATE_MARKS[state], color=color, ms=4, label=f"{state} ({counts.get(state, 0)})")
               for state, color in _STATE_COLORS.items()]  # fmt: skip
    handles.append(Line2D([], [], color="#dedede", lw=6, label="prior, 90 %"))
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.4, -0.02), ncols=3)
    ax.set_title(f"The rows fix {counts.get('fixed by rows', 0)} of {len(shown)} constants, "
                 f"{counts.get('at a bound', 0)} end at a bound")  # fmt: skip
    columns = ["start", "low", "high", "fitted", "interval_low", "interval_high", "moved", "learned", "state"]
    return keep_data(ax, shown[columns].rename_axis("constant").reset_index(), table)


def plot_residuals(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How much slower than predicted each row was, against the predicted seconds, a colour and mark per family of GPUs.

    table: predicted_s, log_error (measured over predicted), family, and source, model, gpu for the data.
    """
    ax = ax or new_axes(height=3.6)
    percent = np.expm1(table["log_error"].astype(float)) * 100
    for family, rows in table.groupby("family"):
        color, mark = _FAMILIES.get(family, (COLORS["other"], "D"))
        part = percent[rows.index]
        name = f"{family}: {len(rows)} rows, median {part.median():+.1f} %, half within {part.abs().median():.1f} %"
        ax.plot(rows["predicted_s"], part, mark, ms=3, mfc="none", mew=0.8, color=color, label=name)
    ax.axhspan(-_WITHIN, _WITHIN, color="#efefef", zorder=0)
    ax.axhline(0, color="#4a4a4a", lw=0.8)
    ax.set(xscale="log", xlabel="predicted [s per step]", ylabel="measured over predicted [%]")
    ax.grid(axis="y")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17))
    far = percent[percent.abs() > _WITHIN]
    ax.set_title(f"{1 - len(far) / len(percent):.0%} of the residuals are within {_WITHIN} %; of the {len(far)} others "
                 f"{(far > 0).sum()} are slower")  # fmt: skip
    columns = ["source", "model", "gpu", "predicted_s", "log_error"]
    return keep_data(ax, table[columns].reset_index(drop=True), table)


def plot_spread(table: pd.DataFrame, by: str, ax: Axes | None = None) -> Axes:
    """Residuals of each value of a column (source, gpu) as dots, their median as a tick; the widest medians on top."""
    percent = np.expm1(table["log_error"].astype(float)) * 100
    medians = percent.groupby(table[by]).median()
    order = medians.abs().sort_values(ascending=False).index
    ax = ax or new_axes(height=1.0 + 0.24 * len(order))
    for place, name in enumerate(order):
        part = percent[table[by] == name]
        shift = np.linspace(-0.25, 0.25, len(part)) if len(part) > 1 else np.zeros(1)
        ax.plot(part, place + shift, "o", ms=2.5, mfc="none", mew=0.7, color=COLORS["compute"])
        ax.plot([medians[name]] * 2, [place - 0.38, place + 0.38], color="#c44e52", lw=1.8)
    ax.axvspan(-_WITHIN, _WITHIN, color="#efefef", zorder=0)
    ax.set_yticks(range(len(order)), [f"{_short(name)} ({(table[by] == name).sum()})" for name in order], fontsize=7)
    ax.set(ylim=(len(order) - 0.4, -0.6), xlabel="measured over predicted [%]")
    off = int((medians.abs() > _WITHIN).sum())
    name = _PLURAL.get(by, f"{by}s")
    which = f"The median of {off} of {len(order)}" if off else f"No median of the {len(order)}"
    ax.set_title(f"{which} {name} is off by more than {_WITHIN} %")
    return keep_data(ax, table[[by, "model", "log_error"]].reset_index(drop=True), table)


def plot_correlations(matrix: pd.DataFrame, ax: Axes | None = None, *, least: float = 0.4) -> Axes:
    """Correlation of the constants that have a partner with at least that correlation."""
    strong = matrix.abs().where(~np.eye(len(matrix), dtype=bool), 0.0)
    names = matrix.index[(strong >= least).any(axis=1)]
    part = matrix.loc[names, names]
    ax = ax or new_axes(height=1.8 + 0.21 * len(names), width=2.6 + 0.21 * len(names))
    image = ax.imshow(part, cmap="RdBu_r", vmin=-1, vmax=1, aspect="equal")
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize=6.5)
    ax.set_yticks(range(len(names)), names, fontsize=6.5)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label="correlation", shrink=0.5)
    pairs = int((np.triu(strong.to_numpy()) >= least).sum())
    ax.set_title(f"{pairs} pairs of constants share what the rows say (|r| of {least} and more)")
    return keep_data(ax, part.rename_axis("constant").reset_index(), matrix)


def _short(name: object, most: int = 62) -> str:
    text = str(name)
    return text if len(text) <= most else f"…{text[1 - most :]}"
