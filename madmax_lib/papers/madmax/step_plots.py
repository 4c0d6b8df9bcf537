"""What does a step look like in MAD-Max, and how far is the model from measurements? Figures 6 to 9."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from madmax_lib.papers.style import HATCH, PAPER, PIECE_COLORS, PIECE_NAMES, bars, done, legend, note
from madmax_lib.timeline import Timeline
from madmax_lib.view.drawing import COLORS, new_axes
from madmax_lib.view.plots.breakdown import plot_timeline

__all__ = ["plot_forward", "plot_prefetch", "plot_validation", "plot_vit"]


def plot_validation(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Figure 7: the pieces of a DLRM-A step one after another and overlapped, beside what was measured."""
    ax = ax or new_axes(height=3.3)
    rows = table[["gpus", "who", "bar"]].drop_duplicates().to_numpy().tolist()
    ranking = {"measured": 0, "paper": 1, "ours": 2}
    order = sorted(rows, key=lambda row: (-row[0], ranking[row[1]]))
    labels = []
    for place, (gpus, who, bar) in enumerate(order):
        part = table[(table["gpus"] == gpus) & (table["who"] == who) & (table["bar"] == bar)]
        left = 0.0
        for row in part.itertuples():
            if who == "ours":
                bars(ax, place, row.value_ms, left=left, color=PIECE_COLORS[row.piece])
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
                name = f"{PIECE_NAMES[row.piece]}\n" if row.value_ms > 8 else ""
                ax.text(left + row.value_ms / 2, place, f"{name}{row.value_ms:.2f}", ha="center", va="center",
                        fontsize=6.5, bbox=box)  # fmt: skip
            else:
                face = "#4a4a4a" if who == "measured" else "none"
                ax.barh(place, row.value_ms, height=0.7, color=face, edgecolor=PAPER, lw=1)
            left += row.value_ms
        theirs = part["published_ms"].sum(min_count=1)
        error = f"; released {theirs:.2f}, error {left / theirs - 1:+.2%}" if theirs > 0 else ""
        note(ax, left, place, f"{left:.2f} ms{error}")
        name = {"measured": "measured", "paper": "paper's model", "ours": "ours"}[who]
        labels.append(f"{gpus} GPUs · {name}\n{bar}")
    ax.set_yticks(range(len(order)), labels)
    ax.set(ylim=(len(order) - 0.5, -0.5), xlim=(0, table["value_ms"].max() * 1.5), xlabel="time of one step [ms]")
    measured = table.loc[table["who"] == "measured", "value_ms"].iloc[0]
    ours = table[(table["who"] == "ours") & (table["gpus"] == 128) & (table["bar"] == "serialized")]["value_ms"].sum()
    ax.set_title(f"DLRM-A on 128 GPUs: serialized {ours:.2f} ms, {ours / measured - 1:+.1%} from measured")
    return done(ax, table)


def plot_vit(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Figure 8: MFU of ViT training measured, predicted by the paper, and ours with constant and fitted utilisation."""
    ax = ax or new_axes(height=4.8)
    styles = {"measured": {"facecolor": "#4a4a4a"}, "paper": {"facecolor": "white", "edgecolor": PAPER},
              "fitted": {"facecolor": COLORS["compute"], "hatch": HATCH, "edgecolor": "white"}}  # fmt: skip
    height = 0.26
    for k, (who, style) in enumerate(styles.items()):
        places = np.arange(len(table)) + (k - 1) * height
        ax.barh(places, table[who] * 100, height=height * 0.92, **style)
        if who != "measured":
            for place, value, error in zip(places, table[who], table[f"{who}_error"], strict=True):
                note(ax, value * 100, place, f"{error:+.0%}", fontsize=6)
    ax.plot(table["ours"] * 100, range(len(table)), "|", color=COLORS["compute"], ms=14, mew=2)
    ax.set_yticks(range(len(table)), [f"{r.model}, {r.gpus} GPUs, batch {r.global_batch}" for r in table.itertuples()])
    errors = {who: table[f"{who}_error"].abs().mean() for who in ("paper", "ours", "fitted")}
    labels = {"measured": "measured", "paper": f"paper's prediction, mean relative error {errors['paper']:.1%}",
              "fitted": f"ours, utilisation fitted to the other eight runs: {errors['fitted']:.1%}"}  # fmt: skip
    handles = [Patch(**style, label=labels[who]) for who, style in styles.items()]
    constant = f"ours, constant utilisation of the release: {errors['ours']:.0%}"
    handles.append(Line2D([], [], marker="|", color=COLORS["compute"], ls="none", ms=12, mew=2, label=constant))
    legend(ax, handles, loc="upper center", bbox_to_anchor=(0.35, -0.13), ncols=2)
    ax.set(ylim=(len(table) - 0.4, -0.6), xlabel="MFU [% of 312 TFLOP/s]", xlim=(0, 80))
    missed = f"{errors['paper']:.1%} (paper), {errors['fitted']:.1%} (ours)"
    ax.set_title(f"ViT: predictions miss the measured MFU by {missed}")
    return done(ax, table)


def plot_forward(timeline: Timeline, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Figure 6: the two streams of a step, the long operations named."""
    ax = plot_timeline(timeline, ax or new_axes(height=1.9))
    zero_ns = timeline.spans["start_ns"].min()
    reach_ns = (timeline.spans["start_ns"] + timeline.spans["dur_ns"]).max() - zero_ns
    for stream, text, start_ns, end_ns in _runs(timeline.spans):
        if end_ns - start_ns > 0.04 * reach_ns:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            wide = end_ns - start_ns > 0.08 * reach_ns
            length = f"{text}\n{(end_ns - start_ns) / 1e6:.2f} ms" if wide else text.replace(" ", "\n")
            middle_ms = ((start_ns + end_ns) / 2 - zero_ns) / 1e6
            ax.text(middle_ms, stream, length, ha="center", va="center", fontsize=6.5, bbox=box)
    ax.set_yticks([0, 1], ["compute", "communication"])
    if title:
        ax.set_title(title)
    return ax


def _runs(spans: pd.DataFrame) -> list[tuple[int, str, int, int]]:
    """(stream, label, start, end) of neighbouring operations of the same part of the model."""
    parts = {"attention": "transformer", "fc": "transformer", "bottom": "bottom MLP", "top": "top MLP"}
    collectives = {"all_to_all": "All2All", "all_reduce": "AllReduce", "all_gather": "AllGather",
                   "reduce_scatter": "ReduceScatter", "embedding": "lookup"}  # fmt: skip
    runs = []
    for row in spans.sort_values(["stream", "start_ns"]).itertuples():
        first, second, *_ = row.name.split()
        text = parts.get(second, second) if first == "gemm" else collectives[first]
        end_ns = row.start_ns + row.dur_ns
        if runs and runs[-1][:2] == (row.stream, text):
            runs[-1] = (row.stream, text, runs[-1][2], end_ns)
        else:
            runs.append((row.stream, text, row.start_ns, end_ns))
    return runs


def plot_prefetch(timelines: Mapping[str, Timeline], table: pd.DataFrame, model: str, *, width_s: float = 0.2) -> Axes:
    """Figure 9: a window in the backward pass without and with prefetching, a panel for each schedule."""
    figure, axes = plt.subplots(len(timelines), 1, figsize=(7.0, 1.55 * len(timelines) + 0.5), sharex=True)
    rows = table[table["model"] == model].set_index("schedule")
    for ax, (schedule, timeline) in zip(axes, timelines.items(), strict=True):
        spans = timeline.spans
        first_ns = spans.loc[spans["name"].str.contains("backward"), "start_ns"].min() + 3 * int(width_s * 1e9) // 4
        start_s = (spans["start_ns"] - first_ns) / 1e9
        seen = spans[(start_s + spans["dur_ns"] / 1e9 > 0) & (start_s < width_s)]
        for row in seen.itertuples():
            begin = max((row.start_ns - first_ns) / 1e6, 0)
            end = min((row.start_ns + row.dur_ns - first_ns) / 1e6, width_s * 1e3)
            short = {"gemm": "GEMM", "all_gather": "AG", "reduce_scatter": "RS"}.get(row.name.split()[0], "")
            color = {"AG": COLORS["comm"], "RS": "#b8561a"}.get(short, COLORS["compute"])
            with matplotlib.rc_context({"hatch.linewidth": 0.5}):
                ax.broken_barh(
                    [(begin, end - begin)],
                    (row.stream - 0.4, 0.8),
                    facecolor=color,
                    hatch=HATCH,
                    edgecolor="white",
                    linewidth=0.3,
                )
            if end - begin > 0.022 * width_s * 1e3:
                text = row.name.split()[1].replace("attention", "att.") if short == "GEMM" else short
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85}
                ax.text((begin + end) / 2, row.stream, text, ha="center", va="center", fontsize=6, bbox=box)
        hidden, step_s = rows.loc[schedule, "overlapped_share"], rows.loc[schedule, "iteration_ms"] / 1e3
        name = {"pre-optimised": "just in time", "optimised": "prefetched"}[schedule]
        told = f"{name}: {hidden:.1%} of communication hidden, step {step_s:.2f} s"
        ax.set_title(told, fontsize=8, fontweight="normal")
        ax.set_yticks([0, 1], ["compute", "communication"])
        ax.set_ylim(1.5, -0.5)
    axes[-1].set(xlabel="time in the backward pass [ms]", xlim=(0, width_s * 1e3))
    saved = 1 - rows["iteration_ms"].iloc[1] / rows["iteration_ms"].iloc[0]
    figure.suptitle(f"{model} under FSDP: prefetching takes {saved:.0%} off the step (AG AllGather, RS ReduceScatter)",
                    fontsize=10, fontweight="bold", x=0.01, ha="left")  # fmt: skip
    return done(axes[0], table)
