"""How long does a training step take? One physical closed form for arrays of models, plans and machines.

`layer_seconds` turns steps (`work`) into the seconds of one layer, the head and the collectives; `step_time` adds them
up along the pipeline: micro-batches x slowest stage + (pp - 1) / interleave x mean stage [Narayanan et al. 2021], then
gradient traffic, optimizer and host work.
"""

from __future__ import annotations

import numpy as np

from madmax_lib.plans import owned
from madmax_lib.simulator.rates.collectives import send_s
from madmax_lib.simulator.rates.compute import attention_flops, gemm_s, longer_of, optimizer_bytes, unfused_attention_s
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step import traffic
from madmax_lib.simulator.step.inputs import Work

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "PARTS",
    "achieved_rates",
    "head_passes",
    "layer_passes",
    "layer_seconds",
    "step_time",
]

PARTS = ("gemm_s", "attention_s", "pointwise_s", "head_s", "launch_s", "tp_s", "cp_s", "ep_s", "fsdp_s", "bubble_s",
         "pp_s", "dp_s", "optimizer_s", "overhead_s")  # fmt: skip
COMPUTE = ("gemm_s", "attention_s", "pointwise_s", "head_s", "optimizer_s")  # of these, the device at work
COMMUNICATION = ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "pp_s")  # as far as it shows


def step_time(work: Work, parameters: Parameters) -> dict[str, np.ndarray]:
    """Seconds of a step and of its parts (`PARTS`), each of the shape of work; step_s is their sum.

    Constants of shape (p, 1) are p machines for the same steps, (n,) of them: the results are (p, n).
    Parts up to fsdp_s are those of the slowest pipeline stage over all micro-batches; fsdp_s, tp_s, cp_s and dp_s count
    only what is exposed.
    """
    w, piece = work, layer_seconds(work, parameters)
    layers, heads = _slowest_stage(w, piece)
    inner = ("gemm_s", "attention_s", "pointwise_s", "launch_s", "tp_s", "cp_s", "ep_s", "fsdp_s")
    parts = {name: w.micro_batches * layers * piece[name] for name in inner}
    parts["head_s"] = w.micro_batches * heads * piece["head_s"]
    waits_s = piece["layer_s"] - np.where(w.zero_bubble > 0, 2 * piece["weight_s"], 0.0)
    parts["bubble_s"] = (w.pp - 1) / w.interleave * (w.layers * waits_s + piece["head_s"]) / w.pp
    parts["pp_s"] = np.where(w.pp > 1, piece["send_s"] * _sends_that_show(w), 0.0)
    parts["dp_s"], parts["optimizer_s"] = piece["dp_s"], piece["optimizer_s"]
    parts["overhead_s"] = parameters.constants["step_s"]
    parts["step_s"] = sum(parts[name] for name in PARTS)
    shape = np.broadcast_shapes(np.shape(parts["step_s"]), w.shape)
    narrow = {name: np.broadcast_to(part, shape) for name, part in parts.items() if np.shape(part) != shape}
    return {name: (parts | narrow)[name] for name in (*PARTS, "step_s")}


def layer_seconds(work: Work, parameters: Parameters) -> dict[str, np.ndarray]:
    """Seconds of one layer and micro-batch by cause (forward and backward together), of the head and of a step's end.

    layer_s is the whole layer; weight_s its gradients of weights, which zero-bubble schedules compute in the bubble:
    what is left of it is forward + backward of inputs - gradients of weights per stage [arXiv 2401.10241].
    """
    w, p = work, parameters
    rates = achieved_rates(w, p)
    tokens = w.micro_batch * w.sequence / w.cp
    forward, backward = layer_passes(w, p, rates)
    result = {name: forward[name] + backward[name] for name in forward}
    result["layer_s"] = sum(result.values())
    result["weight_s"] = (backward["gemm_s"] - w.recompute_gemm * forward["gemm_s"]) / 2
    result["head_s"] = sum(head_passes(w, p, rates))
    sent_bytes = 2 * tokens * w.hidden / w.tp  # each tensor rank sends its part, gathered on arrival [arXiv 2104.04473]
    nearby = w.tp * w.cp * w.dp * w.pp <= w.domain
    result["send_s"] = send_s(sent_bytes, np.where(nearby, rates["link"], rates["nic"]), p.constants["collective_s"])
    stage_passes_s = [sum(part.values()) * w.layers / w.pp for part in (forward, backward)]
    result["dp_s"] = traffic.gradients_s(w, p, rates, stage_passes_s)
    update_s = optimizer_bytes(_owned(w)) / rates["memory"] * p.constants["optimizer_factor"]
    result["optimizer_s"] = w.trained * update_s
    return result


def layer_passes(w: Work, p: Parameters, rates: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """Seconds of the mean layer and one micro-batch by cause, each (n,): (forward, backward with recompute).

    launch_s is what kernel launches add; fsdp_s what gathers and reductions of weights do beside the pass.
    """
    passes = _layer(w, p, w.micro_batch * w.sequence / w.cp, rates)
    launch_s = w.constant("launch_s", p) + w.mixture_share * w.constant("moe_launch_s", p)
    for causes, launches, data in zip(passes, (1, 2 + w.recompute_gemm), traffic.data_s(w, p, rates), strict=True):
        busy_s = sum(causes.values())
        floor_s = longer_of(busy_s, launch_s * launches)
        causes["launch_s"] = floor_s - busy_s
        causes["fsdp_s"] = _overlapped(w, floor_s, *data, p) - floor_s
    return passes


def achieved_rates(w: Work, p: Parameters) -> dict[str, np.ndarray]:
    """Achieved FLOP/s and bytes/s."""
    compute = p.compute_efficiency * w.constant("device_rate", p)
    product = compute * np.where(w.legacy > 0, p.constants["legacy_software"], 1.0)
    scaling = np.where(w.mx > 0, p.constants["quantise_mx"], 1.0)
    scaling = scaling * np.where(w.rowwise > 0, p.constants["quantise_rowwise"], 1.0)
    return {
        "gemm": w.peak_gemm * product * w.constant("gemm_efficiency", p) / scaling,
        "head": w.peak_16 * product * w.of_class("family", "gemm_efficiency:{}-16", p),
        "attention": w.peak_16 * compute * w.constant("attention_efficiency", p),
        "scores": w.peak_16 * compute * p.constants["unfused_efficiency"],
        "memory": w.memory * p.memory_efficiency,
        "link": w.link * p.network_efficiency * w.constant("nvlink_share", p),
        "nic": w.nic * p.network_efficiency * w.constant("network_share", p),
    }


def _layer(w: Work, p: Parameters, tokens, rates) -> tuple[dict, dict]:
    """Seconds of the mean layer by cause, forward and backward, before host time and FSDP traffic."""
    gemm = _products_s(w, p, tokens, rates)
    attention = _attention_s(w, p, tokens, rates)
    pointwise = _pointwise_s(w, p, tokens, rates)
    attention_back = attention * np.where(w.unfused > 0, 2.0, 2.5)
    ring_s, exchange_s = traffic.tensor_s(w, p, tokens, rates), traffic.exchange_s(w, p, tokens, rates)
    keys_s, gradients_s = traffic.ring_s(w, p, tokens, rates)
    heads_s = traffic.to_heads_s(w, p, tokens, rates)
    repeated = w.recompute_gemm
    forward = {
        "gemm_s": gemm,
        "attention_s": attention,
        "pointwise_s": pointwise,
        "tp_s": 2 * ring_s,
        "cp_s": longer_of(attention, keys_s) - attention + heads_s,
        "ep_s": 2 * exchange_s,
    }
    accumulate_s = w.trained * w.constant("weight_bytes", p) * w.layer_weights / w.tp / rates["memory"]
    backward = {
        "gemm_s": gemm * (1 + w.trained + repeated) + accumulate_s,
        "attention_s": attention_back + w.recompute_attention * attention,
        "pointwise_s": pointwise * (2 + repeated),
        "tp_s": (2 + 2 * w.recompute_tp) * ring_s,
        "cp_s": longer_of(attention_back, keys_s + gradients_s) - attention_back + (1 + repeated) * heads_s,
        "ep_s": (2 + 2 * repeated) * exchange_s,
    }
    return forward, backward


def _products_s(w: Work, p: Parameters, tokens, rates):
    """Matrix products of a layer without attention scores: dense share and expert share, 16-bit operands in memory."""
    matrices = 2 + w.gated
    q_width = w.core_width
    mixture = w.mixture_share
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
    heads, scores, memory = w.heads / w.tp, rates["scores"], rates["memory"]
    factor = p.constants["softmax_factor"]
    unfused_s = unfused_attention_s(tokens, w.sequence, heads, w.head_dim, scores, memory, factor)
    return np.where(w.unfused > 0, unfused_s, fused_s)


def _pointwise_s(w: Work, p: Parameters, tokens, rates):
    """Norms, residuals and activations of a layer, forward; experts add routing and permutation."""
    mixture, spread = w.mixture_share, np.where(w.sequence_parallel > 0, w.tp, 1)
    inner = 4 * w.ffn * (1 + 0.5 * w.gated) * (1 - mixture) + 4 * w.hidden
    dense = w.constant("pointwise_factor", p) * tokens * (12 * w.hidden / spread + inner / w.tp)
    used = w.active_experts * (8 * w.hidden + 4 * w.expert_ffn * (1 + 0.5 * w.gated)) / w.tp
    return (dense + mixture * w.constant("moe_pointwise", p) * tokens * used) / rates["memory"]


def head_passes(w: Work, p: Parameters, rates: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of logits and loss in 16 bit: (forward, backward).

    16 bytes of traffic per logit (fp32 loss, 16-bit gradient), shared out like the products.
    """
    logits = w.micro_batch * w.sequence / w.cp * w.vocab / w.tp
    traffic = 16 * logits * w.constant("pointwise_factor", p)
    whole = gemm_s((2 + w.trained) * 2 * logits * w.hidden, traffic, rates["head"], rates["memory"])
    return whole / (2 + w.trained), whole * (1 + w.trained) / (2 + w.trained)


def _sends_that_show(w: Work):
    """Messages on the longest path of a pipeline of equal stages whose sends run beside compute.

    1F1B: forward and backward of a round of pp micro-batches wait pp - 1 times each; GPipe and interleaved schedules
    (micro-batches a multiple of pp) wait only while the pipeline fills and drains.
    """
    one_by_one = 2 * (w.pp - 1) * w.micro_batches / w.pp + 2 * (w.pp - 2)
    return np.where((w.interleave > 1) | (w.gpipe > 0), 2 * (w.pp * w.interleave - 1), one_by_one)


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


def _owned(w: Work):
    """Weights whose optimizer state a device of the mean stage owns."""
    replicas = np.where(w.shard > 1, w.shard, w.dp * w.cp)
    sharing = np.where(w.zero >= 2, w.shard, np.where(w.zero >= 1, replicas, 1))
    dense, experts = w.layers * w.dense_weights + w.end_weights, w.layers * w.expert_weights
    return owned(dense, experts, sharing, w.ep) / (w.tp * w.pp)


def _overlapped(w: Work, busy_s, gather_s, reduce_s, p: Parameters):
    """Compute and communication at the same time slow each other down.

    Gathers tensor by tensor hide nothing, gathers without prefetch only their reductions.
    """
    late_s = np.where(w.prefetch > 0, 0.0, gather_s)
    comm_s = gather_s - late_s + reduce_s
    together = late_s + longer_of(busy_s, comm_s) + p.constants["contention"] * np.minimum(busy_s, comm_s)
    return np.where(w.tensorwise > 0, busy_s + gather_s + reduce_s, together)
