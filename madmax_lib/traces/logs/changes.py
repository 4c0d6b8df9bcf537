"""Change points and drifts of a series of times.

A series is cut into blocks, whose medians no single slow step moves. A step up, or a
line, is believed if it is too large for the noise of the blocks, which counts more where
neighbours are alike: a slow natural drift is no news.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_BLOCKS = 60  # of a series
_LEAST = 12  # values of a series
_EDGE = 3  # blocks on each side of a change
_LEVEL = 0.01  # chance of any false alarm
_SMALLEST = {"change": 0.01, "drift": 0.015}  # relative growth that is worth a word
_NORMAL = 1.4826  # standard deviations of a normal distribution in its median deviation
_OUTLIER = 4.0  # deviations


@dataclass(frozen=True)
class Change:
    """A series that became slower: at once, or little by little."""

    kind: str  # change or drift
    at: int  # first value that is slower
    share: float  # growth relative to the time before
    confidence: float  # 1 - chance that noise of equal times looks like it


def changes(values: np.ndarray) -> list[Change]:
    """Where a series (n,) of positive times becomes slower, the largest first.

    >>> [(one.kind, one.at) for one in changes(np.repeat([1.0, 1.1], 50))]
    [('change', 50)]
    """
    if len(values) < _LEAST:
        return []
    edges = block_edges(len(values), _BLOCKS)
    logs = np.log(values)
    medians = [np.median(part) for part in np.split(logs, edges[1:-1])]
    found = list(_split(_without_outliers(np.array(medians)), 0))
    result = [
        Change(
            one.kind,
            exact_start(logs, edges, one.at) if one.kind == "change" else edges[one.at],
            float(np.expm1(one.share)),
            one.confidence,
        )
        for one in found
        if one.share > _SMALLEST[one.kind]
    ]
    return sorted(result, key=lambda one: -one.share)


def block_edges(count: int, most: int) -> np.ndarray:
    """Bounds (blocks + 1,) of blocks of about equal length, at most so many.

    >>> block_edges(10, 4).tolist()
    [0, 2, 5, 7, 10]
    """
    return np.linspace(0, count, min(most, count) + 1).astype(int)


def exact_start(values: np.ndarray, edges: np.ndarray, block: int) -> int:
    """First value of a step up that begins at a block or in one of its neighbours."""
    if block == 0:
        return 0
    low = edges[max(block - 2, 0)]
    high = edges[min(block + 2, len(edges) - 1)]
    near = values[low:high]
    before = np.median(values[max(low - (high - low), 0) : edges[block]])
    after = np.median(values[edges[block] : high + (high - low)])
    # the split that leaves most values on their side of the middle: one slow step
    # counts as much as any other
    side = np.where(near > (before + after) / 2, 1, -1)
    return int(low + np.append(side, 0)[::-1].cumsum()[::-1].argmax())


def better_fit(series: np.ndarray) -> Change | None:
    """A step or a line, whichever fits a series (n,) better; None if neither is sure.

    share: its growth in the unit of the series.
    """
    from scipy.stats import t as student

    count = len(series)
    number = np.arange(_EDGE, count - _EDGE + 1)
    if len(number) < 2:
        return None
    total = np.append(0.0, series.cumsum())
    jump = (total[-1] - total[number]) / (count - number) - total[number] / number
    # variance of a difference of two means, in that of a value
    variance = 1 / number + 1 / (count - number)
    best = int(np.argmax(np.abs(jump) / np.sqrt(variance)))
    at = number[best]
    place = np.arange(count) - (count - 1) / 2
    slope = place @ series / (place @ place)
    after = np.arange(count) >= at
    step_rest = series - np.where(after, series[after].mean(), series[~after].mean())
    line_rest = series - series.mean() - slope * place
    is_line = line_rest @ line_rest < step_rest @ step_rest
    rest = line_rest if is_line else step_rest
    error = np.sqrt(rest @ rest / (count - 2) * _alike(rest))
    growth = slope * (count - 1) if is_line else jump[best]
    share = 12 / count if is_line else variance[best]
    size = abs(growth) / max(error * np.sqrt(share), 1e-9)
    # any of the splits may look like one
    chance = min(2 * len(number) * student.sf(size, count - 2), 1.0)
    if chance > _LEVEL:
        return None
    kind = "drift" if is_line else "change"
    return Change(kind, 0 if is_line else int(at), float(growth), float(1 - chance))


def _alike(rest):
    """Factor of the variance of a mean where neighbours are alike.

    (1 + r) / (1 - r) for correlation r of neighbours, those of an AR(1) process.
    """
    near = rest[1:] @ rest[:-1] / max(rest @ rest, 1e-30)
    near = min(max(near, 0.0), 0.95)
    return (1 + near) / (1 - near)


def _split(series, begin) -> Iterator[Change]:
    """Steps and lines of a part of a series that begins at a block, and of its parts."""
    one = better_fit(series)
    if one is None:
        return
    at = begin + one.at
    yield Change(one.kind, at, one.share, one.confidence)
    if one.kind == "change":
        yield from _split(series[: one.at], begin)
        yield from _split(series[one.at :], at)


def _without_outliers(series):
    """The series with values far from their neighbours drawn in."""
    from scipy.ndimage import median_filter

    base = median_filter(series, 5, mode="nearest")
    apart = series - base
    limit = _OUTLIER * _NORMAL * np.median(np.abs(apart))
    return base + np.clip(apart, -limit, limit) if limit else series
