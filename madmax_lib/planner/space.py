"""Which plans are worth timing? All legal plans of a model on a cluster, as arrays, and
how many each rule drops.

`Degrees` fill the cluster. The plans of some degrees are the product of two short
lists: passes (micro-batch, schedule, recompute, ...: what a device does between two
messages) and shardings (ZeRO and what belongs to it). Both are arrays, of shapes (a, 1)
and (1, b), so that costs which depend on one of them are worked out once, not a x b
times. A choice that changes nothing is not listed: sequence parallelism without tp,
schedules without pp, ZeRO on one replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from itertools import product

import numpy as np

from madmax_lib.base.fields import require_type
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import DEFAULTS, Plan
from madmax_lib.plan.rule import FIELDS
from madmax_lib.plan.rules import NEST

__all__ = [
    "SEARCHED",
    "Degrees",
    "Space",
    "legal_degrees",
    "pass_choices",
    "plan_of",
    "sharding_choices",
]

_ORDER = (
    "micro_batch",
    "schedule",
    "interleave",
    "last_layers",
    "embedding_as_layer",
    "head_as_layer",
)
_PASS = (*_ORDER, "recompute", "sequence_parallel", "context", "attention")
_ANY = (
    "tp",
    "cp",
    "pp",
    "ep",
    "micro_batch",
    "interleave",
    "hybrid",
)  # None is all that divide
_ENDS = _ORDER[3:]  # columns that are left out where stages are equal
_USUAL = 4  # chunks per stage, beyond which few go
_SHARDING = (
    "zero",
    "shard",
    "overlap_gather",
    "reduce_fp32",
    "qwz",
    "hpz",
    "qgz",
    "prefetch",
)

SEARCHED = (
    "tp",
    "cp",
    "pp",
    "ep",
    "dp",
    *_PASS,
    *_SHARDING,
)  # fields of a Plan that a search sets


@dataclass(frozen=True)
class Space:
    """Values that a search tries for the choices of a Plan; fixed choices have one
    value, None is all that divide.

    tp, cp, pp, ep: degrees (default None).
    micro_batch: samples per device and micro-batch (default None).
    interleave: chunks per stage, as Megatron cuts them: pp x interleave divides the
        layers, with embedding and head counted if need be, pp the micro-batches
        (default None).
    usual_interleave: at most 4 chunks, or the fewest where the layers of a stage only
        divide by more (default False).
    schedule: of the pipeline (default all).
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
    Plan takes.

    >>> Space(tp=8).tp
    (8,)

    Raises ValueError for an empty choice.
    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    interleave: tuple[int, ...] | None = None
    usual_interleave: bool = False
    schedule: tuple[str, ...] = ("1f1b", "gpipe", "zero-bubble")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (True, False)
    context: tuple[str, ...] = ("ring", "ulysses")
    attention: tuple[str, ...] = ("flash", "unfused")
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
            if name in ("quantised", "tp_beyond_node", "usual_interleave"):
                require_type(name, values, bool)
            elif values is not None or name not in _ANY:
                object.__setattr__(self, name, _checked(name, values))

    @classmethod
    def quick(cls) -> Space:
        """What people run: flash and ring attention, 1F1B in few chunks, tp inside a
        node, no ZeRO-2 under a pipeline.

        Gradients are reduced in either type; there is no ZeRO++.
        """
        one = {
            "schedule": ("1f1b",),
            "context": ("ring",),
            "attention": ("flash",),
            "sequence_parallel": (True,),
        }
        one |= {
            "overlap_gather": (True,),
            "zero_under_pipeline": (0, 1, 3),
            "prefetch": (1,),
        }
        return cls(**one, usual_interleave=True)


def _checked(name: str, values) -> tuple:
    """Values of one choice as a tuple, each of which a Plan takes."""
    values = tuple(values) if isinstance(values, (tuple, list, range)) else (values,)
    field = {"hybrid": "shard", "zero_under_pipeline": "zero"}.get(name, name)
    for value in values:
        plan = Plans(**{"sequence_parallel": False} | {field: value})
        if FIELDS[field].broken(plan, None):
            raise ValueError(
                f"Space: {FIELDS[field].words(plan, None).replace(field, name, 1)}"
            )
    if not values and name != "hybrid":
        raise ValueError(f"{name}=() leaves nothing to search")
    return values


@dataclass(frozen=True, order=True)
class Degrees:
    """Degrees of parallelism that fill a cluster."""

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
    filling = sorted(_filling(space, case))
    names = [field.name for field in fields(Degrees)]
    columns = dict(
        zip(
            names,
            np.array([*map(astuple, filling)], int).reshape(-1, len(names)).T,
            strict=True,
        )
    )
    plans = Plans(**columns, context=np.array(space.context)[:, None])
    verdict = legal(
        replace(case, software=None, plan=plans)
    )  # what it does not run is dropped with the choices
    allowed = verdict.mask.any(axis=0)
    dropped = Counter(
        verdict.rules[place].name for place in verdict.first_broken_rule[0, ~allowed]
    )
    leaves_node = (
        allowed
        & (columns["tp"] > case.cluster.devices_per_node)
        & (not space.tp_beyond_node)
    )
    if leaves_node.any():
        dropped["tp must stay inside a node"] = int(leaves_node.sum())
    return [filling[i] for i in np.flatnonzero(allowed & ~leaves_node)], dropped


def _filling(space: Space, case: Case) -> Iterator[Degrees]:
    world = case.cluster.world_size
    degrees = _divisors(world)
    experts = _among(space.ep, _divisors(case.model.experts or 1))
    for tp, cp, pp in product(
        *(_among(values, degrees) for values in (space.tp, space.cp, space.pp))
    ):
        if world % (tp * cp * pp) == 0:
            yield from (
                Degrees(tp, cp, pp, ep, world // (tp * cp * pp)) for ep in experts
            )


def pass_choices(space: Space, case: Case, degrees: Degrees) -> dict[str, np.ndarray]:
    """Columns of `_PASS`, each (a, 1), without `_ENDS` where all stages are equal.

    None if no micro-batch or context goes with the degrees.
    """
    local = case.global_batch // degrees.dp
    contexts = _contexts(space, case, degrees)
    lacks = degrees.tp == 1 or "sequence_parallel=1" in case.software.unsaid
    parallel = (
        (False,) if lacks else (True,) if degrees.ep > 1 else space.sequence_parallel
    )
    micros = _among(space.micro_batch, _divisors(local))
    layers = case.model.layers
    orders = [
        (micro, *order)
        for micro in micros
        for order in _schedules(space, layers, degrees.pp, local // micro)
    ]
    attention = [
        kind
        for kind in space.attention
        if f"attention={kind}" not in case.software.unsaid
    ]
    others = [*product(space.recompute, parallel, contexts, attention or ["unfused"])]
    if not orders or not others:
        return {}
    columns = [np.repeat(column, len(others)) for column in zip(*orders, strict=True)]
    columns += [np.tile(column, len(orders)) for column in zip(*others, strict=True)]
    named = zip(_PASS, columns, strict=True)
    return {
        name: column[:, None]
        for name, column in named
        if name not in _ENDS or column.any()
    }


def _contexts(space: Space, case: Case, degrees: Degrees) -> list[str]:
    """Ways to exchange keys and values that are legal for the degrees."""
    if degrees.cp == 1:
        return ["ring"]
    contexts = np.array(space.context)
    return contexts[
        legal(
            replace(case, software=None, plan=Plans(**vars(degrees), context=contexts))
        ).mask
    ].tolist()


def _schedules(
    space: Space, layers: int, pp: int, micro_batches: int
) -> Iterator[tuple]:
    """Schedules that differ, as `_ORDER` after the micro-batch: with one stage or one
    micro-batch all are 1F1B.
    """
    if pp == 1:
        yield "1f1b", 1, 0, False, False
        return
    cuts = {
        v: ends
        for v in range(1, (layers + 2) // pp + 1)
        if (ends := _ends(layers, pp, v))
    }
    chunks = [v for v in cuts if v == 1 or micro_batches % pp == 0]
    usual = [v for v in chunks if v <= _USUAL]
    chunks = chunks[: max(len(usual), 2)] if space.usual_interleave else chunks
    for schedule in space.schedule if micro_batches > 1 else space.schedule[:1]:
        for v in _among(space.interleave, chunks) if schedule == "1f1b" else [1]:
            yield from ((schedule, v, *ends) for ends in cuts[v])


@lru_cache(maxsize=4096)
def _ends(layers: int, pp: int, chunks: int) -> list[tuple[int, bool, bool]]:
    """last_layers, embedding_as_layer and head_as_layer that cut layers into stages of
    so many chunks.

    Equal ones if they can be; else with embedding and head as layers [Llama 3, arXiv
    2407.21783, 3.3.2; BLOOM], with a short last stage [DeepSeek-V3 in Megatron], or
    with a remainder as the software deals it out.

    >>> _ends(96, 8, 2), _ends(126, 16, 8), _ends(61, 16, 1)
    ([(0, False, False)], [(0, True, True)], [(0, False, False), (1, False, False)])
    """
    if layers % (pp * chunks) == 0:
        return [(0, False, False)]
    counted = [(True, True), (False, True), (True, False)]
    ends = [
        (0, *both) for both in counted if (layers + sum(both)) % (pp * chunks) == 0
    ][:1]
    if chunks > 1 or pp > layers:
        return ends
    last = layers - (pp - 1) * -(-layers // pp)
    return [*ends, (0, False, False), *([(last, False, False)] if last > 0 else [])]


def sharding_choices(
    space: Space, degrees: Degrees, case: Case
) -> dict[str, np.ndarray]:
    """Columns of `_SHARDING`, each (1, b)."""
    late = "overlap_gather=1" in case.software.refuses
    ranks = degrees.dp * degrees.cp
    rows: list[tuple] = []
    stages = (
        space.zero
        if degrees.pp == 1
        else [zero for zero in space.zero if zero in space.zero_under_pipeline]
    )
    for zero in stages if ranks > 1 else (0,):
        if zero == 3:
            rows += _full_shardings(
                space,
                ranks,
                degrees.ep,
                max(case.cluster.devices_per_node // degrees.tp, 1),
            )
        else:
            gathers = space.overlap_gather if zero and not late else (False,)
            wide = space.reduce_fp32 if ranks > 1 else (False,)
            rows += [
                (zero, 0, gather, fp32, False, False, False, 1)
                for gather, fp32 in product(gathers, wide)
            ]
    return (
        {
            name: np.array([row[i] for row in rows])[None, :]
            for i, name in enumerate(_SHARDING)
        }
        if rows
        else {}
    )


def _full_shardings(space: Space, ranks: int, ep: int, node: int) -> list[tuple]:
    """ZeRO-3 over some ranks, `node` of them in a node: plain, HSDP with every size of
    shard, ZeRO++ in its parts.
    """
    sizes = [0, *_among(space.hybrid, _divisors(ranks)[1:-1])]
    sizes = [size for size in sizes if not NEST.broken(Plans(ep=ep, shard=size), None)]
    plain = product(sizes, space.reduce_fp32, space.prefetch)
    rows = [
        (3, size, False, fp32, False, False, False, ahead)
        for size, fp32, ahead in plain
    ]
    if space.quantised:
        inside = (False,) if ranks <= node or node == 1 else (False, True)
        for qwz, hpz, qgz, ahead in product(
            (False, True), inside, (False, True), space.prefetch
        ):
            wide = (False,) if qgz else space.reduce_fp32
            if qwz or hpz or qgz:
                rows += [(3, 0, False, fp32, qwz, hpz, qgz, ahead) for fp32 in wide]
    return rows


def plan_of(row: dict) -> Plan:
    """The Plan of a row of a search table."""
    values = {name: row[name] for name in Plan.__dataclass_fields__ if name in row}
    kinds = {
        name: type(default) for name, default in DEFAULTS.items() if default is not None
    }
    return Plan(
        **{name: kinds.get(name, bool)(value) for name, value in values.items()}
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _among(values: tuple | None, known: list[int]) -> list[int]:
    return known if values is None else [value for value in values if value in known]
