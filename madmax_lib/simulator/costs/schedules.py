"""In which order does a pipeline stage work? Pure orders of (direction, chunk,
micro-batch), nothing is timed here.

gpipe: all forward, then all backward [Huang et al. 2019]. 1f1b: pp - stage - 1 forward
to warm up, then one of each in turn [Narayanan et al. 2021]; with several chunks per
stage the interleaved order of the same paper. zero-bubble: ZB-H1, where a backward pass
is split and the gradients of weights come `stage` passes later [Qi et al. 2024], with
chunks that of torch's ScheduleInterleavedZeroBubble. zbv [Qi et al. 2024, section 6]
and dualpipev [DeepSeek-V3, arXiv 2412.19437] have two chunks per stage, whose second
ones run back from the last stage to the first: the orders of torch.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from madmax_lib.plan.layers import stage_of_chunk

_DIRECTIONS = {"f": "forward", "b": "backward", "w": "weight"}
Slot = tuple[str, int, int]  # (forward, backward or weight, chunk, micro-batch)


def order(
    schedule: str, stage: int, pp: int, micro_batches: int, chunks: int = 1
) -> list[Slot]:
    """Slots that a stage works on, in order. A backward pass whose gradients of weights
    have no slot of their own computes them too.

    >>> [f"{direction[0]}{m}" for direction, _, m in order("1f1b", 0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if schedule in _FOLDED:
        words = _FOLDED[schedule](stage, pp, micro_batches)
        return list(_numbered(words, micro_batches))
    split = schedule == "zero-bubble"
    groups = _groups(pp, micro_batches)
    forward = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    backward = [(chunks - 1 - chunk, m) for chunk, m in forward]
    warm_up = pp - stage - 1
    if chunks > 1:
        warm_up = (2 - split) * warm_up + (chunks - 1) * max(map(len, groups))
    if schedule == "gpipe" or (chunks > 1 and micro_batches <= pp and not split):
        warm_up = len(forward)
    slots = [("forward", *one) for one in forward[:warm_up]]
    for i, one in enumerate(backward):
        slots += [("forward", *later) for later in forward[warm_up + i :][:1]]
        slots.append(("backward", *one))
        if split and i >= stage:
            slots.append(("weight", *backward[i - stage]))
    if split:
        slots += [("weight", *one) for one in backward[-stage:] if stage]
    return slots


def _groups(pp, micro_batches):
    """Micro-batches that go through a chunk in a row: pp of them, or a little more
    where pp does not divide them.
    """
    count = max(micro_batches // pp, 1)
    starts = [-(-micro_batches * i // count) for i in range(count + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


def _zbv(stage, pp, micro_batches):
    """Words of a stage's passes: f, b or w and the chunk; of 2 pp - 1 micro-batches at
    least.
    """
    after = pp - stage
    more = max(micro_batches - 2 * pp + 1, 0)
    return (
        "f0 " * (2 * after - 1)
        + "f1 f0 " * stage
        + "f1 b1 w1 " * after
        + "f0 b0 w0 f1 b1 w1 " * (more + stage)
        + "b0 w0 f1 b1 w1 " * (after - 1)
        + "b0 b1 " * stage
        + "b0 w0 " * after
        + "w1 " * stage
        + "w0 " * stage
    ).split()


def _dual_pipe_v(stage, pp, micro_batches):
    """The same where backward passes are whole (B) but at the ends of the pipeline."""
    after = pp - stage - 1
    last = ["B1", "B0"] * (stage + 1)
    split = [word.lower() for word in last[stage + 1 :]]
    late = [word.replace("b", "w") for word in split] + ["w0"] * after
    usual = (
        "f0 " * (2 * after)
        + "f0 f1 " * (stage + 1)
        + "b1 w1 f1 " * after
        + "f0 B1 f1 B0 " * (micro_batches - 2 * pp + stage + 1)
        + "B1 f1 B0 " * after
    )
    return [
        *usual.split(),
        *last[: stage + 1],
        *split,
        *(word for weight in late[:after] for word in (weight, "b0")),
        *late[after:],
    ]


_FOLDED = {"zbv": _zbv, "dualpipev": _dual_pipe_v}


def _numbered(words, micro_batches):
    """Slots of words, each the next micro-batch's of its chunk."""
    counts = Counter()
    for word in words:
        direction, chunk = one = word.lower()
        number = counts[one]
        counts[one] += 1
        counts[f"w{chunk}"] += word.startswith("B")
        if number < micro_batches:
            yield _DIRECTIONS[direction], int(chunk), number


def turns(
    schedule: str, pp: int, micro_batches: int, chunks: int = 1
) -> Iterator[tuple]:
    """Slots of all stages such that everything comes after what it waits for; each
    stage keeps its own order.

    Yields the stage, its slot, the stage and slot whose message that waits for, if any,
    and whether it is a backward pass that computes gradients of weights, too.

    Raises ValueError if the stages wait for each other.

    >>> [stage for stage, *_ in turns("1f1b", 2, 1)]
    [0, 1, 1, 0]
    """
    folds = schedule in _FOLDED
    orders = [order(schedule, stage, pp, micro_batches, chunks) for stage in range(pp)]
    present = [set(slots) for slots in orders]
    done = {None}
    at = [0] * pp  # what each stage comes to next
    while sum(at) < sum(map(len, orders)):
        before = sum(at)
        for stage, slots in enumerate(orders):
            for slot in slots[at[stage] :]:
                awaits = _awaited(slot, stage, pp, chunks, folds)
                if awaits not in done:
                    break
                done.add((stage, slot))
                at[stage] += 1
                is_split = ("weight", *slot[1:]) in present[stage]
                with_weights = slot[0] == "backward" and not is_split
                yield stage, slot, awaits, with_weights
        if sum(at) == before:
            raise ValueError(f"pipeline stages of {schedule} wait for each other")


def _awaited(slot, stage, pp, chunks, folds):
    """Stage and slot whose message a slot waits for: the virtual stage before it, or
    after it on the way back.
    """
    direction, chunk, m = slot
    virtual = chunk * pp + stage_of_chunk(chunk, stage, pp, folds)
    virtual += 1 if direction == "backward" else -1
    if direction == "weight" or not 0 <= virtual < pp * chunks:
        return None
    chunk, position = divmod(virtual, pp)
    return stage_of_chunk(chunk, position, pp, folds), (direction, chunk, m)
