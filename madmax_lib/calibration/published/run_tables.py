"""What do training runs tell side by side? Breakdowns of their traces, and memory
predicted beside memory measured.

They need runs, traces and the simulator together; `view.plots.runs` draws them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.runs.read import Run, runs_table
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.traces.read.cache import content_sha256
from madmax_lib.traces.read.kineto import read_trace

__all__ = ["memory_table", "steps_files", "trace_breakdowns"]


def trace_breakdowns(runs: dict[str, Run]) -> pd.DataFrame:
    """Breakdown of the traced steps of each run, mean of its ranks: shares of the time,
    and overlap.

    Columns: run, strategy, dimensions, ranks, compute, exposed_comm, idle (0..1),
    overlap. From breakdown.csv where a run has one (it was slimmed), else from its
    traces. attrs carry the files.
    """
    rows = []
    files = {}
    for row in runs_table(runs).itertuples():
        path = runs[row.run].directory / "breakdown.csv"
        if path.exists():
            table = pd.read_csv(path)
            digests = {"breakdown.csv": content_sha256(path)}
        else:
            table = breakdown(read_trace(runs[row.run].directory))
            digests = {
                file["name"]: file["sha256"]
                for file in table.attrs["provenance"]["files"].values()
            }
        files |= {f"{row.run}/{name}": sha256 for name, sha256 in digests.items()}
        about = {
            "run": row.run,
            "strategy": row.strategy,
            "dimensions": row.dimensions,
            "ranks": row.ranks,
        }
        shares = {
            name: (table[f"{name}_s"] / table["total_s"]).mean()
            for name in ("compute", "exposed_comm", "idle")
        }
        overlap = (
            table["overlap"].mean() if row.ranks > 1 else np.nan
        )  # one process has nothing to hide
        rows.append(about | shares | {"overlap": overlap})
    return _with_files(pd.DataFrame(rows), files)


def memory_table(runs: dict[str, Run]) -> pd.DataFrame:
    """Memory of the fullest rank's device by run, beside its plan and status.

    predicted_bytes: allocated at the peak, of `mm.memory` in the habits of this
    project's runs: gradients are views into DDP's buckets, low-rank training has
    gradients of its updates alone. measured_bytes: torch.cuda.max_memory_allocated, NaN
    on a CPU, where nothing counts allocations (host_rss_bytes holds Python and torch
    too). A run out of memory has its plan and prediction here, and what its first steps
    took. attrs carry the model and the files.
    """
    about = runs_table(runs)[["run", "strategy", "dimensions", "status"]]
    rows = []
    for run in (runs[name] for name in about["run"]):
        peaks = [rank["memory_peak_bytes"] for rank in run.summary.get("ranks", ())]
        peaks = [
            size
            for size in (*peaks, run.summary.get("memory_peak_bytes"))
            if size is not None
        ]
        measured = float(max(peaks, default=np.nan))
        rows.append(
            {
                "plan": str(run.spec.plan),
                "predicted_bytes": _predicted(run),
                "measured_bytes": measured,
            }
        )
    table = _with_files(about.join(pd.DataFrame(rows)), steps_files(runs))
    table.attrs["model"] = next(iter(runs.values())).spec.model
    return table


def steps_files(runs: dict[str, Run]) -> dict[str, str]:
    """sha256 of the steps.csv of each run, by name."""
    paths = {name: run.directory / "steps.csv" for name, run in runs.items()}
    return {
        f"{name}/steps.csv": content_sha256(path)
        for name, path in paths.items()
        if path.exists()
    }


def _with_files(table: pd.DataFrame, files: dict[str, str]) -> pd.DataFrame:
    table.attrs["provenance"] = {"files": files}
    return table


def _predicted(run: Run) -> float:
    """Bytes allocated at the peak of the fullest rank."""
    spec = run.spec
    job = run.env.get("job", {})
    trainable = job.get("trained_local_parameters", 1) / job.get("local_parameters", 1)
    software = catalog.software("deepspeed" if spec.engine == "deepspeed" else "fsdp2")
    own = replace(
        software,
        zero=(0, 1, 2, 3),
        expert_placement=("dp-cp",),
        context=("ring", "ulysses"),
    )
    dtype = run.env.get("dtype", spec.dtype)  # the latter may be auto
    shape = {
        "sequence": spec.sequence or None,
        "dtype": dtype,
        "global_batch": spec.global_batch,
    }
    table = memory(spec.shapes, spec.plan, **shape, software=own, trainable=trainable)
    return peak_bytes(
        table[(table["component"] != "buckets") | own.engine], allocated=True
    )
