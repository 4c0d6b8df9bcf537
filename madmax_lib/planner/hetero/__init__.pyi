from madmax_lib.planner.hetero.costs import PlanCost as PlanCost
from madmax_lib.planner.hetero.fleets import *
from madmax_lib.planner.hetero.nodes import *
from madmax_lib.planner.hetero.planned import *
from madmax_lib.planner.hetero.profiles import (
    Profiles as Profiles,
    load_profiles as load_profiles,
)
from madmax_lib.planner.hetero.stage_plan import HeteroPlan as HeteroPlan
from madmax_lib.planner.hetero.stated import predict as predict
