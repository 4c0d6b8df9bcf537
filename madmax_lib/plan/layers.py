"""Which layers does a pipeline stage hold? One rule for runs and simulations."""

from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import STAGES, enforce, layers_between

__all__ = ["chunk_layers"]


def _stage_layers(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage; a remainder goes to the middle stages, which have
    neither embedding nor head.

    >>> _stage_layers(10, 4)
    [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
    """
    even, rest = divmod(layers, pp)
    middle_first = sorted(range(pp), key=lambda stage: abs(stage - (pp - 1) / 2))
    return _ranges([even + (stage in middle_first[:rest]) for stage in range(pp)])


def chunk_layers(layers: int, plan: Plan) -> list[list[range]]:
    """Layers of each chunk of each stage; chunk c of stage s is number c x pp + s of
    the pipeline.

    Without uneven ends a remainder goes to the middle stages. Where embedding or head
    count as layers, it goes to the first stages [torchtitan]; beside first_layers or
    last_layers the others must come out equal [Megatron-LM], and what a first stage
    lacks is missing in its first chunks, a last one in its last [Llama 3, arXiv
    2407.21783, 3.3.2]. Raises ValueError for a plan that breaks one of
    `plan_rules.STAGES`.

    >>> chunk_layers(14, Plan(pp=4, embedding_as_layer=True, head_as_layer=True))
    [[range(0, 3)], [range(3, 7)], [range(7, 11)], [range(11, 14)]]
    >>> chunk_layers(6, Plan(pp=2, interleave=4, first_layers=3, last_layers=3))[0]
    [range(0, 0), range(1, 2), range(3, 4), range(5, 6)]
    """
    pp = plan.pp
    v = plan.interleave
    ends = (
        plan.first_layers
        or plan.last_layers
        or plan.embedding_as_layer
        or plan.head_as_layer
    )
    parts = (
        _ranges(_uneven(layers, plan))
        if pp > 1 and ends
        else _stage_layers(layers, pp * v)
    )
    return [[parts[chunk * pp + stage] for chunk in range(v)] for stage in range(pp)]


def _uneven(layers: int, plan: Plan) -> list[int]:
    """Layers of each virtual stage where the ends differ."""
    enforce(STAGES, plan, layers)
    v = plan.interleave
    (counted, others) = layers_between(plan, layers)
    even, rest = divmod(counted, others) if others else (0, 0)
    first = _filled(plan.first_layers, v)[::-1] if plan.first_layers else [even] * v
    last = _filled(plan.last_layers, v) if plan.last_layers else [even] * v
    sizes = [
        size
        for ends in zip(first, last, strict=True)
        for size in (ends[0], *[even] * (plan.pp - 2), ends[1])
    ]
    sizes = [size + (place < rest) for place, size in enumerate(sizes)]
    sizes[0] -= plan.embedding_as_layer
    sizes[-1] -= plan.head_as_layer
    return sizes


def _filled(layers: int, chunks: int) -> list[int]:
    """Chunks filled one after another, the last ones shorter or empty."""
    full = -(-layers // chunks)
    return [min(full, max(layers - full * chunk, 0)) for chunk in range(chunks)]


def _ranges(sizes: list[int]) -> list[range]:
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
