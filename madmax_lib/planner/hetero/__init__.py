"""Which plan trains a model fastest on GPUs of several types? Stages, groups, degrees
and layer cuts, exactly.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.planner.hetero.costs import PlanCost as PlanCost
    from madmax_lib.planner.hetero.nodes import *
    from madmax_lib.planner.hetero.planned import *
    from madmax_lib.planner.hetero.problem import *
    from madmax_lib.planner.hetero.profiles import (
        Profiles as Profiles,
        load_profiles as load_profiles,
    )
    from madmax_lib.planner.hetero.solve import *
    from madmax_lib.planner.hetero.stage_plan import HeteroPlan as HeteroPlan
    from madmax_lib.planner.hetero.stated import predict as predict

__all__ = open_room(__name__)
