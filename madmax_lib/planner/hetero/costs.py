"""What does a heterogeneous plan cost? The one correct definition, rank by rank, and the defects of Metis' own.

A stage has dp replicas of tp consecutive ranks. A micro-batch of global_batch / batches samples is split over the
replicas in proportion to their speed; a replica waits for the slowest GPU type in it and works on h samples in pieces
of powers of two, which are what profiles hold. In ms:

    cost = (batches - 1) max stage + sum stages + sum sends + last sync + first batch generator
           + max gradient all-reduce + max optimizer

The plan is infeasible, its cost infinite, where a GPU lacks memory. Metis [USENIX ATC 2024] counts otherwise; each of
its departures can be switched on alone by `Rules.defect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import pandas as pd

from madmax_lib.planner.hetero.prices import BYTES_PER_GBPS_MS, Fleet, Prices, bits
from madmax_lib.planner.hetero.stage_plan import HeteroPlan, Rules

__all__ = ["check", "cost_terms", "fits", "memory_table", "replica_samples", "shares", "stage_table"]


@dataclass(frozen=True)
class _Stage:
    """A stage laid over the ranks: kinds has a row of type numbers per replica, samples the h of each replica."""

    start: int
    end: int
    dp: int
    tp: int
    recompute: str
    layers: slice
    kinds: np.ndarray
    samples: list[int]

    @property
    def types(self) -> list[int]:
        return sorted(set(self.kinds.ravel().tolist()))


def shares(samples: int, weights: Sequence[float]) -> list[int]:
    """Samples of each replica in proportion to its weight, by largest remainder; ties go to the first.

    >>> shares(8, [1, 1, 2])
    [2, 2, 4]
    """
    if len(set(weights)) == 1:
        return [samples // len(weights) + (place < samples % len(weights)) for place in range(len(weights))]
    exact = samples * (np.asarray(weights) / np.sum(weights))
    whole = np.floor(exact)
    order = np.argsort(-np.round(exact - whole, 9), kind="stable")
    whole[order[: samples - int(whole.sum())]] += 1
    return whole.astype(int).tolist()


def _stages(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> list[_Stage]:
    samples, starts = rules.global_batch // plan.batches, list(accumulate(plan.device_groups, initial=0))
    stages = []
    for number, (start, end) in enumerate(pairwise(starts)):
        (dp, tp), recompute = plan.strategies[number], plan.recompute[number]
        kinds = fleet.type_of(np.arange(start, end)).reshape(dp, tp)
        kinds = kinds[:, :1] if rules.defect == "E4" else kinds
        weights = [1.0] * dp
        if dp > 1 and kinds.min() < kinds.max():
            whole = [prices.get(fleet.types[k], tp, recompute, 1).layer_ms.sum() if k in kinds else 0.0
                     for k in range(len(fleet.types))]  # fmt: skip
            weights = [1 / max(whole[k] for k in set(row)) for row in kinds.tolist()]
        layers = slice(plan.layer_partition[number], plan.layer_partition[number + 1])
        stages.append(_Stage(start, end, dp, tp, recompute, layers, kinds, shares(samples, weights)))
    return stages


def cost_terms(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> dict[str, float]:
    """Terms of the cost in ms, see the head of the module; their sum is the cost.

    Raises ValueError for a plan that does not fit the cluster, model or batch, or that needs a profile there is not.
    """
    check(plan, prices, fleet, rules)
    stages = _stages(plan, prices, fleet, rules)
    if rules.defect == "E1":
        stages = stages[: rules.counted_stages]
    times = [_replica_ms(stage, prices, fleet) for stage in stages]
    generator_ms = _extra_ms(stages[0], prices, fleet, "generator_ms")
    optimizer_ms = max(_optimizer_ms(stage, prices, fleet, rules) for stage in stages)
    if rules.defect in ("E5", "E7"):
        generator_ms = rules.model_profile[1]
    return {
        "execution_ms": (plan.batches - 1) * max(times) + sum(times),
        "sync_ms": plan.batches * _extra_ms(stages[-1], prices, fleet, "sync_ms"),
        "send_ms": sum(_send_ms(*pair, fleet, rules) for pair in pairwise(stages)),
        "generator_ms": plan.batches * generator_ms,
        "gradients_ms": max(_gradients_ms(stage, prices, fleet, rules) for stage in stages),
        "optimizer_ms": optimizer_ms,
    }


def check(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> None:
    """Raises ValueError where a plan does not tile cluster, layers and batch."""
    if sum(plan.device_groups) != fleet.size:
        raise ValueError(f"device_groups hold {sum(plan.device_groups)} GPUs, the cluster has {fleet.size}")
    if plan.batches < 1 or rules.global_batch % plan.batches:
        raise ValueError(f"batches={plan.batches} does not divide global_batch={rules.global_batch}")
    samples = rules.global_batch // plan.batches
    for number, (dp, tp) in enumerate(plan.strategies):
        if dp > samples:
            raise ValueError(f"stage {number}: dp={dp} exceeds the {samples} samples of a micro-batch")
        if rules.tp_in_node and not _in_nodes(sum(plan.device_groups[:number]), dp, tp, fleet):
            raise ValueError(f"stage {number}: tp={tp} reaches beyond a node, which tp_in_node excludes")
    cuts = plan.layer_partition
    if cuts[0] != 0 or (cuts[-1] != prices.layers and rules.defect != "E2") or cuts[-1] > prices.layers:
        raise ValueError(f"layer_partition {list(cuts)} does not tile {prices.layers} layers")
    if any(y < x + (rules.defect != "E3") for x, y in pairwise(cuts)):
        raise ValueError(f"layer_partition {list(cuts)} has a stage without layers")


def memory_table(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> pd.DataFrame:
    """MB of the fullest GPU of each type in each stage: columns stage, device, used_mb, capacity_mb.

    A GPU holds the table's memory at the largest piece of its replica's samples (at least one), and of micro-batches
    in flight - as many as stages follow, itself included - what lives between forward and backward pass (1F1B).
    """
    rows = []
    for number, stage in enumerate(_stages(plan, prices, fleet, rules)):
        in_flight = min(plan.batches, len(plan.device_groups) - number)
        used: dict[int, float] = {}
        for kinds, samples in {(tuple(row), h) for row, h in zip(stage.kinds.tolist(), stage.samples, strict=True)}:
            for kind in set(kinds):
                used[kind] = max(used.get(kind, 0.0), _held_mb(stage, fleet.types[kind], samples, in_flight, prices))
        rows += [(number, fleet.types[kind], rules.memory_factor * used[kind], fleet.capacity_mb[kind]) for kind in
                 sorted(used)]  # fmt: skip
    return pd.DataFrame(rows, columns=["stage", "device", "used_mb", "capacity_mb"])


def fits(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> bool:
    """Whether every GPU of a plan has enough memory; with defect E6 as Metis would judge."""
    if rules.defect == "E6":
        return all(need <= have for need, have in _group_memory(plan, prices, fleet, rules))
    if not rules.memory_factor:
        return True
    table = memory_table(plan, prices, fleet, rules)
    return bool((table["used_mb"] <= table["capacity_mb"]).all())


def stage_table(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> pd.DataFrame:
    """One row per stage: ranks, GPU types, degrees, layers, samples of its replicas, time of a micro-batch, sends."""
    stages = _stages(plan, prices, fleet, rules)
    sends = [_send_ms(*pair, fleet, rules) for pair in pairwise(stages)] + [0.0]
    rows = [
        {
            "stage": number, "first_rank": stage.start, "gpus": stage.end - stage.start,
            "types": "+".join(fleet.types[kind] for kind in stage.types), "dp": stage.dp, "tp": stage.tp,
            "recompute": stage.recompute, "first_layer": stage.layers.start,
            "layers": stage.layers.stop - stage.layers.start, "least_samples": min(stage.samples),
            "most_samples": max(stage.samples), "stage_ms": _replica_ms(stage, prices, fleet), "send_ms": send_ms,
            "gradients_ms": _gradients_ms(stage, prices, fleet, rules),
            "optimizer_ms": _optimizer_ms(stage, prices, fleet, rules),
        }
        for number, (stage, send_ms) in enumerate(zip(stages, sends, strict=True))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def replica_samples(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules) -> tuple[list[int], ...]:
    """Samples of a micro-batch that each replica takes, by stage."""
    return tuple(stage.samples for stage in _stages(plan, prices, fleet, rules))


def _in_nodes(start: int, dp: int, tp: int, fleet: Fleet) -> bool:
    begins = start + tp * np.arange(dp)
    return bool(fleet.in_one_node(begins, begins + tp).all())


def _work(stage: _Stage):
    """Distinct (type, samples) of the replicas that work."""
    pairs = zip(stage.kinds.tolist(), stage.samples, strict=True)
    return sorted({(kind, samples) for kinds, samples in pairs if samples for kind in set(kinds)})


def _replica_ms(stage: _Stage, prices: Prices, fleet: Fleet) -> float:
    """Time of a micro-batch on the slowest replica."""
    if stage.layers.start == stage.layers.stop:
        return 0.0
    return max(sum(prices.get(fleet.types[kind], stage.tp, stage.recompute, bit).layer_ms[stage.layers].sum()
                   for bit in bits(samples)) for kind, samples in _work(stage))  # fmt: skip


def _extra_ms(stage: _Stage, prices: Prices, fleet: Fleet, name: str) -> float:
    return max(sum(getattr(prices.get(fleet.types[kind], stage.tp, stage.recompute, bit), name)
                   for bit in bits(samples)) for kind, samples in _work(stage))  # fmt: skip


def _bandwidth(types: Sequence[int], one_node: bool, fleet: Fleet, rules: Rules) -> float:
    speeds = fleet.intra if one_node or rules.defect == "E5" else fleet.inter
    return speeds[list(types)].min()


def _send_ms(stage: _Stage, after: _Stage, fleet: Fleet, rules: Rules) -> float:
    """Activations of the largest replica to the next stage."""
    one_node = bool(fleet.in_one_node(stage.start, after.end))
    bandwidth = _bandwidth(stage.types + after.types, one_node, fleet, rules)
    sent_bytes = max(stage.samples) * rules.sequence * rules.hidden * rules.element_bytes
    return sent_bytes / (bandwidth * BYTES_PER_GBPS_MS)


def _gradients_ms(stage: _Stage, prices: Prices, fleet: Fleet, rules: Rules) -> float:
    bandwidth = _bandwidth(stage.types, bool(fleet.in_one_node(stage.start, stage.end)), fleet, rules)
    size_bytes = prices.parameters_bytes[stage.layers].sum() / stage.tp
    return 2 * (stage.dp - 1) / (stage.dp * bandwidth * BYTES_PER_GBPS_MS) * size_bytes


def _optimizer_ms(stage: _Stage, prices: Prices, fleet: Fleet, rules: Rules) -> float:
    whole_ms = max(prices.optimizer_ms[fleet.types[kind]] for kind in stage.types)
    if rules.defect in ("E5", "E7"):
        whole_ms = rules.model_profile[0]
    return whole_ms / stage.tp * ((stage.layers.stop - stage.layers.start) / prices.layers)


def _held_mb(stage: _Stage, device: str, samples: int, in_flight: int, prices: Prices) -> float:
    pieces = [prices.get(device, stage.tp, stage.recompute, bit) for bit in bits(max(samples, 1))]
    live_mb = sum(piece.live_mb[stage.layers].sum() for piece in pieces)
    return pieces[0].base_mb + pieces[0].memory_mb[stage.layers].sum() + in_flight * live_mb


def _group_memory(plan: HeteroPlan, prices: Prices, fleet: Fleet, rules: Rules):
    """(MB needed, MB there) of each stage by Metis' rule: E6."""
    samples, every = rules.global_batch // plan.batches, fleet.type_of(np.arange(fleet.size))
    for stage in _stages(plan, prices, fleet, rules):
        table = lambda bit, s=stage: 5.0 * prices.get(fleet.types[0], s.tp, s.recompute, bit).memory_mb[s.layers].sum()  # noqa: E731
        if len(stage.types) == 1:
            need = table(max(samples // stage.dp, 1))
        else:
            first = every[:: len(every) // stage.dp][: stage.dp]
            weights = [1 / prices.get(fleet.types[k], stage.tp, stage.recompute, 1).layer_ms.sum() for k in first]
            need = sum(table(bit) for h in shares(samples, weights) for bit in bits(h))
        yield 0.001 + need, fleet.capacity_mb[every[stage.start : stage.end]].sum()
