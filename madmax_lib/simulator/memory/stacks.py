"""Which of some training stacks launch a plan, and hold it in the memory of a device?"""

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import or_

import numpy as np

from madmax_lib import catalog
from madmax_lib.catalog.software import STACKS, Software
from madmax_lib.plan import Case
from madmax_lib.plan.rules import SOFTWARE, STATED
from madmax_lib.simulator.memory.memory import plans_peak_bytes, usable_bytes


def stacks_of(case: Case) -> tuple[Software, ...]:
    """Software that may train: the one named, else JAX on TPUs, else the `STACKS`."""
    if case.software.name != "none":
        return (case.software,)
    on_tpu = case.device.name.startswith("tpu")
    return tuple(map(catalog.software, ("jax",) if on_tpu else STACKS))


def unlaunchable(case: Case, stacks: Iterable[Software]) -> list[np.ndarray]:
    """Masks, one per stack and with two axes each, of the plans of a case that it does
    not launch, or that its configuration cannot say.
    """
    masks = []
    for stack in stacks:
        of_stack = replace(case, software=stack)
        broken = (rule.broken(case.plan, of_stack) for rule in SOFTWARE + STATED)
        masks.append(np.atleast_2d(reduce(or_, broken, np.False_)))
    return masks


def holders(case: Case) -> list[str]:
    """Names of the known stacks that launch the Plan of a case and hold it in the memory
    of a device.
    """
    room = usable_bytes(case.device)
    stacks = stacks_of(case)
    names = []
    for stack, broken in zip(stacks, unlaunchable(case, stacks), strict=True):
        if not broken.any():
            peaks = plans_peak_bytes(replace(case, software=stack))
            names += [stack.name] if peaks[0] <= room else []
    return names
