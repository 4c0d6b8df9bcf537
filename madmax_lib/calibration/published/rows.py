"""Rows of published tables, normalised: the step as a `Case`, and its time.

Every rule stands once: about model, machine and software in `plan.stated`, about the
plan in `row_plans`. A row that cannot be timed keeps its place with `supported=False`
and the reason; a table never dies of one row.
"""

import difflib
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.published.row_plans import cases_of, devices_of
from madmax_lib.calibration.published.run_rows import run_rows
from madmax_lib.catalog.software import OVERLAPS
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.legal import legal
from madmax_lib.plan.rules import SOFTWARE, enforce
from madmax_lib.plan.stated import (
    completed,
    machine_of,
    model_of,
    number_of,
    positive_of,
    remarks_of,
    software_of,
    text_of,
)
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import start
from madmax_lib.simulator.steady.step_time import step_s

# layouts that a row leaves open are compared before any fit, so that no fit chooses
# its own data
_begin = lru_cache(maxsize=1)(start)
# columns of a normalised row, in order
_ABOUT = ["source", "model", "repository", "group", "n_gpus", "recompute_stated"]
_JUDGED = ["supported", "consistent", "reason", "measured_s", "case"]
_DEGREES = ["dp", "tp", "pp", "cp", "ep"]
_PLAN = [*_DEGREES, "zero", "micro_batch", "interleave", "recompute", "attention"]
_FACTS = ["kind", "software", "gpu", "family", "dtype", "global_batch", *_PLAN]
# columns that rows may have beside those of published_train.csv, row_clusters.csv and
# row_models.csv, and what `predict` adds
_FURTHER = {"plan", "like", "sizes", "lora_rank", *OVERLAPS, "iteration time (ms)"}
_FURTHER |= {"predicted_s", "low_s", "high_s", "fits", "predicted_memory_bytes"}


def read_rows(table: pd.DataFrame | str | Path) -> pd.DataFrame:
    """One normalised row per row of a published table, same order and index.

    table: columns of `data/published_train.csv`, or of vTrain's ground truth, or a CSV
    file of either, or a folder of runs. Unknown columns are ignored with a warning,
    missing ones are empty. The columns of a normalised row:

    source, model, repository, group: who published it, what was trained, whose it is,
        and whose model.
    supported, consistent, reason: whether it can be timed, whether it agrees with
        itself, and why not.
    measured_s: seconds of a step, NaN where none is published.
    case: the step, a `Case`; None where it is not supported. What the source leaves
        open is as fast as it can be.
    n_gpus, recompute_stated: as the row or its source states.
    kind: dense, mixture, vision, encoder or lora; and for groups and plots what the case says:
        software, gpu, family, dtype, global_batch, dp, tp, pp, cp, ep, zero,
        micro_batch, interleave, recompute, attention.
    """
    table = to_table(table)
    renamed = _renamed(table) if "# GPUs" in table.columns else table
    _warn_of_unknown(renamed)
    rows = [_read(raw) for raw in renamed.to_dict("records")]
    return pd.DataFrame(rows, index=table.index, columns=[*_ABOUT, *_JUDGED, *_FACTS])


def to_steps(rows: pd.DataFrame) -> Steps:
    """Supported normalised rows as steps to be timed."""
    return Steps.stack(rows["case"].tolist())


def to_table(rows: pd.DataFrame | str | Path) -> pd.DataFrame:
    """A table as it is, of a CSV file, or of a folder of runs (`run_rows`)."""
    if isinstance(rows, pd.DataFrame):
        return rows
    if Path(rows).is_dir():
        return run_rows(rows)
    try:
        return pd.read_csv(rows, encoding="utf-8-sig")
    except ValueError as error:
        raise ValueError(
            f"{rows}: not a table of runs ({str(error).strip()})"
        ) from None


def _warn_of_unknown(table):
    """Warn of columns that nothing reads, with the nearest name that something does."""
    names = ("published_train", "row_clusters", "row_models")
    columns = _FURTHER.union(_JUDGED, *(catalog.table(name).columns for name in names))
    unknown = [str(name) for name in table.columns if name not in columns]
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], sorted(columns), n=1, cutoff=0.5)
    words = (
        f"nearest to {unknown[0]}: {near[0]}"
        if near
        else "help(calibration.fit.update) lists all columns"
    )
    warnings.warn(f"ignored column(s) {', '.join(unknown)}; {words}", stacklevel=3)


def facts_of(case: Case) -> dict:
    """Kind, software, machine and plan of a case, in columns of `read_rows`."""
    # the first that applies
    kinds = {
        "vision": case.model.image,
        "lora": case.plan.lora_rank,
        "mixture": case.model.experts,
        "encoder": case.model.predicted_share < 1,
        "dense": True,
    }
    return {name: getattr(case.plan, name) for name in _PLAN} | {
        "kind": next(kind for kind, applies in kinds.items() if applies),
        "software": case.software.name,
        "gpu": case.device.name,
        "family": case.device.family,
        "dtype": case.dtype,
        "global_batch": case.global_batch,
    }


def _renamed(table):
    """vTrain's ground truth in the published columns."""
    # a column of theirs, or what their repository says of all runs
    columns = catalog.table("vtrain_columns").set_index("ours")
    is_fact = columns["value"] != ""
    names = columns.loc[~is_fact, "theirs"]
    table = table.rename(columns=dict(zip(names, names.index, strict=True)))
    empty = pd.Series(np.nan, table.index)
    time_ms = table.get("iteration time (ms)", empty)
    table["iteration_time_s"] = pd.to_numeric(time_ms, errors="coerce") / 1e3
    billions = table.get("params_b", empty)
    table["model"] = billions.map(lambda billion: f"GPT {billion}B")
    return table.assign(**columns.loc[is_fact, "value"])


def _read(raw):
    """One row; anything wrong with it becomes its reason."""
    source = text_of(raw, "source")
    model = text_of(raw, "model")
    # pages of one repository, such as owner/name, are of one hand
    first = source.partition(" ")[0]
    repository = first if "/" in first else source
    # what is known of a row that is refused
    row = {
        "source": source,
        "model": model,
        "repository": repository,
        "group": f"{repository} | {model}",
        "n_gpus": np.nan,
        "recompute_stated": False,
        "case": None,
        "measured_s": np.nan,
    }
    try:
        row["n_gpus"] = devices = number_of(raw, "n_gpus")
        shape = model_of(raw)
        raw, device = completed(raw)
        cluster, dtype = machine_of(raw, device, devices_of(raw))
        software = software_of(raw, device)
        cases = cases_of(
            raw, Case(shape, cluster, Plan(), dtype=dtype, software=software)
        )
        case = cases[0]
        if len(cases) > 1:  # the one that the model finds fastest
            times_s = step_s(Steps.stack(cases), _begin())
            case = cases[int(np.argmin(times_s))]
        enforce(SOFTWARE if case.software else (), case.plan, case)
        seconds = _measured_s(case, raw)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        return row | {"supported": False, "consistent": False, "reason": str(error)}
    # offload is no recompute, though tables put it there
    recompute = text_of(raw, "recompute")
    reason = _violation_of(case, devices)
    row |= {
        "recompute_stated": bool(recompute) and "offloads" not in recompute,
        "measured_s": seconds,
        "supported": True,
        "consistent": not reason,
        "reason": reason,
        "case": case,
    }
    return row | facts_of(case)


def _violation_of(case, devices):
    """The contradiction in a row, empty if none: its world size or micro-batch, or a
    rule of plans.

    devices: as stated, NaN where not.
    """
    plan = case.plan
    if devices == devices and plan.world_size != devices:  # not NaN
        return f"dp x tp x pp x cp = {plan.world_size:g}, but n_gpus = {devices:g}"
    if plan.dp <= case.global_batch < plan.dp * plan.micro_batch:
        return (
            f"micro_batch={plan.micro_batch} exceeds {case.global_batch} samples "
            f"over dp={plan.dp}"
        )
    return str(legal(case).words())


def model_flops(case: Case, raw: dict) -> float:
    """FLOPs of a step as a source counts them: 6N + 12 L h s per token.

    N counts the head, but not the embedding. Megatron-Bridge halves the attention term
    (causal), NeMo leaves it out in fine-tuning; frozen weights have no gradients. SC'21,
    BLOOM and MT-NLG count the repeated forward pass (x 4/3).
    """
    model = case.model
    source = text_of(raw, "source")
    # N: attention, feed-forward parts (those of experts that a token meets), and head
    routed_width = (model.active_experts + model.shared_experts) * model.expert_ffn
    dense_layers = model.layers - model.moe_layers
    width = model.moe_layers * routed_width + dense_layers * model.ffn
    products = sum(inputs * outputs for _, inputs, outputs in model.attention_matrices)
    weights = model.layers * products + (2 + model.gated) * model.hidden * width
    # an image is classified once, not token by token
    outputs = model.classes / case.sequence if model.image else model.vocab
    weights += model.hidden * outputs
    attention = 12 * model.layers * model.core_width * case.sequence
    if "Megatron-Bridge" in source:
        attention *= 0.5
    if "SFT" in remarks_of(raw) and "NeMo docs" in source:
        attention = 0.0
    # forward, dgrad and wgrad: 2 FLOPs per weight each; frozen weights have no wgrad
    per_weight = 4 if case.plan.lora_rank else 6
    per_token = per_weight * weights + attention
    kind = text_of(raw, "flops_kind")
    repeated = 4 / 3 if kind.startswith(("hardware", "as published")) else 1.0
    return case.global_batch * case.sequence * repeated * per_token


def flops_and_peaks(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs of normalised rows, and FLOP/s of their devices by the data sheet, (n,)."""
    cases = rows["case"]
    flops = [
        model_flops(case, {"source": source})
        for case, source in zip(cases, rows["source"], strict=True)
    ]
    peaks = [case.plan.world_size * case.device.peak(case.dtype) for case in cases]
    return np.array(flops), np.array(peaks)


def _measured_s(case, raw):
    """Seconds per step: as published, else from tokens per second, else from FLOP/s.

    NaN if none is given. Where a source does not say how long a sample is, only a step
    that it timed tells.
    """
    stated_s = positive_of(raw, "iteration_time_s")
    if text_of(raw, "source") and not text_of(raw, "seq_len"):
        return stated_s
    tokens_per_s = positive_of(raw, "tokens_per_s_per_gpu")
    tflops = positive_of(raw, "tflops_per_gpu")
    if stated_s > 0:
        return stated_s
    world = case.plan.world_size
    if tokens_per_s > 0:
        return case.global_batch * case.sequence / (tokens_per_s * world)
    return model_flops(case, raw) / (tflops * 1e12 * world)
