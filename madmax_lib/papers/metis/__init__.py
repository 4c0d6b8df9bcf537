"""Metis [Um et al., USENIX ATC 2024] and its fork: the search as released (behaviour recorded), and its tables."""

from __future__ import annotations

from madmax_lib.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.metis.defects import DEFECTS as DEFECTS, defect_table as defect_table
    from madmax_lib.papers.metis.generate import generate_profiles as generate_profiles
    from madmax_lib.papers.metis.plots import (
        plot_defects as plot_defects,
        plot_orders as plot_orders,
        plot_profile_choice as plot_profile_choice,
        plot_search_time as plot_search_time,
        plot_training as plot_training,
    )
    from madmax_lib.papers.metis.studies import (
        NODE_ORDERS as NODE_ORDERS,
        data_and_tensor as data_and_tensor,
        defect_choices as defect_choices,
        defect_shares as defect_shares,
        model_profiles as model_profiles,
        nodes_of as nodes_of,
        run_row as run_row,
        run_rows as run_rows,
        search_times as search_times,
        table1 as table1,
        table1_errors as table1_errors,
        training_logs as training_logs,
    )
    from madmax_lib.papers.metis.walk import MetisResult as MetisResult, search as search

__all__ = open_room(__name__)
