"""The layers that a pipeline stage holds: one rule for runs and simulations."""

from itertools import accumulate, pairwise

from madmax_lib.plan.layout import layout_chunks
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import STAGES, enforce, layers_between


def _stage_layers(layers, pp):
    """Layers of each pipeline stage; a remainder goes to the middle stages, which have
    neither embedding nor head.

    >>> _stage_layers(10, 4)
    [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
    """
    even, rest = divmod(layers, pp)
    middle = (pp - 1) / 2
    middle_first = sorted(range(pp), key=lambda stage: abs(stage - middle))
    longer = middle_first[:rest]
    return _ranges([even + (stage in longer) for stage in range(pp)])


def chunk_layers(layers: int, plan: Plan) -> list[list[range]]:
    """Layers of each chunk of each stage; chunk c of stage s is number c x pp + s of
    the pipeline, where this is not a V (`stage_of_chunk`).

    Without uneven ends a remainder goes to the middle stages. Where embedding or head
    count as layers, it goes to the first stages [torchtitan]; beside first_layers or
    last_layers the others must come out equal [Megatron-LM], and what a first stage
    lacks is missing in its first chunks, a last one in its last [Llama 3, arXiv
    2407.21783, 3.3.2]. Raises ValueError for a plan that breaks one of
    `rules.STAGES`.

    >>> chunk_layers(14, Plan(pp=4, embedding_as_layer=True, head_as_layer=True))
    [[range(0, 3)], [range(3, 7)], [range(7, 11)], [range(11, 14)]]
    >>> chunk_layers(6, Plan(pp=2, interleave=4, first_layers=3, last_layers=3))[0]
    [range(0, 0), range(1, 2), range(3, 4), range(5, 6)]
    """
    pp = plan.pp
    chunks = plan.interleave
    is_stated = plan.first_layers or plan.last_layers or plan.ends_as_layers
    if plan.layout:
        enforce(STAGES, plan, layers)
        parts = _ranges(map(sum, layout_chunks(plan.layout)))
    elif pp > 1 and is_stated:
        parts = _ranges(_uneven(layers, plan))
    else:
        parts = _stage_layers(layers, pp * chunks)
    if plan.folds:
        parts[pp:] = reversed(parts[pp:])
    # every pp-th part, from the stage's own, is one of its chunks
    return [parts[stage::pp] for stage in range(pp)]


def stage_of_chunk(chunk: int, position: int, pp: int, folds: bool) -> int:
    """Stage at a position among the chunks of that number, or the position of a stage.

    folds: the second chunks run back from the last stage to the first, as a V [arXiv
    2401.10241, section 6].

    >>> [stage_of_chunk(1, stage, 4, True) for stage in range(4)]
    [3, 2, 1, 0]
    """
    return pp - 1 - position if folds and chunk else position


def _uneven(layers, plan):
    """Layers of each virtual stage where the ends differ."""
    enforce(STAGES, plan, layers)
    between = layers_between(plan, layers)
    even = rest = 0
    if between.stages:
        even, rest = divmod(between.layers, between.stages)
    sizes = []
    for chunk in range(plan.interleave):
        # the first stage fills its last chunks, the last stage its first ones
        first = last = even
        if plan.first_layers:
            first = _filled(plan.first_layers, plan.interleave)[-1 - chunk]
        if plan.last_layers:
            last = _filled(plan.last_layers, plan.interleave)[chunk]
        sizes += [first, *[even] * (plan.pp - 2), last]
    for stage in range(rest):
        sizes[stage] += 1
    # an end that counts as a layer has one layer less
    sizes[0] -= plan.embedding_as_layer
    sizes[-1] -= plan.head_as_layer
    return sizes


def _filled(layers, chunks):
    """Chunks filled one after another, the last ones shorter or empty."""
    full = -(-layers // chunks)  # rounded up
    return [min(full, max(layers - full * chunk, 0)) for chunk in range(chunks)]


def _ranges(sizes):
    """Layers of each part, where the parts follow each other."""
    ends = accumulate(sizes, initial=0)
    return [range(*pair) for pair in pairwise(ends)]
