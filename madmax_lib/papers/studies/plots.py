"""Pictures of two public studies beside our numbers: `hybrid` and `vit_study`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    COLORS,
    COMPONENTS,
    DASHED,
    GREY,
    OTHER,
    PAPER,
    areas,
    bars,
    finish,
    line_key,
    lines,
    mark_key,
    new_axes,
    note,
    patch_key,
    published,
)

_GIB = 2**30
_BIN = 16  # logged steps per point of a curve
_ORANGE = COLORS["comm"]
_MARKS = {  # columns of `hybrid.audit`: name, mark
    "mfu_reproduced": ("reproduced", {"marker": "x", "ms": 7}),
    "mfu_window": ("real batches", {"marker": "|", "ms": 9}),
    "mfu_wall": ("wall clock", {"marker": "o", "ms": 4}),
}
_STRATEGIES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zeropp": "ZeRO++"}
_LINES = {
    "zero2": (COLORS["compute"], "o"),
    "zero3": (COLORS["comm"], "s"),
    "zeropp": (COLORS["memcpy"], "^"),
}
_DASHES = {"one host": "-", "nodes of two": "--"}
# components that have a colour of their own; the rest is "other"
_PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "buckets",
    "optimizer temporaries",
    "activations",
)
_FILLS = {name: COMPONENTS[name] for name in _PARTS}
_FILLS |= {"other": OTHER, "context and fragmentation": COMPONENTS["context"]}
_PHASES = {
    "forward": "#9dbede",
    "backward": "compute",
    "update": "memcpy",
    "all_gather": "comm",
}


def plot_mfu(table: pd.DataFrame) -> Axes:
    """MFU of each row of `hybrid.audit`: as reported, from real batches, from the wall
    clock, corrected.
    """
    ax = new_axes(height=1.4 + 0.42 * len(table))
    rows = range(len(table))
    bars(ax, 100 * table["mfu_corrected"], fill="compute", height=0.6)
    published(ax, 100 * table["mfu_reported"], rows)
    for column, (_, mark) in _MARKS.items():
        ax.plot(100 * table[column], rows, color=_ORANGE, mew=1.3, ls="none", **mark)
    for row, audit in enumerate(table.itertuples()):
        # TP peers may have seen different samples: then the rate is an upper bound
        bound = "at most " if audit.executed < 1 else ""
        note(ax, 0, row, f"{bound}{audit.mfu_corrected:.1%}", color="white")
    marks = [
        mark_key(name, color=_ORANGE, hollow=False, **mark)
        for name, mark in _MARKS.values()
    ]
    key = [
        mark_key("reported"),
        *marks,
        patch_key("useful tokens, usual FLOPs", "compute"),
    ]
    title = (
        "The last, short batch was counted full: MFU came out up to "
        f"{table['inflation'].max():.2f}x too high"
    )
    reach = 115 * table["mfu_reported"].max()  # in percent, 15 % beyond the largest
    names = _row_names(table)
    return finish(
        ax, table, title, x="MFU [%]", rows=names, reach=reach, key=key, columns=3
    )


def plot_memory_rows(table: pd.DataFrame) -> Axes:
    """Peak memory of each row, measured (filled) and predicted (hatched)."""
    within = (table["error"].abs() <= 0.1).sum()
    title = f"{within} of {len(table)} rows within 10 % of what the study measured"
    ax = new_axes(height=1.2 + 0.5 * len(table))
    bars(ax, table["measured_gib"], slot=(0, 2))
    errors = table["error"].map("{:+.1%}".format)
    bars(ax, table["predicted_gib"], source="simulated", slot=(1, 2), notes=errors)
    key = [
        patch_key("measured", "compute"),
        patch_key("predicted", "compute", "simulated"),
    ]
    x = "peak memory allocated on a GPU [GiB]"
    return finish(ax, table, title, x=x, rows=_row_names(table), key=key)


def plot_gelu(table: pd.DataFrame) -> Axes:
    """Share of the memory bandwidth that each kernel of `hybrid.gelu` reaches, by
    shape.
    """
    ax = new_axes(height=3.0)
    unfused_ms = table["unfused_ms"].map("{:.3f} ms".format)
    ideal = table["ideal_ms"].map(", ideal {:.3f} ms".format)
    fused_ms = table["fused_ms"].map("{:.3f} ms".format) + ideal
    bars(ax, 100 * table["unfused_share"], fill="idle", slot=(0, 2), notes=unfused_ms)
    bars(ax, 100 * table["fused_share"], slot=(1, 2), notes=fused_ms)
    rows = []
    for row in table.itertuples():
        # what stays in the cache says nothing about device memory
        cached = "\nin L2 cache" if row.in_cache else ""
        rows.append(f"{row.batch} x {row.sequence} x {row.width}{cached}")
    reached = table["fused_share"].iloc[-1]
    title = (
        f"The fused kernel reaches {reached:.0%} of the bandwidth: the kernel is "
        "slow, not fusion"
    )
    key = [
        patch_key("two kernels of PyTorch", "idle"),
        patch_key("fused kernel of the study", "compute"),
    ]
    x = "bytes that the kernel moves per second, of 1,555 GB/s [%]"
    return finish(ax, table, title, x=x, rows=rows, reach=100, key=key)


def plot_steps(log: pd.DataFrame, *, last: int, simulated_s: float) -> Axes:
    """Seconds of the logged steps by phase, means of 16; steps 2..last are the fit's,
    simulated_s its step.
    """
    ax = new_axes(height=3.4)
    regular = log[log["kind"] == "regular"]
    overflow = log[log["kind"] == "overflow"]
    rest_s = regular.loc[regular["step"] > last, "step_s"].mean()
    # a point for every 16 steps, which hides the noise of single ones
    bins = regular.groupby(regular["step"] // _BIN)[["step", *_PHASES]]
    curve = bins.mean().reset_index(drop=True)
    areas(ax, curve["step"], curve, _PHASES)
    # names of the phases in the middle of their areas, at the right end
    end = curve["step"].iloc[-1]
    heights_s = curve[list(_PHASES)].tail(2).mean()
    middles_s = heights_s.cumsum() - heights_s / 2
    for phase, middle_s in middles_s.items():
        note(ax, end, middle_s, phase.replace("_", "-"), dx=5)
    fitted = {"color": "black", "alpha": 0.10, "lw": 0}
    odd = {"mfc": "white", "mec": PAPER, "ms": 5, "ls": "none"}
    odd["label"] = "overflow: no update"
    key = ax.plot(overflow["step"], overflow["step_s"], "v", **odd)
    key.append(ax.axvspan(2, last, **fitted, label=f"fit: steps 2 to {last}"))
    label = f"simulated: {simulated_s:.3f} s"
    key.append(ax.axhline(simulated_s, **DASHED, label=label))
    title = (
        f"Fitted on steps 2 to {last}, the simulated step is "
        f"{simulated_s / rest_s - 1:+.1%} off on the others"
    )
    ax.set_ylim(0, 3.0)  # room for the key
    return finish(
        ax,
        curve,
        title,
        x="step",
        y="time [s]",
        reach=log["step"].max() * 1.12,
        key=key,
        where="upper center",
        columns=3,
        origin=log,
    )


def plot_overlap(simulated: pd.DataFrame, measured: pd.DataFrame) -> Axes:
    """Share of communication under compute: simulated cases as bars, traced ranks as
    hollow marks.
    """
    ax = new_axes(height=3.0)
    bars(ax, 100 * simulated["overlap"], fill="hidden", source="simulated")
    for row, case in enumerate(simulated.itertuples()):
        # ZeRO-2 was run with one reduction at the end, its other cases are predictions
        was_run = case.strategy != "zero2" or case.case.startswith("one")
        same = measured["strategy"] == case.strategy
        traced = 100 * measured.loc[same & was_run, "overlap"]
        published(ax, traced, [row] * len(traced))
        note(ax, 100 * case.overlap, row, f"{case.overlap:.0%}", dx=8)
    rows = [
        f"{_STRATEGIES[case.strategy]}, {case.case}" for case in simulated.itertuples()
    ]
    key = [
        patch_key("simulated", "hidden", "simulated"),
        mark_key("traced, each rank"),
    ]
    title = "ZeRO-2 hid nothing; sharding layer by layer hides most of it"
    x = "communication hidden under compute [%]"
    return finish(ax, simulated, title, x=x, rows=rows, reach=112, key=key)


def plot_memory_parts(table: pd.DataFrame) -> Axes:
    """Bytes on a GPU by strategy at its fullest moment, with the usable memory."""
    ax = new_axes(height=3.0)
    by_strategy = table.groupby("strategy", sort=False)
    parts_gib = {strategy: _fullest(rows) / _GIB for strategy, rows in by_strategy}
    parts = pd.DataFrame(parts_gib).T.fillna(0.0)
    fills = {
        name: fill
        for name, fill in _FILLS.items()
        if name in parts and parts[name].any()
    }
    before_gib = by_strategy["before_update_bytes"].first() / _GIB
    notes = [
        f"{size:.1f} GiB\n{before_gib[name]:.1f} before the update"
        for name, size in parts.sum(axis=1).items()
    ]
    bars(ax, parts, fill=fills, source="simulated", height=0.6, notes=notes)
    usable_gib = table["usable_bytes"].iloc[0] / _GIB
    ax.axvline(usable_gib, **DASHED)
    note(ax, usable_gib, -0.62, f"usable: {usable_gib:.2f} GiB")
    rows = [_STRATEGIES[name] for name in parts.index]
    title = "DDP runs out of memory when AdamW makes its temporaries, not before"
    x = "memory of a GPU [GiB]"
    finish(ax, table, title, x=x, rows=rows, reach=20, key=fills, columns=4)
    ax.set_ylim(top=-0.8)  # room above the first bar for the note
    return ax


def plot_scaling(table: pd.DataFrame) -> Axes:
    """Predicted throughput against the number of GPUs: one host solid, nodes dashed,
    linear growth grey.
    """
    ax = new_axes(height=3.4, width=6.0)
    styles = {
        (where, strategy): {"color": color, "marker": mark, "ls": dashes}
        for where, dashes in _DASHES.items()
        for strategy, (color, mark) in _LINES.items()
    }
    white = {"mfc": "white", "ms": 5}
    lines(
        ax,
        table,
        "gpus",
        "samples_per_s",
        by=["place", "strategy"],
        styles=styles,
        **white,
    )
    zero2 = table[table["strategy"] == "zero2"]
    gpus = np.unique(table["gpus"])
    linear = gpus * zero2["samples_per_s"].iloc[0] / zero2["gpus"].iloc[0]
    ax.plot(gpus, linear, color=GREY, lw=1)
    note(ax, gpus[-1], linear[-1], "linear from ZeRO-2", color="#777777", dx=8)
    ax.grid(True, axis="both")
    key = [
        line_key(_STRATEGIES[name], color, marker=mark, **white)
        for name, (color, mark) in _LINES.items()
    ]
    key += [
        line_key("one host", PAPER),
        line_key("nodes of two, 10 Gb/s", PAPER, ls="--"),
    ]
    on_host = (zero2["gpus"] == gpus[-1]) & (zero2["place"] == "one host")
    efficiency = zero2.loc[on_host, "efficiency"].item()
    title = f"ZeRO-2 keeps {efficiency:.0%} of its rate per GPU on {gpus[-1]} GPUs of one host"
    limits = {"xticks": gpus, "xlim": (0.8 * gpus[0], 1.35 * gpus[-1])}
    y = "simulated throughput [samples/s]"
    return finish(
        ax, table, title, x="GPUs", y=y, key=key, where="upper left", **limits
    )


def _fullest(rows):
    """Bytes by part at the moment of the peak: the optimizer's temporaries, or a pass."""
    # The peak is the larger of a pass, with the loss or the backward pass on top, and
    # of the update with its temporaries.
    sums = rows.groupby("phase")["size_bytes"].sum()
    loss = sums.get("loss", 0.0)
    passing = sums.get("pass", 0.0) + max(loss, sums.get("backward", 0.0))
    phases = ["always", "pass", "backward"]
    if sums.get("step", 0.0) > passing:
        phases = ["always", "step"]
    rows = rows[rows["phase"].isin(phases)]
    names = rows["component"]
    fixed = names.isin(["context", "fragmentation"])
    names = names.where(names.isin(_PARTS), "other")
    names = names.mask(fixed, "context and fragmentation")
    return rows.groupby(names)["size_bytes"].sum()


def _row_names(table):
    """Rows of the GPT-2 Large study by configuration and batch."""
    names = table["config"].str.upper().str.replace("ZERO", "ZeRO-")
    names = names.str.replace("+CUDA_FUSED", " fused")
    return list(names + ", batch " + table["batch_per_gpu"].astype(str))
