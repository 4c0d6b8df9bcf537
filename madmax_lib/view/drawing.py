"""What do all pictures share? Colours of kinds, hatching of simulations, legends, rows, and data kept for saving."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from madmax_lib.intervals import union
from madmax_lib.timeline import Timeline

__all__ = [
    "COLORS",
    "LABELS",
    "figure_data",
    "fill_of",
    "keep_data",
    "kind_legend",
    "new_axes",
    "rank_axis",
    "row_label",
    "rows_of",
    "visible_blocks",
]  # fmt: skip

COLORS = {"compute": "#3b75af", "comm": "#e1812c", "hidden": "#f4c79a", "memcpy": "#8cc269", "other": "#56378c",
          "idle": "#d9d9d9"}  # fmt: skip  # also told apart by lightness alone, in print without colour
LABELS = {"compute": "compute", "comm": "communication", "memcpy": "copies", "other": "other", "idle": "idle"}
_SMALLEST = 1 / 3000  # of the time axis: gaps below are not drawn, so that pictures of any trace stay small


def figure_data(ax: Axes) -> pd.DataFrame | None:
    """The table a picture of this module shows."""
    return getattr(ax, "_madmax_data", None)


def rows_of(spans: pd.DataFrame) -> list[tuple[int, int]]:
    """(rank, stream) of each row to draw: by rank, device before host, computing before communicating, then number."""
    rows = spans.assign(comm=spans["kind"].eq("comm")).groupby(["rank", "stream"])["comm"].mean().reset_index()
    rows["host"], rows["talks"], rows["number"] = rows["stream"] < 0, rows["comm"] > 0.5, rows["stream"].abs()
    rows = rows.sort_values(["rank", "host", "talks", "number"])
    return list(rows[["rank", "stream"]].itertuples(index=False, name=None))


def visible_blocks(intervals: np.ndarray, reach_ns: int) -> np.ndarray:
    """Union of intervals in which gaps too small to see are closed and blocks too thin to see are widened."""
    gap = max(int(reach_ns * _SMALLEST), 1)
    blocks = union(intervals + np.array([0, gap])) - np.array([0, gap])
    blocks[:, 1] = np.maximum(blocks[:, 1], blocks[:, 0] + gap)
    return blocks


def new_axes(*, height: float, width: float = 7.0) -> Axes:
    """Axes of a new figure, in inches."""
    _, ax = plt.subplots(figsize=(width, height))
    return ax


def row_label(rank: int, stream: int) -> str:
    """Text for a row of a timeline."""
    return f"rank {rank} · " + (f"stream {stream}" if stream >= 0 else f"thread {-stream}")


def rank_axis(ax: Axes, ranks: pd.Series) -> None:
    """A row per rank, the first on top."""
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(ranks) - 0.4, -0.6)


def fill_of(kind: str, source: str | None) -> dict:
    """Colour of a kind; measured is filled, simulated hatched."""
    hatch = "////" if source == "simulated" else None
    return {"facecolor": COLORS[kind], "edgecolor": "white", "linewidth": 0, "hatch": hatch}


def kind_legend(ax: Axes, kinds: list[str], labels: dict[str, str] | None = None) -> None:
    """Legend of kinds below the axes."""
    labels = {**LABELS, **(labels or {})}
    if not kinds:
        return
    handles = [Patch(color=COLORS[kind], label=labels[kind]) for kind in kinds]
    below = -0.75 / ax.figure.get_figheight()
    ax.legend(handles=handles, ncols=len(handles), loc="upper right", bbox_to_anchor=(1.0, below))


def keep_data(ax: Axes, data: pd.DataFrame, origin: Timeline | pd.DataFrame | None = None) -> Axes:
    """Remember the table of a picture and where its numbers come from, for `save_figure`."""
    if isinstance(origin, Timeline):
        data.attrs["provenance"] = origin.meta.provenance
    elif origin is not None:
        data.attrs.update(origin.attrs)
    ax._madmax_data = data
    return ax
