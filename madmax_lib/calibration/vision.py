"""How well does the step-time model, told about other runs, predict the vision transformers of MAD-Max?

Nine FSDP runs on AWS p4d (8 x A100-40, 400 Gb/s a node) in the artifact of [Hsia et al., ISCA 2024, arXiv 2310.02784],
figure 8; ViT-L to ViT-120B, FLOP/s per device. Each run is predicted by constants fitted to the other eight. Three
descriptions of the software are compared (`WAYS`), each with few constants: the sheet says FSDP and no more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.fit import fingerprint, fit
from madmax_lib.calibration.published_rows import to_work
from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import machine_fields, matrix_fields, model_fields, plan_fields
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.step.inputs import FIELDS
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.specs import Transformer

__all__ = ["CONSTANTS", "WAYS", "compare_ways", "vision_errors", "vision_rows"]

# matrix products at any size and what small ones lose, and the network; all else stays as fitted on language models
CONSTANTS = ("gemm_efficiency:ampere-16", "gemm_bytes", "network_share:ampere")
WAYS = {
    "gathers hidden": "the weights of the next block travel while one computes, as in FSDP since 2023",
    "weights kept": "as before, and weights that fit stay between forward and backward pass (ZeRO-2)",
    "gathers in turn": "nothing is gathered ahead: compute waits for every block, as in FSDP of 2022",
}
_MODELS = {"ViT-L": "vit-large", "ViT-H": "vit-huge", "ViT-10B": "vit-10b", "ViT-25B": "vit-25b", "ViT-60B": "vit-60b",
           "ViT-120B": "vit-120b"}  # fmt: skip


def vision_rows(way: str = "gathers in turn") -> pd.DataFrame:
    """The nine runs as normalised rows (see `rows.read_rows`), with measured and paper, in FLOP/s per device.

    Blocks are recomputed where the activations do not fit without. Raises ValueError for an unknown way.
    """
    if way not in WAYS:
        raise ValueError(f"way={way!r} is not one of {', '.join(WAYS)}")
    rows = pd.DataFrame([_row(run, way) for run in catalog.table("published_vision").to_dict("records")])
    rows.attrs["provenance"] = {"files": {"rows": {"sha256": fingerprint(rows)}}, "rules": way}
    return rows


def vision_errors(way: str = "gathers in turn") -> pd.DataFrame:
    """Measured, the paper's and our MFU of each run (0..1), ours by `CONSTANTS` fitted to the other runs.

    Columns model, gpus, global_batch, measured, paper, ours, paper_error and ours_error (relative to measured).
    """
    rows = vision_rows(way)
    seconds = np.empty(len(rows))
    for place in range(len(rows)):
        others = np.arange(len(rows)) != place
        fitted = fit(rows[others], starts=1, only=CONSTANTS, begin=shipped())
        seconds[place] = step_time(to_work(rows[~others]), fitted)["step_s"][0]
    found = rows[["model", "global_batch", "measured", "paper"]].assign(gpus=rows["dp"].astype(int))
    found["ours"] = found["measured"] * rows["measured_s"] / seconds
    found[["measured", "paper", "ours"]] = found[["measured", "paper", "ours"]].div(rows["peak_gemm"], axis=0)
    for who in ("paper", "ours"):
        found[f"{who}_error"] = found[who] / found["measured"] - 1
    found.attrs.update(rows.attrs)
    return found


def compare_ways() -> pd.DataFrame:
    """Mean and median relative error of every way, constants fitted to the other runs, and of the paper's model."""
    tables = {way: vision_errors(way) for way in WAYS}
    errors = {way: table["ours_error"].abs() for way, table in tables.items()}
    errors["the paper's model"] = next(iter(tables.values()))["paper_error"].abs()
    return pd.DataFrame({name: {"mean": part.mean(), "median": part.median()} for name, part in errors.items()}).T


def _row(run: dict[str, str], way: str) -> dict:
    name, gpus, batch = run["model"], int(run["gpus"]), int(run["global_batch"])
    model = _model(name)
    cluster = catalog.cluster("p4d", nodes=gpus // 8)
    plan = Plan(dp=gpus, zero=3, micro_batch=batch // gpus)
    room = usable_bytes(cluster.device)
    if peak_bytes(memory(model, plan, stack="torch")) > room:
        plan = replace(plan, recompute="full")
    kept = peak_bytes(memory(model, replace(plan, zero=2), stack="torch")) <= room
    fields, classes = machine_fields(cluster, stack="eager")
    fields |= model_fields(model) | matrix_fields(cluster.device, "bf16") | plan_fields(plan, batch)
    fields |= {"zero": 2 if way == "weights kept" and kept else 3, "tensorwise": way == "gathers in turn"}
    measured = float(run["measured_tflop_per_s"]) * 1e12
    step_s = 3 * float(run["forward_tflop"]) * 1e12 * batch / gpus / measured
    known = {field: default for field, default in FIELDS.items() if default == default}
    return known | {field: float(number) for field, number in fields.items()} | classes | {
        "mixture": "none", "source": "MAD-Max sheet", "model": name, "group": f"{name}/{gpus}/{batch}",
        "supported": True, "consistent": True, "measured_s": step_s, "measured": measured, "global_batch": batch,
        "paper": float(run["paper_tflop_per_s"]) * 1e12,
    }  # fmt: skip


def _model(name: str) -> Transformer:
    """Of the catalog; the sheet's ViT-H has patches of 16 pixels, as its FLOPs tell."""
    model = catalog.model(_MODELS[name])
    return replace(model, patch=16, classes=1000, sequence=0) if name == "ViT-H" else model
