"""vTrain, its configurations, collectives, operators and graph: what one calls first.

The model of [Bang et al., MICRO 2024] as its public release applies it (behaviour recorded), and corrected where it
deviates from what one would expect (`rules`). One module per question: files in `vtrain_config`, switches in
`vtrain_rules`, collectives in `vtrain_comm`, the graph on the shared engine in `vtrain_graph`, the fit of operators in
`vtrain_fit`, operator times from formulas in `vtrain_analytic`, text traces in `vtrain_trace`, the case studies in
`vtrain_studies`, seed 000 in `vtrain_seed`.
"""

from __future__ import annotations

from madmax_lib.papers.vtrain_comm import Nccl, communication_s, load_nccl
from madmax_lib.papers.vtrain_config import Config, load_config
from madmax_lib.papers.vtrain_fit import Profile, data_parallel_pairs, fit, predict
from madmax_lib.papers.vtrain_graph import Operators, iteration_s, sweep, timeline
from madmax_lib.papers.vtrain_rules import CORRECTED, RELEASED, Rules, parse_rules
from madmax_lib.papers.vtrain_trace import export, load_trace, trace_operators

rules = parse_rules

__all__ = [
    "CORRECTED", "RELEASED", "Config", "Nccl", "Operators", "Profile", "Rules", "communication_s",
    "data_parallel_pairs", "export", "fit", "iteration_s", "load_config", "load_nccl", "load_trace", "predict", "rules",
    "sweep", "timeline", "trace_operators",
]  # fmt: skip
