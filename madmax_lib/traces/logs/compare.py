"""Two logs of one training: did it become slower? The gate of logs."""

import numpy as np
import pandas as pd

from madmax_lib.traces.logs.changes import block_edges
from madmax_lib.traces.logs.log import Log

_LEAST = 4  # blocks of a side, below which nobody can tell
_LEVEL, _POWER = 0.05, 0.8
# Two runs of one code differ by more than their steps make likely: standard deviation
# of a run's median, assumed where only one of each is there.
_RUNS_APART = 0.002


def compare_logs(a: Log, b: Log, threshold: float = 0.03) -> pd.DataFrame:
    """Verdict on the step of log b beside a: a row with quantity, a, b, ratio, low, high
    (its 90 % interval), detectable, verdict, as `gate` has them.

    verdict: slower, if the step surely grew, and by about the threshold or more; fine,
    if it surely did not grow by so much; else cannot tell. detectable: the least growth
    that this noise shows. Raises ValueError for logs without steps.
    """
    from scipy.stats import t as student

    if not 0 < threshold < 10:
        raise ValueError(f"threshold={threshold} is not a share above 0, such as 0.03")
    sides = [np.log(log.step_s) for log in (a, b)]
    if not all(map(len, sides)):
        raise ValueError("a log without times of steps has nothing to compare")
    cut = [np.split(side, block_edges(len(side))[1:-1]) for side in sides]
    blocks = [np.array([np.median(part) for part in parts]) for parts in cut]
    middles = [np.median(side) for side in blocks]
    growth = middles[1] - middles[0]
    # variance of a median: pi / 2 of that of a mean
    variance = sum(np.pi / 2 * side.var() / len(side) for side in blocks)
    error = np.sqrt(variance + 2 * _RUNS_APART**2)
    counts = [len(side) for side in blocks]
    width, power = student.ppf([1 - _LEVEL, _POWER], max(sum(counts) - 2, 1)) * error
    verdict = "cannot tell"
    if min(counts) >= _LEAST and growth > max(width, 0.8 * np.log1p(threshold)):
        verdict = "slower"
    elif min(counts) >= _LEAST and growth + width < np.log1p(threshold):
        verdict = "fine"
    row = {"quantity": "step_s", "a": np.exp(middles[0]), "b": np.exp(middles[1])}
    for name, value in (("ratio", 0.0), ("low", -width), ("high", width)):
        row[name] = np.exp(growth + value)
    row |= {"detectable": np.expm1(width + power), "verdict": verdict}
    return pd.DataFrame([row])
