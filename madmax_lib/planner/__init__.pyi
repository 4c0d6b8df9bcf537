from madmax_lib.planner import hetero as hetero
from madmax_lib.planner.answer import SearchResult as SearchResult
from madmax_lib.planner.changes import changes as changes
from madmax_lib.planner.layouts import layouts as layouts
from madmax_lib.planner.money.campaign import (
    campaign as campaign,
    training as training,
)
from madmax_lib.planner.money.codesign import codesign as codesign
from madmax_lib.planner.money.compare import *
from madmax_lib.planner.money.goodput import *
from madmax_lib.planner.search import search as search
from madmax_lib.planner.space import Space as Space, plan_of as plan_of
from madmax_lib.planner.tuner.jobs import Jobs as Jobs
from madmax_lib.planner.tuner.tune import *
from madmax_lib.planner.tuner.tuner import Tuner as Tuner
