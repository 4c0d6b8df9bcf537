"""Kinds of kernels by name, at a public path: see `madmax_lib.timeline.kinds`."""

from madmax_lib.timeline.kinds import *
