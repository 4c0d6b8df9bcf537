"""How long does a training step take? One physical closed form for arrays of models, plans and machines.

`pieces` turns steps (`work`) into the seconds of one layer, the head and the collectives; `step_time` adds them up
along the pipeline: micro-batches x slowest stage + (pp - 1) / interleave x mean stage [Narayanan et al. 2021], then
gradient traffic, optimizer and host work.
"""

from __future__ import annotations

import numpy as np

from madmax_lib.simulator.collectives import all_gather_s, all_reduce_s, all_to_all_s, send_s, shared_bandwidth
from madmax_lib.simulator.compute import attention_flops, gemm_s, longer_of, optimizer_bytes, unfused_attention_s
from madmax_lib.simulator.parameters import Parameters
from madmax_lib.simulator.work import Work

__all__ = ["PARTS", "pieces", "step_time"]

_TENSORS = 12  # of a transformer layer: weights and biases of four products and two norms
PARTS = ("gemm_s", "attention_s", "pointwise_s", "head_s", "launch_s", "tp_s", "cp_s", "ep_s", "fsdp_s", "bubble_s",
         "pp_s", "dp_s", "optimizer_s", "overhead_s")  # fmt: skip


def step_time(work: Work, parameters: Parameters) -> dict[str, np.ndarray]:
    """Seconds of a step and of its parts (`PARTS`), each (n,); step_s is their sum.

    Parts up to fsdp_s are those of the slowest pipeline stage over all micro-batches; fsdp_s, tp_s, cp_s and dp_s count
    only what is exposed.
    """
    w, piece = work, pieces(work, parameters)
    layers, heads = _slowest_stage(w, piece)
    inner = ("gemm_s", "attention_s", "pointwise_s", "launch_s", "tp_s", "cp_s", "ep_s", "fsdp_s")
    parts = {name: w.micro_batches * layers * piece[name] for name in inner}
    parts["head_s"] = w.micro_batches * heads * piece["head_s"]
    mean_stage_s = (w.layers * piece["layer_s"] + piece["head_s"]) / w.pp
    parts["bubble_s"] = (w.pp - 1) / w.interleave * mean_stage_s
    parts["pp_s"] = np.where(w.pp > 1, 2 * piece["send_s"] * (w.micro_batches * w.interleave + w.pp - 1), 0.0)
    parts["dp_s"], parts["optimizer_s"] = piece["dp_s"], piece["optimizer_s"]
    parts["overhead_s"] = parameters.constants["step_s"]
    parts["step_s"] = sum(parts[name] for name in PARTS)
    return {name: np.broadcast_to(parts[name], w.size) for name in (*PARTS, "step_s")}


def pieces(work: Work, parameters: Parameters) -> dict[str, np.ndarray]:
    """Seconds of one layer and micro-batch by cause (forward and backward together), of the head and of a step's end.

    layer_s is the whole layer; forward_s and backward_s are its halves without FSDP traffic.
    """
    w, p = work, parameters
    rates = _rates(w, p)
    tokens = w.micro_batch * w.sequence / w.cp
    forward, backward = _layer(w, p, tokens, rates)
    forward_s, backward_s = sum(forward.values()), sum(backward.values())
    launch_s = w.constant("launch_s", p) + _mixture_share(w) * w.constant("moe_launch_s", p)
    floor_s, back_floor_s = longer_of(forward_s, launch_s), longer_of(backward_s, launch_s * (2 + w.recompute_gemm))
    result = {name: forward[name] + backward[name] for name in forward}
    result["launch_s"] = floor_s + back_floor_s - forward_s - backward_s
    gather_s = _gather_s(w, p, rates)
    back_s = np.where(w.zero >= 3, gather_s, 0.0) + w.trained * gather_s * 2 / w.gather_bytes
    result["layer_s"] = _overlapped(w, floor_s, gather_s, p) + _overlapped(w, back_floor_s, back_s, p)
    result["fsdp_s"] = result["layer_s"] - floor_s - back_floor_s
    result["forward_s"], result["backward_s"] = floor_s, back_floor_s
    result["head_s"] = _head_s(w, p, tokens, rates)
    sent_bytes = 2 * tokens * w.hidden / w.tp  # each tensor rank sends its part, gathered on arrival [arXiv 2104.04473]
    nearby = w.tp * w.cp * w.dp * w.pp <= w.domain
    result["send_s"] = send_s(sent_bytes, np.where(nearby, rates["link"], rates["nic"]), p.constants["collective_s"])
    result["dp_s"] = _gradients_s(w, p, rates)
    update_s = optimizer_bytes(_owned(w)) / rates["memory"] * p.constants["optimizer_factor"]
    result["optimizer_s"] = w.trained * update_s
    return result


def _rates(w: Work, p: Parameters) -> dict[str, np.ndarray]:
    """Achieved FLOP/s and bytes/s."""
    compute = p.compute_efficiency * w.constant("device_rate", p)
    product = compute * np.where(w.legacy > 0, p.constants["legacy_software"], 1.0)
    scaling = np.where(w.mx > 0, p.constants["quantise_mx"], 1.0)
    scaling = scaling * np.where(w.rowwise > 0, p.constants["quantise_rowwise"], 1.0)
    families, code = w.codes["family"]
    head = np.array([p.constants[f"gemm_efficiency:{family}-16"] for family in families])[code]
    return {
        "gemm": w.peak_gemm * product * w.constant("gemm_efficiency", p) / scaling,
        "head": w.peak_16 * product * head,
        "attention": w.peak_16 * compute * w.constant("attention_efficiency", p),
        "scores": w.peak_16 * compute * p.constants["unfused_efficiency"],
        "memory": w.memory * p.memory_efficiency,
        "link": w.link * p.network_efficiency * w.constant("nvlink_share", p),
        "nic": w.nic * p.network_efficiency * w.constant("network_share", p),
    }


def _layer(w: Work, p: Parameters, tokens, rates) -> tuple[dict, dict]:
    """Seconds of the mean layer by cause, forward and backward, before host time and FSDP traffic."""
    gemm, attention, pointwise = _products_s(w, p, tokens, rates), _attention_s(w, p, tokens, rates), _pointwise_s(
        w, p, tokens, rates)  # fmt: skip
    attention_back = attention * np.where(w.unfused > 0, 2.0, 2.5)
    ring_s = _latency(w.tp, p) + all_reduce_s(2 * tokens * w.hidden, w.tp, _bandwidth(w, rates, w.tp, 1))
    ring_s = np.where(w.tp > 1, ring_s * np.where(w.overlap_tp > 0, p.constants["tp_exposed"], 1.0), 0.0)
    exchange_s = _exchange_s(w, p, tokens, rates)
    keys_s = _latency(w.cp, p) + 4 * tokens * w.kv_width / w.tp * (w.cp - 1) / _ring_hop(w, rates)
    keys_s = np.where(w.cp > 1, keys_s, 0.0)
    repeated = w.recompute_gemm
    forward = {"gemm_s": gemm, "attention_s": attention, "pointwise_s": pointwise, "tp_s": 2 * ring_s,
               "cp_s": longer_of(attention, keys_s) - attention, "ep_s": 2 * exchange_s}  # fmt: skip
    accumulate_s = w.trained * w.constant("weight_bytes", p) * _layer_weights(w) / w.tp / rates["memory"]
    backward = {
        "gemm_s": gemm * (1 + w.trained + repeated) + accumulate_s,
        "attention_s": attention_back + w.recompute_attention * attention,
        "pointwise_s": pointwise * (2 + repeated),
        "tp_s": (2 + 2 * w.recompute_tp) * ring_s,
        "cp_s": longer_of(attention_back, 2 * keys_s) - attention_back,
        "ep_s": (2 + 2 * repeated) * exchange_s,
    }
    return forward, backward


def _products_s(w: Work, p: Parameters, tokens, rates):
    """Matrix products of a layer without attention scores: dense share and expert share, 16-bit operands in memory."""
    matrices = 2 + w.gated
    q_width = w.core_width
    mixture = _mixture_share(w)
    weights = w.attention_weights + (1 - mixture) * matrices * w.hidden * w.ffn
    inputs = tokens * (3 * w.hidden + (2 * q_width + 2 * w.kv_width) / w.tp)
    inner = (1 - mixture) * tokens * (2 * w.hidden + matrices * w.ffn / w.tp)
    traffic = 2 * (inputs + inner + weights / w.tp) * p.constants["gemm_bytes"]
    dense_s = gemm_s(2 * tokens * weights / w.tp, traffic, rates["gemm"], rates["memory"])
    if not np.any(w.experts):
        return dense_s
    used = w.active_experts + w.shared_experts
    expert = matrices * w.hidden * w.expert_ffn
    held = (w.experts / w.ep + w.shared_experts) * expert / w.tp
    moved = tokens * used * (2 * w.hidden + matrices * w.expert_ffn) / w.tp
    traffic = 2 * (held + moved) * p.constants["gemm_bytes"]
    flops = 2 * tokens * (used * expert / w.tp + w.hidden * w.experts) * p.constants["imbalance"]
    return dense_s + mixture * gemm_s(flops, traffic, rates["gemm"] * p.constants["moe_gemm"], rates["memory"])


def _attention_s(w: Work, p: Parameters, tokens, rates):
    """Scores, softmax and weighted values of a layer, forward."""
    width = w.core_width / w.tp
    whole = attention_flops(tokens, w.sequence, width, causal=w.causal > 0)
    near = attention_flops(tokens, w.sequence, width, causal=w.causal > 0, window=w.window)
    fused_s = (whole + w.windowed_share * (near - whole)) / rates["attention"]
    if not np.any(w.unfused):
        return fused_s
    unfused_s = unfused_attention_s(tokens, w.sequence, w.heads / w.tp, w.head_dim, rates["scores"], rates["memory"],
                                    p.constants["softmax_factor"])  # fmt: skip
    return np.where(w.unfused > 0, unfused_s, fused_s)


def _pointwise_s(w: Work, p: Parameters, tokens, rates):
    """Norms, residuals and activations of a layer, forward; experts add routing and permutation."""
    mixture, spread = _mixture_share(w), np.where(w.sequence_parallel > 0, w.tp, 1)
    inner = 4 * w.ffn * (1 + 0.5 * w.gated) * (1 - mixture) + 4 * w.hidden
    dense = w.constant("pointwise_factor", p) * tokens * (12 * w.hidden / spread + inner / w.tp)
    used = w.active_experts * (8 * w.hidden + 4 * w.expert_ffn * (1 + 0.5 * w.gated)) / w.tp
    return (dense + mixture * w.constant("moe_pointwise", p) * tokens * used) / rates["memory"]


def _head_s(w: Work, p: Parameters, tokens, rates):
    """Logits and loss, forward and backward, in 16 bit; 16 bytes of traffic per logit (fp32 loss, 16-bit gradient)."""
    logits = tokens * w.vocab / w.tp
    traffic = 16 * logits * w.constant("pointwise_factor", p)
    return gemm_s((2 + w.trained) * 2 * logits * w.hidden, traffic, rates["head"], rates["memory"])


def _exchange_s(w: Work, p: Parameters, tokens, rates):
    """All-to-all of the tokens of a mixture layer, once, 16 bit."""
    if not np.any(w.ep > 1):
        return np.zeros(1)
    share = p.constants["all_to_all_share"]
    inside = np.maximum(np.floor(w.domain / w.tp), 1)
    copies = np.where(w.send_once > 0, w.ep * (1 - (1 - 1 / w.ep) ** w.active_experts), w.active_experts)
    size = 2 * tokens * copies * w.hidden / w.tp * p.constants["imbalance"]
    time = all_to_all_s(size, w.ep, inside, share * rates["link"], share * rates["nic"], p.constants["collective_s"])
    return np.where(w.ep > 1, time * _mixture_share(w), 0.0)


def _gather_s(w: Work, p: Parameters, rates):
    """All-gather of one layer's weights over the devices that share them (FSDP), 0 otherwise."""
    sharded = (w.zero >= 2) & (w.shard > 1)
    size = w.gather_bytes * _layer_weights(w) / w.tp
    share = np.where(w.tensorwise > 0, p.constants["tensorwise_share"], 1.0)
    calls = np.where(w.tensorwise > 0, _TENSORS, 1)
    time = all_gather_s(size, w.shard, share * _bandwidth(w, rates, w.shard, w.tp)) + calls * _latency(w.shard, p)
    return np.where(sharded, time, 0.0)


def _gradients_s(w: Work, p: Parameters, rates):
    """Gradient traffic at the end of a step that stays visible; FSDP has reduced within its shard already."""
    held = (w.layers * _layer_weights(w) / w.tp + _ends(w) / w.tp) / w.pp
    sharded = (w.zero >= 2) & (w.shard > 1)
    replicas = np.where(sharded, w.dp * w.cp / w.shard, w.dp * w.cp)
    stride = np.where(sharded, w.tp * w.shard, w.tp)
    size = w.gradient_wire_bytes / 2 * held / np.where(sharded, w.shard, 1)
    time = all_reduce_s(size, replicas, _bandwidth(w, rates, replicas, stride)) + _latency(replicas, p)
    visible = np.where(w.overlap_dp > 0, p.constants["dp_exposed"], 1.0)
    return np.where(replicas > 1, w.trained * visible * time, 0.0)


def _slowest_stage(w: Work, piece) -> tuple[np.ndarray, np.ndarray]:
    """Layers and heads (0 or 1) of the slowest pipeline stage.

    A remainder of layers makes the last stage shorter, which has the head; with ends_as_layers embedding and head count
    as a layer each where that divides evenly [DeepSpeed PipelineModule].
    """
    even = np.where((w.ends_as_layers > 0) & ((w.layers + 2) % w.pp == 0), (w.layers + 2) / w.pp, np.nan)
    full = np.ceil(w.layers / w.pp)
    middle = np.where(np.isnan(even), full, even)
    last = np.where(np.isnan(even), np.maximum(w.layers - (w.pp - 1) * full, 0), even - 1)
    last = np.where(w.pp == 1, w.layers, last)
    head_last = (last * piece["layer_s"] + piece["head_s"] > middle * piece["layer_s"]) | (w.pp == 1)
    return np.where(head_last, last, middle), head_last.astype(float)


def _mixture_share(w: Work):
    return np.where(w.experts > 0, 1 - w.dense_layers / w.layers, 0.0)


def _layer_weights(w: Work):
    """Weights of the mean layer that data parallelism shares: experts are split over ep."""
    mixture, matrices = _mixture_share(w), 2 + w.gated
    experts = (w.experts / w.ep + w.shared_experts) * matrices * w.hidden * w.expert_ffn
    return w.attention_weights + (1 - mixture) * matrices * w.hidden * w.ffn + mixture * experts


def _ends(w: Work):
    return 2 * w.vocab * w.hidden


def _owned(w: Work):
    """Weights whose optimizer state a device holds."""
    held = (w.layers * _layer_weights(w) + _ends(w)) / (w.tp * w.pp)
    return held / np.where(w.zero >= 2, w.shard, np.where(w.zero >= 1, w.dp * w.cp, 1))


def _bandwidth(w: Work, rates, ranks, stride):
    return shared_bandwidth(ranks, stride, w.domain, rates["link"], rates["nic"])


def _ring_hop(w: Work, rates):
    """Bandwidth of a neighbour exchange of the context-parallel ring: one port where it leaves the fast link."""
    return np.where(w.cp * w.tp <= w.domain, rates["link"], np.minimum(rates["nic"], rates["link"]))


def _latency(ranks, p: Parameters):
    return np.where(ranks > 1, p.constants["collective_s"] + (ranks - 1) * p.constants["hop_s"], 0.0)


def _overlapped(w: Work, busy_s, comm_s, p: Parameters):
    """Compute and communication at the same time slow each other down; gathers tensor by tensor do not overlap."""
    shorter = np.minimum(busy_s, comm_s)
    together = longer_of(busy_s, comm_s) + p.constants["contention"] * shorter
    return np.where(w.tensorwise > 0, busy_s + comm_s, together)
