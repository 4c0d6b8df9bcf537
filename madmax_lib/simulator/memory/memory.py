"""Does a step fit? Bytes on a device by pipeline stage and component, and their peak.

Model states are in `states`, activations follow arXiv 2205.05198 (`activations`). A
step has three moments that may set the peak: the loss of the last stage (logits), the
backward pass of a layer (what was recomputed, gradients on their way) and the optimizer
(its temporaries); `peak_bytes` takes the largest on top of what is always there.
`stage_bytes` holds the formulas and broadcasts over arrays of plans and stages,
`memory` is its table for one plan, `plans_peak_bytes` the peak of millions of plans.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import is_number, require_type, short_repr
from madmax_lib.catalog import DLRM, Cluster, Device, Model, Software, Transformer
from madmax_lib.catalog.blocks import Blocks
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.columns import take_product
from madmax_lib.plan.rules import RECOMMENDATION, check_plan, enforce
from madmax_lib.simulator.layers.cuts import cuts_of, kinds_of_chunks, plan_of_cut
from madmax_lib.simulator.memory.activations import (
    dropout_bytes,
    in_flight,
    in_flight_of_layouts,
    layer_bytes,
)
from madmax_lib.simulator.memory.states import (
    USUAL_SOFTWARE,
    StageParameters,
    default_software,
    normalised,
    software_of,
    stage_parameters,
    state_bytes,
    width_of,
)

# when a component is there: always, or in the phase that may set the peak
PHASES = pd.read_csv(catalog.data_file("components.csv"), index_col="component")
PHASES = PHASES["phase"].to_dict()
_LOGIT_GRADIENT = 4  # fp32
# The three below are round; with them the 37 published peaks of whole devices (BLOOM,
# torchtitan) have little bias.
# context and kernels of a process, loaded as needed; 1.3e9 all at once [HF, model
# memory]
_CUDA_BYTES = 0.5e9
# per group: 4 MiB (NCCL_BUFFSIZE) and half for LL128, 32 channels, both ways [NCCL
# docs]
_COMMUNICATOR_BYTES = 0.5e9
_CHUNK = 1 << 14  # plans at a time
FRAGMENTATION = (
    0.07  # of the allocated peak: held by the caching allocator, in no tensor
)


def memory(
    model: Model | str,
    plan: Plan | str,
    *,
    sequence: int | None = None,
    dtype: str = "bf16",
    global_batch: int | None = None,
    optimizer: str = "adam",
    software: str | Software | None = None,
    imbalance: float | str = 1.0,
    trainable: float = 1.0,
    cluster: Cluster | str | None = None,
) -> pd.DataFrame:
    """Bytes on one device of each pipeline stage: columns stage, component, phase,
    size_bytes.

    model, plan: or their name and text. sequence: tokens per sample, the model's own if
    None. global_batch: samples per step, which limits the micro-batches a stage can
    hold; as many as the pipeline wants if None. software: that trains, a name of
    `data/software.csv` or one of your own; `default_software` if None. imbalance: of
    experts, as in `Case`. optimizer: adam, momentum, sgd or muon, which leaves tables and
    head to Adam.
    trainable: share of the parameters with gradients. cluster: that the plan fills, for
    what its processes hold beside the step; any GPUs if None. phase: when the bytes are
    there, see `peak_bytes`. Offload is not counted, all lies on the device: see `fits`
    for it. Raises ValueError for unknown names, a plan that model, batch or software
    cannot have, an offload that `fits` refuses, gpipe without global_batch. See
    also: mm.fits, mm.largest_model, mm.simulator.peak_bytes.

    FSDP has 4 + 4 + 8 bytes per parameter, of which each rank holds a quarter:

    >>> parts = memory("gpt2-large", "dp4.z3").set_index("component")["size_bytes"]
    >>> gpt = catalog.model("gpt2-large")
    >>> (parts[["weights", "gradients", "optimizer"]] / gpt.parameters).tolist()
    [1.0, 1.0, 2.0]
    """
    if not (is_number(trainable) and trainable <= 1):
        raise ValueError(
            f"trainable={short_repr(trainable)} must be a share of the parameters, 0..1"
        )
    case = Case(
        model,
        cluster,
        Plan.parse(plan),
        global_batch,
        sequence,
        dtype,
        software,
        imbalance,
        optimizer=optimizer,
    )
    return memory_of(case, trainable)


def memory_of(case: Case, trainable: float = 1.0) -> pd.DataFrame:
    """`memory` of a step, whose cluster and batch may be None."""
    plan = case.plan
    check_plan(case)
    if plan.offload is not None:
        normalised(case)
    if plan.schedule == "gpipe" and case.global_batch is None:
        raise ValueError(
            "schedule='gpipe' keeps every micro-batch, global_batch is needed"
        )
    parts = bytes_by_component(case, trainable)
    rows = [
        (stage, name, PHASES[name], float(size[stage]))
        for stage in range(plan.pp)
        for name, size in parts.items()
    ]
    return pd.DataFrame(rows, columns=["stage", "component", "phase", "size_bytes"])


def bytes_by_component(case: Case, trainable: float = 1.0) -> dict[str, np.ndarray]:
    """Bytes by component of each pipeline stage, (pp,). trainable: as in `memory`."""
    plan = case.plan
    stages = np.arange(plan.pp)
    if isinstance(case.model, DLRM):
        parts = _dlrm_bytes(case, trainable)
    else:
        layers = held_layers(case.model, plan, case.software or default_software(plan))
        parts = stage_bytes(case, stages, layers, trainable)
    return {name: np.broadcast_to(size, stages.shape) for name, size in parts.items()}


def held_layers(
    model: Transformer, plan: Plan, software: str | Software | None = None
) -> dict[str, np.ndarray]:
    """Layers of each kind (`Transformer.kinds`) of each pipeline stage, (pp,) each."""
    chunks = kinds_of_chunks(model, plan, catalog.software(software))
    return dict(zip(model.kinds, chunks.sum(axis=1).T, strict=True))


def peak_bytes(table: pd.DataFrame, *, allocated: bool = False) -> float:
    """Bytes of the fullest stage at its fullest moment.

    A stage holds what is there always, and either its pass, with the loss or a layer's
    backward on top, or the optimizer's temporaries. allocated: without context and
    fragmentation, as torch.cuda.max_memory_allocated counts.

    >>> gpt = catalog.model("gpt2-large")
    >>> [round(peak_bytes(memory(gpt, Plan(dp=4, zero=zero))) / 1e9, 1) for zero in range(4)]
    [21.2, 9.1, 7.9, 6.8]
    """
    if allocated:
        table = table[~table["component"].isin(["context", "fragmentation"])]
    stage, phase, size_bytes = (
        table[name].to_numpy() for name in ("stage", "phase", "size_bytes")
    )
    sums = {
        name: np.bincount(stage, np.where(phase == name, size_bytes, 0.0))
        for name in PHASES.values()
    }
    return float(moment_peak(sums).max())


def plans_peak_bytes(case: Case) -> np.ndarray:
    """Peak bytes of plans in their shape, as `peak_bytes(memory(model, plan, ...))` has
    them one by one.

    case: with legal plans, the rows of a table or a product (a, b) whose degrees are
    single and whose ZeRO stages are (1, b), or one Plan: then (1,). Each has the
    software of the case, or that it is usually run with; offload is not counted.
    """
    plans = case.plan
    if not plans.shape:
        sums = by_phase(bytes_by_component(case).items())
        return np.atleast_1d(moment_peak(sums).max())
    usual = default_software(plans)
    result = np.empty(plans.shape)
    for software in [case.software] if case.software else USUAL_SOFTWARE:
        runs = np.broadcast_to(bool(case.software) | (usual == software), plans.shape)
        if not runs.any():
            continue
        for stages, rows in _groups(case.model, plans, software):
            # of a table the rows that it runs, of a product those with any plan of it
            rows = rows[runs[rows].reshape(len(rows), -1).any(axis=1)]
            for start in range(0, len(rows), _CHUNK):
                part = rows[start : start + _CHUNK]
                chunk = (
                    plans[part]
                    if result.ndim == 1
                    else take_product(plans, part, slice(None))
                )
                one = replace(case, plan=chunk, software=software)
                layers = dict(zip(case.model.kinds, stages[1:], strict=True))
                sums = by_phase(_tensor_bytes(one, stages[0], layers).items())
                context_bytes, share = _process(one)
                # what `_overhead` adds is alike in all stages
                fullest = np.max(moment_peak(sums), axis=0)
                peaks = (1 + share) * fullest + context_bytes
                result[part] = np.where(runs[part], peaks, result[part])
    return result


def _groups(model, plans, software):
    """Stages that can be the fullest, (1 + kinds, stages, 1 for each axis of plans), and
    the rows of plans, their first axis, that have these.
    """
    cuts, index = cuts_of(plans)
    numbers = {}
    for number, cut in enumerate(cuts):
        stages = _differing_stages(model, cut, software)
        numbers.setdefault(stages, []).append(number)
    index = np.broadcast_to(index.ravel(), plans.shape[:1])
    for stages, equal in numbers.items():
        columns = np.expand_dims(np.array(stages).T, (*range(2, 2 + len(plans.shape)),))
        yield columns, np.flatnonzero(np.isin(index, equal))


@lru_cache(maxsize=4096)
def _differing_stages(model, cut, software):
    """Stage, and layers of each kind, of the stages that can be the fullest: the first
    of equal ones.
    """
    kinds = {}
    plan = plan_of_cut(cut)
    counts = held_layers(model, plan, software).values()
    for stage, layers in enumerate(zip(*counts, strict=True)):
        key = layers, stage == 0, stage == plan.head_stage
        # chunks of equal stages may differ in a layout
        kinds.setdefault(stage if plan.layout else key, (stage, *layers))
    return tuple(kinds.values())


def fullest_stage(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the pipeline stage with the highest peak, of a table of `memory`."""
    return max((rows for _, rows in table.groupby("stage")), key=peak_bytes)


def usable_bytes(device: Device) -> float:
    """Memory a process can have: the share that was published of a device of this name,
    else what the device has.
    """
    name = require_type("device", device, Device).name
    return (
        _published_shares(os.environ.get(catalog.USER_FOLDER)).get(name, 1.0)
        * device.memory_bytes
    )


@lru_cache(maxsize=2)
def _published_shares(folder):
    """Usable memory over the data sheet's by device, the tables of the user's folder
    among ours.
    """
    rows = catalog.table("published_memory").query("quantity == 'usable'")
    usable = zip(rows["device"], rows["value"], strict=True)
    return {
        name: float(gib) * 2**30 / catalog.device(name).memory_bytes
        for name, gib in usable
    }


def stage_bytes(
    case: Case, stage, layers: dict, trainable: float = 1.0
) -> dict[str, np.ndarray]:
    """Bytes by component of a pipeline stage; the plans of the case, stage and numbers
    of layers may be arrays.

    layers: of the stage, of each kind (`held_layers`). trainable: as in `memory`.
    Raises ValueError for unknown software or dtype.
    """
    parts = _tensor_bytes(case, stage, layers, trainable)
    return parts | _overhead(case, parts)


def _tensor_bytes(case, stage, layers, trainable=1.0):
    """`stage_bytes` of tensors."""
    model = case.model
    p = case.plan
    tokens = case.tokens
    micro_batches = case.micro_batches
    software = software_of(case.software or default_software(p), case.dtype)
    batches = in_flight(p.schedule, stage, p.pp, p.interleave, micro_batches)
    batches = in_flight_of_layouts(p, stage, batches, micro_batches)
    stored = 0.0
    at_work = 0.0
    for word, count in layers.items():
        layer = layer_bytes(case, word, software)
        stored = stored + count * layer.stored
        at_work = np.maximum(at_work, np.where(count > 0, layer.at_work, 0.0))
    # masks of the embedding, and what a tower before it keeps
    masks = dropout_bytes(model, software) * tokens * model.hidden / layer.shards
    if tower := model.tower:
        seen = replace(case, model=tower, sequence=tower.sequence)
        seen_layers = tower.layers * model.images
        masks = masks + seen_layers * layer_bytes(seen, Blocks("*-"), software).stored
    masks = masks * in_flight(p.schedule, stage, p.pp, 1, micro_batches)
    masks = np.where(stage == 0, masks, 0.0)
    sent = np.where(p.pp > 1, layer.input, 0.0) * software.engine
    tokens = model.predicted_share * model.decoder_tokens(tokens)
    outputs = p.micro_batch * model.classes if model.image else tokens * model.vocab
    of_logit = software.fused_logit_bytes
    if not software.fused_loss:
        split = software.split_logit_bytes or software.logit_bytes
        of_logit = np.where(p.tp > 1, split, software.logit_bytes)
    if "logits" in software.keeps:
        of_logit = of_logit + width_of(case.dtype)
    # logits of micro-batches whose backward pass has not begun
    waiting = np.where(p.schedule == "gpipe", batches, 1.0)
    logits = of_logit * waiting * outputs / p.tp + 2 * layer.input
    if "gathered" in software.keeps:  # for the head's product too
        logits = logits + layer.input * (layer.shards - 1)
    if "outputs" in software.keeps:
        most = np.where(np.isfinite(micro_batches), micro_batches, p.pp)
        earlier = np.where(p.pp > 1, most - 1, 0)
        logits = logits + earlier * width_of(case.dtype) * outputs / p.tp
    count = stage_parameters(model, p, stage, layers)
    states = state_bytes(p, count, software, case.optimizer, trainable)
    # What is freed after an update comes back while the backward pass frees activations:
    # with one micro-batch a step it is not there when these are most.
    fresh = software.frees_gradients & (p.pp == 1) & (micro_batches == 1)
    gradients = states["gradients"]
    # Autocast remembers casts of all weights until the forward pass ends, when a loss in
    # fp32 still lacks its gradient.
    casts = software.cast_bytes * (count.dense + count.experts - count.block)
    casts = casts - _LOGIT_GRADIENT * outputs / p.tp
    remembers = "stream" in software.keeps and (p.zero < 2) & (p.recompute != "none")
    remembers = remembers & (stage == p.head_stage)
    return states | {
        "gradients": np.where(fresh, 0.0, gradients),
        "gradients of one pass": np.where(fresh, gradients, 0.0),
        "activations": batches * (stored + sent) + masks,
        "logits": np.where(stage == p.head_stage, logits, 0.0),
        "casts until the loss": np.where(remembers, np.maximum(casts, 0.0), 0.0),
        "block at work": at_work,
    }


def _dlrm_bytes(case, trainable):
    """Bytes by component of a recommendation model: fp16 tables over all devices, fp32
    dense layers by ZeRO stage.

    Tables are updated in their backward pass by row-wise Adagrad, one fp32 number per
    row [FBGEMM]. Fields of the plan may be arrays. Raises ValueError for tp, pp or cp.
    """
    model = case.model
    p = case.plan
    enforce(RECOMMENDATION, p, case)
    width_of(case.dtype)
    tables = model.embedding_parameters
    dense = model.parameters - model.embedding_parameters
    count = StageParameters(
        dense,
        experts=0.0,
        ends=0.0,
        block=max(model.mlp_dim**2, 4 * model.attention_dim**2),
    )
    software = software_of(case.software or default_software(p), "fp32")
    parts = state_bytes(p, count, software, case.optimizer, trainable)
    parts["weights"] = parts["weights"] + 2 * tables / p.dp
    parts["optimizer"] = parts["optimizer"] + 4 * tables / model.embedding_dim / p.dp
    pooled = (
        2 * 2 * model.tables * model.embedding_dim
    )  # before and after the exchange, fp16
    products = (
        4
        * model.mlp_dim
        * (model.bottom_layers + model.top_layers * max(model.active_experts, 1))
    )
    width = (
        4 * model.transformer_layers * (6 * model.attention_dim + model.transformer_ffn)
    )
    parts |= {
        "activations": p.micro_batch
        * (pooled + products + model.transformer_sequence * width)
    }
    return parts | _overhead(case, parts)


def _overhead(case, parts):
    """CUDA context and communicators, and what the caching allocator cannot hand out."""
    context_bytes, share = _process(case)
    return {
        "context": context_bytes,
        "fragmentation": share * moment_peak(by_phase(parts.items())),
    }


def _process(case):
    """Bytes that a process holds beside tensors, and further ones as a share of these."""
    device = getattr(case.cluster, "device", None)
    p = case.plan
    if device and not np.isnan(device.process_bytes):
        return device.process_bytes, 0.0
    groups = sum(1 * (degree > 1) for degree in (p.tp, p.replicas, p.pp, p.ep))
    return _CUDA_BYTES + _COMMUNICATOR_BYTES * groups, FRAGMENTATION


def by_phase(sizes: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Sums of (component, bytes) over the components of each phase."""
    sums = dict.fromkeys(PHASES.values(), 0.0)
    for name, size in sizes:
        sums[PHASES[name]] = sums[PHASES[name]] + size
    return sums


def moment_peak(sizes):
    """Bytes of the fullest moment from the sums by phase."""
    during = sizes["pass"] + np.maximum(sizes["loss"], sizes["backward"])
    return sizes["always"] + np.maximum(during, sizes["step"])
