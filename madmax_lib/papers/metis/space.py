"""Inter-stage plans of Metis: stages of which sizes it looks at, in which order.

As the public release of [Um et al., USENIX ATC 2024] enumerates them (behaviour
recorded): orders of the GPU types > numbers of stages > sizes of the
stages > micro-batches. Sizes are powers of two; every distinct permutation of their
multiset is taken in cool-lex order [Williams, SODA 2009]. The order decides ties.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, permutations
from typing import NamedTuple


class GroupList(NamedTuple):
    """Device groups tried for one order of the GPU types."""

    sequence: tuple[str, ...]
    costed_stages: int  # stages that the cost counts
    groups: list[tuple[int, ...]]  # GPUs of each stage


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
    lists = {}
    for stages in range(1, min(gpus, layers) + 1):
        if groups := _device_groups(gpus, stages, variance, max_permute_len):
            lists[stages] = groups
    several = {stages: groups for stages, groups in lists.items() if stages > 1}
    for number, sequence in enumerate(permutations(node_order)):
        if number and several:
            yield GroupList(sequence, 1, next(iter(several.values())))
        for stages, groups in (several if number else lists).items():
            yield GroupList(sequence, stages, groups)


def _device_groups(gpus, stages, variance, max_permute_len):
    """Sizes of the stages, powers of two that sum to `gpus`, none below variance x the
    mean size.

    >>> _device_groups(8, 3, 1, 6)
    [(4, 2, 2), (2, 4, 2), (2, 2, 4)]
    """
    # floor = max(N // S, S // N) x variance
    least = max(gpus // stages, stages // gpus) * variance
    shapes = [2**k for k in range(gpus.bit_length()) if 2**k >= least]
    return [
        tuple(chain(*order))
        for sizes in _non_decreasing(shapes, stages, gpus)
        for order in _cool_lex(_merged(sizes, max_permute_len))
    ]


def _non_decreasing(shapes, count, total):
    """Non-decreasing sequences of `count` shapes with this sum, in lexicographic order."""
    if count == 0:
        yield from [()] if total == 0 else []
        return
    for number, shape in enumerate(shapes):
        # even the smallest shapes sum to more, or the largest to less
        if shape * count > total or shapes[-1] * count < total:
            return
        for rest in _non_decreasing(shapes[number:], count - 1, total - shape):
            yield (shape, *rest)


def _merged(sizes, limit):
    """Non-decreasing sizes as at most `limit` groups that are permuted as wholes:
    smallest neighbours are joined.

    >>> _merged((1, 1, 1, 1, 1, 1, 2, 8), 4)
    [(1, 1, 1, 1), (1, 1, 2), (8,)]
    """
    groups = [(size,) for size in sizes]
    while (excess := len(groups) - limit) > 0:
        # m, the 1-based index of the first group that differs from the first one
        different = len(groups)
        for index, group in enumerate(groups, 1):
            if group != groups[0]:
                different = index
                break
        pairs = max(excess, different // 2)
        groups = _join_pairs(groups, pairs)
        # the release stops here too, with more groups than the limit
        if len(groups) - limit == pairs:
            break
    return groups


def _join_pairs(groups, pairs):
    """Groups with the first pairs joined where both have the smallest sum."""
    smallest = min(map(sum, groups))
    joined = []
    for start in range(0, min(2 * pairs, len(groups)), 2):
        pair = groups[start : start + 2]
        if len(pair) == 2 and all(sum(group) == smallest for group in pair):
            pair = [pair[0] + pair[1]]
        joined += pair
    return joined + groups[2 * pairs :]


def _cool_lex(groups):
    """All distinct permutations by prefix shifts, from the non-increasing arrangement
    on.

    >>> [[size for (size,) in order] for order in _cool_lex([(1,), (1,), (2,)])]
    [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    """
    order = sorted(groups, reverse=True)
    start = list(order)
    last = len(order) - 1
    while True:
        yield list(order)
        # i, the last index of the longest non-increasing prefix
        i = next((i for i in range(last) if order[i + 1] > order[i]), last)
        # element i + 2 moves to the front if it is not above the prefix, else i + 1
        moved = i + 2
        if moved > last or order[moved] > order[i]:
            moved = min(i + 1, last)
        order.insert(0, order.pop(moved))
        if order == start:
            return
