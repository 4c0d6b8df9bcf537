"""What does offload cost, and how much should leave the device? The closed form of
`staging`, and its best share.

Three things show. Weights that come slower than a layer computes set the pace of a
pass; gradients that go slower than they are made leave a tail; and the update takes as
long as the slower of device and host [arXiv 2101.06840, 2104.07857]. All follow from
bytes per layer over the rates of `hosts`, for arrays of shares at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from madmax_lib.plan import Case
from madmax_lib.plan.columns import owned
from madmax_lib.plan.rules import check_plan
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import held_layers
from madmax_lib.simulator.memory.states import normalised, stage_parameters
from madmax_lib.simulator.offload.fits import room_bytes, shares_that_fit
from madmax_lib.simulator.offload.placement import (
    ACCUMULATE_BYTES,
    Offloaded,
    Policy,
    policy_of,
    rates,
    split_of,
    streams_gradients,
)
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.step_time import PARTS, layer_costs

_WIDTH = 2  # bytes of a weight or gradient on its way


@dataclass(frozen=True)
class OffloadTimes:
    """Exposed seconds of a step, (k,) each."""

    share: np.ndarray  # of what may leave the device
    passes_s: np.ndarray  # passes that wait for weights or checkpoints
    drain_s: np.ndarray  # gradients after the last pass
    update_s: np.ndarray  # the device updates its share of the states
    host_s: np.ndarray  # what the host takes longer for its own

    @property
    def total_s(self) -> np.ndarray:
        """Seconds added to the passes and the traffic of a step that holds everything."""
        return self.passes_s + self.drain_s + self.update_s + self.host_s


def best_offload(
    case: Case, parameters: Parameters, policy: Policy | None = None
) -> tuple[Offloaded, OffloadTimes]:
    """The share of the states that makes a step shortest, among those that device, host
    and drives can hold.

    Tried are hundredths from 0.01 and the least share that the device needs; of equal
    times, the smallest one. case: as `normalised` gives it. Returns what the engine
    needs to know, and the times of that share alone. Raises ValueError when no share
    fits, with what is missing.
    """
    policy = policy_of(policy, case)
    shares = shares_that_fit(case, policy, room_bytes(case.cluster, case.plan))
    # a plan with offload offloads something
    if policy.share is None:
        shares = shares[shares > 0]
    if not len(shares):
        raise ValueError(
            f"{case.model.name} under {case.plan} does not fit {case.cluster.name}: "
            "`madmax fits` (mm.fits) says what is missing"
        )
    times = offload_times(case, parameters, shares, policy)
    at = int(np.argmin(times.total_s))
    best = OffloadTimes(*(values[at : at + 1] for values in vars(times).values()))
    return _offloaded(case, float(shares[at]), policy), best


def offload_times(
    case: Case, parameters: Parameters, shares: np.ndarray, policy: Policy | None = None
) -> OffloadTimes:
    """Seconds that each share costs. case: as `normalised` gives it."""
    plan = case.plan
    offloaded = _offloaded(case, shares, policy_of(policy, case))
    batches = offloaded.micro_batches
    pieces = layer_costs(Steps.of(case), parameters)
    stage = _first_stage(case, pieces, offloaded)
    passes_s = (batches + plan.pp - 1) * (stage.start_s + stage.wait_s)
    drain_s = stage.tail_s(batches if streams_gradients(plan) else 1)
    whole_s = float(pieces.prices.update_s(pieces.stage.owned(pieces.prices)))
    update_s = whole_s * (1 - offloaded.split.states)
    host_s, copy_s = _update(stage, offloaded)
    if offloaded.delayed:
        step_s = batches * stage.computed_s + passes_s + drain_s
        away_s = np.maximum(host_s - step_s, copy_s)
    else:
        away_s = _tiled_s(host_s, copy_s, stage.tiles)
    shares = np.asarray(shares, dtype=float)
    late_s = np.maximum(away_s, update_s) - update_s
    return OffloadTimes(shares, passes_s, drain_s, update_s, late_s)


def _tiled_s(first_s, second_s, tiles):
    """Seconds of two things side by side, the shorter a tile ahead of or behind the
    longer.
    """
    longer_s = np.maximum(first_s, second_s)
    return longer_s + np.minimum(first_s, second_s) / tiles


def _offloaded(case, shares, policy):
    """Facts of the offload of a share of the states, or of an array of shares."""
    plan = case.plan
    method = policy.method(case.plan)
    checkpoint_bytes = 0.0
    if method.checkpoints:
        parts = plan.tp if plan.sequence_parallel else 1
        checkpoint_bytes = _WIDTH * case.tokens * case.model.hidden / parts
    split = split_of(method, shares)
    batches = plan.micro_batches(case.global_batch)
    return Offloaded(
        method, split, rates(case.cluster), batches, policy.delayed, checkpoint_bytes
    )


@dataclass(frozen=True)
class _Unit:
    """Seconds on the links of a layer, the embedding or the head, (k,) each."""

    read_s: np.ndarray  # weights from the drives
    load_s: np.ndarray  # and to the device
    copy_s: np.ndarray  # gradients to the host
    sum_s: np.ndarray  # added up by it
    drive_s: np.ndarray  # and written to the drives

    @property
    def drain_s(self):
        """The slowest way of the gradients."""
        return np.maximum.reduce([self.copy_s, self.sum_s, self.drive_s])


@dataclass(frozen=True)
class _Stage:
    """The first pipeline stage: what a device computes for a micro-batch, and what its
    links carry meanwhile.
    """

    layers: int
    parameters: float  # that a device owns, updated in `tiles`
    layer: _Unit
    embedding: _Unit
    head: _Unit
    forward_s: float  # passes of a layer
    backward_s: float
    head_forward_s: float
    head_backward_s: float
    checkpoint_s: float  # a layer's checkpoint to the device

    @property
    def tiles(self):
        return self.layers + 2  # embedding and head

    @property
    def computed_s(self):
        """Passes of a micro-batch that waits for nothing."""
        return self.layers * (self.forward_s + self.backward_s) + (
            self.head_forward_s + self.head_backward_s
        )

    @property
    def start_s(self):
        """Until the passes of a micro-batch begin to compute, forward and backward."""
        layer = self.layer
        head = self.head
        # the end's weights are read, and copied beside the read of the first layer's
        forward_s, backward_s = (
            end.read_s + np.maximum(end.load_s, layer.read_s) + layer.load_s
            for end in (self.embedding, head)
        )
        # the first layer of the backward pass has the head's own to come
        hidden_s = backward_s + self.checkpoint_s - self.head_backward_s
        return forward_s + np.maximum(hidden_s, head.read_s + head.load_s)

    @property
    def backward_link_s(self):
        """A layer's slowest link in the backward pass, where a drive reads and writes."""
        layer = self.layer
        drive_s = np.where(layer.read_s > 0, layer.read_s + layer.drive_s, 0.0)
        return np.maximum(layer.load_s + self.checkpoint_s, drive_s)

    @property
    def wait_s(self):
        """Waits of a micro-batch's passes: each layer for its slowest link, as a link
        is a unit ahead of the next.
        """
        link_s = np.maximum(self.layer.load_s, self.layer.read_s)
        forward_s = np.maximum(link_s - self.forward_s, 0.0)
        backward_s = np.maximum(self.backward_link_s - self.backward_s, 0.0)
        head_s = np.maximum(self.head.load_s - self.forward_s, 0.0)
        embedding_s = np.maximum(self.embedding.load_s - self.backward_s, 0.0)
        return (self.layers - 1) * (forward_s + backward_s) + head_s + embedding_s

    def tail_s(self, batches):
        """Gradients after the last pass: the last ones, or the queue since some
        micro-batch of `batches` began.
        """
        embedding = self.embedding
        layer_s = np.maximum(self.backward_link_s, self.backward_s)
        batch_s = self.computed_s + self.start_s + self.wait_s
        passed_s = embedding.copy_s + embedding.sum_s + embedding.drive_s
        last_s = self.layer.copy_s + passed_s
        whole_s = self.layers * self.layer.drain_s + embedding.drain_s
        since_first_s = whole_s - (self.layers - 1) * layer_s
        since_head_s = self.head.drain_s + whole_s - self.layers * layer_s
        # the queue grows by what a micro-batch drains longer than it takes
        queue_s = since_head_s + (batches - 1) * (self.head.drain_s + whole_s - batch_s)
        return np.maximum.reduce([last_s, since_first_s, since_head_s, queue_s])


def _first_stage(case, pieces, offloaded):
    model = case.model
    plan = case.plan
    passes_s = map(float, (*pieces.layer.passes_s, *pieces.head.passes_s))
    kinds = held_layers(model, plan)
    count = stage_parameters(model, plan, np.arange(plan.pp), kinds)
    layers = sum(kinds.values())
    sharing = plan.sharing if plan.zero else 1
    parameters = owned(count.dense[0], np.ravel(count.experts)[0], sharing, plan.ep)
    embedding = model.embedding_parameters / plan.tp / sharing
    head = count.ends[0] / sharing - embedding
    summed = offloaded.micro_batches > 1 and streams_gradients(plan)
    sizes = ((parameters - embedding - head) / layers[0], embedding, head)
    units = [_unit(size, offloaded, summed) for size in sizes]
    checkpoint_s = offloaded.checkpoint_bytes / offloaded.rates.link
    return _Stage(int(layers[0]), parameters, *units, *passes_s, checkpoint_s)


def _unit(parameters, offloaded, summed):
    """Seconds of so many parameters. summed: the host adds up the gradients of
    micro-batches.
    """
    rate = offloaded.rates
    drives = offloaded.drives
    split = offloaded.split
    weights_bytes = _WIDTH * split.weights * parameters
    count = split.states * parameters
    copy_s = _WIDTH * count / rate.link
    return _Unit(
        read_s=weights_bytes / rate.nvme_read if drives else 0 * weights_bytes,
        load_s=weights_bytes / rate.link,
        copy_s=copy_s,
        sum_s=ACCUMULATE_BYTES * count / rate.adam * summed,
        drive_s=(1 + summed) * _WIDTH * count / rate.nvme_write
        if drives
        else 0 * copy_s,
    )


def _update(stage, offloaded):
    """Seconds of the host's update, with drives beside it, and of the copies that
    return.
    """
    method = offloaded.method
    rate = offloaded.rates
    count = offloaded.split.states * stage.parameters
    adam_s = rate.adam_s(count)
    copy_s = _WIDTH * stage.parameters * offloaded.returned / rate.link
    if not offloaded.drives:
        return adam_s, copy_s
    read_s = (method.optimizer + method.gradients) * count / rate.nvme_read
    write_s = (
        (method.optimizer + _WIDTH * offloaded.split.weights) * count / rate.nvme_write
    )
    return _tiled_s(adam_s, read_s + write_s, stage.tiles), copy_s


def offload_row(
    case: Case, parameters: Parameters, policy: Policy | None, seconds_of: Callable
) -> dict[str, float]:
    """Seconds of one plan by column, with offload_s and offload_share.

    seconds_of: seconds of a case by column, as if everything fitted.
    """
    check_plan(case)
    case = normalised(case)
    row = seconds_of(case)
    factor = row["high_s"] / row["step_s"]
    _, times = best_offload(case, parameters, policy)
    row["optimizer_s"] = float(times.update_s[0])
    row["offload_s"] = float(times.total_s[0]) - row["optimizer_s"]
    row["step_s"] = sum(row[name] for name in (*PARTS, "offload_s"))
    row["low_s"] = row["step_s"] / factor
    row["high_s"] = row["step_s"] * factor
    return row | {"offload_share": float(times.share[0])}
