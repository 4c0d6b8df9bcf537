from madmax_lib.papers.vtrain import (
    formulas as formulas,
    studies as studies,
)
from madmax_lib.papers.vtrain.config import (
    RINGS as RINGS,
    Config as Config,
    Nccl as Nccl,
    VTrainRules as VTrainRules,
    communication_s as communication_s,
    load_config as load_config,
    load_nccl as load_nccl,
    parse_rules as parse_rules,
)
from madmax_lib.papers.vtrain.fit import fit as fit, predict as predict
from madmax_lib.papers.vtrain.graph import (
    iteration_s as iteration_s,
    timeline as timeline,
)
from madmax_lib.papers.vtrain.trace import (
    load_trace as load_trace,
    measured as measured,
    operators_of as operators_of,
)
