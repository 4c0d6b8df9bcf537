"""What do two public studies look like beside our numbers? Pictures of `hybrid` and `vit_study`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from madmax_lib.papers.style import GREY, PAPER, legend, note, paper_marks
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, new_axes
from madmax_lib.view.plots.steps import COMPONENTS, OTHER

__all__ = ["plot_gelu", "plot_loss", "plot_memory_parts", "plot_memory_rows", "plot_mfu", "plot_mlp", "plot_overlap",
           "plot_phases", "plot_scaling", "plot_steps"]  # fmt: skip

_GIB = 2**30
_BIN = 16  # logged steps per point of a curve
_STRATEGIES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zeropp": "ZeRO++"}
_LINES = {"zero2": (COLORS["compute"], "o"), "zero3": (COLORS["comm"], "s"), "zeropp": (COLORS["memcpy"], "^")}
_PARTS = {name: COMPONENTS[name] for name in ("weights", "gradients", "optimizer", "buckets", "optimizer temporaries",
          "activations")} | {"other": OTHER, "context and fragmentation": COMPONENTS["context"]}  # fmt: skip
_PHASES = {"forward": "#9dbede", "backward": COLORS["compute"], "update": COLORS["memcpy"],
           "all_gather": COLORS["comm"]}  # fmt: skip


def plot_mfu(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """MFU of each row of `hybrid.audit`: as reported, from real batches, from the wall clock, corrected."""
    ax = ax or new_axes(height=1.4 + 0.42 * len(table))
    places = np.arange(len(table))
    ax.barh(places, 100 * table["mfu_corrected"], height=0.6, **fill_of("compute", None))
    paper_marks(ax, 100 * table["mfu_reported"], places)
    for column, mark in (("mfu_reproduced", "x"), ("mfu_window", "|"), ("mfu_wall", "o")):
        ax.plot(100 * table[column], places, mark, color=COLORS["comm"], ms=7 if mark != "o" else 4, mew=1.3, ls="none")
    for place, row in enumerate(table.itertuples()):
        bound = "at most " if row.executed < 1 else ""
        note(ax, 0, place, f"{bound}{row.mfu_corrected:.1%}", dx=4, color="white")
    ax.set_yticks(places, _row_names(table))
    ax.set(ylim=(len(table) - 0.4, -0.6), xlim=(0, 115 * table["mfu_reported"].max()), xlabel="MFU [%]")
    ax.set_title(f"The last, short batch was counted full: MFU came out up to {table['inflation'].max():.2f}x too high")
    handles = [
        Line2D([], [], marker="D", mfc="none", mec=PAPER, ls="none", label="reported"),
        Line2D([], [], marker="x", color=COLORS["comm"], ls="none", label="reproduced"),
        Line2D([], [], marker="|", color=COLORS["comm"], ls="none", ms=9, label="real batches"),
        Line2D([], [], marker="o", color=COLORS["comm"], ls="none", ms=4, label="wall clock"),
        Patch(facecolor=COLORS["compute"], label="useful tokens, usual FLOPs"),
    ]
    _below(ax, handles, columns=3)
    return keep_data(ax, table, table)


def plot_loss(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Loss after the same 5,000 samples against the time they took, one point per run that reports it."""
    shown = table.dropna(subset=["loss"]).reset_index(drop=True)
    ax = ax or new_axes(height=3.0, width=5.4)
    ax.plot(shown["train_time_s"], shown["loss"], "o", color=COLORS["compute"], ms=7)
    for row, name in zip(shown.itertuples(), _row_names(shown), strict=True):
        note(ax, row.train_time_s, row.loss, f"{name}\naccuracy {row.accuracy_pct:g} %", dx=8)
    reach = np.ptp(shown["train_time_s"])
    ax.set_xlim(shown["train_time_s"].min() - 0.15 * reach, shown["train_time_s"].max() + 0.45 * reach)
    ax.margins(y=0.2)
    ax.set(xlabel="time for 5,000 samples [s]", ylabel="loss at the end")
    ax.grid(True, axis="both")
    worst = _row_names(shown)[shown["loss"].idxmax()]
    ax.set_title(f"{worst} learns least from the same samples")
    return keep_data(ax, shown[["config", "batch_per_gpu", "train_time_s", "loss", "accuracy_pct"]], table)


def plot_memory_rows(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Peak memory of each row, measured (filled) and predicted (hatched)."""
    ax = ax or new_axes(height=1.2 + 0.5 * len(table))
    for place, row in enumerate(table.itertuples()):
        ax.barh(place - 0.19, row.measured_gib, height=0.36, **fill_of("compute", None))
        ax.barh(place + 0.19, row.predicted_gib, height=0.36, **fill_of("compute", "simulated"))
        note(ax, max(row.measured_gib, row.predicted_gib), place, f"{row.error:+.1%}", dx=5)
    ax.set_yticks(range(len(table)), _row_names(table))
    ax.set(ylim=(len(table) - 0.4, -0.6), xlabel="peak memory allocated on a GPU [GiB]")
    within = (table["error"].abs() <= 0.1).sum()
    ax.set_title(f"{within} of {len(table)} rows within 10 % of what the study measured")
    _below(ax, [Patch(**fill_of("compute", None), label="measured"),
                Patch(**fill_of("compute", "simulated"), label="predicted")])  # fmt: skip
    return keep_data(ax, table, table)


def plot_gelu(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of the memory bandwidth that each kernel of `hybrid.gelu` reaches, by shape."""
    ax = ax or new_axes(height=3.0)
    for place, row in enumerate(table.itertuples()):
        for offset, share, kind in ((-0.19, row.unfused_share, "idle"), (0.19, row.fused_share, "compute")):
            ax.barh(place + offset, 100 * share, height=0.36, facecolor=COLORS[kind], edgecolor="white", lw=0)
        note(ax, 100 * row.unfused_share, place - 0.19, f"{row.unfused_ms:.3f} ms")
        note(ax, 100 * row.fused_share, place + 0.19, f"{row.fused_ms:.3f} ms, ideal {row.ideal_ms:.3f} ms")
    names = [f"{row.batch} x {row.sequence} x {row.width}" + ("\nin L2 cache" if row.in_cache else "")
             for row in table.itertuples()]  # fmt: skip
    ax.set_yticks(range(len(table)), names)
    ax.set(
        ylim=(len(table) - 0.4, -0.6),
        xlim=(0, 100),
        xlabel="bytes that the kernel moves per second, of 1,555 GB/s [%]",
    )
    last = table.iloc[-1]
    ax.set_title(f"The fused kernel reaches {last['fused_share']:.0%} of the bandwidth: the kernel is slow, not fusion")
    _below(ax, [Patch(facecolor=COLORS["idle"], label="two kernels of PyTorch"),
                Patch(facecolor=COLORS["compute"], label="fused kernel of the study")])  # fmt: skip
    return keep_data(ax, table, table)


def plot_mlp(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Time of each part of an MLP, with the share of the peak that products reach."""
    parts = table[table["name"] != "full mlp"].reset_index(drop=True)
    ax = ax or new_axes(height=2.6)
    for place, row in enumerate(parts.itertuples()):
        product = row.flops_per_s == row.flops_per_s
        ax.barh(place, row.ms, height=0.65, **fill_of("compute" if product else "comm", None))
        rate = f", {row.flops_per_s / 1e12:.0f} TFLOP/s ({row.peak_share:.0%} of the peak)" if product else ""
        note(ax, row.ms, place, f"{row.share:.1%}{rate}", dx=5)
    ax.set_yticks(range(len(parts)), parts["name"])
    ax.set(ylim=(len(parts) - 0.4, -0.6), xlim=(0, 1.6 * parts["ms"].max()), xlabel="time [ms]")
    gain = 1 / (1 - parts.set_index("name").at["gelu", "share"])
    ax.set_title(f"If GELU took no time at all, the MLP would be {gain:.2f}x as fast")
    return keep_data(ax, table, table)


def plot_steps(log: pd.DataFrame, ax: Axes | None = None, *, last: int, simulated_s: float) -> Axes:
    """Seconds of the logged steps by phase, means of 16; steps 2..last are the fit's, simulated_s its step."""
    ax = ax or new_axes(height=3.4)
    regular = log[log["kind"] == "regular"]
    rest = regular[regular["step"] > last]["step_s"].mean()
    regular = regular.groupby(regular["step"] // _BIN)[["step", *_PHASES]].mean()
    below = np.zeros(len(regular))
    for phase, color in _PHASES.items():
        top = below + regular[phase].to_numpy()
        ax.fill_between(regular["step"], below, top, color=color, lw=0)
        note(ax, regular["step"].iloc[-1], (below + top)[-2:].mean() / 2, phase.replace("_", "-"), dx=5)
        below = top
    odd = log[log["kind"] == "overflow"]
    ax.plot(odd["step"], odd["step_s"], "v", mfc="white", mec=PAPER, ms=5, label="overflow: no update")
    ax.axvspan(2, last, color="#000000", alpha=0.10, lw=0, label=f"fit: steps 2 to {last}")
    ax.axhline(simulated_s, color=PAPER, lw=1, ls="--", label=f"simulated: {simulated_s:.3f} s")
    ax.set(xlim=(0, log["step"].max() * 1.12), ylim=(0, 3.0), xlabel="step", ylabel="time [s]")
    ax.legend(loc="upper center", ncols=3)
    ax.set_title(f"Fitted on steps 2 to {last}, the simulated step is {simulated_s / rest - 1:+.1%} off on the others")
    return keep_data(ax, regular.reset_index(drop=True), log)


def plot_phases(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Each phase of `vit_study.fit_and_predict`: measured on steps after those of the fit, and simulated."""
    ax = ax or new_axes(height=3.0)
    for place, row in enumerate(table.itertuples()):
        ax.barh(place - 0.19, row.rest_s, height=0.36, **fill_of("compute", None))
        ax.barh(place + 0.19, row.simulated_s, height=0.36, **fill_of("compute", "simulated"))
        note(ax, max(row.rest_s, row.simulated_s), place, f"{row.error:+.1%}", dx=5)
    ax.set_yticks(range(len(table)), table["phase"].str.replace("_", "-"))
    ax.set(ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.12 * table["rest_s"].max()), xlabel="time [s]")
    worst = table.loc[table["error"].abs().idxmax()]
    ax.set_title(f"Three shares of the data sheet give every phase; {worst['phase']} is {abs(worst['error']):.0%} off")
    _below(ax, [Patch(**fill_of("compute", None), label="measured, not seen by the fit"),
                Patch(**fill_of("compute", "simulated"), label="simulated")])  # fmt: skip
    return keep_data(ax, table, table)


def plot_overlap(simulated: pd.DataFrame, measured: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of communication under compute: simulated cases as bars, traced ranks as hollow marks."""
    ax = ax or new_axes(height=3.0)
    of_run = ~simulated["strategy"].eq("zero2") | simulated["case"].str.startswith("one")
    for place, row in enumerate(simulated.itertuples()):
        ax.barh(place, 100 * row.overlap, height=0.65, **fill_of("hidden", "simulated"))
        traced = 100 * measured.loc[measured["strategy"] == row.strategy, "overlap"] if of_run[place] else []
        paper_marks(ax, traced, [place] * len(traced))
        note(ax, 100 * row.overlap, place, f"{row.overlap:.0%}", dx=8)
    names = [f"{_STRATEGIES[row.strategy]}, {row.case}" for row in simulated.itertuples()]
    ax.set_yticks(range(len(simulated)), names)
    ax.set(ylim=(len(simulated) - 0.4, -0.6), xlim=(0, 112), xlabel="communication hidden under compute [%]")
    ax.set_title("ZeRO-2 hid nothing; sharding layer by layer hides most of it")
    _below(ax, [Patch(**fill_of("hidden", "simulated"), label="simulated"),
                Line2D([], [], marker="D", mfc="none", mec=PAPER, ls="none", label="traced, each rank")])  # fmt: skip
    return keep_data(ax, simulated, simulated)


def plot_memory_parts(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What a GPU holds by strategy at its fullest moment, with the usable memory."""
    ax = ax or new_axes(height=3.0)
    strategies, shown = list(dict.fromkeys(table["strategy"])), set()
    for place, strategy in enumerate(strategies):
        rows = table[table["strategy"] == strategy]
        left, parts = 0.0, _fullest(rows)
        shown |= set(parts)
        for part, size in parts.items():
            ax.barh(place, size / _GIB, left=left, height=0.6, facecolor=_PARTS[part], edgecolor="white", lw=0.4)
            left += size / _GIB
        before = rows["before_update_bytes"].iloc[0] / _GIB
        note(ax, left, place, f"{left:.1f} GiB\n{before:.1f} before the update", dx=5)
    usable = table["usable_bytes"].iloc[0] / _GIB
    ax.axvline(usable, color=PAPER, lw=1, ls="--")
    note(ax, usable, -0.62, f"usable: {usable:.2f} GiB", dx=4)
    ax.set_yticks(range(len(strategies)), [_STRATEGIES[name] for name in strategies])
    ax.set(ylim=(len(strategies) - 0.4, -0.8), xlim=(0, 20), xlabel="memory of a GPU [GiB]")
    ax.set_title("DDP runs out of memory when AdamW makes its temporaries, not before")
    _below(ax, [Patch(facecolor=color, label=part) for part, color in _PARTS.items() if part in shown], columns=4)
    return keep_data(ax, table, table)


def plot_scaling(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Predicted throughput against the number of GPUs: one host solid, nodes dashed, linear growth grey."""
    ax = ax or new_axes(height=3.4, width=6.0)
    for (place, strategy), part in table.groupby(["place", "strategy"], sort=False):
        color, mark = _LINES[strategy]
        dashes = "-" if place == "one host" else "--"
        ax.plot(part["gpus"], part["samples_per_s"], color=color, marker=mark, ls=dashes, mfc="white", ms=5)
    counts = np.array(sorted(table["gpus"].unique()))
    first = table[table["strategy"] == "zero2"].iloc[0]
    ax.plot(counts, counts * first["samples_per_s"] / first["gpus"], color=GREY, lw=1)
    note(
        ax, counts[-1], counts[-1] * first["samples_per_s"] / first["gpus"], "linear from ZeRO-2", color="#777777", dx=8
    )
    ax.set(
        xlabel="GPUs",
        ylabel="simulated throughput [samples/s]",
        xticks=counts,
        xlim=(counts[0] * 0.8, counts[-1] * 1.35),
    )
    ax.grid(True, axis="both")
    handles = [Line2D([], [], color=color, marker=mark, mfc="white", ms=5, label=_STRATEGIES[name])
               for name, (color, mark) in _LINES.items()]  # fmt: skip
    handles += [Line2D([], [], color=PAPER, ls=ls, label=text) for ls, text in
                (("-", "one host"), ("--", "nodes of two, 10 Gb/s"))]  # fmt: skip
    legend(ax, handles, loc="upper left")
    kept = table[(table["strategy"] == "zero2") & (table["gpus"] == counts[-1])].set_index("place")["efficiency"]
    ax.set_title(f"ZeRO-2 keeps {kept['one host']:.0%} of its rate per GPU on {counts[-1]} GPUs of one host")
    return keep_data(ax, table, table)


def _fullest(rows: pd.DataFrame) -> dict[str, float]:
    """Bytes by part at the moment of the peak: the optimizer's temporaries, or a pass."""
    sums = rows.groupby("phase")["size_bytes"].sum()
    working = sums.get("pass", 0.0) + max(sums.get("loss", 0.0), sums.get("backward", 0.0))
    moment = ["always", "step"] if sums.get("step", 0.0) > working else ["always", "pass", "backward"]
    parts = dict.fromkeys(_PARTS, 0.0)
    for row in rows[rows["phase"].isin(moment)].itertuples():
        fixed = row.component in ("context", "fragmentation")
        name = "context and fragmentation" if fixed else row.component if row.component in _PARTS else "other"
        parts[name] += row.size_bytes
    return {name: size for name, size in parts.items() if size}


def _row_names(table: pd.DataFrame) -> list[str]:
    """Rows of the GPT-2 Large study by configuration and batch."""
    names = table["config"].str.upper().str.replace("ZERO", "ZeRO-").str.replace("+CUDA_FUSED", " fused")
    return [f"{name}, batch {batch}" for name, batch in zip(names, table["batch_per_gpu"], strict=True)]


def _below(ax: Axes, handles: list, columns: int = 5) -> None:
    """A legend under the axes."""
    below = ax.transAxes + ScaledTranslation(0, -0.4, ax.figure.dpi_scale_trans)  # inches, whatever the axes' height
    ax.legend(handles=handles, ncols=min(columns, len(handles)), loc="upper left", bbox_to_anchor=(0, 0),
              bbox_transform=below)  # fmt: skip
