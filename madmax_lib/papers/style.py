"""How do the pictures of `50_madmax` look alike? Bars, marks, notes and legends they share."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from madmax_lib.view.drawing import COLORS, keep_data

__all__ = [
    "GREY",
    "HATCH",
    "MARKS",
    "PAPER",
    "PIECE_COLORS",
    "PIECE_NAMES",
    "STRATEGY_COLORS",
    "UNFIT",
    "bars",
    "done",
    "legend",
    "note",
    "ours_and_paper",
    "paper_marks",
    "strategy_label",
]

STRATEGY_COLORS = {"fsdp": "#6b6b6b", "ddp": "#b5485d", "tp,ddp": "#2a9d8f", "ddp,tp": "#7a5195", "fsdp,tp": "#c9a227",
                   "fsdp,ddp": "#5a9bd4", "tp": "#a0785a", "tp,fsdp": "#1d3557"}  # fmt: skip
PIECE_COLORS = {"gemm_ms": COLORS["compute"], "emb_ms": "#9dbede", "all2all_ms": COLORS["comm"],
                 "allreduce_ms": "#b8561a", "compute": COLORS["compute"], "exposed": COLORS["comm"]}  # fmt: skip
PIECE_NAMES = {"gemm_ms": "GEMM", "emb_ms": "lookup", "all2all_ms": "All2All", "allreduce_ms": "AllReduce",
                "compute": "compute", "exposed": "exposed"}  # fmt: skip
GREY, HATCH, PAPER = "#b9b9b9", "////", "#222222"
MARKS = {"fsdp": "o", "ddp": "s", "tp,ddp": "D"}


def strategy_label(strategy: str) -> str:
    """How the paper writes a strategy: "tp,ddp" is (TP, DDP)."""
    return "(" + ", ".join(part.upper() for part in strategy.split(",")) + ")"


def bars(ax: Axes, places, widths, *, color, fits=True, left=0.0, height=0.7):
    """Horizontal bars of simulated values: hatched, or dotted and hollow where they do not fit in memory."""
    if not fits:
        return ax.barh(places, widths, left=left, height=height, color="none", edgecolor=GREY, linestyle=":", lw=1.3)
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        return ax.barh(places, widths, left=left, height=height, color=color, hatch=HATCH, edgecolor="white", lw=0)


def note(ax: Axes, x: float, y: float, text: str, *, dx: float = 3, dy: float = 0, **style) -> None:
    """A small text at a point, dx and dy points away."""
    style = {"fontsize": 7, "va": "center", **style}
    ax.annotate(text, (x, y), (dx, dy), textcoords="offset points", **style)


def paper_marks(ax: Axes, x, y, **style) -> None:
    """Hollow diamonds where a number is published."""
    ax.plot(x, y, "D", mfc="none", mec=PAPER, ms=6, mew=1.1, linestyle="none", zorder=4, clip_on=False, **style)


def legend(ax: Axes, handles: Sequence, **place) -> None:
    """A legend of these handles."""
    ax.legend(handles=handles, **{"loc": "best", **place})


def ours_and_paper(paper: str = "published") -> list:
    """Handles for ours (hatched) and the published number (hollow)."""
    return [Patch(facecolor="#9a9a9a", hatch=HATCH, edgecolor="white", label="ours"),
            Line2D([], [], marker="D", mfc="none", mec=PAPER, ls="none", label=paper)]  # fmt: skip


def done(ax: Axes, table: pd.DataFrame) -> Axes:
    """Lay out once and for all, so that neither saving nor showing repeats it; keep the table."""
    ax.figure.draw_without_rendering()
    ax.figure.set_layout_engine("none")
    return keep_data(ax, table)


UNFIT = Patch(facecolor="none", edgecolor=GREY, linestyle=":", label="does not fit in memory")
