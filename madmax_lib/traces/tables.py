"""Small steps that many analyses share: ends of spans, covered time, ratios, tables in
order.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from madmax_lib.base import Intervals, pack, union
from madmax_lib.base.fields import require_number
from madmax_lib.timeline import Timeline


def require_growth(what: str, value) -> float:
    """The value. Raises ValueError unless it is a growth above 0 and below 1."""
    if not 0 < require_number(what, value) < 1:
        raise ValueError(
            f"{what}={value!r} is not a share above 0 and below 1, such as 0.03 for 3 %"
        )
    return value


def reach(intervals: Intervals, times: np.ndarray) -> np.ndarray:
    """End (n,) of the interval, of a set in normal form, that begins last by each time;
    before the first one the least number.

    >>> reach(pack([0, 20], [10, 5]), [-1, 3, 12]).tolist()[1:]
    [10, 10]
    """
    start, end = intervals.T
    begun = np.searchsorted(start, times, side="right")
    least = np.iinfo("int64").min
    ends = np.r_[least, end]
    return ends[begun]


def covered(spans: pd.DataFrame):
    """Intervals (m, 2) in normal form that at least one span covers, in ns."""
    return union(pack(spans["start_ns"], spans["dur_ns"]))


def unseen_ranks(timeline: Timeline) -> list[str]:
    """Words on the ranks of the job that have no trace, none where all have one."""
    # a rank stands for others where a simulation drew one of several alike
    present = sum(map(len, timeline.meta.represents.values()))
    every = timeline.meta.world_size
    if every <= present:
        return []
    return [
        f"{every - present} of {every} ranks have no trace: waiting for them counts as "
        "transfer; read the traces of all ranks"
    ]


def stacked(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below another, without the empty ones, whose columns have no types."""
    filled = [table for table in tables if len(table)]
    return pd.concat(filled or tables[:1], ignore_index=True)


def largest_first(table: pd.DataFrame, column: str, *names: str) -> pd.DataFrame:
    """Rows by a column, the largest first, equal ones by names."""
    ascending = [False] + [True] * len(names)
    return table.sort_values([column, *names], ascending=ascending, ignore_index=True)


def ratio(value: pd.Series, by: pd.Series) -> pd.Series:
    """value / by, NaN where by is not positive."""
    return value.astype(float) / by.where(by > 0).astype(float)
