"""How does it look? Pictures, widgets, notebooks run headless, pages and reports: everything that draws."""

from __future__ import annotations

from madmax_lib.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.calibration.run_tables import memory_table as memory_table, trace_breakdowns as trace_breakdowns
    from madmax_lib.view.explore.perfetto import view_in_perfetto as view_in_perfetto
    from madmax_lib.view.explore.space_explorer import SpaceExplorer as SpaceExplorer
    from madmax_lib.view.explore.step_explorer import StepExplorer as StepExplorer
    from madmax_lib.view.explore.trace_explorer import TraceExplorer as TraceExplorer
    from madmax_lib.view.explore.widgets import view_timeline as view_timeline
    from madmax_lib.view.notebooks.report import write_report as write_report
    from madmax_lib.view.notebooks.runner import run_notebook as run_notebook
    from madmax_lib.view.notebooks.setup import (
        optional_dataset as optional_dataset,
        save_figure as save_figure,
        setup as setup,
    )
    from madmax_lib.view.notebooks.site import write_site as write_site
    from madmax_lib.view.plots.breakdown import (
        plot_advice as plot_advice,
        plot_breakdown as plot_breakdown,
        plot_exposed as plot_exposed,
        plot_overlap as plot_overlap,
        plot_timeline as plot_timeline,
        plot_waiting as plot_waiting,
    )
    from madmax_lib.view.plots.comm import (
        plot_bandwidth as plot_bandwidth,
        plot_clock_offsets as plot_clock_offsets,
        plot_groups as plot_groups,
        plot_skew as plot_skew,
        plot_stragglers as plot_stragglers,
    )
    from madmax_lib.view.plots.diff import plot_compare as plot_compare, plot_ops as plot_ops, plot_pair as plot_pair
    from madmax_lib.view.plots.fits import (
        plot_constants as plot_constants,
        plot_correlations as plot_correlations,
        plot_errors as plot_errors,
        plot_predicted as plot_predicted,
        plot_residuals as plot_residuals,
        plot_spread as plot_spread,
        plot_vision as plot_vision,
    )
    from madmax_lib.view.plots.hetero import (
        plot_alone as plot_alone,
        plot_stage_memory as plot_stage_memory,
        plot_stages as plot_stages,
    )
    from madmax_lib.view.plots.launch import (
        plot_idle as plot_idle,
        plot_launch_floor as plot_launch_floor,
        plot_launches as plot_launches,
        plot_queue as plot_queue,
        plot_steps as plot_steps,
    )
    from madmax_lib.view.plots.memory import (
        plot_held as plot_held,
        plot_memory as plot_memory,
        plot_memory_categories as plot_memory_categories,
    )
    from madmax_lib.view.plots.offload import (
        plot_levers as plot_levers,
        plot_moments as plot_moments,
        plot_places as plot_places,
        plot_streams as plot_streams,
    )
    from madmax_lib.view.plots.operators import (
        plot_kernel_types as plot_kernel_types,
        plot_kernels as plot_kernels,
        plot_mfu as plot_mfu,
        plot_modules as plot_modules,
        plot_operators as plot_operators,
        plot_roofline as plot_roofline,
    )
    from madmax_lib.view.plots.path import (
        plot_path as plot_path,
        plot_path_share as plot_path_share,
        plot_what_if as plot_what_if,
    )
    from madmax_lib.view.plots.runs import (
        plot_losses as plot_losses,
        plot_run as plot_run,
        plot_run_memory as plot_run_memory,
        plot_run_phases as plot_run_phases,
        plot_shares as plot_shares,
        plot_speed as plot_speed,
    )
    from madmax_lib.view.plots.search import (
        plot_front as plot_front,
        plot_parallel as plot_parallel,
        plot_shortlist as plot_shortlist,
        plot_value as plot_value,
    )
    from madmax_lib.view.plots.steps import (
        plot_components as plot_components,
        plot_parts as plot_parts,
        plot_predicted_steps as plot_predicted_steps,
    )

__all__ = open_room(__name__)
