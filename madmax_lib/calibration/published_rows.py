"""What does a row of a published table say? A row in, one normalised row out: step, machine, software, measured time.

Every default is one written rule here, with facts about the sources' machines and software in `data/row_clusters.csv`
and about models that rows do not describe in `data/row_models.csv`. A row that cannot be timed keeps its place with
`supported=False` and the reason; a table never dies of one row.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.consistency import measured_s, violation_of
from madmax_lib.calibration.software import device_of, machine_of, number_of, positive_of, software_of, text_of
from madmax_lib.simulator.estimate import model_fields
from madmax_lib.simulator.rates.parameters import start
from madmax_lib.simulator.step.inputs import CLASSES, FIELDS, Work
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.specs import DLRM, Transformer

__all__ = ["FIELD_DEFAULTS", "read_rows", "to_work"]

FIELD_DEFAULTS = {name: value for name, value in FIELDS.items() if value == value}

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
_MICRO_BATCHES = (1, 2, 4)
_COLUMNS = [
    "source", "model", "group", "task", "supported", "reason", "consistent", "violation", "measured_s", "gpu", "shape",
    "software", "dtype", "said", "recompute_stated", "fused_loss", "memory_bytes", "n_gpus", "global_batch",
    "counts_recompute", "out_of_memory", "interleaves", "given_micro_batch", "given_interleave", "calibrated",
    *FIELDS, *CLASSES,
]  # fmt: skip


def read_rows(table: pd.DataFrame | str | Path) -> pd.DataFrame:
    """One normalised row per row of a published table, same order and index.

    table: columns of `data/published_train.csv`, or of vTrain's ground truth, or a CSV file of either. Unknown columns
    are ignored, missing ones are empty. The columns of a normalised row, beside `inputs.FIELDS` and `CLASSES`:

    source, model, group: who published it, what was trained, and both.
    supported, reason: whether it can be timed, and why not.
    consistent, violation: whether it agrees with itself, and what does not.
    measured_s: seconds of a step, NaN where none is published.
    shape, gpu, software, dtype: a `Transformer`, the catalog's device, its software, type of the matrix products.
    task, said, recompute_stated, counts_recompute, out_of_memory: training, recompute in words, and what notes tell.
    global_batch, n_gpus, given_micro_batch, given_interleave: as stated, NaN where not.
    memory_bytes, fused_loss, interleaves, calibrated: room on a device, and what software and family are known for.
    """
    if not isinstance(table, pd.DataFrame):
        table = pd.read_csv(table, encoding="utf-8-sig")
    table = _renamed(table)
    rows = [_read(record) for record in table.to_dict("records")]
    result = pd.DataFrame(rows, index=table.index, columns=_COLUMNS)
    _choose_schedule(result)
    records = zip(result.to_dict("records"), table.to_dict("records"), strict=True)
    result["measured_s"] = [_measured_s(row, raw) if row["supported"] else np.nan for row, raw in records]
    return result


def to_work(rows: pd.DataFrame) -> Work:
    """Supported normalised rows as steps to be timed."""
    fields = {name: rows[name].to_numpy(float) for name in FIELDS}
    return Work(fields, {name: rows[name].to_numpy(str) for name in CLASSES})


def _measured_s(row: dict, raw: dict) -> float:
    rates = number_of(raw, "tokens_per_s_per_gpu"), 1e12 * number_of(raw, "tflops_per_gpu")
    return measured_s(row, number_of(raw, "iteration_time_s"), *rates)


def _renamed(table: pd.DataFrame) -> pd.DataFrame:
    """vTrain's columns in the published names; its rows are fp16 with a vocabulary of 50257 and full recompute."""
    if "# GPUs" not in table.columns:
        return table
    table = table.rename(columns=_VTRAIN)
    table["iteration_time_s"] = pd.to_numeric(table.get("iteration time (ms)"), errors="coerce") / 1e3
    table["model"] = table["params_b"].map(lambda billion: f"GPT {billion}B")
    facts = {"vocab": 50257, "precision": "fp16", "gpu": "A100-80GB", "recompute": "full"}
    return table.assign(source=_VTRAIN_SOURCE, **facts)


def _read(raw: dict) -> dict:
    """One row; anything wrong with it becomes its reason."""
    row = {"source": text_of(raw, "source"), "model": text_of(raw, "model")}
    row["group"] = f"{row['source']} | {row['model']}"
    row |= {"supported": False, "reason": "", "consistent": False, "violation": ""}
    try:
        row["shape"] = _model(raw)
        row |= model_fields(row["shape"])
        device = device_of(raw)
        row |= machine_of(raw, row, device)
        row |= _plan(raw)
        row |= software_of(raw, row, device)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        return row | {"reason": str(error)}
    violation = violation_of(row)
    return FIELD_DEFAULTS | row | {"supported": True, "consistent": not violation, "violation": violation}


def _model(raw: dict) -> Transformer:
    """Dimensions from the row, else from the catalog by the model's name, else by rule; experts by `row_models.csv`."""
    name = text_of(raw, "model")
    listed, facts = _catalog_model(name), _facts_of(name)
    row = {}
    for field, own in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("seq_len", "sequence")):
        row[own] = int(positive_of(raw, field, getattr(listed, own, 0) or 0))
        if not row[own] > 0:
            raise ValueError(f"{field} is not stated")
    fallback = {"ffn": 4 * row["hidden"], "vocab": 50257, "kv_heads": row["heads"]}  # classic GPT where not stated
    for field, value in fallback.items():
        row[field] = int(positive_of(raw, field, getattr(listed, field, 0) or value))
    if not facts.get("experts") and (re.search(r"\d+x\d+b|[-_ ]a\d+b|moe", name, re.I) or number_of(raw, "ep") > 1):
        raise ValueError(f"experts of {name!r} are not stated and not in data/row_models.csv")
    # a gated feed-forward part is the rule where it is not four times the width, and in mixtures
    gated = row["ffn"] != 4 * row["hidden"] or bool(facts.get("experts"))
    style = {"norm": "rms", "positions": "rope", "attention_bias": "none", "mlp_bias": False, "tied": False}
    row["head_dim"] = row["hidden"] // row["heads"]
    row |= facts
    row["dense_layers"] = min(row.get("dense_layers", 0), row["layers"])
    return Transformer(name or "unnamed", **row, gated=gated, **(style if gated else {}))


def _plan(raw: dict) -> dict:
    """Degrees; a missing one follows from the others, else it is 1. Batch and micro-batch; schedule is chosen later."""
    degrees = {name: positive_of(raw, name, 1.0) for name in ("tp", "pp", "cp", "dp", "ep")}
    devices, dp = number_of(raw, "n_gpus"), positive_of(raw, "dp")
    if not devices > 0 and not dp > 0:
        raise ValueError("neither n_gpus nor dp is stated")
    degrees["dp"] = dp if dp > 0 else devices / (degrees["tp"] * degrees["pp"] * degrees["cp"])
    if any(value != int(value) or value < 1 for value in degrees.values()):
        raise ValueError(f"degrees of parallelism are not whole: {degrees}")
    micro, interleave = positive_of(raw, "micro_batch"), positive_of(raw, "vpp")
    batch = positive_of(raw, "global_batch", degrees["dp"] * micro)  # one micro-batch
    if not batch > 0:
        raise ValueError("neither global batch nor micro-batch is stated")
    plan = degrees | {"micro_batch": positive_of(raw, "micro_batch", 1.0), "micro_batches": 1.0}
    plan["interleave"] = positive_of(raw, "vpp", 1.0) if degrees["pp"] > 1 else 1.0
    stated = {"n_gpus": devices, "given_micro_batch": micro, "given_interleave": interleave}
    return plan | stated | {"global_batch": batch}


def _choose_schedule(rows: pd.DataFrame) -> None:
    """Micro-batch and interleaving that a source does not state, for all rows at once.

    The pair that the model, with its start values, finds fastest: micro-batch 1, 2 or 4, interleaving dividing the
    layers of a stage where the software can, micro-batches a multiple of pp then. FSDP and data-parallel rows without a
    micro-batch take the whole batch of a device.
    """
    interleaved = (rows["pp"] > 1) & (rows["interleaves"] > 0)
    open_choice = rows["given_micro_batch"].isna() | (rows["given_interleave"].isna() & interleaved)
    free = rows["supported"] & open_choice
    candidates = []
    for index, row in zip(rows.index[free], rows[free].to_dict("records"), strict=True):
        for micro, interleave in _pairs(row):
            count = np.ceil(row["global_batch"] / (row["dp"] * micro))
            choice = {"micro_batch": micro, "interleave": interleave, "micro_batches": count}
            candidates.append(row | choice | {"owner": index})
    if candidates:
        options = pd.DataFrame(candidates)
        options["step_s"] = step_time(to_work(options), start())["step_s"]
        best = options.loc[options.groupby("owner")["step_s"].idxmin()].set_index("owner")
        for name in ("micro_batch", "interleave"):
            rows.loc[best.index, name] = best[name]
    batch_per_pass = (rows["dp"] * rows["micro_batch"]).astype(float)
    rows["micro_batches"] = np.ceil(rows["global_batch"].astype(float) / batch_per_pass)


def _pairs(row: dict) -> list[tuple[float, float]]:
    local = row["global_batch"] / row["dp"]
    if row["given_micro_batch"] == row["given_micro_batch"]:
        micros = [row["given_micro_batch"]]
    elif row["pp"] == 1 and row["zero"] >= 2:
        micros = [local]
    else:
        micros = [m for m in _MICRO_BATCHES if local % m == 0] or [1.0]
    pairs = []
    for micro in micros:
        count, per_stage = local / micro, row["layers"] / row["pp"]
        interleave = [1.0]
        if row["given_interleave"] == row["given_interleave"]:
            interleave = [row["given_interleave"]]
        elif row["pp"] > 1 and row["interleaves"] and count % row["pp"] == 0 and per_stage == int(per_stage):
            interleave = [float(v) for v in range(1, int(per_stage) + 1) if per_stage % v == 0]
        pairs += [(micro, v) for v in interleave]
    return pairs


@lru_cache(maxsize=256)
def _facts_of(name: str) -> dict[str, int]:
    """Fields of `Transformer` that rows do not have, by the model's name."""
    for facts in catalog.table("row_models").drop(columns="source").to_dict("records"):
        pattern, model = facts.pop("pattern"), facts.pop("model")
        if re.search(pattern, name, re.I):
            values = {field: getattr(catalog.model(model), field) for field in facts} if model else facts
            return {field: int(value) for field, value in values.items() if value}
    return {}


@lru_cache(maxsize=256)
def _catalog_model(name: str) -> Transformer | None:
    try:
        model = catalog.model(name) if name else None
    except (ValueError, OSError):
        return None
    return None if isinstance(model, DLRM) else model
