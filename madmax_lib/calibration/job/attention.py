"""Is the attention of a trace that of a plan? What products and messages leave open: how
many heads and tokens a rank has, and how often it attends.
"""

import numpy as np

from madmax_lib.calibration.job.observed import Observed
from madmax_lib.plan import Case
from madmax_lib.timeline import Timeline

_SAME_TOKENS = 1.1  # labels are a token shorter, samples are padded to round numbers
_AGAIN = 0.6  # of attention's passes are forward: two of three where one is repeated
_SAME_PASSES = 1.25  # some of attention's kernels are launched twice or not named


def check_attention(timeline: Timeline, case: Case) -> None:
    """Raise ValueError where attention, if shapes were recorded, is repeated and the plan
    says no recompute, or heads and tokens on a rank are not those that it leaves:

        heads = model's / tp (/ cp where heads are exchanged for tokens)
        tokens of a call = micro-batch x sequence / cp, fewer where a ring cuts them
    """
    model = case.model
    plan = case.plan
    simulated = timeline.meta.source != "measured"
    if simulated or model.tower:  # which attends in layers of its own
        return
    _check_passes(timeline, case)
    seen = Observed.of(timeline).attentions
    if seen.empty:
        return
    again = 1 - seen["backward"].mean() >= _AGAIN and seen["backward"].any()
    if plan.recompute in ("none", "full") and again != (plan.recompute == "full"):
        done = "is" if again else "is not"
        raise ValueError(
            f"timeline: attention {done} computed again in the backward pass, but {plan} "
            f"has recompute={plan.recompute}"
        )
    of_ulysses = plan.cp if plan.context == "ulysses" else 1
    kinds = {each.heads for each in (model, *model.variants.values())}
    heads = {count / plan.tp / of_ulysses for count in kinds}
    traced = set(seen["heads"])
    if not heads & traced:
        raise ValueError(
            f"timeline: {min(traced)} heads of attention on a rank, but {plan} leaves "
            f"{max(heads):g} of {model.name}'s {model.heads}"
        )
    tokens = case.tokens * of_ulysses
    most = (seen["batch"] * seen["tokens"]).max()
    few = most * _SAME_TOKENS < tokens and plan.cp == 1
    if few or most > tokens * _SAME_TOKENS:
        raise ValueError(
            f"timeline: {most:,} tokens a micro-batch of a rank, but {plan} at "
            f"sequence={case.sequence} has {tokens:,.0f}"
        )


def _check_passes(timeline, case):
    """Backward passes of attention on a rank and step, which names tell without shapes,
    against micro-batches x layers.
    """
    plan = case.plan
    attends = all(kind.has_attention for kind in case.model.kinds)
    if plan.pp * plan.cp > 1 or not attends or case.model.decoder_sequence:
        return
    spans = timeline.spans[timeline.spans["step"] >= 0]
    names = spans["name"].cat.categories
    names = names[names.str.contains("attention") & names.str.contains("backward")]
    calls_of_steps = spans[spans["name"].isin(names)].groupby(["rank", "step"])["name"]
    # a library's operators call each other: the names are as often recorded
    counts = calls_of_steps.agg(lambda name: name.value_counts().max())
    expected = case.micro_batches * case.model.layers
    if len(counts) and abs(np.log(counts.median() / expected)) > np.log(_SAME_PASSES):
        raise ValueError(
            f"timeline: {counts.median():g} backward passes of attention in a step, but "
            f"{plan} at global_batch={case.global_batch} has {expected:g}"
        )
