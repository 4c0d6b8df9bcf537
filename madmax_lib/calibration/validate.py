"""Predictions for measured rows, at the public path of `judge.validate`."""

from madmax_lib.calibration.judge.validate import *
