"""Training runs side by side: breakdowns of their traces, and memory predicted beside
memory measured.

They need runs, traces and the simulator together; `view.plots.runs` draws them.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.runs.read import Run, runs_table
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.traces.read.cache import content_sha256
from madmax_lib.traces.read.kineto import read_trace


def trace_breakdowns(runs: dict[str, Run]) -> pd.DataFrame:
    """Breakdown of the traced steps of each run, mean of its ranks: shares of the time,
    and overlap.

    Columns: run, strategy, dimensions, ranks, compute, exposed_comm, idle (0..1),
    overlap. From breakdown.csv where a run has one (it was slimmed), else from its
    traces. attrs carry the files.
    """
    rows = []
    files = {}
    for about in runs_table(runs).to_dict("records"):
        directory = runs[about["run"]].directory
        path = directory / "breakdown.csv"
        if path.exists():
            table = pd.read_csv(path)
            digests = {path.name: content_sha256(path)}
        else:
            table = breakdown(read_trace(directory))
            traced = table.attrs["provenance"]["files"].values()
            digests = {file["name"]: file["sha256"] for file in traced}
        files |= {f"{about['run']}/{name}": digest for name, digest in digests.items()}
        row = {name: about[name] for name in ("run", "strategy", "dimensions", "ranks")}
        # shares of each rank, then their mean: ranks may run for unlike times
        for name in ("compute", "exposed_comm", "idle"):
            row[name] = (table[f"{name}_s"] / table["total_s"]).mean()
        # one process has nothing to hide
        row["overlap"] = table["overlap"].mean() if about["ranks"] > 1 else np.nan
        rows.append(row)
    result = pd.DataFrame(rows)
    result.attrs["provenance"] = {"files": files}
    return result


def memory_table(runs: dict[str, Run]) -> pd.DataFrame:
    """Memory of the fullest rank's device by run, beside its plan and status.

    predicted_bytes: allocated at the peak, of `mm.memory` in the habits of this
    project's runs: gradients are views into DDP's buckets, low-rank training has
    gradients of its updates alone. measured_bytes: torch.cuda.max_memory_allocated, NaN
    on a CPU, where nothing counts allocations (host_rss_bytes holds Python and torch
    too). A run out of memory has its plan and prediction here, and what its first steps
    took. attrs carry the model and the files.
    """
    table = runs_table(runs)[["run", "strategy", "dimensions", "status"]]
    measured = []
    for run in (runs[name] for name in table["run"]):
        parts = [*run.summary.get("ranks", ()), run.summary]
        peaks = [part.get("memory_peak_bytes") for part in parts]
        sizes = [float(size) for size in peaks if size is not None]
        # a run out of memory may have no peak
        measured.append(max(sizes, default=np.nan))
    table = table.assign(
        plan=[str(runs[name].spec.plan) for name in table["run"]],
        predicted_bytes=[_predicted_bytes(runs[name]) for name in table["run"]],
        measured_bytes=measured,
    )
    table.attrs["provenance"] = {"files": steps_files(runs)}
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


def _predicted_bytes(run: Run):
    """Bytes allocated at the peak of the fullest rank."""
    spec = run.spec
    job = run.env.get("job", {})
    # adapters: parameters that are trained over those that are there
    trainable = job.get("trained_local_parameters", 1) / job.get("local_parameters", 1)
    software = catalog.software("deepspeed" if spec.engine == "deepspeed" else "fsdp2")
    # these runs take plans that the released stack would refuse
    software = replace(
        software,
        zero=(0, 1, 2, 3),
        expert_placement=("dp-cp",),
        context=("ring", "ulysses"),
    )
    table = memory(
        spec.shapes,
        spec.plan,
        sequence=spec.sequence or None,
        dtype=run.env.get("dtype", spec.dtype),  # the latter may be auto
        global_batch=spec.global_batch,
        software=software,
        trainable=trainable,
    )
    # gradients are views into DDP's buckets, so buckets take nothing of their own
    counted = (table["component"] != "buckets") | software.engine
    return peak_bytes(table[counted], allocated=True)
