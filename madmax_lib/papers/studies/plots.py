"""Pictures of a public study beside our numbers: `vit_study`."""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    COMPONENTS,
    DASHED,
    GIB,
    OTHER,
    PAPER,
    areas,
    bars,
    finish,
    new_axes,
    note,
)

_BIN = 16  # logged steps per point of a curve
_STRATEGIES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zeropp": "ZeRO++"}
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
    "update": "other",
    "all_gather": "comm",
}


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


def plot_memory_parts(table: pd.DataFrame) -> Axes:
    """Bytes on a GPU by strategy at its fullest moment, with the usable memory."""
    ax = new_axes(height=3.0)
    by_strategy = table.groupby("strategy", sort=False)
    parts_gib = {strategy: _fullest(rows) / GIB for strategy, rows in by_strategy}
    parts = pd.DataFrame(parts_gib).T.fillna(0.0)
    fills = {
        name: fill
        for name, fill in _FILLS.items()
        if name in parts and parts[name].any()
    }
    before_gib = by_strategy["before_update_bytes"].first() / GIB
    notes = [
        f"{size:.1f} GiB\n{before_gib[name]:.1f} before the update"
        for name, size in parts.sum(axis=1).items()
    ]
    bars(ax, parts, fill=fills, source="simulated", height=0.6, notes=notes)
    usable_gib = table["usable_bytes"].iloc[0] / GIB
    ax.axvline(usable_gib, **DASHED)
    note(ax, usable_gib, -0.62, f"usable: {usable_gib:.2f} GiB")
    rows = [_STRATEGIES[name] for name in parts.index]
    title = "DDP runs out of memory when AdamW makes its temporaries, not before"
    x = "memory of a GPU [GiB]"
    finish(ax, table, title, x=x, rows=rows, reach=20, key=fills, columns=4)
    ax.set_ylim(top=-0.8)  # room above the first bar for the note
    return ax


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
