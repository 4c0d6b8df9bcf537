"""What does a plan cost, at a glance? Time, MFU and memory with what they consist of,
as HTML and as bars.

The numbers are those of `estimate` and `memory`: a few milliseconds, so that a slider
can be followed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import format_s
from madmax_lib.catalog.models import Cluster, Model
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.memory.memory import (
    fullest_stage,
    memory,
    peak_bytes,
    usable_bytes,
)
from madmax_lib.simulator.steady.step_time import COMMUNICATION
from madmax_lib.view.drawing import COLORS, DASHED, BarStyle, bars, patch_key

__all__ = ["PlanCard", "plan_card", "plan_card_html", "plot_plan_card"]

_TIME = {  # parts of the step: columns of `estimate`
    "compute": ["gemm_s", "attention_s", "pointwise_s", "head_s"],
    "exposed communication": list(COMMUNICATION),
    "pipeline bubble": ["bubble_s"],
    "optimizer and host": ["optimizer_s", "launch_s", "overhead_s"],
}
_STATES = [
    "weights",
    "gradients",
    "optimizer",
]  # the other bytes that are always there are buffers
_MEMORY = [*_STATES, "buffers and context", "activations and temporaries"]
_FILLS = dict(zip(_TIME, ("compute", "comm", "idle", "other"), strict=True))
_FILLS |= dict(
    zip(_MEMORY, ("compute", "hidden", "other", "memcpy", "comm"), strict=True)
)


@dataclass(frozen=True)
class PlanCard:
    """Cost of one plan."""

    row: pd.Series  # of `estimate`
    time_s: pd.Series  # parts of the step by name, which add up to it
    memory_bytes: (
        pd.Series
    )  # parts of the fullest device's memory, which add up to its peak
    room_bytes: float  # what a process can have on a device
    sold_bytes: float  # what its data sheet says: 80 GB of a device that has 80 GiB

    @property
    def step_text(self) -> str:
        """Time and MFU with their 90 % intervals."""
        step_s, low_s, high_s, mfu = self.row[["step_s", "low_s", "high_s", "mfu"]]
        interval = f"{mfu * step_s / high_s:.1%} to {mfu * step_s / low_s:.1%}"
        return (
            f"{format_s(step_s)} per step ({format_s(low_s)} to "
            f"{format_s(high_s)}), MFU {mfu:.1%} ({interval})"
        )


def plan_card(model: Model, cluster: Cluster, plan: Plan, **run) -> PlanCard:
    """The cost of a plan. run: further arguments of `estimate` and `memory`, whose
    ValueErrors are raised.
    """
    row = estimate(model, cluster, plan, **run).iloc[0]
    time_s = pd.Series({name: row[columns].sum() for name, columns in _TIME.items()})
    fullest = fullest_stage(memory(model, plan, cluster=cluster, **run))
    always = fullest[fullest["phase"] == "always"].set_index("component")["size_bytes"]
    states = always.reindex(_STATES, fill_value=0.0)
    parts = [*states, always.sum() - states.sum(), peak_bytes(fullest) - always.sum()]
    return PlanCard(
        row,
        time_s,
        pd.Series(parts, _MEMORY),
        usable_bytes(cluster.device),
        cluster.device.memory_bytes,
    )


def plan_card_html(card: PlanCard) -> str:
    """Numbers, a bar of the step's parts and a bar of the memory's, for the browser."""
    peak = card.memory_bytes.sum()
    verdict = (
        "fits"
        if peak <= card.room_bytes
        else '<b style="color:#c0392b">does not fit</b>'
    )
    return (
        f'<div style="font-variant-numeric:tabular-nums;line-height:1.5">'
        f"<b>{card.step_text}</b> · {card.row['tokens_per_s']:,.0f} tokens/s · "
        f"memory <b>{_gib(peak)}</b> of {_gib(card.room_bytes)} (sold as "
        f"{card.sold_bytes / 1e9:.3g} GB), {verdict}"
        f"{_bar_html(card.time_s, card.row['step_s'], format_s)}"
        f"{_bar_html(card.memory_bytes, max(card.room_bytes, peak), _gib)}</div>"
    )


def plot_plan_card(card: PlanCard, axes: tuple[Axes, Axes]) -> None:
    """The two bars into two axes: parts of the step in percent, memory in GiB."""
    time, room = axes
    _bar(time, card.time_s / card.row["step_s"] * 100)
    time.set(xlim=(0, 100), xlabel="share of the step [%]", title=card.step_text)
    _bar(room, card.memory_bytes / 2**30)
    room.axvline(card.room_bytes / 2**30, **DASHED)
    room.set_xlim(0, 1.05 * max(card.room_bytes, card.memory_bytes.sum()) / 2**30)
    room.set_xlabel("memory of the fullest device [GiB], dashed: what it has")


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"


def _bar_html(parts: pd.Series, whole: float, text: Callable[[float], str]) -> str:
    blocks = ""
    legend = []
    for name, value in parts[parts / whole > 5e-4].items():
        color = COLORS[_FILLS[name]]
        label = f"{name} {text(value)}"
        blocks += (
            f'<div title="{label}" '
            f'style="width:{value / whole:.2%};background:{color}"></div>'
        )
        legend.append(f'<span style="color:{color}">&#9632;</span> {label}')
    return (
        "<div "
        f'style="display:flex;height:16px;margin-top:6px;background:#8882">{blocks}</div>'
        f'<div style="font-size:11px">{" · ".join(legend)}</div>'
    )


def _bar(ax: Axes, parts: pd.Series) -> None:
    fills = {name: _FILLS[name] for name in parts.index}
    bars(ax, parts.to_frame().T, BarStyle(fills, height=0.8))
    ax.set_yticks([])
    key = [patch_key(*entry) for entry in fills.items()]
    ax.legend(
        handles=key,
        loc="upper left",
        bbox_to_anchor=(0, -0.9),
        ncols=5,
        frameon=False,
        fontsize=7,
    )
