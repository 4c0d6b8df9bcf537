"""What does offload cost, and how much should leave the device? The closed form of `staging`, and its best share.

Three things show. Weights that come slower than a layer computes set the pace of a pass; gradients that go slower than
they are made leave a tail; and the update takes as long as the slower of device and host [arXiv 2101.06840,
2104.07857]. All follow from bytes per layer over the rates of `hosts`, for arrays of shares at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import held_layers
from madmax_lib.simulator.memory.states import stage_parameters
from madmax_lib.simulator.offload.fits import shares_that_fit
from madmax_lib.simulator.offload.hosts import ACCUMULATE_BYTES, ADAM_BYTES, Offloaded, Rates, rates
from madmax_lib.simulator.offload.placement import Policy, Split, normalised, split_of, streams_gradients
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step.inputs import Work
from madmax_lib.simulator.step.step_time import achieved_rates, head_passes, layer_passes, pieces
from madmax_lib.specs import Cluster, Transformer

__all__ = ["OffloadTimes", "best_offload", "offload_times"]

_WIDTH = 2  # bytes of a weight or gradient on its way


@dataclass(frozen=True)
class OffloadTimes:
    """Exposed seconds of a step by share, (k,) each. passes_s: passes that wait for weights or checkpoints; drain_s:
    gradients after the last pass; update_s: of the device's share of the states; host_s: what the host's takes longer.
    """

    share: np.ndarray
    passes_s: np.ndarray
    drain_s: np.ndarray
    update_s: np.ndarray
    host_s: np.ndarray

    @property
    def total_s(self) -> np.ndarray:
        """What is added to the passes and the traffic of a step that holds everything."""
        return self.passes_s + self.drain_s + self.update_s + self.host_s


def best_offload(model: Transformer, cluster: Cluster, plan: Plan, work: Work, parameters: Parameters, *,
                 global_batch: int, sequence: int | None = None, dtype: str = "bf16", policy: Policy | None = None
                 ) -> tuple[Offloaded, OffloadTimes]:  # fmt: skip
    """The share of a plan's states that makes its step shortest, among those that device, host and drives can hold.

    Tried are hundredths from 0.01 and the least share that the device needs; of equal times, the smallest one. work: of
    the plan as `normalised` gives it. Returns what the engine needs to know, and the times of that share alone.
    Raises ValueError when no share fits, with what is missing.
    """
    plan, policy = normalised(plan, model, dtype), policy or Policy()
    shape = {"sequence": sequence, "dtype": dtype, "global_batch": global_batch}
    shares = shares_that_fit(model, cluster, plan, policy, **shape)
    shares = shares[shares > 0] if policy.share is None else shares  # a plan with offload offloads something
    if not len(shares):
        raise ValueError(f"{model.name} under {plan} does not fit {cluster.name}: see mm.fits")
    times = offload_times(model, cluster, plan, work, parameters, shares, policy, global_batch=global_batch,
                          sequence=sequence)  # fmt: skip
    at = int(np.argmin(times.total_s))
    split = split_of(policy.method(plan), shares[at])
    known = Offloaded(policy.method(plan), Split(float(split.states), float(split.weights)), rates(cluster),
                      plan.micro_batches(global_batch), policy.delayed,
                      _checkpoint_bytes(model, plan, policy, sequence))  # fmt: skip
    return known, OffloadTimes(**{name: value[at : at + 1] for name, value in vars(times).items()})


def offload_times(model: Transformer, cluster: Cluster, plan: Plan, work: Work, parameters: Parameters,
                  shares: np.ndarray, policy: Policy | None = None, *, global_batch: int, sequence: int | None = None
                  ) -> OffloadTimes:  # fmt: skip
    """Seconds that each share costs. plan: as `normalised` gives it; work: of it."""
    policy = policy or Policy()
    method, rate, batches = policy.method(plan), rates(cluster), plan.micro_batches(global_batch)
    split = split_of(method, shares)
    drives = method.to == "nvme"
    unit = _units(model, plan)
    found = _passes(work, parameters)
    checkpoint_s = _checkpoint_bytes(model, plan, policy, sequence) / rate.link
    summed = batches > 1 and streams_gradients(plan)
    drain = _drain(unit, split, rate, summed, drives)
    reads = _reads(unit, split, rate, drives)
    slower = _pace(unit, reads, checkpoint_s, drain.drive_s, found)
    passes_s = (batches + plan.pp - 1) * (slower.start_s + slower.steady_s)
    batch_s = unit.layers * (found.forward_s + found.backward_s) + sum(found.head_s) + slower.start_s + slower.steady_s
    drain_s = _tail(unit, drain, slower, batches if streams_gradients(plan) else 1, batch_s)
    update_s = float(np.ravel(pieces(work, parameters)["optimizer_s"])[0]) * (1 - split.states)
    host_s, copy_s = _update(unit, method, split, rate, drives)
    if policy.delayed:
        whole_s = batches * (batch_s - slower.start_s - slower.steady_s) + passes_s + drain_s
        after_s = np.maximum(host_s - whole_s, np.maximum(update_s, copy_s))
    else:
        tiles = unit.layers + 2
        after_s = np.maximum(update_s, np.maximum(host_s, copy_s) + np.minimum(host_s, copy_s) / tiles)
    return OffloadTimes(np.asarray(shares, dtype=float), passes_s, drain_s, update_s, after_s - update_s)


def _units(model: Transformer, plan: Plan) -> SimpleNamespace:
    """Parameters that a device of the first stage owns: of a layer, embedding, head; layers; all of them."""
    layers, mixtures = held_layers(model, plan)
    count = stage_parameters(model, plan, np.arange(plan.pp), layers, mixtures)
    sharing = plan.shard or plan.dp * plan.cp if plan.zero else 1
    dense, experts = count.dense[0] / sharing, np.ravel(count.experts)[0] / max(sharing / plan.ep, 1)
    embedding = model.embedding_parameters / plan.tp / sharing
    head = count.ends[0] / sharing - embedding
    return SimpleNamespace(layers=int(layers[0]), layer=(dense + experts - embedding - head) / layers[0],
                           embedding=embedding, head=head, all=dense + experts)  # fmt: skip


def _passes(work: Work, parameters: Parameters) -> SimpleNamespace:
    """Seconds of a layer's passes, and of the head's (forward, backward)."""
    rate = achieved_rates(work, parameters)
    forward, backward = (float(np.ravel(sum(causes.values()))[0]) for causes in layer_passes(work, parameters, rate))
    heads = [float(np.ravel(s)[0]) for s in head_passes(work, parameters, rate)]
    return SimpleNamespace(forward_s=forward, backward_s=backward, head_s=heads)


def _reads(unit: SimpleNamespace, split: Split, rate: Rates, drives: bool) -> dict[str, tuple]:
    """Seconds of a layer's, the embedding's and the head's weights: (from the drives, to the device)."""
    sizes = {name: _WIDTH * split.weights * getattr(unit, name) for name in ("layer", "embedding", "head")}
    return {name: (size / rate.nvme_read if drives else 0 * size, size / rate.link) for name, size in sizes.items()}


def _drain(unit: SimpleNamespace, split: Split, rate: Rates, summed: bool, drives: bool) -> SimpleNamespace:
    """Seconds of the gradients of a layer and of the ends: copied, summed by the host, written."""

    def of(count: float) -> tuple:
        copy_s, sum_s = _WIDTH * count / rate.link, ACCUMULATE_BYTES * count / rate.adam * summed
        return copy_s, sum_s, (1 + summed) * _WIDTH * count / rate.nvme_write if drives else 0 * copy_s

    layer, embedding, head = (of(split.states * getattr(unit, name)) for name in ("layer", "embedding", "head"))
    return SimpleNamespace(layer=layer, embedding=embedding, layer_s=np.maximum.reduce(layer), drive_s=layer[2],
                           ends_s=np.maximum.reduce(embedding), head_s=np.maximum.reduce(head))  # fmt: skip


def _pace(unit: SimpleNamespace, reads: dict, checkpoint_s: float, written_s, found: SimpleNamespace
          ) -> SimpleNamespace:  # fmt: skip
    """Seconds that a micro-batch's passes take longer: until they begin to compute, and layer by layer.

    A layer waits for its own link alone, since each link is a unit further ahead than the next.
    """
    (read_s, copy_s), (read_e, copy_e), (read_h, copy_h) = reads["layer"], reads["embedding"], reads["head"]
    back_s = copy_s + checkpoint_s
    ahead, behind = np.maximum(copy_s, read_s), np.maximum(back_s, np.where(read_s > 0, read_s + written_s, 0.0))
    first_s = read_e + np.maximum(copy_e, read_s) + copy_s
    ready_s = read_h + np.maximum(copy_h, read_s) + back_s
    start_s = first_s + np.maximum(ready_s - found.head_s[1], read_h + copy_h)
    waits = (unit.layers - 1) * (_over(ahead, found.forward_s) + _over(behind, found.backward_s))
    steady_s = waits + _over(copy_h, found.forward_s) + _over(copy_e, found.backward_s)
    return SimpleNamespace(start_s=start_s, steady_s=steady_s, layer_s=np.maximum(behind, found.backward_s))


def _tail(unit: SimpleNamespace, drain: SimpleNamespace, slower: SimpleNamespace, batches: int, batch_s) -> np.ndarray:
    """Seconds that gradients need after the last pass: the last ones, or the queue since some micro-batch began."""
    last_s = drain.layer[0] + sum(drain.embedding)
    whole_s = unit.layers * drain.layer_s + drain.ends_s
    since_first_s = whole_s - (unit.layers - 1) * slower.layer_s
    since_head_s = drain.head_s + whole_s - unit.layers * slower.layer_s
    since_begin_s = batches * (drain.head_s + whole_s) - (batches - 1) * batch_s - unit.layers * slower.layer_s
    return np.maximum.reduce([last_s, since_first_s, since_head_s, since_begin_s])


def _update(unit: SimpleNamespace, method, split: Split, rate: Rates, drives: bool) -> tuple:
    """Seconds of the host's update, with drives beside it, and of the copies that return."""
    count, tiles = split.states * unit.all, unit.layers + 2
    adam_s = ADAM_BYTES * count / rate.adam
    copy_s = _WIDTH * unit.all * np.minimum(split.states, 1 - split.weights) / rate.link
    if not drives:
        return adam_s, copy_s
    read_s = (method.optimizer + method.gradients) * count / rate.nvme_read
    write_s = (method.optimizer + _WIDTH * split.weights) * count / rate.nvme_write
    return np.maximum((read_s + write_s) / tiles + adam_s, read_s + write_s + adam_s / tiles), copy_s


def _checkpoint_bytes(model: Transformer, plan: Plan, policy: Policy, sequence: int | None) -> float:
    """Of a layer and micro-batch, 0 where they stay on the device."""
    if not policy.method(plan).checkpoints:
        return 0.0
    tokens = plan.micro_batch * (sequence or model.sequence) / plan.cp
    return _WIDTH * tokens * model.hidden / (plan.tp if plan.sequence_parallel else 1)


def _over(needed_s, had_s):
    return np.maximum(needed_s - had_s, 0.0)
