"""traceml's final summary: means of the phases of a step by rank.

Without a series it says who, not since when. Format: traceml-ai 0.5.0,
reporting/SCHEMA.md; its schema 1.9.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.traces.logs.log import Log, Phase

_MS = 1e-3
_OLDEST = (1, 7)  # schema; earlier ones have other names
# phases of a step and what they are inside of; others are sums or clocks of these
_PHASES = {
    "input_wait_ms": "",
    "h2d_ms": "",
    "compute_ms": "",
    "forward_ms": "compute",
    "backward_ms": "compute",
    "optimizer_ms": "compute",
}


def read_traceml(paths: Sequence[Path]) -> Log:
    """The log of one summary. Raises ValueError for schemas before 1.7, and for one
    without times of steps.
    """
    path = paths[-1]
    summary = json.loads(path.read_text())
    version = str(summary.get("schema_version", summary.get("schema", 0)))
    if tuple(map(int, version.split("."))) < _OLDEST:
        raise ValueError(f"{path}: schema {version} of traceml; read are 1.7 and later")
    section = summary.get("step_time") or {}
    rows = (section.get("groups") or {}).get("rows") or {}
    if not rows:
        raise ValueError(f"{path}: this summary of traceml has no times of steps")
    identities = [row["identity"] for row in rows.values()]
    metrics = pd.DataFrame([row["metrics"] for row in rows.values()])
    metrics = metrics.apply(pd.to_numeric, errors="coerce") * _MS
    units = pd.DataFrame({"rank": [one.get("global_rank") for one in identities]})
    units["host"] = [one.get("hostname") or "" for one in identities]
    units = units.assign(group="", file=str(path))
    last = (section.get("global") or {}).get("window") or {}
    steps = np.array([last.get("start_step") or 0])
    group = np.zeros(len(units), int)
    return Log(
        source="traceml",
        units=units,
        steps=steps,
        pace_s=np.array([metrics["step_time_ms"].median()]),
        tags=np.array([""], dtype=object),
        phases={
            name.removesuffix("_ms"): Phase(
                metrics[[name]].to_numpy(np.float32), steps, group, parent
            )
            for name, parent in _PHASES.items()
            if name in metrics and metrics[name].notna().any()
        },
        notes=("means by rank: no series, so nothing is known of since when",),
    )
