"""How many changes lead from a recipe, a plan that people run, to another plan?

A change is one line of a configuration that a person would edit: another degree,
micro-batch, ZeRO stage, kind of recompute. dp follows from the degrees, and what only
exists beside a degree (chunks beside stages, sequence parallelism beside tp) changes
with it.
"""

import warnings
from dataclasses import replace

import numpy as np

from madmax_lib import catalog
from madmax_lib.catalog.software import STACKS
from madmax_lib.plan import Case, Plan, Plans
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import is_file_name
from madmax_lib.planner.space import SEARCHED, Space

# of a model, that its configurations state alike
_SIZES = ("layers", "hidden", "heads")
# choices that come with another one, and are no change of their own where it changes
_WITH = {
    "interleave": "pp",
    "schedule": "pp",
    "first_layers": "pp",
    "last_layers": "pp",
    "layout": "pp",
    "embedding_as_layer": "pp",
    "head_as_layer": "pp",
    "sequence_parallel": "tp",
    "context": "cp",
    "shard": "zero",
    "overlap_gather": "zero",
    "prefetch": "zero",
}


def changed(plans: Plans, recipe: Plan) -> dict[str, np.ndarray]:
    """Masks, by field, of the plans in which it is a change from a recipe.

    >>> masks = changed(Plan(dp=4, tp=2, zero=1), Plan(dp=8))
    >>> [name for name, mask in masks.items() if mask]
    ['tp', 'zero']
    """
    masks = {
        name: np.not_equal(getattr(plans, name), getattr(recipe, name))
        for name in SEARCHED
        if name != "dp"
    }
    return {
        name: mask & ~masks[_WITH[name]] if name in _WITH else mask
        for name, mask in masks.items()
    }


def changes(plans: Plans, recipe: Plan) -> np.ndarray:
    """Number of changes from a recipe to each plan."""
    # + 0: the sum of two masks would be their `or`
    return sum(mask + 0 for mask in changed(plans, recipe).values())


def near_recipe(plans: Plans, case: Case, most: int) -> np.ndarray:
    """Mask of the legal plans that at most so many changes of a case's plan lead to."""
    near = changes(plans, case.plan) <= most
    if not near.any():
        return near
    # what a search does not set may not go with what it sets
    return near & legal(replace(case, plan=plans, software=None)).mask


def in_words(plan: Plan, recipe: Plan) -> str:
    """The changes from a recipe to a plan, with what comes with each and is not as usual.

    >>> in_words(Plan(dp=8, zero=2, overlap_gather=True), Plan(dp=4, tp=2))
    'tp 2 -> 1, zero 0 -> 2 with overlap_gather True'
    """
    usual = Plan()
    words = []
    for name, mask in changed(plan, recipe).items():
        more = [
            f"{field} {getattr(plan, field)}"
            for field, of in _WITH.items()
            if of == name
            and getattr(plan, field)
            not in (getattr(usual, field), getattr(recipe, field))
        ]
        if mask:
            change = f"{name} {getattr(recipe, name)} -> {getattr(plan, name)}"
            words.append(" with ".join(filter(None, [change, " and ".join(more)])))
    return ", ".join(words)


def with_recipe(case: Case, like) -> Case:
    """A case whose plan is a recipe, under the stack in whose words that stands where
    the case names no software.

    like: a Plan, its text, or what `plan_flags.read` takes: a configuration, its file
    or a log that prints it. dp may be left out, and offload is. Raises ValueError for
    what is neither, of another number of devices, or not legal.
    """
    devices = case.cluster.world_size
    software = case.software
    try:
        plan = Plan.parse(like)
    except ValueError as no_plan:
        from madmax_lib import plan_flags  # a wing
        from madmax_lib.plan_flags.keys import framework_named

        layers = case.model.layers
        try:
            stated = plan_flags.read(like, world_size=devices, layers=layers)
        except FileNotFoundError as absent:
            raise (absent if is_file_name(str(like)) else no_plan) from None
        except TypeError:
            raise no_plan from None
        plan = stated.plan
        if other_sizes := _differing_sizes(like, case.model):
            warnings.warn(
                f"the recipe is of another model than {case.model.name}: "
                f"{', '.join(other_sizes)}; its plan alone is taken",
                stacklevel=3,  # at the user's search
            )
        for name in ("sequence", "global_batch"):
            theirs, ours = getattr(stated, name), getattr(case, name)
            if theirs not in (None, ours):
                warnings.warn(
                    f"the recipe has {name}={theirs}, priced is {ours}", stacklevel=3
                )
        for note in stated.notes:
            warnings.warn(f"of the recipe, {note}", stacklevel=3)
        if software.name == "none":
            names = (one for one in STACKS if framework_named(one) == stated.framework)
            software = catalog.software(next(names))
    group, rest = divmod(devices, plan.tp * plan.pp * plan.cp)
    if plan.dp == 1 and not rest:
        plan = replace(plan, dp=group)
    if plan.offload is not None:
        warnings.warn(
            f"of the recipe, offload={plan.offload} is left out, as a search compares "
            "plans that keep all on the device; estimate and fits take one with it",
            stacklevel=3,
        )
        plan = replace(plan, offload=None)
    plan.check(case.model, case.cluster, case.global_batch, case.sequence)
    return replace(case, plan=plan, software=software)


def _differing_sizes(like, model):
    """Sizes of a model that a configuration states otherwise, in words."""
    from madmax_lib.plan_flags.text import source_of  # a wing

    # the last part of model.hidden_size or MODEL_ARGS.--hidden-size
    stated = {
        key.rpartition(".")[2].lstrip("-").replace("_", "-"): value
        for key, value in source_of(like).values.items()
    }
    rows = catalog.table("size_flags").query("field in @_SIZES")
    sizes = {
        key.replace("_", "-"): getattr(model, field)
        for key, field in zip(rows["key"], rows["field"], strict=True)
    }
    return [
        f"{name} {stated[name]} for {size}"
        for name, size in sizes.items()
        if f"{stated.get(name, size)}" != f"{size}"
    ]


def space_of(recipe: Plan) -> Space:
    """Choices that people make, and those of a recipe."""
    usual = replace(
        Space.quick(),
        zero_under_pipeline=(0, 1, 2, 3),
        sequence_parallel=(True, False),
        usual_interleave=False,
        quantised=bool(recipe.qwz or recipe.hpz or recipe.qgz),
    )
    # what the recipe has may be missing in a tuple of choices
    choices = {
        name: tuple(dict.fromkeys([*values, getattr(recipe, name)]))
        for name, values in vars(usual).items()
        if isinstance(values, tuple) and name in SEARCHED
    }
    return replace(usual, **choices)
