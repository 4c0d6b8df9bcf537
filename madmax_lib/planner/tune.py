"""The tuner, at a public path: see `madmax_lib.planner.tuner.tuner`."""

from madmax_lib.planner.tuner.tuner import *
