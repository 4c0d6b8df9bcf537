"""Pictures of what a predicted step consists of: its seconds by cause, and bytes by
component.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.catalog import data_file
from madmax_lib.simulator.memory.memory import PHASES
from madmax_lib.view.drawing import (
    DASHED,
    GIB,
    SERIES,
    bar_chart,
    components_key,
    line_key,
    new_axes,
    patch_key,
)

# of a step: what each column of `estimate` is, and its kind of work
STEP_PARTS = pd.read_csv(data_file("view/step_parts.csv"), index_col="column")
_CAUSES = STEP_PARTS["part"][STEP_PARTS["kind"] == "comm"].to_dict()
_MOST_STAGES = 12


def plot_causes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Communication that nothing hides, by its cause, a bar per row of `estimate`; the
    index names the rows.
    """
    parts = table[list(_CAUSES)].clip(lower=0.0).rename(columns=_CAUSES)
    colors = dict(zip(parts, SERIES, strict=False))
    # a cause keeps its colour where others are left out
    fills = {cause: color for cause, color in colors.items() if parts[cause].max() > 0}
    exposed_s = parts.sum(axis=1)
    step_s = table["step_s"]
    shares = (exposed_s / step_s).map("{:.1%}".format)
    return bar_chart(
        ax,
        parts.assign(step_s=step_s).rename_axis("step").reset_index(),
        parts[list(fills)],
        f"Exposed communication: {exposed_s.min():.3g} s ({exposed_s.idxmin()}) "
        f"to {exposed_s.max():.3g} s ({exposed_s.idxmax()})",
        x="exposed communication predicted by mm.estimate [s], and its share of the step",
        rows=table.index,
        key=fills,
        columns=3,
        fill=fills,
        source="simulated",
        notes=shares + step_s.map(" of {:.3g} s".format),
    )


def plot_components(
    table: pd.DataFrame, room_bytes: float, ax: Axes | None = None
) -> Axes:
    """Bytes of each pipeline stage by component, and the memory of a device. table: of
    `mm.memory`.
    """
    # in the order of the pipeline
    stages = table["stage"].unique()
    every = -(-len(stages) // _MOST_STAGES)  # of many stages every n-th
    rows = stages[::every]
    size_gib = table.pivot_table(
        index="stage", columns="component", values="size_bytes", sort=False
    ).div(GIB)
    components = [
        name for name in PHASES if name in size_gib and size_gib[name].max() > 0
    ]
    fills = components_key(components)
    largest_gib = size_gib[components].max()
    key = [patch_key(name, color) for name, color in fills.items()]
    key.append(line_key(f"room: {room_bytes / GIB:.0f} GiB", **DASHED))
    # the legend beside the axes needs some height
    ax = ax or new_axes(height=max(1.6 + 0.3 * len(rows), 2.4))
    ax = bar_chart(
        ax,
        table,
        size_gib.loc[rows],
        f"Largest component: {largest_gib.idxmax()}, {largest_gib.max():.1f} GiB on a device",
        x="simulated memory [GiB], all moments of a step",
        rows=[f"stage {stage}" for stage in rows],
        key=key,
        where="beside",
        fill=fills,
        source="simulated",
    )
    ax.axvline(room_bytes / GIB, **DASHED)
    return ax
