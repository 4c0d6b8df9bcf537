"""Does a row agree with itself, and which time does it publish? World size, batch, FLOP counts of the sources."""

from __future__ import annotations

__all__ = ["measured_s", "model_flops", "violation_of"]


def violation_of(row: dict) -> str:
    """What contradicts itself in a row, empty if nothing: world size, batch, experts, layers."""
    world = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    if row["n_gpus"] == row["n_gpus"] and world != row["n_gpus"]:
        return f"dp x tp x pp x cp = {world:g}, but n_gpus = {row['n_gpus']:g}"
    if row["dp"] > row["global_batch"]:
        return f"dp={row['dp']:g} exceeds the global batch of {row['global_batch']:g}"
    if (row["dp"] * row["cp"]) % row["ep"]:
        return f"ep={row['ep']:g} does not divide dp x cp = {row['dp'] * row['cp']:g}"
    if row["experts"] % row["ep"] and row["experts"]:
        return f"ep={row['ep']:g} does not divide {row['experts']:g} experts"
    if row["pp"] * row["interleave"] > row["layers"]:
        return f"pp x vpp = {row['pp'] * row['interleave']:g} exceeds {row['layers']:g} layers"
    return ""


def model_flops(row: dict) -> float:
    """FLOPs of a step as the row's source counts them: 6N + 12 L h s per token, N with head and without embedding.

    Megatron-Bridge halves the attention term (causal); SC'21, BLOOM and MT-NLG count the repeated forward pass (x 4/3).
    """
    used = row["active_experts"] + row["shared_experts"]
    mixture = 1 - row["dense_layers"] / row["layers"] if row["experts"] else 0.0
    width = (1 - mixture) * row["ffn"] + mixture * used * row["expert_ffn"]
    per_layer = row["attention_weights"] + (2 + row["gated"]) * row["hidden"] * width
    weights = row["layers"] * per_layer + row["vocab"] * row["hidden"]
    attention = 12 * row["layers"] * row["core_width"] * row["sequence"]
    source = str(row["source"])
    attention *= 0.5 if "Megatron-Bridge" in source else 1.0
    attention *= 0.0 if row["task"] == "sft" and "NeMo docs" in source else 1.0
    repeated = 4 / 3 if row["counts_recompute"] else 1.0
    factor = 6 if row["trained"] else 4
    return row["global_batch"] * row["sequence"] * repeated * (factor * weights + attention)


def measured_s(row: dict, time_s: float, tokens_per_s: float, flops_per_s: float) -> float:
    """Seconds per step: as published, else from tokens per second, else from the source's FLOP/s; NaN if none is given.

    tokens_per_s and flops_per_s: per device.
    """
    devices = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    if time_s > 0:
        return time_s
    if tokens_per_s > 0:
        return row["global_batch"] * row["sequence"] / (tokens_per_s * devices)
    if flops_per_s > 0:
        return model_flops(row) / (flops_per_s * devices)
    return float("nan")
