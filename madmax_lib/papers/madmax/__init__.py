"""MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784]: its model, released and corrected, and its figures."""

from __future__ import annotations

from madmax_lib.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.madmax.model import evaluate as evaluate, timeline as timeline
    from madmax_lib.papers.madmax.plots import (
        plot_best as plot_best,
        plot_classes as plot_classes,
        plot_cloud as plot_cloud,
        plot_context as plot_context,
        plot_hardware as plot_hardware,
        plot_scaling as plot_scaling,
        plot_strategies as plot_strategies,
    )
    from madmax_lib.papers.madmax.rules import MadmaxRules as MadmaxRules
    from madmax_lib.papers.madmax.step_plots import (
        plot_forward as plot_forward,
        plot_prefetch as plot_prefetch,
        plot_validation as plot_validation,
        plot_vit as plot_vit,
    )
    from madmax_lib.papers.madmax.studies import (
        claims as claims,
        cloud_comparison as cloud_comparison,
        context_scaling as context_scaling,
        hardware_study as hardware_study,
        one_step as one_step,
        prefetch_overlap as prefetch_overlap,
        prefetch_timelines as prefetch_timelines,
        scaling_study as scaling_study,
        strategies_over_fsdp as strategies_over_fsdp,
        task_dependence as task_dependence,
        tp_inside_fsdp_across as tp_inside_fsdp_across,
        validation_bars as validation_bars,
        vit_mfu as vit_mfu,
    )
    from madmax_lib.papers.madmax.suite import (
        class_strategies as class_strategies,
        published as published,
        suite as suite,
        systems as systems,
    )

__all__ = open_room(__name__)
