"""Longest paths through graphs of events: when does each happen, if it waits for the last
of its reasons? Replays of steps and of operations without stragglers both ask this.
"""

from collections.abc import Sequence


def longest_paths(
    source: Sequence[int],
    target: Sequence[int],
    weight: Sequence[float],
    at: list[float],
) -> list[float]:
    """Time of each event, of edges in an order in which all into an event come before any
    out of it.

    at(v) = max(at(v), at(u) + weight(u, v) over edges u -> v)

    at: when each event happens without the edges, -inf where it only follows others; it
    is changed. Lists, as their items are read faster than those of arrays.

    >>> longest_paths([0, 0, 1], [1, 2, 2], [3.0, 4.0, 2.0], [0.0, 0.0, 0.0])
    [0.0, 3.0, 5.0]
    """
    for before, after, delay in zip(source, target, weight, strict=True):
        ready = at[before] + delay
        if ready > at[after]:
            at[after] = ready
    return at
