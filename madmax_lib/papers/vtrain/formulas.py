"""Operator times from first principles, beside those that vTrain profiles.

Roofline formulas, attention's scores in memory as in Megatron until 2022, give the five
constants of `vtrain.fit` for a GPT on a device; the order of the operators and their
collectives stay vTrain's. Five numbers are fitted to the times of whole steps, so
shapes that were left out can be predicted, and models that nobody has profiled.
"""

from dataclasses import dataclass

import numpy as np

from madmax_lib.catalog import Device, device
from madmax_lib.papers.vtrain.config import (
    Config,
    Nccl,
    Sizes,
    VTrainRules,
    parse_rules,
    tensor_s,
)
from madmax_lib.papers.vtrain.fit import network_s, terms
from madmax_lib.papers.vtrain.graph import Operators
from madmax_lib.simulator.rates.compute import SCORE_BYTES, misfit, optimizer_bytes

# per logit, forward and backward: 16-bit logits and gradient, fp32 copies of both in
# the loss
_LOGIT_BYTES = 32


@dataclass(frozen=True)
class Formulas:
    """Numbers that the operator formulas leave open; the defaults are fitted to
    vTrain's single-node table (A100).

    >>> Formulas(gemm_efficiency=0.8).traffic
    4.2
    """

    gemm_efficiency: float = 0.9  # of the 16-bit peak
    traffic: float = 4.2  # of layer norms, dropout and activations, over one fused pass
    # seconds of a layer's kernels, forward and backward, however small they are
    floor_s: float = 3.2e-3
    update_traffic: float = 1.6  # over 30 bytes per parameter
    # FLOPs of logits whose vocabulary is no multiple of 8, over those of aligned ones
    unaligned: float = 3.1


def operator_s(shape: Sizes, heads, formulas: Formulas, machine: Device) -> np.ndarray:
    """Seconds (n, 5) of a layer, the embedding, logits with loss, the update of a layer
    and of the embedding.
    """
    f = formulas
    memory = machine.memory_bandwidth_bytes_per_s
    rate = machine.peak("fp16") * f.gemm_efficiency
    h = np.asarray(shape.hidden, dtype=float)
    tp = np.asarray(shape.tp)
    tokens = shape.micro_batch * shape.sequence
    vocabulary = shape.vocab // tp
    # products: 2 FLOPs for each of 12 h^2/t weights and token; 16-bit operands
    weights = 12 * h * h / tp
    operands = 2 * (tokens * (6 * h + 10 * h / tp) + weights)
    products = 2 * tokens * weights / rate + operands / memory
    # scores: 4 b s^2 h / t FLOPs, which reach 0.4 of the rate of large products, and
    # b s^2 a / t scores, which unfused attention writes and reads
    squares = tokens * shape.sequence / tp
    score_flops = 4 * squares * h * misfit(h / heads)
    score_bytes = f.traffic / 2 * SCORE_BYTES * squares * heads
    scores = score_flops / (0.4 * rate) + score_bytes / memory
    pointwise = f.traffic * tokens * (12 * h + 20 * h / tp) / memory
    # forward and backward: 3 x forward
    layer = _longer_of(3 * (products + scores + pointwise), f.floor_s)
    flops = 6 * tokens * vocabulary * h * np.where(vocabulary % 8 > 0, f.unaligned, 1.0)
    output = flops / rate + _LOGIT_BYTES * tokens * vocabulary / memory
    embedding = (f.traffic * 12 * tokens * h + 4 * vocabulary * h) / memory
    embedding_weights = (vocabulary + shape.sequence) * h
    # a layer has six times the kernels of an embedding and 3/2 of those of the output
    columns = np.broadcast_arrays(
        layer,
        embedding + f.floor_s / 6,
        _longer_of(output, f.floor_s * 2 / 3),
        f.update_traffic * optimizer_bytes(weights) / memory,
        f.update_traffic * optimizer_bytes(embedding_weights) / memory,
    )
    return np.stack(columns, axis=-1)


def _longer_of(first_s, second_s):
    """Duration of two things that overlap, smooth where they are alike: their norm of
    order 6.
    """
    # (a^6 + b^6)^(1/6), the longer one taken out so that nothing overflows
    longest = np.maximum(first_s, second_s)
    shortest = np.minimum(first_s, second_s)
    return longest * (1 + (shortest / longest) ** 6) ** (1 / 6)


def formula_operators(config: Config) -> Operators:
    """Operator times of a configuration; a backward pass takes twice a forward pass."""
    machine = device(config.gpu_name)
    totals_s = operator_s(config.shape, config.num_attention_heads, Formulas(), machine)
    return Operators.of_totals(*totals_s.tolist())


def step_s(
    shape: Sizes,
    times_s: np.ndarray,
    nccl: Nccl,
    rules: str | VTrainRules = "corrected",
) -> np.ndarray:
    """Seconds of steps (n,) from operator times (n, 5) in closed form, for recompute
    "all" and "none".

    A recomputed forward pass waits for the gradient, so it makes the backward pass
    longer by a third of the layer and two all-reduces. Raises ValueError for recompute
    "not last", which only the graph knows.
    """
    rules = parse_rules(rules)
    if rules.recompute == "not last":
        raise ValueError("recompute='not last' has no closed form; use iteration_s")
    columns = terms(shape)
    result = network_s(shape, nccl, rules) + (columns * times_s).sum(axis=-1)
    if rules.recompute == "none":
        return result
    # column 0 counts the layers: l/3 + 2A is a forward pass
    repeated_s = times_s[..., 0] / 3 + 2 * tensor_s(shape, nccl, rules)
    return result + columns[..., 0] * repeated_s
