"""The tuner, at a public path: see `madmax_lib.planner.tuner.tune`."""

from madmax_lib.planner.tuner.tune import *
