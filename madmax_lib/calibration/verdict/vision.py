"""Vision transformers of MAD-Max, predicted by constants of the other runs.

Nine FSDP runs on AWS p4d (8 x A100-40, 400 Gb/s a node) in the artifact of [Hsia et
al., ISCA 2024, arXiv 2310.02784], figure 8; ViT-L to ViT-120B, FLOP/s per device. Each
run is predicted by constants fitted to the other eight. The sheet says FSDP and no
more. Of three descriptions (weights gathered ahead, kept where they fit, gathered in
turn) the last, FSDP of 2022, meets these runs best.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.fit import fingerprint, fit
from madmax_lib.calibration.published.rows import read_rows, to_steps
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.timeline.timeline import with_origin

# matrix products at any size and what small ones lose, and the network; all else stays
# as fitted on language models
_CONSTANTS = ("gemm_efficiency:ampere-16", "gemm_bytes", "network_share:efa")
# what the sheet says of all runs
_SHEET = {
    "source": "MAD-Max sheet",
    "gpu": "A100-40GB",
    "cluster": "p4d",
    "software": "fsdp2",
    "zero_stage": 3,
}
_VIT_H_TOKENS = 197  # patches of 16 pixels, as its FLOPs tell


def _vision_rows():
    """The nine runs as normalised rows, with measured and paper in FLOP/s per device.

    Blocks are recomputed where the activations do not fit without.
    """
    runs = catalog.table("published_vision", numbers=True)
    runs = runs.rename(columns={"gpus": "n_gpus"})
    measured = 1e12 * runs["measured_tflop_per_s"]
    paper = 1e12 * runs["paper_tflop_per_s"]
    micro_batch = runs["global_batch"] / runs["n_gpus"]
    # forward and backward pass are three forward passes
    flops = 3 * 1e12 * runs["forward_tflop"] * micro_batch
    runs = runs.loc[:, ~runs.columns.str.contains("tflop")].assign(
        micro_batch=micro_batch,
        iteration_time_s=flops / measured,
        seq_len=runs["model"].map({"ViT-H": _VIT_H_TOKENS}),
        **_SHEET,
    )
    rows = read_rows(runs)
    rows["case"] = [
        replace(case, software=replace(case.software, gathers_tensorwise=True))
        for case in rows["case"]
    ]
    rows = rows.assign(group=rows.index.astype(str), measured=measured, paper=paper)
    files = {"rows": {"sha256": fingerprint(rows)}}
    return with_origin(rows, {"files": files, "rules": "gathers in turn"})


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
    table = rows[["model", "global_batch", "measured", "paper"]]
    table = table.assign(gpus=rows["dp"].astype(int))
    table["ours"] = table["measured"] * rows["measured_s"] / seconds
    peak = [case.cluster.device.peak(case.dtype) for case in rows["case"]]
    rates = ["measured", "paper", "ours"]
    table[rates] = table[rates].div(peak, axis=0)
    for name in ("paper", "ours"):
        table[f"{name}_error"] = table[name] / table["measured"] - 1
    return with_origin(table, rows.attrs["provenance"])
