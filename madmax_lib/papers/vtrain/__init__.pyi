from madmax_lib.papers.vtrain import (
    formulas as formulas,
    plots as plots,
    studies as studies,
)
from madmax_lib.papers.vtrain.comm import (
    RINGS as RINGS,
    Nccl as Nccl,
    communication_s as communication_s,
    load_nccl as load_nccl,
)
from madmax_lib.papers.vtrain.config import (
    Config as Config,
    VTrainRules as VTrainRules,
    load_config as load_config,
)
from madmax_lib.papers.vtrain.fit import fit as fit, predict as predict
from madmax_lib.papers.vtrain.graph import (
    iteration_s as iteration_s,
    timeline as timeline,
)
