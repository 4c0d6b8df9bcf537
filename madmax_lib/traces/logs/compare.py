"""Two logs of one training: did it become slower? The gate of logs."""

import numpy as np
import pandas as pd

from madmax_lib.traces.logs.changes import block_edges
from madmax_lib.traces.logs.log import Log

_BLOCKS = 40
_LEAST = 4  # blocks of a side, below which nobody can tell
_LEVEL = 0.05
_POWER = 0.8
# Two runs of one code differ by more than their steps make likely: standard deviation
# of a run's median, assumed where only one of each is there.
_RUNS_APART = 0.002


def compare_logs(a: Log, b: Log, threshold: float = 0.03) -> pd.DataFrame:
    """Verdict on the step of log b beside a: a row with quantity, kind, unit, a, b,
    ratio, low, high (its 90 % interval), p, detectable, verdict, as `gate` has them.

    verdict: slower, if the step grew by more than the threshold may hide; fine, if it
    surely did not grow by so much; else cannot tell, as where detectable, the least
    growth that this noise shows, is above the threshold.
    """
    from scipy.stats import t as student

    if not 0 < threshold < 10:
        raise ValueError(f"threshold={threshold} is not a share above 0, such as 0.03")
    medians = [_block_medians(log) for log in (a, b)]
    counts = [len(values) for values in medians]
    freedom = max(sum(counts) - 2, 1)
    middle_a, middle_b = (float(np.median(values)) for values in medians)
    growth = middle_b - middle_a
    # variance of a median: pi / 2 of that of a mean
    variance = sum(np.pi / 2 * values.var() / len(values) for values in medians)
    error = float(np.sqrt(variance + 2 * _RUNS_APART**2))
    width = student.ppf(1 - _LEVEL, freedom) * error
    least_shown = (
        student.ppf(1 - _LEVEL, freedom) + student.ppf(_POWER, freedom)
    ) * error
    verdict = "cannot tell"
    # a growth of about the threshold is found: it has to be surely above 4/5 of none
    if min(counts) >= _LEAST and growth - width > 0 and growth > 0.8 * threshold:
        verdict = "slower"
    elif min(counts) >= _LEAST and growth + width < np.log1p(threshold):
        verdict = "fine"
    row = {"quantity": "step_s", "kind": "", "unit": "s"}
    row |= {"a": np.exp(middle_a), "b": np.exp(middle_b), "ratio": np.exp(growth)}
    row |= {"low": np.exp(growth - width), "high": np.exp(growth + width)}
    row |= {
        "p": student.sf(growth / error, freedom),
        "detectable": np.expm1(least_shown),
    }
    return pd.DataFrame([row | {"verdict": verdict}])


def _block_medians(log):
    """(blocks,) logarithms of the medians of blocks of steps. Raises ValueError for a
    log without times.
    """
    if not len(log.step_s):
        raise ValueError(f"{log.units['file'].iloc[0]}: this log has no times of steps")
    logs = np.log(log.step_s)
    edges = block_edges(len(logs), _BLOCKS)
    return np.array([np.median(part) for part in np.split(logs, edges[1:-1])])
