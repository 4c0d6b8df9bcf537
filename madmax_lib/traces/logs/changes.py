"""Change points and drifts of a series of times.

A series is cut into blocks, whose medians no single slow step moves. A step up, or a
line, is believed if it is too large for the noise of the blocks, which counts more where
neighbours are alike: a slow natural drift is no news.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

BLOCKS = 40  # of a series
EDGE = 3  # blocks on each side of a change
_LEAST = 12  # values of a series
_LEVEL = 0.01  # chance of any false alarm
_SMALLEST = {"change": 0.01, "drift": 0.015}  # relative growth that is worth a word


@dataclass(frozen=True)
class Change:
    """A series that became slower: at once, or little by little."""

    kind: str  # change or drift
    at: int  # first value that is slower
    share: float  # growth relative to the time before
    confidence: float  # 1 - chance that noise of equal times looks like it


def changes(values: np.ndarray) -> list[Change]:
    """Changes of a series (n,) of positive times that make it slower, the largest first.

    >>> [(one.kind, one.at) for one in changes(np.repeat([1.0, 1.1], 50))]
    [('change', 50)]
    """
    if len(values) < _LEAST:
        return []
    logs = np.log(values)
    edges = block_edges(len(values))
    result = []
    for one in every_change(block_medians(logs)):
        if one.share > _SMALLEST[one.kind]:
            at = exact_start(logs, edges, one.at)
            result.append(replace(one, at=at, share=np.expm1(one.share)))
    return sorted(result, key=lambda one: -one.share)


def block_edges(count: int, size: int = 1) -> np.ndarray:
    """Bounds (blocks + 1,) of at most 40 blocks of about equal length, size at least.

    >>> block_edges(10, 3).tolist()
    [0, 3, 6, 10]
    """
    return np.linspace(0, count, max(min(count // size, BLOCKS), 1) + 1).astype(int)


def block_medians(values: np.ndarray, size: int = 1) -> np.ndarray:
    """(..., blocks) medians of the blocks of values (..., n)."""
    parts = np.split(values, block_edges(values.shape[-1], size)[1:-1], axis=-1)
    return np.stack([np.median(part, axis=-1) for part in parts], axis=-1)


def exact_start(values: np.ndarray, edges: np.ndarray, block: int) -> int:
    """First value of a step up that begins at a block or in one of its neighbours."""
    if not block:
        return 0
    low = edges[max(block - 2, 0)]
    near = values[low : edges[block : block + 3][-1]]
    middle = near.mean()
    # The split with most values on their side of the middle: the sum of signs falls
    # before it and rises after it, and one slow step counts as much as any other.
    return int(low + np.where(near > middle, 1, -1).cumsum().argmin() + 1)


def best_fit(series: np.ndarray) -> Change | None:
    """A step or a line, whichever fits a series (n,) better; None if neither is sure.

    share: its growth in the unit of the series.
    """
    from scipy.stats import t as student

    count = len(series)
    if count < 2 * EDGE + 1:
        return None
    splits = np.arange(EDGE, count - EDGE + 1)
    index = np.arange(count)
    # (splits + 1, count) every step up by one, and the line up by one, around 0
    shapes = np.vstack([index >= splits[:, None], index / (count - 1)])
    shapes = shapes - shapes.mean(axis=1, keepdims=True)
    # least squares: growth g = s.y / s.s leaves y.y - (s.y)^2 / s.s
    weight = (shapes**2).sum(axis=1)
    growth = shapes @ series / weight
    best = int(np.argmax(growth**2 * weight))
    rest = series - series.mean() - growth[best] * shapes[best]
    # Neighbours that are alike say less: variance x (1 + r) / (1 - r), r their
    # correlation, as of an AR(1) process.
    correlation = np.clip(rest[1:] @ rest[:-1] / max(rest @ rest, 1e-30), 0.0, 0.95)
    variance = (
        rest @ rest / (count - 2) / weight[best] * (1 + correlation) / (1 - correlation)
    )
    size = abs(growth[best]) / np.sqrt(variance + 1e-24)
    # any of the splits may look like one
    chance = 2 * len(splits) * student.sf(size, count - 2)
    if chance > _LEVEL:
        return None
    at = int(splits[best]) if best < len(splits) else 0
    return Change(
        kind="change" if at else "drift",
        at=at,
        share=float(growth[best]),
        confidence=1 - chance,
    )


def every_change(series: np.ndarray, begin: int = 0) -> Iterator[Change]:
    """Steps and lines, up or down, of a series (n,) and of its parts; at: from begin on."""
    if one := best_fit(series):
        yield replace(one, at=begin + one.at)
        if one.at:
            yield from every_change(series[: one.at], begin)
            yield from every_change(series[one.at :], begin + one.at)
