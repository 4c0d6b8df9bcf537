"""How well does the step-time model, told about other runs, predict the vision transformers of MAD-Max?

Nine FSDP runs on AWS p4d (8 x A100-40, 400 Gb/s a node) in the artifact of [Hsia et al., ISCA 2024, arXiv 2310.02784],
figure 8; ViT-L to ViT-120B, FLOP/s per device. Each run is predicted by constants fitted to the other eight. Three
descriptions of the software are compared, each with few constants: the sheet says FSDP and no more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.fit import fingerprint, fit
from madmax_lib.calibration.published_rows import FIELD_DEFAULTS, to_work
from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import case_fields
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.timeline import with_origin

__all__ = ["compare_ways", "vision_errors"]

# matrix products at any size and what small ones lose, and the network; all else stays as fitted on language models
_CONSTANTS = ("gemm_efficiency:ampere-16", "gemm_bytes", "network_share:ampere")
_WAYS = {
    "gathers hidden": "the weights of the next block travel while one computes, as in FSDP since 2023",
    "weights kept": "as before, and weights that fit stay between forward and backward pass (ZeRO-2)",
    "gathers in turn": "nothing is gathered ahead: compute waits for every block, as in FSDP of 2022",
}


def _vision_rows(way: str) -> pd.DataFrame:
    """The nine runs as normalised rows (see `published_rows.read_rows`), with measured and paper, in FLOP/s per device.

    Blocks are recomputed where the activations do not fit without. Raises ValueError for an unknown way.
    """
    if way not in _WAYS:
        raise ValueError(f"way={way!r} is not one of {', '.join(_WAYS)}")
    rows = pd.DataFrame([_row(run, way) for run in catalog.table("published_vision").to_dict("records")])
    return with_origin(rows, {"files": {"rows": {"sha256": fingerprint(rows)}}, "rules": way})


def vision_errors(way: str = "gathers in turn") -> pd.DataFrame:
    """Measured, the paper's and our MFU of each run (0..1), ours by `_CONSTANTS` fitted to the other runs.

    way: what the software does between blocks, a row of `compare_ways`. Columns model, gpus, global_batch, measured,
    paper, ours, paper_error and ours_error (relative to measured). Raises ValueError for an unknown way.
    """
    rows = _vision_rows(way)
    seconds = np.empty(len(rows))
    for run in range(len(rows)):
        others = np.arange(len(rows)) != run
        fitted = fit(rows[others], starts=1, only=_CONSTANTS, begin=shipped())
        seconds[run] = step_time(to_work(rows[~others]), fitted)["step_s"][0]
    table = rows[["model", "global_batch", "measured", "paper"]].assign(gpus=rows["dp"].astype(int))
    table["ours"] = table["measured"] * rows["measured_s"] / seconds
    table[["measured", "paper", "ours"]] = table[["measured", "paper", "ours"]].div(rows["peak_gemm"], axis=0)
    for who in ("paper", "ours"):
        table[f"{who}_error"] = table[who] / table["measured"] - 1
    return with_origin(table, rows.attrs["provenance"])


def compare_ways() -> pd.DataFrame:
    """Mean and median relative error of every way, constants fitted to the other runs, and of the paper's model."""
    tables = {way: vision_errors(way) for way in _WAYS}
    errors = {way: table["ours_error"].abs() for way, table in tables.items()}
    errors["the paper's model"] = next(iter(tables.values()))["paper_error"].abs()
    return pd.DataFrame({name: {"mean": part.mean(), "median": part.median()} for name, part in errors.items()}).T


def _row(run: dict[str, str], way: str) -> dict:
    name, gpus, batch = run["model"], int(run["gpus"]), int(run["global_batch"])
    model = catalog.model(name)
    if name == "ViT-H":  # patches of 16 pixels, as its FLOPs tell
        model = replace(model, patch=16, classes=1000, sequence=0)
    cluster = catalog.cluster("p4d", nodes=gpus // 8)
    plan = Plan(dp=gpus, zero=3, micro_batch=batch // gpus)
    room = usable_bytes(cluster.device)
    if peak_bytes(memory(model, plan, software="torch")) > room:
        plan = replace(plan, recompute="full")
    kept = way == "weights kept" and peak_bytes(memory(model, replace(plan, zero=2), software="torch")) <= room
    fields, classes = case_fields(Case(model, cluster, plan, batch), kernels="eager")
    fields |= {"zero": 2 if kept else 3, "tensorwise": way == "gathers in turn"}
    measured, paper = (1e12 * float(run[f"{who}_tflop_per_s"]) for who in ("measured", "paper"))
    step_s = 3 * float(run["forward_tflop"]) * 1e12 * batch / gpus / measured
    run_name = {"source": "MAD-Max sheet", "model": name, "group": f"{name}/{gpus}/{batch}", "global_batch": batch}
    rates = {"measured_s": step_s, "measured": measured, "paper": paper, "supported": True, "consistent": True}
    numbers = {field: float(number) for field, number in fields.items()}
    return FIELD_DEFAULTS | numbers | classes | run_name | rates
