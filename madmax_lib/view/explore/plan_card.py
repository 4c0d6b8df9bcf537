"""Card of a plan: time, MFU and memory with what they consist of, as HTML.

The numbers are those of `estimate` and `memory`: a few milliseconds, so that a slider
can be followed.
"""

from dataclasses import dataclass

import pandas as pd

from madmax_lib.base import format_s
from madmax_lib.catalog import Cluster, Model
from madmax_lib.plan import Plan
from madmax_lib.simulator import estimate
from madmax_lib.simulator.memory.memory import (
    fullest_stage,
    memory,
    peak_bytes,
    usable_bytes,
)
from madmax_lib.view.drawing import COLORS, COMPONENTS
from madmax_lib.view.plots.predicted import STEP_PARTS

_TIME = ["compute", "exposed communication", "pipeline bubble", "optimizer and host"]
# the other bytes that are always there are buffers
_STATES = ["weights", "gradients", "optimizer"]
_MEMORY = [*_STATES, "buffers and context", "activations and temporaries"]
_FILLS = dict(zip(_TIME, ("compute", "comm", "idle", "other"), strict=True))
_PARTS = (*_STATES, "context", "activations")
_FILLS |= dict(zip(_MEMORY, map(COMPONENTS.get, _PARTS), strict=True))


@dataclass(frozen=True)
class PlanCard:
    """Cost of one plan."""

    row: pd.Series  # of `estimate`
    time_s: pd.Series  # parts of the step by name, which add up to it
    # parts of the fullest device's memory, which add up to its peak
    memory_bytes: pd.Series
    room_bytes: float  # what a process can have on a device
    sold_bytes: float  # what its data sheet says: 80 GB of a device that has 80 GiB

    @property
    def step_text(self) -> str:
        """Time and MFU with their 90 % intervals."""
        row = self.row
        step = f"{format_s(row['low_s'])} to {format_s(row['high_s'])}"
        # the FLOPs are the same, so that MFU * time is too:
        #   MFU_low = MFU * T / T_high
        flops_s = row["mfu"] * row["step_s"]
        mfu = f"{flops_s / row['high_s']:.1%} to {flops_s / row['low_s']:.1%}"
        return (
            f"{format_s(row['step_s'])} per step ({step}), MFU {row['mfu']:.1%} ({mfu})"
        )


def plan_card(model: Model, cluster: Cluster, plan: Plan, **run) -> PlanCard:
    """The cost of a plan. run: further arguments of `estimate` and `memory`, whose
    ValueErrors are raised.
    """
    row = estimate(model, cluster, plan, **run).iloc[0]
    time_s = (
        row[STEP_PARTS.index].astype(float).groupby(STEP_PARTS["summary"]).sum()[_TIME]
    )
    fullest = fullest_stage(memory(model, plan, cluster=cluster, **run))
    always = fullest[fullest["phase"] == "always"].set_index("component")["size_bytes"]
    states = always.reindex(_STATES, fill_value=0.0)
    buffers_bytes = always.sum() - states.sum()
    # what comes and goes: the peak without what is always there
    passing_bytes = peak_bytes(fullest) - always.sum()
    return PlanCard(
        row,
        time_s,
        pd.Series([*states, buffers_bytes, passing_bytes], _MEMORY),
        room_bytes=usable_bytes(cluster.device),
        sold_bytes=cluster.device.memory_bytes,
    )


def plan_card_html(card: PlanCard) -> str:
    """Numbers, a bar of the step's parts and a bar of the memory's, for the browser."""
    peak = card.memory_bytes.sum()
    verdict = '<b style="color:#c0392b">does not fit</b>'
    if peak <= card.room_bytes:
        verdict = "fits"
    return (
        f'<div style="font-variant-numeric:tabular-nums;line-height:1.5">'
        f"<b>{card.step_text}</b> · {card.row['tokens_per_s']:,.0f} tokens/s · "
        f"memory <b>{_gib(peak)}</b> of {_gib(card.room_bytes)} (sold as "
        f"{card.sold_bytes / 1e9:.3g} GB), {verdict}"
        f"{_bar_html(card.time_s, card.row['step_s'], format_s)}"
        f"{_bar_html(card.memory_bytes, max(card.room_bytes, peak), _gib)}</div>"
    )


def _gib(size_bytes):
    return f"{size_bytes / 2**30:.3g} GiB"


def _bar_html(parts, total, text):
    blocks = ""
    legend = []
    # what is below half a per mille would not be a pixel wide
    for name, value in parts[parts / total > 5e-4].items():
        color = COLORS.get(_FILLS[name], _FILLS[name])
        label = f"{name} {text(value)}"
        style = f"width:{value / total:.2%};background:{color}"
        blocks += f'<div title="{label}" style="{style}"></div>'
        legend.append(f'<span style="color:{color}">&#9632;</span> {label}')
    style = "display:flex;height:16px;margin-top:6px;background:#8882"
    return (
        f'<div style="{style}">{blocks}</div>'
        f'<div style="font-size:11px">{" · ".join(legend)}</div>'
    )
