"""Predictions for measured rows, at a public path: see
`madmax_lib.calibration.judge.validate`.
"""

from madmax_lib.calibration.judge.validate import *
