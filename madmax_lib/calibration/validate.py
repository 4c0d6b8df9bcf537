"""Predictions for measured rows, at a public path of `judge.intervals`."""

from madmax_lib.calibration.judge.intervals import *
