"""Which training step does a span belong to?

Steps are the ProfilerStep#N annotations, else annotations that look like an iteration,
else those of an engine that serves (vLLM, SGLang, ATOM: batches, numbered in their
order), else the whole trace is step 0. Host spans belong to the step they start in;
device spans to the step of the launch with their correlation, because they often run
after the host has gone on; without a launch, to the step in which they start. Kernels
that precede those launched in the trace on their stream, or all launches by their
correlation, are left over from before it: step -1.
"""

import re

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import Timeline

__all__ = ["assign_steps", "hta_rows", "step_spans"]

_PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,9})(?!\d)")
_ITERATION = re.compile(
    r"^\W*(?:train(?:ing)?[_ ]?)?(?:step|iter|iteration|batch)[\W_]*(\d{1,9})\W*$",
    re.IGNORECASE,
)

_SERVED = (
    re.compile(r"^execute_(?:\w*_)?(?:context|generation|new|cached)_\d()"),
    re.compile(r"^(?:step\[\w+ |(?:prefill|decode)\[)bs=\d()"),
)


def assign_steps(spans: pd.DataFrame) -> np.ndarray:
    """Step number (n,) int32 of the spans of one rank, -1 outside of all steps."""
    if not len(spans):
        return np.zeros(0, dtype=np.int32)
    steps = step_spans(spans)
    if steps is None:
        return np.zeros(len(spans), dtype=np.int32)
    step = _by_time(spans["start_ns"].to_numpy(), steps)
    stream = spans["stream"].to_numpy()
    correlation = spans["correlation"].to_numpy()
    launches = np.flatnonzero((stream < 0) & (correlation >= 0))
    if len(launches):
        launches = launches[np.argsort(correlation[launches], kind="stable")]
        kernels = np.flatnonzero((stream >= 0) & (correlation >= 0))
        place = np.searchsorted(correlation[launches], correlation[kernels])
        launch = launches[np.minimum(place, len(launches) - 1)]
        launched = correlation[launch] == correlation[kernels]
        step[kernels[launched]] = step[launch[launched]]
        lost = kernels[~launched]
        begins = spans["start_ns"].iloc[kernels[launched]]
        first_ns = (
            begins.groupby(stream[kernels[launched]])
            .min()
            .reindex(stream[lost])
            .to_numpy(dtype=float)
        )
        before = spans["start_ns"].to_numpy()[lost] < np.where(
            np.isnan(first_ns), begins.min(), first_ns
        )
        step[lost[before | (correlation[lost] < correlation[launches[0]])]] = -1
    return step


def hta_rows(timelines: dict[int, Timeline]) -> dict[int, Timeline]:
    """HTA 0.5.0's selection: with two or more step names, all that starts with or after
    the last step is dropped.

    A device row stays if a host row that stays has its correlation; one without
    correlation counts as a host row.
    """
    names = {
        n
        for t in timelines.values()
        for n in t.spans["name"].unique()
        if "ProfilerStep" in n
    }
    if len(names) < 2:
        return timelines
    return {
        rank: _before_last_step(timeline, names) for rank, timeline in timelines.items()
    }


def _before_last_step(timeline: Timeline, step_names: set[str]) -> Timeline:
    spans = timeline.spans
    sync = spans["name"].isin(["Event Sync", "Context Sync"])
    device = ((spans["stream"] >= 0) & (spans["correlation"] >= 0)) | sync
    starts = spans.loc[~device & spans["name"].isin(step_names), "start_ns"]
    host = ~device & (spans["start_ns"] < (starts.max() if len(starts) else -np.inf))
    launched = device & spans["correlation"].isin(spans.loc[host, "correlation"])
    return timeline.where(host | launched)


def step_spans(spans: pd.DataFrame) -> np.ndarray | None:
    """(k, 3) start, end and number of each step on the host, sorted by start; None
    without steps.
    """
    annotations = spans[(spans["kind"] == "annotation") & (spans["stream"] < 0)]
    names = annotations["name"].cat.categories
    for pattern in (_PROFILER_STEP, _ITERATION, *_SERVED):
        number = np.array(
            [int(m[1] or 0) if (m := pattern.search(name)) else -1 for name in names],
            dtype=np.int64,
        )
        of_row = (
            number[annotations["name"].cat.codes.to_numpy()]
            if len(annotations)
            else number[:0]
        )
        if (is_step := of_row >= 0).any():
            start = annotations["start_ns"].to_numpy()[is_step]
            end = start + annotations["dur_ns"].to_numpy()[is_step]
            table = np.stack([start, end, of_row[is_step]], axis=1)
            table = table[np.argsort(table[:, 0], kind="stable")]
            table[:, 2] = np.arange(len(table)) if pattern in _SERVED else table[:, 2]
            return table
    return None


def _by_time(start_ns: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Step number (n,) int32 at each time, -1 outside of all."""
    place = np.searchsorted(steps[:, 0], start_ns, side="right").astype(np.int32) - 1
    number = np.append(steps[:, 2], -1).astype(np.int32)[place]
    number[start_ns >= np.append(steps[:, 1], 0)[place]] = -1
    return number
