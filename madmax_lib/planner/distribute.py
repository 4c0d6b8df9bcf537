"""A space worked out here, or in parts by any executor.

A part is a fixed share of the degrees; its result does not depend on who works it out,
and results are merged by a total order, so a serial search and one on many workers end
the same. The part of a worker that dies is done again.
"""

from collections.abc import Sequence
from functools import partial

from madmax_lib.base import as_they_end
from madmax_lib.base.progress import bar
from madmax_lib.planner.evaluate import (
    PartialResult,
    SearchProblem,
    evaluate,
    evaluated,
    merged,
)
from madmax_lib.planner.space import Degrees

_PARTS = 64  # enough to keep a cluster busy, few enough to merge in no time


def run_parts(
    problem: SearchProblem,
    degrees: Sequence[Degrees],
    client=None,
    progress: bool = True,
) -> tuple[PartialResult, bool]:
    """The best of all degrees, and whether all were done."""
    with_bar = partial(bar, desc="searching", show=progress)
    if client is None:
        results = evaluated(problem, with_bar(degrees, unit="layout"))
    else:
        # every 64th of the degrees, so that parts are about equally large
        parts = {i: degrees[i::_PARTS] for i in range(min(_PARTS, len(degrees)))}
        ends = as_they_end(client, partial(evaluate, problem), parts)
        results = (part for _, part in with_bar(ends, total=len(parts), unit="part"))
    result = merged(problem, [])
    try:
        for part in results:
            result = merged(problem, [result, part])
    except KeyboardInterrupt:
        return result, False
    return result, True
