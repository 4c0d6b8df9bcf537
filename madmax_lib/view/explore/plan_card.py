"""What does a plan cost, at a glance? Time, MFU and memory with what they consist of, as HTML and as bars.

The numbers are those of `estimate` and `memory`: a few milliseconds, so that a slider can be followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.memory.memory import fullest_stage, memory, peak_bytes, usable_bytes
from madmax_lib.specs import Cluster, Transformer
from madmax_lib.units import format_bytes, format_s
from madmax_lib.view.drawing import COLORS, DASHED, bars, patch_key

__all__ = ["PlanCard", "plan_card", "plan_card_html", "plot_plan_card"]

_TIME = {  # parts of the step: columns of `estimate`
    "compute": ("gemm_s", "attention_s", "pointwise_s", "head_s"),
    "exposed communication": ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "pp_s"),
    "pipeline bubble": ("bubble_s",),
    "optimizer and host": ("optimizer_s", "launch_s", "overhead_s"),
}
_STATES = ("weights", "gradients", "optimizer")  # the other bytes that are always there are buffers
_MEMORY = (*_STATES, "buffers and context", "activations and temporaries")
_FILLS = dict(zip(_TIME, map(COLORS.get, ("compute", "comm", "idle", "other")), strict=True))
_FILLS |= dict(zip(_MEMORY, map(COLORS.get, ("compute", "hidden", "other", "memcpy", "comm")), strict=True))


@dataclass(frozen=True)
class PlanCard:
    """Cost of one plan.

    step_s, mfu: low end of the 90 % interval, middle, high end
    tokens_per_s: of all devices together
    time_s: parts of the step, which add up to it
    memory_bytes: parts of the fullest device's memory, which add up to its peak
    room_bytes: what a process can have on a device
    """

    step_s: tuple[float, float, float]
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


def plan_card(
    model: Transformer, cluster: Cluster, plan: Plan, *, global_batch: int, sequence: int | None = None
) -> PlanCard:
    """The cost of a plan. Raises ValueError, as `estimate` and `memory` do, for one that cannot be laid out."""
    row = estimate(model, cluster, plan, global_batch=global_batch, sequence=sequence).iloc[0]
    low_s, step_s, high_s = row["low_s"], row["step_s"], row["high_s"]
    fullest = fullest_stage(memory(model, plan, sequence=sequence, global_batch=global_batch))
    always = fullest[fullest["phase"] == "always"].set_index("component")["size_bytes"]
    states = [float(always.get(name, 0.0)) for name in _STATES]
    parts = [*states, float(always.sum()) - sum(states), peak_bytes(fullest) - float(always.sum())]
    return PlanCard(
        step_s=(low_s, step_s, high_s),
        mfu=(row["mfu"] * step_s / high_s, row["mfu"], row["mfu"] * step_s / low_s),
        tokens_per_s=row["tokens_per_s"],
        time_s={name: float(row[list(columns)].sum()) for name, columns in _TIME.items()},
        memory_bytes=dict(zip(_MEMORY, parts, strict=True)),
        room_bytes=usable_bytes(cluster.device),
    )


def plan_card_html(card: PlanCard) -> str:
    """Numbers, a bar of the step's parts and a bar of the memory's, for the browser."""
    (low_s, step_s, high_s), (low, mfu, high) = card.step_s, card.mfu
    verdict = "fits" if card.fits else '<b style="color:#c0392b">does not fit</b>'
    return (
        f'<div style="font-variant-numeric:tabular-nums;line-height:1.5">'
        f"step <b>{format_s(step_s)}</b> ({format_s(low_s)} to {format_s(high_s)}) · "
        f"MFU <b>{mfu:.1%}</b> ({low:.1%} to {high:.1%}) · {card.tokens_per_s:,.0f} tokens/s · "
        f"memory <b>{format_bytes(card.peak_bytes)}</b> of {format_bytes(card.room_bytes)}, {verdict}"
        f"{_bar_html(card.time_s, step_s, format_s)}"
        f"{_bar_html(card.memory_bytes, max(card.room_bytes, card.peak_bytes), format_bytes)}</div>"
    )


def plot_plan_card(card: PlanCard, axes: tuple[Axes, Axes]) -> None:
    """The two bars into two axes: parts of the step in percent, memory in GB."""
    (low_s, step_s, high_s), (low, mfu, high) = card.step_s, card.mfu
    time, room = axes
    _bar(time, pd.Series(card.time_s) / step_s * 100)
    interval = f"{format_s(low_s)} to {format_s(high_s)}"
    time.set(xlim=(0, 100), xlabel="share of the step [%]")
    time.set_title(f"{format_s(step_s)} per step ({interval}), MFU {mfu:.0%} ({low:.0%} to {high:.0%})")
    _bar(room, pd.Series(card.memory_bytes) / 1e9)
    room.axvline(card.room_bytes / 1e9, **DASHED)
    room.set(xlim=(0, 1.05e-9 * max(card.room_bytes, card.peak_bytes)))
    room.set_xlabel("memory of the fullest device [GB], dashed: what it has")


def _bar_html(parts: dict[str, float], whole: float, text: Callable[[float], str]) -> str:
    blocks, legend = "", []
    for name, value in parts.items():
        if value / whole > 5e-4:
            color, label = _FILLS[name], f"{name} {text(value)}"
            blocks += f'<div title="{label}" style="width:{value / whole:.2%};background:{color}"></div>'
            legend.append(f'<span style="color:{color}">&#9632;</span> {label}')
    return (
        f'<div style="display:flex;height:16px;margin-top:6px;background:#8882">{blocks}</div>'
        f'<div style="font-size:11px">{" · ".join(legend)}</div>'
    )


def _bar(ax: Axes, parts: pd.Series) -> None:
    bars(ax, parts.to_frame().T, {name: _FILLS[name] for name in parts.index}, height=0.8)
    ax.set_yticks([])
    key = [patch_key(name, _FILLS[name]) for name in parts.index]
    ax.legend(handles=key, loc="upper left", bbox_to_anchor=(0, -0.9), ncols=5, frameon=False, fontsize=7)
