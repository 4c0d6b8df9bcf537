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
from madmax_lib.calibration.software import device_of, machine_of, number_of, software_of, text_of
from madmax_lib.simulator.estimate import model_fields
from madmax_lib.simulator.rates.parameters import start
from madmax_lib.simulator.step.inputs import CLASSES, FIELDS, Work
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.specs import DLRM, Transformer

__all__ = ["read_rows", "to_work"]

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
_FACTS = ("experts", "active_experts", "shared_experts", "expert_ffn", "dense_layers", "head_dim", "q_lora_rank",
          "kv_lora_rank", "rope_head_dim", "v_head_dim", "window", "full_every")  # fmt: skip
_MICRO_BATCHES = (1, 2, 4)
_COLUMNS = [
    "source", "model", "group", "task", "supported", "reason", "consistent", "violation", "measured_s", "gpu", "shape",
    "software", "dtype", "said", "recompute_stated", "fused_loss", "memory_bytes", "n_gpus", "global_batch",
    "counts_recompute", "out_of_memory", "interleaves", "given_micro_batch", "given_interleave", "calibrated",
    *FIELDS, *CLASSES,
]  # fmt: skip


def read_rows(table: pd.DataFrame | str | Path) -> pd.DataFrame:
    """One normalised row per row of a published table, same order and index.

    Columns: source, model, group (source | model), supported, reason, consistent, violation, measured_s, every field
    of `work.FIELDS`, the classes that choose constants, device and memory_bytes. Unknown columns are ignored,
    missing ones are empty. Tables in the columns of vTrain's ground truth are understood too.
    """
    if not isinstance(table, pd.DataFrame):
        table = pd.read_csv(table, encoding="utf-8-sig")
    table = _renamed(table)
    rows = [_read(record) for record in table.to_dict("records")]
    result = pd.DataFrame(rows, index=table.index, columns=_COLUMNS)
    _choose_schedule(result)
    result["measured_s"] = [
        measured_s(row, *published) if row["supported"] else np.nan
        for row, published in zip(result.to_dict("records"), _published(table), strict=True)
    ]
    return result


def to_work(rows: pd.DataFrame) -> Work:
    """Supported normalised rows as steps to be timed."""
    return Work({name: rows[name].to_numpy(float) for name in FIELDS},
                {name: rows[name].to_numpy(str) for name in CLASSES})  # fmt: skip


def _published(table: pd.DataFrame) -> list[tuple[float, float, float]]:
    """Seconds, tokens per second and FLOP/s of each row as its source gives them."""
    return [
        (
            number_of(raw, "iteration_time_s"),
            number_of(raw, "tokens_per_s_per_gpu"),
            1e12 * number_of(raw, "tflops_per_gpu"),
        )
        for raw in table.to_dict("records")
    ]


def _renamed(table: pd.DataFrame) -> pd.DataFrame:
    """vTrain's columns in the published names; its rows are fp16 with a vocabulary of 50257 and full recompute."""
    if "# GPUs" not in table.columns:
        return table
    table = table.rename(columns=_VTRAIN)
    table["iteration_time_s"] = pd.to_numeric(table.get("iteration time (ms)"), errors="coerce") / 1e3
    size = table["params_b"].map(lambda v: f"GPT {v}B")
    return table.assign(vocab=50257, precision="fp16",
                        gpu="A100-80GB", source=_VTRAIN_SOURCE, model=size, recompute="full")  # fmt: skip


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
    row["violation"] = violation_of(row)
    return {name: value for name, value in FIELDS.items() if value == value} | row | {
        "supported": True, "consistent": not row["violation"]}  # fmt: skip


def _model(raw: dict) -> Transformer:
    """Dimensions from the row, else from the catalog by the model's name, else by rule; experts by `row_models.csv`."""
    name = text_of(raw, "model")
    known, facts = _catalog_model(name), _facts_of(name)
    row = {}
    for field, own in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("seq_len", "sequence")):
        value = number_of(raw, field)
        value = value if value > 0 else float(getattr(known, own, 0) or 0)
        if not value > 0:
            raise ValueError(f"{field} is not stated")
        row[own] = int(value)
    fallback = {"ffn": 4 * row["hidden"], "vocab": 50257, "kv_heads": row["heads"]}  # classic GPT where not stated
    for field, value in fallback.items():
        given = number_of(raw, field)
        row[field] = int(given if given > 0 else getattr(known, field, 0) or value)
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
    degrees = {name: number_of(raw, name) for name in ("tp", "pp", "cp", "dp", "ep")}
    devices = number_of(raw, "n_gpus")
    if not devices > 0 and not degrees["dp"] > 0:
        raise ValueError("neither n_gpus nor dp is stated")
    for name in ("tp", "pp", "cp", "ep"):
        degrees[name] = degrees[name] if degrees[name] > 0 else 1.0
    if not degrees["dp"] > 0:
        degrees["dp"] = devices / (degrees["tp"] * degrees["pp"] * degrees["cp"])
    if any(value != int(value) or value < 1 for value in degrees.values()):
        raise ValueError(f"degrees of parallelism are not whole: {degrees}")
    batch, micro = number_of(raw, "global_batch"), number_of(raw, "micro_batch")
    if not batch > 0 and not micro > 0:
        raise ValueError("neither global batch nor micro-batch is stated")
    if not batch > 0:
        batch = degrees["dp"] * micro  # one micro-batch
    interleave = number_of(raw, "vpp")
    return degrees | {
        "n_gpus": devices, "global_batch": batch, "given_micro_batch": micro if micro > 0 else np.nan,
        "given_interleave": interleave if interleave > 0 else np.nan, "micro_batch": micro if micro > 0 else 1.0,
        "interleave": interleave if interleave > 0 and degrees["pp"] > 1 else 1.0, "micro_batches": 1.0,
    }  # fmt: skip


def _choose_schedule(rows: pd.DataFrame) -> None:
    """Micro-batch and interleaving that a source does not state, for all rows at once.

    The pair that the model, with its start values, finds fastest: micro-batch 1, 2 or 4, interleaving dividing the
    layers of a stage where the software can, micro-batches a multiple of pp then. FSDP and data-parallel rows without a
    micro-batch take the whole batch of a device.
    """
    free = rows["supported"] & (rows["given_micro_batch"].isna() | (rows["given_interleave"].isna() & (rows["pp"] > 1)
                                                                  & (rows["interleaves"] > 0)))  # fmt: skip
    candidates, owner = [], []
    for index, row in zip(rows.index[free], rows[free].to_dict("records"), strict=True):
        for micro, interleave in _pairs(row):
            candidates.append(row | {"micro_batch": micro, "interleave": interleave,
                                     "micro_batches": np.ceil(row["global_batch"] / (row["dp"] * micro))})  # fmt: skip
            owner.append(index)
    if candidates:
        options = pd.DataFrame(candidates)
        options["step_s"], options["owner"] = step_time(to_work(options), start())["step_s"], owner
        best = options.loc[options.groupby("owner")["step_s"].idxmin()].set_index("owner")
        for name in ("micro_batch", "interleave"):
            rows.loc[best.index, name] = best[name]
    rows["micro_batches"] = np.ceil(
        rows["global_batch"].astype(float) / (rows["dp"] * rows["micro_batch"]).astype(float)
    )


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
    for row in catalog.table("row_models").to_dict("records"):
        if re.search(row["pattern"], name, re.I):
            if not row["model"]:
                return {field: int(row[field]) for field in _FACTS if row[field]}
            found = catalog.model(row["model"])
            return {field: getattr(found, field) for field in _FACTS if getattr(found, field)}
    return {}


@lru_cache(maxsize=256)
def _catalog_model(name: str):
    try:
        found = catalog.model(name) if name else None
    except (ValueError, OSError):
        return None
    return None if isinstance(found, DLRM) else found
