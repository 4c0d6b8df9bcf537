"""Which communication of a step shows, and for how long? Tensor, context, expert and data parallelism in closed form.

All of `simulator.rates.collectives` at achieved rates, one step per row of the arrays (`work`).
"""

from __future__ import annotations

import numpy as np

from madmax_lib.simulator.rates.collectives import all_gather_s, all_reduce_s, all_to_all_s, shared_bandwidth
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step.inputs import Work

__all__ = ["copies_sent", "data_s", "exchange_s", "gradients_s", "ring_s", "tensor_s", "to_heads_s"]

_TENSORS = 12  # of a transformer layer: weights and biases of four products and two norms


def data_s(w: Work, p: Parameters, rates: dict[str, np.ndarray]) -> tuple[tuple, tuple]:
    """Seconds of FSDP per layer: (gather, reduction) of the forward and of the backward pass."""
    gather_s = _gather_s(w, p, rates)
    reduce_s = gather_s * w.reduce_bytes / w.gather_bytes
    again_s = np.where(w.zero >= 3, gather_s, 0.0)
    if np.any(w.hpz) or np.any(w.qgz):
        node = np.minimum(np.maximum(np.floor(w.domain / w.tp), 1), w.shard)
        weights = w.layer_weights / w.tp
        near_s = all_gather_s(2 * weights, node, _bandwidth(w, rates, node, w.tp)) + _latency_s(node, p)
        again_s = np.where(w.hpz > 0, near_s, again_s)
        reduce_s = np.where(w.qgz > 0, _quantised_s(w, p, weights / 2, node, rates), reduce_s)
    return (gather_s, 0.0), (again_s, w.trained * reduce_s)


def tensor_s(w: Work, p: Parameters, tokens, rates):
    """What is visible of one reduction of a layer's activations over tp, 16 bit."""
    time = _latency_s(w.tp, p) + all_reduce_s(2 * tokens * w.hidden, w.tp, _bandwidth(w, rates, w.tp, 1))
    return np.where(w.tp > 1, time * np.where(w.overlap_tp > 0, p.constants["tp_exposed"], 1.0), 0.0)


def ring_s(w: Work, p: Parameters, tokens, rates):
    """Ring of context parallelism in 16 bit: (keys and values, their gradients, which come home: one hop more)."""
    one_port = np.minimum(rates["nic"], rates["link"])
    hop = np.where(w.cp * w.tp <= w.domain, rates["link"], one_port)
    time = _latency_s(w.cp, p) + 4 * tokens * w.kv_width / w.tp * (w.cp - 1) / hop
    time = np.where((w.cp > 1) & (w.ulysses == 0), time, 0.0)
    return time, time * w.cp / np.maximum(w.cp - 1, 1)


def exchange_s(w: Work, p: Parameters, tokens, rates):
    """All-to-all of the tokens of a mixture layer, once, 16 bit."""
    if not np.any(w.ep > 1):
        return np.zeros(1)
    share = p.constants["all_to_all_share"]
    inside = np.maximum(np.floor(w.domain / w.tp), 1)
    size = 2 * tokens * copies_sent(w) * w.hidden / w.tp * p.constants["imbalance"]
    time = all_to_all_s(size, w.ep, inside, share * rates["link"], share * rates["nic"], p.constants["collective_s"])
    return np.where(w.ep > 1, time * w.mixture_share, 0.0)


def to_heads_s(w: Work, p: Parameters, tokens, rates):
    """All-to-alls of Ulysses in a forward pass: queries, keys and values to heads, outputs back to tokens, 16 bit."""
    if not np.any(w.ulysses):
        return np.zeros(1)
    inside = np.maximum(np.floor(w.domain / w.tp), 1)
    size = 2 * tokens * (2 * w.core_width + 2 * w.kv_width) / w.tp
    time = all_to_all_s(size, w.cp, inside, rates["link"], rates["nic"], 2 * p.constants["collective_s"])
    return np.where((w.ulysses > 0) & (w.cp > 1), time, 0.0)


def copies_sent(w: Work) -> np.ndarray:
    """Devices that a token is sent to: once to each expert, or once to each device of its experts."""
    return np.where(w.send_once > 0, w.ep * (1 - (1 - 1 / w.ep) ** w.active_experts), w.active_experts)


def _gather_s(w: Work, p: Parameters, rates):
    """All-gather of one layer's weights over the devices that share them (FSDP), 0 otherwise."""
    sharded = (w.zero >= 2) & (w.shard > 1)
    size = w.gather_bytes * w.layer_weights / w.tp
    share = np.where(w.tensorwise > 0, p.constants["tensorwise_share"], 1.0)
    calls = np.where(w.tensorwise > 0, _TENSORS, 1)
    time = all_gather_s(size, w.shard, share * _bandwidth(w, rates, w.shard, w.tp)) + calls * _latency_s(w.shard, p)
    return np.where(sharded, time, 0.0)


def _quantised_s(w: Work, p: Parameters, size_bytes, node, rates):
    """ZeRO++'s exchange of 4-bit gradients: inside the node, then across [arXiv 2306.10209]."""
    call_s, across = p.constants["collective_s"], w.shard / node
    inside_s = all_to_all_s(size_bytes, node, node, rates["link"], rates["nic"], call_s)
    return inside_s + all_to_all_s(size_bytes / node, across, 1, rates["link"], rates["nic"], call_s)


def gradients_s(w: Work, p: Parameters, rates, stage_passes_s):
    """Gradient traffic that stays visible; FSDP has reduced within its shard already.

    Gradients are reduced beside the last backward pass of a stage, weights of ZeRO-1/2 gathered beside its first
    forward pass; what is longer than these shows, and so does the last bucket. stage_passes_s: (forward, backward).
    """
    held = (w.layers * w.layer_weights / w.tp + w.end_weights / w.tp) / w.pp
    sharded = (w.zero >= 2) & (w.shard > 1)
    replicas = np.where(sharded, w.dp * w.cp / w.shard, w.dp * w.cp)
    stride = np.where(sharded, w.tp * w.shard, w.tp)
    size = w.gradient_wire_bytes / 2 * held / np.where(sharded, w.shard, 1)
    time = all_reduce_s(size, replicas, _bandwidth(w, rates, replicas, stride)) + _latency_s(replicas, p)
    last = np.minimum(w.bucket_bytes / np.maximum(w.gradient_bytes * held, 1.0), 1.0)
    visible = np.where(w.overlap_dp > 0, np.maximum(p.constants["dp_exposed"], last), 1.0)
    gather_s = time * w.gathered_bytes / w.gradient_wire_bytes
    reduce_s, (forward_s, backward_s) = time - gather_s, stage_passes_s
    late_s = np.maximum(reduce_s - backward_s, 0.0)
    shown = np.maximum(visible * reduce_s, late_s) + w.reduce_each * (w.micro_batches - 1) * late_s
    shown = shown + np.maximum(np.where(w.late_gather > 0, 1.0, visible) * gather_s, gather_s - forward_s)
    return np.where(replicas > 1, w.trained * shown, 0.0)


def _bandwidth(w: Work, rates, ranks, stride):
    return shared_bandwidth(ranks, stride, w.domain, rates["link"], rates["nic"])


def _latency_s(ranks, p: Parameters):
    return np.where(ranks > 1, p.constants["collective_s"] + (ranks - 1) * p.constants["hop_s"], 0.0)
