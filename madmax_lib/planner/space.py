"""All legal plans of a model on a cluster, as arrays, and how many each rule drops.

`Degrees` fill the cluster. The plans of some degrees are the product of two short
lists: passes (micro-batch, schedule, recompute, ...: what a device does between two
messages) and shardings (ZeRO and what belongs to it). Both are arrays, of shapes (a, 1)
and (1, b), so that costs which depend on one of them are worked out once, not a x b
times. A choice that changes nothing is not listed: sequence parallelism without tp,
schedules without pp, ZeRO on one replica.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from madmax_lib.base import require_type
from madmax_lib.plan import Case, Plan, Plans
from madmax_lib.plan.legal import legal
from madmax_lib.plan.rule import FIELDS, Rule
from madmax_lib.plan.rules import NEST

_USUAL = ("1f1b", "gpipe", "zero-bubble")
_USUAL_CHUNKS = 4  # per stage, beyond which few trainings go
# of schedules that do not come in any number of chunks, or are run with few
_CHUNKS = {"gpipe": [1], "zero-bubble": [1, 2], "zbv": [2], "dualpipev": [2]}


class _Schedule(NamedTuple):
    """A pipeline's schedule, and how layers are dealt out over its stages."""

    schedule: str = "1f1b"
    interleave: int = 1  # chunks per stage
    last_layers: int = 0  # of the last stage, 0 where it has as many as the others
    embedding_as_layer: bool = False
    head_as_layer: bool = False
    # those of a recipe alone
    first_layers: int = 0
    layout: str = ""


class _Sharding(NamedTuple):
    """ZeRO, and what belongs to it."""

    zero: int
    shard: int = 0  # ranks of a shard group of HSDP, 0 for all
    overlap_gather: bool = False
    reduce_fp32: bool = False
    qwz: bool = False
    hpz: bool = False
    qgz: bool = False
    prefetch: int = 1  # layers gathered ahead


_PASS = (
    "micro_batch",
    *_Schedule._fields,
    "recompute",
    "sequence_parallel",
    "context",
    "attention",
)
# columns that are left out where stages are equal, as in most plans: formulas then
# stay with numbers instead of arrays
_ENDS = _Schedule._fields[2:]

# fields of a Plan that a search sets
SEARCHED = ("tp", "cp", "pp", "ep", "dp", *_PASS, *_Sharding._fields)


@dataclass(frozen=True)
class Space:
    """Values that a search tries for the choices of a Plan; fixed choices have one
    value, None is all that divide.

    >>> Space(tp=8).tp
    (8,)
    >>> Space.quick().schedule
    ('1f1b',)

    tp, cp, pp, ep: degrees (default None).
    micro_batch: samples per device and micro-batch (default None).
    interleave: chunks per stage, as Megatron cuts them: pp x interleave divides the
        layers, with embedding and head counted if need be, pp the micro-batches
        (default None).
    usual_interleave: at most 4 chunks, or the fewest where the layers of a stage only
        divide by more (default False).
    schedule: of the pipeline (default 1f1b, gpipe, zero-bubble, and what the software
        launches where one is named).
    recompute: what the backward pass computes again (default all).
    sequence_parallel: beside tp (default both; always with ep, never where the software
        has none).
    context: how cp exchanges keys and values (default ring and ulysses).
    attention: kernels (default flash and unfused; the latter alone where the software
        had no other).
    zero: stages of ZeRO (default all).
    zero_under_pipeline: those of them beside pp (default all).
    hybrid: sizes of HSDP's shards in devices (default None; () for no HSDP).
    overlap_gather: of ZeRO-1/2 (default both; never where the software does not).
    reduce_fp32: gradients reduced in fp32 (default both).
    quantised: the choices of ZeRO++ too, whose 8-bit weights and 4-bit gradients change
        the numbers (default False).
    prefetch: layers that ZeRO-3 gathers ahead (default 1 and 0).
    tp_beyond_node: tensor parallelism may leave the node (default False).

    A single value stands for a choice of one. Raises ValueError for a value that no
    Plan takes, and for an empty choice.
    """

    # degrees
    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    # what a device does between two messages
    micro_batch: tuple[int, ...] | None = None
    interleave: tuple[int, ...] | None = None
    usual_interleave: bool = False
    schedule: tuple[str, ...] | None = None
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (True, False)
    context: tuple[str, ...] = ("ring", "ulysses")
    attention: tuple[str, ...] = ("flash", "unfused")
    # how states are sharded
    zero: tuple[int, ...] = (0, 1, 2, 3)
    zero_under_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    hybrid: tuple[int, ...] | None = None
    overlap_gather: tuple[bool, ...] = (True, False)
    reduce_fp32: tuple[bool, ...] = (False, True)
    quantised: bool = False
    prefetch: tuple[int, ...] = (1, 0)
    tp_beyond_node: bool = False

    def __post_init__(self):
        for name, values in vars(self).items():
            default = getattr(Space, name)
            if isinstance(default, bool):
                require_type(name, values, bool)
            elif values is not None or default is not None:
                object.__setattr__(self, name, _checked(name, values))

    @classmethod
    def quick(cls) -> Space:
        """Space of what people run: flash and ring attention, 1F1B in few chunks, tp
        inside a node, no ZeRO-2 under a pipeline.

        Gradients are reduced in either type; there is no ZeRO++.
        """
        return cls(
            schedule=("1f1b",),
            context=("ring",),
            attention=("flash",),
            sequence_parallel=(True,),
            overlap_gather=(True,),
            # sharded gradients would be reduced with every micro-batch
            zero_under_pipeline=(0, 1, 3),
            prefetch=(1,),
            usual_interleave=True,
        )


def _checked(name, values):
    """Values of one choice as a tuple, each of which a Plan takes."""
    values = tuple(values) if isinstance(values, (tuple, list, range)) else (values,)
    # two choices have no field of their own name in a Plan
    field = {"hybrid": "shard", "zero_under_pipeline": "zero"}.get(name, name)
    rule = FIELDS[field]
    for value in values:
        plan = Plans(**{"sequence_parallel": False, field: value})
        if rule.broken(plan, None):
            raise ValueError(f"Space: {rule.words(plan, None).replace(field, name, 1)}")
    if not values and name != "hybrid":
        raise ValueError(f"{name}=() leaves nothing to search")
    return values


class Degrees(NamedTuple):
    """Degrees of parallelism that fill a cluster: dp x tp x pp x cp devices, ep laid
    over them.
    """

    tp: int
    cp: int
    pp: int
    ep: int
    dp: int


def legal_degrees(space: Space, case: Case) -> tuple[list[Degrees], Counter]:
    """Degrees that have a legal plan, in order, and how many of all that fill the
    cluster each rule drops.

    case: the model, cluster, batch and sequence; its plan is not looked at. Degrees are
    dropped by the first rule that applies, after those of the book by the choice of the
    space to stay inside a node.
    """
    filling = _filling(space, case)
    table = np.array(filling, int).reshape(-1, len(Degrees._fields))  # a row each
    columns = dict(zip(Degrees._fields, table.T, strict=True))
    # (contexts, 1) beside columns of (degrees,): all pairs are judged, and degrees are
    # dropped where no way to exchange keys and values goes with them
    contexts = np.array(space.context)[:, None]
    plans = Plans(**columns, context=contexts)
    stay_inside = Rule(
        "tp must stay inside a node",
        lambda p, c: (p.tp > c.cluster.devices_per_node) & (not space.tp_beyond_node),
        "tp={p.tp} leaves the node",
    )
    # what a software does not run is dropped later, with the choices
    verdict = legal(replace(case, software=None, plan=plans), (stay_inside,))
    allowed = verdict.mask.any(axis=0)
    # of the way that gets farthest, the rule that stops it
    broken = verdict.first_broken_rule.max(axis=0)[~allowed]
    dropped = Counter(verdict.rules[rule].name for rule in broken)
    return [filling[i] for i in np.flatnonzero(allowed)], dropped


def _filling(space, case):
    """All degrees of the space that fill the cluster, in order."""
    world = case.cluster.world_size
    divisors = _divisors(world)
    experts = _among(space.ep, _divisors(case.model.experts or 1))
    degrees = []
    for tp, cp, pp, ep in product(
        _among(space.tp, divisors),
        _among(space.cp, divisors),
        _among(space.pp, divisors),
        experts,
    ):
        dp, rest = divmod(world, tp * cp * pp)
        if not rest:
            degrees.append(Degrees(tp, cp, pp, ep, dp))
    return sorted(degrees)


def pass_choices(space: Space, case: Case, degrees: Degrees) -> dict[str, np.ndarray]:
    """Columns of `_PASS`, each (a, 1), without `_ENDS` where all stages are equal.

    Empty if no micro-batch or context goes with the degrees.
    """
    local_batch = case.global_batch // degrees.dp
    unsaid = case.software.unsaid
    # experts need it beside tp: the tokens that they exchange are split over tp
    sequence_parallel = (True,) if degrees.ep > 1 else space.sequence_parallel
    if degrees.tp == 1 or "sequence_parallel=1" in unsaid:
        sequence_parallel = (False,)
    orders = [
        (micro_batch, *schedule)
        for micro_batch in _among(space.micro_batch, _divisors(local_batch))
        for schedule in _schedules(space, case, degrees.pp, local_batch // micro_batch)
    ]
    # ways to exchange keys and values that are legal for the degrees, as a single one is
    contexts = np.array(space.context if degrees.cp > 1 else ["ring"])
    if len(contexts) > 1:
        plans = Plans(**degrees._asdict(), context=contexts)
        contexts = contexts[legal(replace(case, software=None, plan=plans)).mask]
    attention = [kind for kind in space.attention if f"attention={kind}" not in unsaid]
    others = list(
        product(
            space.recompute,
            sequence_parallel,
            contexts,
            attention or ["unfused"],
        )
    )
    if not orders or not others:
        return {}
    # every order with every other choice, the latter changing fastest
    columns = [np.repeat(column, len(others)) for column in zip(*orders, strict=True)]
    columns += [np.tile(column, len(orders)) for column in zip(*others, strict=True)]
    # (a, 1): the first axis of the product of plans
    return {
        name: column[:, None]
        for name, column in zip(_PASS, columns, strict=True)
        if name not in _ENDS or any(column.tolist())
    }


def _schedules(space, case, pp, micro_batches):
    """Schedules that differ: with one stage or one micro-batch all are 1F1B."""
    if pp == 1:
        yield _Schedule()
        return
    layers = case.model.layers
    cuts = {}  # chunks of a stage -> ways to deal out the layers
    for chunks in range(1, (layers + 2) // pp + 1):
        if ends := _ends(layers, pp, chunks):
            cuts[chunks] = ends
    recipe = case.plan  # where none leads the search, of one stage
    if pp == recipe.pp:
        own_ends = tuple(getattr(recipe, name) for name in _ENDS)
        ends = cuts.setdefault(recipe.interleave, [])
        if own_ends not in [_Schedule("", 1, *each)[2:] for each in ends]:
            cuts[recipe.interleave] = [*ends, own_ends]
    # interleaving sends pp micro-batches round at a time
    counts = [chunks for chunks in cuts if chunks == 1 or micro_batches % pp == 0]
    if space.usual_interleave:
        usual = sum(chunks <= _USUAL_CHUNKS for chunks in counts)
        counts = counts[: max(usual, 2)]
    tried = _USUAL + case.software.schedules
    schedules = space.schedule or tuple(dict.fromkeys(tried))
    for schedule in schedules if micro_batches > 1 else schedules[:1]:
        if schedule == "dualpipev" and micro_batches < 2 * pp:
            continue
        allowed = counts if schedule in _USUAL else cuts  # a V has no rounds
        allowed = _among(_CHUNKS.get(schedule), allowed)
        for chunks in _among(space.interleave, allowed):
            yield from (_Schedule(schedule, chunks, *ends) for ends in cuts[chunks])


@lru_cache(maxsize=4096)
def _ends(layers, pp, chunks):
    """The last_layers, embedding_as_layer and head_as_layer that cut layers into stages
    of so many chunks.

    Equal ones if they can be; else with embedding and head as layers [Llama 3, arXiv
    2407.21783, 3.3.2; BLOOM], with a short last stage [DeepSeek-V3 in Megatron], or
    with a remainder as the software deals it out.

    >>> _ends(96, 8, 2), _ends(126, 16, 8), _ends(61, 16, 1)
    ([(0, False, False)], [(0, True, True)], [(0, False, False), (1, False, False)])
    """
    if layers % (pp * chunks) == 0:
        return [(0, False, False)]
    # both ends before one: they leave the stages of first and last rank alike
    counted = [(True, True), (False, True), (True, False)]
    equal = [pair for pair in counted if (layers + sum(pair)) % (pp * chunks) == 0]
    ends = [(0, *pair) for pair in equal[:1]]
    if chunks > 1 or pp > layers:
        return ends
    ends.append((0, False, False))
    # all stages but the last have ceil(layers / pp)
    last = layers - (pp - 1) * -(-layers // pp)
    if last > 0:
        ends.append((last, False, False))
    return ends


def sharding_choices(
    space: Space, degrees: Degrees, case: Case
) -> dict[str, np.ndarray]:
    """Columns of `_Sharding`, each (1, b); empty if no ZeRO stage goes with them."""
    gathers_late = "overlap_gather=1" in case.software.refuses
    ranks = degrees.dp * degrees.cp
    stages = space.zero
    if degrees.pp > 1:
        stages = [zero for zero in stages if zero in space.zero_under_pipeline]
    if ranks == 1:
        stages = (0,)
    reduce_fp32 = space.reduce_fp32 if ranks > 1 else (False,)
    rows = []
    for zero in stages:
        if zero == 3:
            # replicas in a node: its devices that tp leaves
            node = max(case.cluster.devices_per_node // degrees.tp, 1)
            rows += _full_shardings(space, ranks, degrees.ep, node)
            continue
        gathers = space.overlap_gather if zero and not gathers_late else (False,)
        rows += [
            _Sharding(zero, overlap_gather=gather, reduce_fp32=fp32)
            for gather, fp32 in product(gathers, reduce_fp32)
        ]
    # (1, b): the second axis of the product of plans
    columns = zip(*rows, strict=True)
    return {
        name: np.array(column)[None, :]
        for name, column in zip(_Sharding._fields, columns, strict=bool(rows))
    }


def _full_shardings(space, ranks, ep, node):
    """ZeRO-3 over some ranks, `node` of them in a node: plain, HSDP with every size of
    shard, ZeRO++ in its parts.
    """
    proper = _divisors(ranks)[1:-1]
    for size in [0, *_among(space.hybrid, proper)]:
        if NEST.broken(Plans(ep=ep, shard=size), None):
            continue
        for fp32, ahead in product(space.reduce_fp32, space.prefetch):
            yield _Sharding(3, size, reduce_fp32=fp32, prefetch=ahead)
    if not space.quantised:
        return
    either = (False, True)
    # a second copy of the weights in each node is of use where there are several
    hpz_choices = (False,) if ranks <= node or node == 1 else either
    for qwz, hpz, qgz, ahead in product(either, hpz_choices, either, space.prefetch):
        if qwz or hpz or qgz:
            # 4-bit gradients are not reduced in fp32
            for fp32 in (False,) if qgz else space.reduce_fp32:
                yield _Sharding(3, 0, False, fp32, qwz, hpz, qgz, ahead)


def fixed_fields(plan: Plan) -> dict:
    """Fields of a plan that no search sets, by name."""
    return {name: value for name, value in vars(plan).items() if name not in SEARCHED}


def plan_of(row: dict) -> Plan:
    """The Plan of a row of a search table."""
    # .item(): numpy's numbers and flags become Python's
    names = Plan.__dataclass_fields__.keys() & row.keys()
    return Plan(**{name: np.asarray(row[name]).item() for name in names})


def _divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def _among(values, choices):
    """The values that are choices; all choices for None."""
    if values is None:
        return choices
    return [value for value in values if value in choices]
