"""In which order does a pipeline stage work? Pure orders of (direction, chunk,
micro-batch), nothing is timed here.

gpipe: all forward, then all backward [Huang et al. 2019]. 1f1b: pp - stage - 1 forward
to warm up, then one of each in turn [Narayanan et al. 2021]; with several chunks per
stage the interleaved order of the same paper. zero-bubble: ZB-H1, where a backward pass
is split and the gradients of weights come `stage` micro-batches later [Qi et al. 2024].
"""

from collections.abc import Iterator
from itertools import pairwise

_BEFORE = {"backward": "forward", "weight": "backward"}
Slot = tuple[str, int, int]  # (forward, backward or weight, chunk, micro-batch)


def order(
    schedule: str, stage: int, pp: int, micro_batches: int, chunks: int = 1
) -> list[Slot]:
    """Slots that a stage works on, in order. Raises ValueError for a schedule that has no
    such order.

    >>> [f"{direction[0]}{m}" for direction, _, m in order("1f1b", 0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if chunks > 1 and schedule != "1f1b":
        raise ValueError(f"interleave={chunks} needs schedule='1f1b', got {schedule!r}")
    if schedule == "zero-bubble":
        return list(_zero_bubble(stage, pp, micro_batches))
    groups = _groups(pp, micro_batches)
    forward = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    warm_up = pp - stage - 1
    if chunks > 1:
        warm_up = 2 * warm_up + (chunks - 1) * max(map(len, groups))
    if schedule == "gpipe" or (chunks > 1 and micro_batches <= pp):
        warm_up = len(forward)
    warm_up = min(warm_up, len(forward))
    slots = [("forward", *forward[i]) for i in range(warm_up)]
    for i, (chunk, m) in enumerate(forward):
        if warm_up + i < len(forward):
            slots.append(("forward", *forward[warm_up + i]))
        slots.append(("backward", chunks - 1 - chunk, m))
    return slots


def _groups(pp, micro_batches):
    """Micro-batches that go through a chunk in a row: pp of them, or a little more
    where pp does not divide them.
    """
    count = max(micro_batches // pp, 1)
    starts = [-(-micro_batches * i // count) for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


def _zero_bubble(stage, pp, micro_batches):
    warm_up = min(pp - stage - 1, micro_batches)
    yield from (("forward", 0, m) for m in range(warm_up))
    for m in range(micro_batches):
        if warm_up + m < micro_batches:
            yield "forward", 0, warm_up + m
        yield "backward", 0, m
        if m >= stage:
            yield "weight", 0, m - stage
    yield from (
        ("weight", 0, m) for m in range(max(micro_batches - stage, 0), micro_batches)
    )


def dependency(slot: Slot, stage: int, pp: int, chunks: int) -> tuple[int, Slot] | None:
    """(stage, slot) whose message a slot waits for: the virtual stage before it, or
    after it on the way back.
    """
    direction, chunk, m = slot
    virtual = chunk * pp + stage + {"forward": -1, "backward": 1}.get(direction, 0)
    if direction == "weight" or not 0 <= virtual < pp * chunks:
        return None
    return virtual % pp, (direction, virtual // pp, m)


def in_order(orders: list[list[Slot]], chunks: int = 1) -> Iterator[tuple[int, Slot]]:
    """(stage, slot) of all stages such that everything comes after what it waits for;
    each stage keeps its own order.

    Raises ValueError if the stages wait for each other.
    """
    # at: what each stage comes to next
    pp = len(orders)
    done = set()
    at = [0] * len(orders)
    while any(at[stage] < len(orders[stage]) for stage in range(pp)):
        before = len(done)
        for stage, slots in enumerate(orders):
            while at[stage] < len(slots):
                slot = slots[at[stage]]
                needed = {dependency(slot, stage, pp, chunks)} - {None}
                # the same stage's pass over the same micro-batch that comes before
                if slot[0] in _BEFORE:
                    needed.add((stage, (_BEFORE[slot[0]], *slot[1:])))
                if not needed <= done:
                    break
                done.add((stage, slot))
                at[stage] += 1
                yield stage, slot
        if len(done) == before:
            stage = next(s for s in range(pp) if at[s] < len(orders[s]))
            raise ValueError(
                f"pipeline stages wait for each other, stage {stage} before "
                f"{orders[stage][at[stage]]}"
            )
