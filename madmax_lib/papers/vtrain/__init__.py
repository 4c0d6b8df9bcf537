"""vTrain [Bang et al., MICRO 2024]: its model, released (behaviour recorded) and corrected, and its case studies."""

from __future__ import annotations

from madmax_lib.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.vtrain.comm import (
        RINGS as RINGS,
        Nccl as Nccl,
        communication as communication,
        communication_s as communication_s,
        load_nccl as load_nccl,
    )
    from madmax_lib.papers.vtrain.config import (
        Config as Config,
        VTrainRules as VTrainRules,
        load_config as load_config,
    )
    from madmax_lib.papers.vtrain.fit import data_parallel_pairs as data_parallel_pairs, fit as fit, predict as predict
    from madmax_lib.papers.vtrain.formulas import (
        cross_validate as cross_validate,
        fit_formulas as fit_formulas,
        formula_operators as formula_operators,
    )
    from madmax_lib.papers.vtrain.graph import iteration_s as iteration_s, timeline as timeline
    from madmax_lib.papers.vtrain.plots import (
        plot_compute_optimal as plot_compute_optimal,
        plot_costs as plot_costs,
        plot_layouts as plot_layouts,
        plot_measured as plot_measured,
        plot_pairs as plot_pairs,
        plot_rules as plot_rules,
        plot_scheduling as plot_scheduling,
        plot_seed as plot_seed,
        plot_space as plot_space,
    )
    from madmax_lib.papers.vtrain.scheduling import scheduling_study as scheduling_study, throughputs as throughputs
    from madmax_lib.papers.vtrain.studies import (
        SEED as SEED,
        as_meant as as_meant,
        claims as claims,
        compute_optimal as compute_optimal,
        design_space as design_space,
        kernel_rates as kernel_rates,
        layouts as layouts,
        optional_local as optional_local,
        plan_table as plan_table,
        published as published,
        rule_effects as rule_effects,
        seed_predictions as seed_predictions,
        seed_steps as seed_steps,
        unit_findings as unit_findings,
    )

__all__ = open_room(__name__)
