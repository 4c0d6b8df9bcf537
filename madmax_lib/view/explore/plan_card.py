"""What does a plan cost, at a glance? Time, MFU and memory with what they consist of, as HTML and as bars.

The numbers are those of `estimate` and `memory`: a few milliseconds, so that a slider can be followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.specs import Cluster, Transformer
from madmax_lib.units import format_bytes, format_s
from madmax_lib.view.drawing import COLORS

__all__ = ["Glance", "glance", "glance_html", "plot_glance"]

_TIME = {
    "compute": ("gemm_s", "attention_s", "pointwise_s", "head_s"),
    "exposed communication": ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "pp_s"),
    "pipeline bubble": ("bubble_s",),
    "optimizer and host": ("optimizer_s", "launch_s", "overhead_s"),
}
_STATES = ("weights", "gradients", "optimizer")  # the other bytes that are always there are buffers
_FILLS = {
    "compute": COLORS["compute"], "exposed communication": COLORS["comm"], "pipeline bubble": COLORS["idle"],
    "optimizer and host": COLORS["other"], "weights": COLORS["compute"], "gradients": COLORS["hidden"],
    "optimizer": COLORS["other"], "buffers and context": COLORS["memcpy"],
    "activations and temporaries": COLORS["comm"],
}  # fmt: skip


@dataclass(frozen=True)
class Glance:
    """Cost of one plan. *_low, *_high: 90 % interval. time_s, memory_bytes: parts that add up, the latter to the peak
    of the fullest device; room_bytes: what a process can have there."""

    step_s: tuple[float, float, float]  # low, middle, high
    mfu: tuple[float, float, float]
    tokens_per_s: float
    time_s: dict[str, float]
    memory_bytes: dict[str, float]
    room_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device at its fullest moment."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the fullest device can hold that."""
        return self.peak_bytes <= self.room_bytes


def glance(model: Transformer, cluster: Cluster, plan: Plan, *, global_batch: int, sequence: int | None = None
           ) -> Glance:  # fmt: skip
    """The cost of a plan. Raises ValueError, as `estimate` and `memory` do, for one that cannot be laid out."""
    row = estimate(model, cluster, plan, global_batch=global_batch, sequence=sequence).iloc[0]
    low_s, step_s, high_s = row["low_s"], row["step_s"], row["high_s"]
    held = memory(model, plan, sequence=sequence, global_batch=global_batch)
    stages = [held[held["stage"] == stage] for stage in held["stage"].unique()]
    fullest = max(stages, key=peak_bytes)
    always = fullest[fullest["phase"] == "always"].set_index("component")["size_bytes"]
    parts = {name: float(always.get(name, 0.0)) for name in _STATES}
    parts["buffers and context"] = float(always.sum()) - sum(parts.values())
    parts["activations and temporaries"] = peak_bytes(fullest) - sum(parts.values())
    return Glance(
        (low_s, step_s, high_s),
        (row["mfu"] * step_s / high_s, row["mfu"], row["mfu"] * step_s / low_s),
        row["tokens_per_s"],
        {name: float(sum(row[part] for part in of)) for name, of in _TIME.items()},
        parts,
        usable_bytes(cluster.device),
    )


def glance_html(cost: Glance) -> str:
    """Numbers, a bar of the step's parts and a bar of the memory's, for the browser."""
    (low_s, step_s, high_s), (low, mfu, high) = cost.step_s, cost.mfu
    verdict = "fits" if cost.fits else '<b style="color:#c0392b">does not fit</b>'
    return (
        f'<div style="font-variant-numeric:tabular-nums;line-height:1.5">'
        f"step <b>{format_s(step_s)}</b> ({format_s(low_s)} to {format_s(high_s)}) · "
        f"MFU <b>{mfu:.1%}</b> ({low:.1%} to {high:.1%}) · {cost.tokens_per_s:,.0f} tokens/s · "
        f"memory <b>{format_bytes(cost.peak_bytes)}</b> of {format_bytes(cost.room_bytes)}, {verdict}"
        f"{_bar_html(cost.time_s, step_s, format_s)}"
        f"{_bar_html(cost.memory_bytes, max(cost.room_bytes, cost.peak_bytes), format_bytes)}</div>"
    )


def plot_glance(cost: Glance, axes: tuple[Axes, Axes]) -> None:
    """The two bars into two axes: parts of the step in percent, memory in GB."""
    (low_s, step_s, high_s), (low, mfu, high) = cost.step_s, cost.mfu
    _bar(axes[0], {name: 100 * value / step_s for name, value in cost.time_s.items()})
    axes[0].set(xlim=(0, 100), xlabel="share of the step [%]")
    reach = f"{format_s(low_s)} to {format_s(high_s)}"
    axes[0].set_title(f"{format_s(step_s)} per step ({reach}), MFU {mfu:.0%} ({low:.0%} to {high:.0%})")
    _bar(axes[1], {name: value / 1e9 for name, value in cost.memory_bytes.items()})
    axes[1].axvline(cost.room_bytes / 1e9, color="#4a4a4a", ls="--", lw=0.8)
    axes[1].set(xlim=(0, 1.05e-9 * max(cost.room_bytes, cost.peak_bytes)))
    axes[1].set_xlabel("memory of the fullest device [GB], dashed: what it has")


def _bar_html(parts: dict[str, float], whole: float, text) -> str:
    shown = {name: value for name, value in parts.items() if value / whole > 5e-4}
    blocks = "".join(f'<div title="{name}: {text(value)}" style="width:{value / whole:.2%};background:{_FILLS[name]}">'
                     "</div>" for name, value in shown.items())  # fmt: skip
    legend = " · ".join(f'<span style="color:{_FILLS[name]}">&#9632;</span> {name} {text(value)}'
                        for name, value in shown.items())  # fmt: skip
    return (f'<div style="display:flex;height:16px;margin-top:6px;background:#8882">{blocks}</div>'
            f'<div style="font-size:11px">{legend}</div>')  # fmt: skip


def _bar(ax: Axes, parts: dict[str, float]) -> None:
    left = 0.0
    for name, value in parts.items():
        ax.barh(0, value, left=left, height=0.8, color=_FILLS[name], label=name)
        left += value
    ax.set_yticks([])
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.9), ncols=5, frameon=False, fontsize=7)
