"""Training step of each span.

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

_PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,9})(?!\d)")
_ITERATION = re.compile(
    r"^\W*(?:train(?:ing)?[_ ]?)?(?:step|iter|iteration|batch)[\W_]*(\d{1,9})\W*$",
    re.IGNORECASE,
)

# batches of vLLM, then of SGLang and ATOM; the empty group stands for a number
_SERVED = (
    re.compile(r"^execute_(?:\w*_)?(?:context|generation|new|cached)_\d()"),
    re.compile(r"^(?:step\[\w+ |(?:prefill|decode)\[)bs=\d()"),
)


def assign_steps(spans: pd.DataFrame, steps: np.ndarray | None = None) -> np.ndarray:
    """Step number (n,) int32 of the spans of one rank, -1 outside of all steps.

    steps: as `step_spans` gives them, which is the default.
    """
    if spans.empty:
        return np.zeros(0, dtype="int32")
    steps = step_spans(spans) if steps is None else steps
    if steps is None:
        return np.zeros(len(spans), dtype="int32")
    step = _by_time(spans["start_ns"], steps)
    stream = spans["stream"].to_numpy()
    correlation = spans["correlation"].to_numpy()
    launches = np.flatnonzero((stream < 0) & (correlation >= 0))
    if not len(launches):
        return step
    # each kernel takes the step of the launch with its correlation: a join by search in
    # the sorted correlations of the launches
    launches = launches[np.argsort(correlation[launches], kind="stable")]
    kernels = np.flatnonzero((stream >= 0) & (correlation >= 0))
    index = np.searchsorted(correlation[launches], correlation[kernels])
    launch = launches[np.minimum(index, len(launches) - 1)]
    is_launched = correlation[launch] == correlation[kernels]
    step[kernels[is_launched]] = step[launch[is_launched]]
    # The others were launched before the recording, or their launch was lost: left over
    # if they start before the first launched kernel of their stream (of any, on a stream
    # without one), or their correlation is before that of every launch
    lost = kernels[~is_launched]
    begins = spans["start_ns"].iloc[kernels[is_launched]]
    first_of_stream = begins.groupby(stream[kernels[is_launched]]).min()
    first_ns = first_of_stream.reindex(stream[lost]).to_numpy(dtype=float)
    first_ns = np.where(np.isnan(first_ns), begins.min(), first_ns)
    left_over = spans["start_ns"].to_numpy()[lost] < first_ns
    left_over |= correlation[lost] < correlation[launches[0]]
    step[lost[left_over]] = -1
    return step


def hta_rows(timelines: dict[int, Timeline]) -> dict[int, Timeline]:
    """HTA 0.5.0's selection: with two or more step names, all that starts with or after
    the last step is dropped.

    A device row stays if a host row that stays has its correlation; one without
    correlation counts as a host row.
    """
    names = set()
    for timeline in timelines.values():
        names.update(timeline.spans["name"].unique())
    names = {name for name in names if "ProfilerStep" in name}
    if len(names) < 2:
        return timelines
    return {
        rank: _before_last_step(timeline, names) for rank, timeline in timelines.items()
    }


def _before_last_step(timeline, step_names):
    spans = timeline.spans
    # HTA counts these two among the rows of the device, also without a stream
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
    if annotations.empty:
        return None
    for pattern in (_PROFILER_STEP, _ITERATION, *_SERVED):
        # number of each name, -1 for those that are no step; each name is searched once
        number = np.full(len(names), -1, dtype="int64")
        for code, name in enumerate(names):
            if match := pattern.search(name):
                number[code] = int(match[1] or 0)
        of_row = number[annotations["name"].cat.codes]
        is_step = of_row >= 0
        if is_step.any():
            start = annotations["start_ns"][is_step]
            end = start + annotations["dur_ns"][is_step]
            table = np.stack([start, end, of_row[is_step]], axis=1)
            table = table[np.argsort(start, kind="stable")]
            if pattern in _SERVED:  # their names have no number of the batch
                table[:, 2] = np.arange(len(table))
            return table
    return None


def _by_time(start_ns, steps):
    """Step number (n,) int32 at each time, -1 outside of all."""
    # the last step that has begun; before the first, -1 takes the appended item: number
    # -1, end 0. int32, because there are as many as spans
    index = np.searchsorted(steps[:, 0], start_ns, side="right").astype("int32") - 1
    number = np.append(steps[:, 2], -1).astype("int32")[index]
    end_ns = np.append(steps[:, 1], 0)[index]
    number[start_ns >= end_ns] = -1
    return number
