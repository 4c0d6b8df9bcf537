"""How well does the step-time model, told about other runs, predict the vision
transformers of MAD-Max?

Nine FSDP runs on AWS p4d (8 x A100-40, 400 Gb/s a node) in the artifact of [Hsia et
al., ISCA 2024, arXiv 2310.02784], figure 8; ViT-L to ViT-120B, FLOP/s per device. Each
run is predicted by constants fitted to the other eight. The sheet says FSDP and no
more. Of three descriptions (weights gathered ahead, kept where they fit, gathered in
turn) the last, FSDP of 2022, meets these runs best.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.fit import fingerprint, fit
from madmax_lib.calibration.published.rows import read_rows, to_steps
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.timeline.timeline import with_origin

__all__ = ["vision_errors"]

# matrix products at any size and what small ones lose, and the network; all else stays
# as fitted on language models
_CONSTANTS = ("gemm_efficiency:ampere-16", "gemm_bytes", "network_share:efa")
_SOURCE = {"gpu": "A100-40GB", "cluster": "p4d", "software": "fsdp2", "zero_stage": 3}


def _vision_rows() -> pd.DataFrame:
    """The nine runs as normalised rows (see `published_rows.read_rows`), with measured
    and paper, in FLOP/s per device.

    Blocks are recomputed where the activations do not fit without.
    """
    runs = catalog.table("published_vision", numbers=True).rename(
        columns={"gpus": "n_gpus"}
    )
    measured, paper = (
        1e12 * runs[f"{who}_tflop_per_s"] for who in ("measured", "paper")
    )
    runs["micro_batch"] = runs["global_batch"] / runs["n_gpus"]
    runs["iteration_time_s"] = (
        3 * 1e12 * runs["forward_tflop"] * runs["micro_batch"] / measured
    )
    runs["seq_len"] = runs["model"].map(
        {"ViT-H": 197}
    )  # patches of 16 pixels, as its FLOPs tell
    rows = read_rows(
        runs.loc[:, ~runs.columns.str.contains("tflop")].assign(
            source="MAD-Max sheet", **_SOURCE
        )
    )
    rows["case"] = [
        replace(case, software=replace(case.software, gathers_tensorwise=True))
        for case in rows["case"]
    ]
    rows = rows.assign(group=rows.index.astype(str), measured=measured, paper=paper)
    return with_origin(
        rows,
        {"files": {"rows": {"sha256": fingerprint(rows)}}, "rules": "gathers in turn"},
    )


def vision_errors() -> pd.DataFrame:
    """Measured, the paper's and our MFU of each run (0..1), ours by `_CONSTANTS` fitted
    to the other runs.

    Columns model, gpus, global_batch, measured, paper, ours, paper_error and ours_error
    (relative to measured).
    """
    rows = _vision_rows()
    seconds = np.empty(len(rows))
    for run in range(len(rows)):
        others = np.arange(len(rows)) != run
        fitted = fit(rows[others], starts=1, only=_CONSTANTS, begin=shipped())
        seconds[run] = step_time(to_steps(rows[~others]), fitted)["step_s"][0]
    table = rows[["model", "global_batch", "measured", "paper"]].assign(
        gpus=rows["dp"].astype(int)
    )
    table["ours"] = table["measured"] * rows["measured_s"] / seconds
    peak = [case.cluster.device.peak(case.dtype) for case in rows["case"]]
    table[["measured", "paper", "ours"]] = table[["measured", "paper", "ours"]].div(
        peak, axis=0
    )
    for who in ("paper", "ours"):
        table[f"{who}_error"] = table[who] / table["measured"] - 1
    return with_origin(table, rows.attrs["provenance"])
