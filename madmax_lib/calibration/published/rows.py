"""What does a row of a published table say? A row in, one normalised row out: the step
as a `Case`, and its time.

Every rule stands once: about model, machine and software in `row_facts`, about the plan
in `row_plans`. A row that cannot be timed keeps its place with `supported=False` and
the reason; a table never dies of one row.
"""

from __future__ import annotations

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
from madmax_lib.plan.case import Case
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
from madmax_lib.simulator.steady.step_time import step_time

__all__ = ["facts_of", "model_flops", "read_rows", "to_steps", "to_table"]

_begin = lru_cache(maxsize=1)(start)
_VTRAIN_SOURCE = "VIA-Research/vTrain data/ground_truth_multi.csv"
_VTRAIN = {
    "Parameters (billion)": "params_b",
    "# GPUs": "n_gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq_len",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
_ABOUT = ["source", "model", "repository", "group", "n_gpus", "recompute_stated"]
_JUDGED = ["supported", "consistent", "reason", "measured_s", "case"]
_PLAN = [
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "micro_batch",
    "interleave",
    "recompute",
    "attention",
]
_FACTS = ["kind", "software", "gpu", "family", "dtype", "global_batch", *_PLAN]
# columns that rows may have beside those of published_train.csv, row_clusters.csv and
# row_models.csv, and what is added
_FURTHER = {
    "plan",
    "sizes",
    "lora_rank",
    *OVERLAPS,
    "iteration time (ms)",
    "predicted_s",
    "low_s",
    "high_s",
    "fits",
}
_FURTHER |= {"predicted_memory_bytes"}


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
    kind: dense, mixture, vision or lora; and for groups and plots what the case says:
        software, gpu, family, dtype, global_batch, dp, tp, pp, cp, ep, zero,
        micro_batch, interleave, recompute, attention.
    """
    table = to_table(table)
    renamed = _renamed(table)
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
    return (
        run_rows(rows)
        if Path(rows).is_dir()
        else pd.read_csv(rows, encoding="utf-8-sig")
    )


def _warn_of_unknown(table: pd.DataFrame) -> None:
    names = ("published_train", "row_clusters", "row_models")
    known = _FURTHER.union(_JUDGED, *(catalog.table(name).columns for name in names))
    if unknown := [str(name) for name in table.columns if name not in known]:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.5)
        words = (
            f"nearest to {unknown[0]}: {near[0]}"
            if near
            else "known are those of help(calibration.fit.update)"
        )
        warnings.warn(f"ignored column(s) {', '.join(unknown)}; {words}", stacklevel=3)


def facts_of(case: Case) -> dict:
    """What groups and plots ask of a case: its kind, software, machine and plan, in
    columns of `read_rows`.
    """
    kinds = {
        "vision": case.model.image,
        "lora": case.plan.lora_rank,
        "mixture": case.model.experts,
        "dense": True,
    }
    return {name: getattr(case.plan, name) for name in _PLAN} | {
        "kind": next(kind for kind, applies in kinds.items() if applies),
        "software": case.software.name,
        "gpu": case.cluster.device.name,
        "family": case.cluster.device.family,
        "dtype": case.dtype,
        "global_batch": case.global_batch,
    }


def _renamed(table: pd.DataFrame) -> pd.DataFrame:
    """vTrain's columns in the published names; its rows are fp16 with a vocabulary of
    50257 and full recompute.
    """
    if "# GPUs" not in table.columns:
        return table
    table = table.rename(columns=_VTRAIN)
    stated = {
        name: table.get(name, pd.Series(np.nan, table.index))
        for name in ("iteration time (ms)", "params_b")
    }
    table["iteration_time_s"] = (
        pd.to_numeric(stated["iteration time (ms)"], errors="coerce") / 1e3
    )
    table["model"] = stated["params_b"].map(lambda billion: f"GPT {billion}B")
    facts = {
        "vocab": 50257,
        "precision": "fp16",
        "gpu": "A100-80GB",
        "recompute": "full",
    }
    return table.assign(source=_VTRAIN_SOURCE, **facts)


def _read(raw: dict) -> dict:
    """One row; anything wrong with it becomes its reason."""
    source = text_of(raw, "source")
    model = text_of(raw, "model")
    first = source.partition(" ")[0]
    repository = (
        first if "/" in first else source
    )  # pages of one repository are of one hand
    row = {
        "source": source,
        "model": model,
        "repository": repository,
        "group": f"{repository} | {model}",
    }
    row |= {
        "n_gpus": np.nan,
        "recompute_stated": False,
        "case": None,
        "measured_s": np.nan,
    }
    try:
        row["n_gpus"] = devices = number_of(raw, "n_gpus")
        shape = model_of(raw)
        (raw, device) = completed(raw)
        case = _fastest(
            cases_of(
                raw,
                shape,
                *machine_of(raw, device, devices_of(raw)),
                software_of(raw, device),
            )
        )
        enforce(SOFTWARE if case.software else (), case.plan, case)
        seconds = _measured_s(case, raw)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        return row | {"supported": False, "consistent": False, "reason": str(error)}
    said = text_of(raw, "recompute")
    reason = _violation_of(case, devices, text_of(raw, "software"))
    row |= {
        "recompute_stated": bool(said) and "offloads" not in said,
        "measured_s": seconds,
    }
    return (
        row
        | {"supported": True, "consistent": not reason, "reason": reason, "case": case}
        | facts_of(case)
    )


def _fastest(cases: list[Case]) -> Case:
    """The one that the model finds fastest, with its start values."""
    if len(cases) == 1:
        return cases[0]
    return cases[int(np.argmin(step_time(Steps.stack(cases), _begin())["step_s"]))]


def _violation_of(case: Case, devices: float, software: str) -> str:
    """What contradicts itself in a row, empty if nothing: its world size, software or
    micro-batch, or a rule of plans.

    devices, software: as stated, NaN and empty where not.
    """
    plan = case.plan
    if devices == devices and plan.world_size != devices:
        return f"dp x tp x pp x cp = {plan.world_size:g}, but n_gpus = {devices:g}"
    if software not in ("", "none") and not case.software:
        return (
            f"software={software!r} is not in software.csv; add it to that in "
            f"{catalog.USER_FOLDER}, or say none"
        )
    if plan.dp <= case.global_batch < plan.dp * plan.micro_batch:
        return (
            f"micro_batch={plan.micro_batch} exceeds {case.global_batch} samples "
            f"over dp={plan.dp}"
        )
    return str(legal(case).words())


def model_flops(case: Case, raw: dict) -> float:
    """FLOPs of a step as a source counts them: 6N + 12 L h s per token, N with head and
    without embedding.

    Megatron-Bridge halves the attention term (causal), NeMo leaves it out in
    fine-tuning; frozen weights have no gradients. SC'21, BLOOM and MT-NLG count the
    repeated forward pass (x 4/3).
    """
    model = case.model
    source = text_of(raw, "source")
    used = (model.active_experts + model.shared_experts) * model.expert_ffn
    width = model.moe_layers * used + (model.layers - model.moe_layers) * model.ffn
    products = sum(inputs * outputs for _, inputs, outputs in model.attention_matrices)
    weights = model.layers * products + (2 + model.gated) * model.hidden * width
    weights += model.hidden * (
        model.classes / case.sequence if model.image else model.vocab
    )
    attention = 12 * model.layers * model.core_width * case.sequence
    attention *= 0.5 if "Megatron-Bridge" in source else 1.0
    attention *= 0.0 if "SFT" in remarks_of(raw) and "NeMo docs" in source else 1.0
    repeated = (
        4 / 3
        if text_of(raw, "flops_kind").startswith(("hardware", "as published"))
        else 1.0
    )
    return (
        case.global_batch
        * case.sequence
        * repeated
        * ((4 if case.plan.lora_rank else 6) * weights + attention)
    )


def _measured_s(case: Case, raw: dict) -> float:
    """Seconds per step: as published, else from tokens per second, else from FLOP/s;
    NaN if none is given.

    Where a source does not say how long a sample is, only a step that it timed tells.
    """
    stated = positive_of(raw, "iteration_time_s")
    if text_of(raw, "source") and not text_of(raw, "seq_len"):
        return stated
    by_tokens = (
        case.global_batch
        * case.sequence
        / (positive_of(raw, "tokens_per_s_per_gpu") * case.plan.world_size)
    )
    by_flops = model_flops(case, raw) / (
        positive_of(raw, "tflops_per_gpu") * 1e12 * case.plan.world_size
    )
    return next(
        (seconds for seconds in (stated, by_tokens, by_flops) if seconds > 0),
        float("nan"),
    )
