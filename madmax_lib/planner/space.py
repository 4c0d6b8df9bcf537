"""Which plans are worth timing? All legal plans of a model on a cluster, as arrays, and how many each rule drops.

A `Layout` fixes the degrees (tp, cp, pp, ep, dp). Its plans are the product of two short lists: passes (micro-batch,
schedule, recompute, ...: what a device does between two messages) and shards (ZeRO and what belongs to it). Both are
arrays, of shapes (a, 1) and (1, b), so that costs which depend on one of them are worked out once, not a x b times.
A choice that changes nothing is not listed: sequence parallelism without tp, schedules without pp, ZeRO on one replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np

from madmax_lib.plan import DEFAULTS, Plan
from madmax_lib.specs import Cluster, Transformer

__all__ = ["Layout", "Space", "layouts", "namespace", "passes", "plan_of", "shards"]

_PASS = ("micro_batch", "schedule", "interleave", "recompute", "sequence_parallel", "context", "attention")
_SHARD = ("zero", "shard", "overlap_gather", "reduce_fp32", "qwz", "hpz", "qgz", "prefetch")


@dataclass(frozen=True)
class Space:
    """Values a search tries for the choices of a Plan; None: all that divide. Fixed choices have one value.

    interleave: up to that many chunks per stage, as Megatron cuts them (pp x interleave divides the layers, pp the
    micro-batches). tp_beyond_node: whether tensor parallelism may leave the node. hybrid: sizes of HSDP's shards,
    none for no HSDP.
    quantised: tries the choices of ZeRO++. Raises ValueError for an empty choice.
    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    interleave: tuple[int, ...] | None = None
    schedule: tuple[str, ...] = ("1f1b", "gpipe", "zero-bubble")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (True, False)
    context: tuple[str, ...] = ("ring", "ulysses")
    attention: tuple[str, ...] = ("flash", "unfused")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    hybrid: tuple[int, ...] | None = None
    overlap_gather: tuple[bool, ...] = (True, False)
    reduce_fp32: tuple[bool, ...] = (False, True)
    quantised: bool = True
    prefetch: tuple[int, ...] = (1, 0)
    tp_beyond_node: bool = True

    def __post_init__(self):
        for name, values in vars(self).items():
            if values == () and name != "hybrid":
                raise ValueError(f"{name}=() leaves nothing to search")

    @classmethod
    def quick(cls) -> Space:
        """What people run: flash attention, 1F1B, ring attention, tensor parallelism inside a node, no ZeRO++."""
        return cls(schedule=("1f1b",), context=("ring",), attention=("flash",), sequence_parallel=(True,),
                   overlap_gather=(True,), reduce_fp32=(True,), quantised=False, prefetch=(1,),
                   tp_beyond_node=False)  # fmt: skip


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of parallelism that fill a cluster."""

    tp: int
    cp: int
    pp: int
    ep: int
    dp: int


def layouts(space: Space, model: Transformer, cluster: Cluster, global_batch: int, sequence: int
            ) -> tuple[list[Layout], Counter]:  # fmt: skip
    """Legal layouts in order, and how many of all that fill the cluster each rule drops (the first that applies)."""
    found, dropped = [], Counter()
    world = cluster.world_size
    degrees = _divisors(world)
    for tp, cp, pp in product(*(_among(values, degrees) for values in (space.tp, space.cp, space.pp))):
        if world % (tp * cp * pp):
            continue
        dp = world // (tp * cp * pp)
        for ep in _among(space.ep, _divisors(model.experts or 1)):
            layout = Layout(tp, cp, pp, ep, dp)
            rule = _broken(layout, space, model, cluster, global_batch, sequence)
            dropped[rule] += 1
            if not rule:
                found.append(layout)
    del dropped[""]
    return sorted(found), dropped


def _broken(at: Layout, space: Space, model: Transformer, cluster: Cluster, global_batch: int, sequence: int) -> str:
    """The rule that a layout breaks, empty if none."""
    shared = at.tp > model.kv_heads and at.tp % model.kv_heads == 0
    rules = {
        "tp must divide the attention heads": model.heads % at.tp or (model.kv_heads % at.tp and not shared),
        "tp must stay inside a node": not space.tp_beyond_node and at.tp > cluster.devices_per_node,
        "pp must not exceed the layers": at.pp > model.layers,
        "2 cp must divide the sequence": at.cp > 1 and sequence % (2 * at.cp),
        "ep must divide dp x cp": (at.dp * at.cp) % at.ep,
        "dp must divide the global batch": global_batch % at.dp,
    }
    return next((rule for rule, broken in rules.items() if broken), "")


def passes(space: Space, model: Transformer, at: Layout, global_batch: int) -> dict[str, np.ndarray]:
    """Columns of `_PASS`, each (a, 1)."""
    local = global_batch // at.dp
    rows = []
    contexts = ["ring"] if at.cp == 1 else [
        c for c in space.context if c == "ring" or (model.heads // at.tp) % at.cp == 0]  # fmt: skip
    parallel = (False,) if at.tp == 1 else (True,) if at.ep > 1 else space.sequence_parallel
    for micro in _among(space.micro_batch, _divisors(local)):
        if local % micro:
            continue
        schedules = list(_schedules(space, model.layers, at.pp, local // micro))
        for (schedule, v), *choices in product(schedules, space.recompute, parallel, contexts, space.attention):
            rows.append((micro, schedule, v, *choices))
    return {name: np.array([row[i] for row in rows])[:, None] for i, name in enumerate(_PASS)} if rows else {}


def _schedules(space: Space, layers: int, pp: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Schedules that differ: with one stage or one micro-batch all are 1F1B."""
    if pp == 1:
        yield "1f1b", 1
        return
    chunks = [v for v in _divisors(layers // pp) if layers % (pp * v) == 0 and micro_batches % pp == 0] or [1]
    for schedule in space.schedule if micro_batches > 1 else space.schedule[:1]:
        if schedule == "1f1b":
            yield from ((schedule, v) for v in _among(space.interleave, chunks))
        else:
            yield schedule, 1


def shards(space: Space, at: Layout, cluster: Cluster) -> dict[str, np.ndarray]:
    """Columns of `_SHARD`, each (1, b)."""
    ranks = at.dp * at.cp
    rows: list[tuple] = []
    for zero in space.zero if ranks > 1 else (0,):
        if zero == 3:
            rows += _full_shards(space, at, cluster)
        else:
            gathers = space.overlap_gather if zero else (False,)
            wide = space.reduce_fp32 if ranks > 1 else (False,)
            rows += [(zero, 0, gather, fp32, False, False, False, 1) for gather, fp32 in product(gathers, wide)]
    return {name: np.array([row[i] for row in rows])[None, :] for i, name in enumerate(_SHARD)} if rows else {}


def _full_shards(space: Space, at: Layout, cluster: Cluster) -> list[tuple]:
    """ZeRO-3: plain, ZeRO++ in its parts, and HSDP with every size of shard."""
    ranks, node = at.dp * at.cp, max(cluster.devices_per_node // at.tp, 1)
    rows = [(3, size, False, fp32, False, False, False, ahead) for size, fp32, ahead in product(
        [0, *_among(space.hybrid, _divisors(ranks)[1:-1])], space.reduce_fp32, space.prefetch)]  # fmt: skip
    if space.quantised:
        inside = (False,) if ranks <= node or node == 1 else (False, True)
        for qwz, hpz, qgz, ahead in product((False, True), inside, (False, True), space.prefetch):
            wide = (False,) if qgz else space.reduce_fp32
            if qwz or hpz or qgz:
                rows += [(3, 0, False, fp32, qwz, hpz, qgz, ahead) for fp32 in wide]
    return rows


def namespace(at: Layout, columns: dict[str, np.ndarray]) -> SimpleNamespace:
    """A product of plans as an object with all fields of Plan, for formulas that broadcast."""
    return SimpleNamespace(**(DEFAULTS | vars(at) | columns))


def plan_of(row: dict) -> Plan:
    """The Plan of a row of a search table."""
    values = {name: row[name] for name in Plan.__dataclass_fields__ if name in row}
    kinds = {name: type(default) for name, default in DEFAULTS.items() if default is not None}
    return Plan(**{name: kinds.get(name, bool)(value) for name, value in values.items()})


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _among(values: tuple | None, known: list[int]) -> list[int]:
    return known if values is None else [value for value in values if value in known]
