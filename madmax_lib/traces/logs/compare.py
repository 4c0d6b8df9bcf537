"""Two logs of one training: did it become slower? The gate of logs."""

import numpy as np
import pandas as pd

from madmax_lib.traces.logs.changes import block_medians
from madmax_lib.traces.logs.log import Log
from madmax_lib.traces.tables import require_growth

_LEAST = 8  # blocks of both, below which nobody can tell
# Two runs of one code differ by more than their steps make likely: a median of one
# beside that of another, where only one of each is there.
_RUNS_APART = 0.003
_OTHER_UNIT = 200  # times another step: no growth
_POWER = 1.5  # of an interval's half width: growth that is found in four of five cases


def compare_logs(a: Log, b: Log, threshold: float = 0.03) -> pd.DataFrame:
    """Verdict on the step of log b beside a: a row with quantity, a, b, ratio, low, high
    (its 90 % interval), detectable, verdict, as `gate` has them.

    verdict: slower, if the step surely grew, and by about the threshold or more; fine,
    if it surely did not grow by so much; else cannot tell. detectable: the least growth
    that this noise shows. Raises ValueError for a threshold outside of 0..1, for steps
    that seem to be in two units.
    """
    from scipy.stats import ttest_ind

    require_growth("threshold", threshold)
    after, before = (block_medians(np.log(log.step_s)) for log in (b, a))
    growth = after.mean() - before.mean()
    if abs(growth) > np.log(_OTHER_UNIT):
        raise ValueError(
            f"a step of b takes {np.exp(growth):.3g} times that of a: are both in one unit? "
            "A column is read in s unless its name ends in ms or us"
        )
    interval = ttest_ind(after, before, equal_var=False).confidence_interval(0.9)
    width = interval.high - growth + _RUNS_APART
    limit = np.log1p(threshold)
    # a growth of about the threshold is to be found: it has to be surely above 0
    is_slower = growth > max(width, 0.8 * limit)
    verdict = "slower" if is_slower else "fine" if growth + width < limit else ""
    enough = len(after) + len(before) >= _LEAST
    values = {"a": before.mean(), "b": after.mean(), "ratio": growth}
    values |= {"low": growth - width, "high": growth + width}
    more = {"detectable": np.expm1(_POWER * width), "quantity": "step_s"}
    verdict = (enough and verdict) or "cannot tell"
    return np.exp(pd.DataFrame([values])).assign(**more, verdict=verdict)
