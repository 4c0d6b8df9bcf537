"""Which stages of which sizes does Metis look at, and in which order?

Inter-stage plans of Metis [Um et al., USENIX ATC 2024] as its public release enumerates
them (behaviour recorded): orders of the GPU types > numbers of stages > sizes of the
stages > micro-batches. Sizes are powers of two; every distinct permutation of their
multiset is taken in cool-lex order [Williams, SODA 2009]. The order decides ties.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, permutations
from typing import NamedTuple

__all__ = ["GroupList", "group_lists"]


class GroupList(NamedTuple):
    """Device groups tried for one order of the GPU types; `costed_stages` is the number
    that the cost counts.
    """

    sequence: tuple[str, ...]
    costed_stages: int
    groups: list[tuple[int, ...]]


def group_lists(
    node_order: Sequence[str],
    gpus: int,
    layers: int,
    variance: float,
    max_permute_len: int,
) -> Iterator[GroupList]:
    """All lists in order; node_order is the first order of the types, the others are
    its permutations.

    For the second and later orders the release never tries one stage: instead the first
    list of more stages comes twice, and its first time it is costed as one stage.
    """
    stages = range(1, min(gpus, layers) + 1)
    lists = {
        n: groups
        for n in stages
        if (groups := _device_groups(gpus, n, variance, max_permute_len))
    }
    several = {n: groups for n, groups in lists.items() if n > 1}
    for number, sequence in enumerate(permutations(node_order)):
        if number:
            yield from (
                GroupList(sequence, 1, groups) for groups in list(several.values())[:1]
            )
        yield from (
            GroupList(sequence, n, groups)
            for n, groups in (several if number else lists).items()
        )


def _device_groups(
    gpus: int, stages: int, variance: float, max_permute_len: int
) -> list[tuple[int, ...]]:
    """Sizes of the stages, powers of two that sum to `gpus`, none below variance x the
    mean size.

    >>> _device_groups(8, 3, 1, 6)
    [(4, 2, 2), (2, 4, 2), (2, 2, 4)]
    """
    least = max(gpus // stages, stages // gpus) * variance
    shapes = [2**k for k in range(gpus.bit_length()) if 2**k >= least]
    every = _non_decreasing(shapes, stages, gpus)
    return [
        tuple(chain(*order))
        for sizes in every
        for order in _cool_lex(_merged(sizes, max_permute_len))
    ]


def _non_decreasing(
    shapes: list[int], count: int, total: int
) -> Iterator[tuple[int, ...]]:
    """Non-decreasing sequences of `count` shapes with this sum, in lexicographic order."""
    if count == 0:
        yield from [()] if total == 0 else []
        return
    for place, shape in enumerate(shapes):
        if shape * count > total or shapes[-1] * count < total:
            return
        for rest in _non_decreasing(shapes[place:], count - 1, total - shape):
            yield (shape, *rest)


def _merged(sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Non-decreasing sizes as at most `limit` groups that are permuted as wholes:
    smallest neighbours are joined.

    >>> _merged((1, 1, 1, 1, 1, 1, 2, 8), 4)
    [(1, 1, 1, 1), (1, 1, 2), (8,)]
    """
    groups = [(size,) for size in sizes]
    while (excess := len(groups) - limit) > 0:
        equal = next(
            (place for place, group in enumerate(groups, 1) if group != groups[0]),
            len(groups),
        )
        pairs = max(excess, equal // 2)
        groups = _join_pairs(groups, pairs)
        if len(groups) - limit == pairs:
            break
    return groups


def _join_pairs(groups: list[tuple[int, ...]], pairs: int) -> list[tuple[int, ...]]:
    smallest = min(map(sum, groups))
    joined: list[tuple[int, ...]] = []
    for place in range(0, min(2 * pairs, len(groups)), 2):
        pair = groups[place : place + 2]
        if len(pair) == 2 and all(sum(group) == smallest for group in pair):
            joined.append(pair[0] + pair[1])
        else:
            joined.extend(pair)
    return joined + groups[2 * pairs :]


def _cool_lex(groups: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """All distinct permutations by prefix shifts, from the non-increasing arrangement
    on.

    >>> ["".join(str(group[0]) for group in order) for order in _cool_lex([(1,), (1,), (2,)])]
    ['211', '121', '112']
    """
    order = sorted(groups, reverse=True)
    start = list(order)
    last = len(order) - 1
    while True:
        yield list(order)
        end = next(
            (i for i in range(last) if order[i + 1] > order[i]), last
        )  # of the longest non-increasing prefix
        moved = (
            end + 2
            if end + 2 <= last and order[end + 2] <= order[end]
            else min(end + 1, last)
        )
        order.insert(0, order.pop(moved))
        if order == start:
            return
