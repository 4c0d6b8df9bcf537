"""The chart grammar: what all pictures of the workbench are made of.

A picture is a function from a table to Axes: it draws shapes (`bars`, `lines`, `blocks`, ...) on `new_axes` and returns
`finish(ax, table, title, ...)`, which keeps the table, so that a figure is saved with its data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from madmax_lib.doors import open_room

if TYPE_CHECKING:
    from madmax_lib.view.drawing.axes import (
        empty as empty,
        figure_data as figure_data,
        finish as finish,
        keep_data as keep_data,
        legend as legend,
        log_axis as log_axis,
        new_axes as new_axes,
        note as note,
        panels as panels,
        published as published,
    )
    from madmax_lib.view.drawing.shapes import (
        areas as areas,
        bars as bars,
        blocks as blocks,
        grid as grid,
        lines as lines,
        ours_and_theirs as ours_and_theirs,
        rank_labels as rank_labels,
        row_label as row_label,
        rows_of as rows_of,
        visible_blocks as visible_blocks,
    )
    from madmax_lib.view.drawing.style import (
        COLORS as COLORS,
        DARK as DARK,
        DASHED as DASHED,
        GREY as GREY,
        HATCH as HATCH,
        LABELS as LABELS,
        PAPER as PAPER,
        SERIES as SERIES,
        THEIRS as THEIRS,
        UNFIT as UNFIT,
        faded as faded,
        fill_of as fill_of,
        ink_on as ink_on,
        kinds_key as kinds_key,
        line_key as line_key,
        mark_key as mark_key,
        patch_key as patch_key,
        percent as percent,
        plural as plural,
        shorten as shorten,
    )

__all__ = open_room(__name__)
