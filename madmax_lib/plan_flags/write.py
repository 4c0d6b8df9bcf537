"""A plan as the text of a framework's configuration, checked by reading it back."""

from madmax_lib import catalog
from madmax_lib.base import require_int
from madmax_lib.catalog import Model, Transformer
from madmax_lib.catalog.software import OVERLAPS
from madmax_lib.plan import Case
from madmax_lib.plan.plan import DEFAULTS, Plan
from madmax_lib.plan.rules import STATED, enforce
from madmax_lib.plan_flags.keys import framework_named
from madmax_lib.plan_flags.read import read
from madmax_lib.plan_flags.writers import WRITERS, StatedRun, is_moot


def write(
    plan: Plan | str,
    framework: str,
    *,
    model: Model | str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    devices_per_node: int = 8,
) -> str:
    """The configuration of a framework that runs a plan; `read` gives the plan back.

    framework: torchtitan (flags of 0.3, beside --module and --config; with etp=tp of
    0.2), megatron-lm (torchrun and flags), megatron-bridge (YAML of overrides),
    deepspeed (JSON) or accelerate (YAML). What the training script must do itself
    stands in a comment that begins with `script:`.
    model: or its name, whose sizes are stated too: to Megatron in its flags, which then
    train 20 steps on made up data, to torchtitan by the config function that has them,
    else in that comment. Its layers and sequence go for those that are None.
    global_batch, sequence: samples and tokens of the run, left out if None. dtype: bf16
    (if None), fp16 or fp32. layers: of the model, which torchtitan needs for more than
    two chunks per stage. devices_per_node: for torchrun and hpz. Raises ValueError for
    a plan that is not legal for the model, for a field that the framework cannot state,
    and for a batch that the plan does not divide.

    >>> print(write("dp4.tp2.one-bucket", "megatron-lm", devices_per_node=4))
    torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py \\
        --tensor-model-parallel-size 2 \\
        --micro-batch-size 1 \\
        --sequence-parallel \\
        --bf16 \\
        --grad-reduce-in-bf16
    """
    plan = Plan.parse(plan)
    name = framework_named(framework)
    dtype = dtype or "bf16"
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype={dtype} is not one of bf16, fp16, fp32")
    if model is not None:
        model = catalog.model(model)
        if not isinstance(model, Transformer):
            raise ValueError(
                f"{model.name}: recommendation models have no configuration"
            )
        sequence = model.sequence if sequence is None else sequence
        layers = model.layers if layers is None else layers
        # before any text: errors in the words of the plan
        plan.check(model, None, sequence=sequence)
        case = Case(model, None, plan, sequence=sequence, software=name)
        enforce(STATED, plan, case)
    run = StatedRun(
        global_batch,
        sequence,
        dtype,
        layers,
        require_int("devices_per_node", devices_per_node, 1),
        model,
    )
    # raises for a batch that the plan does not divide
    run.passes(plan)
    return _checked(WRITERS[name](plan, run), plan, run, name)


def _checked(text, plan, run, name):
    """The text. Raises ValueError for the first field that it does not state as it is."""
    usual = catalog.software(name)
    try:
        # the reader knows the rules, so a writer needs none
        stated = read(text, name, world_size=plan.world_size, layers=run.layers)
    except ValueError as error:
        raise ValueError(f"{name} cannot state the plan: {error}") from None
    for field in DEFAULTS:
        ours = getattr(plan, field)
        theirs = getattr(stated.plan, field)
        if field in OVERLAPS:
            degree = field.removeprefix("overlap_")
            if getattr(plan, degree) == 1:  # nothing to overlap
                continue
            # what a plan leaves open is as the software does
            ours = plan.overlaps(degree, usual)
            theirs = stated.plan.overlaps(degree, usual)
        if ours != theirs and not is_moot(field, plan):
            raise ValueError(
                f"{name} cannot state {field}={ours}: its configuration would run "
                f"{field}={theirs}"
            )
    for field in ("global_batch", "sequence", "dtype"):
        value = getattr(run, field)
        if value not in (None, getattr(stated, field)):
            raise ValueError(f"{name} cannot state {field}={value}")
    return text
