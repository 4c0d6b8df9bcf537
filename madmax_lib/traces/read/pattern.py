"""Steps of a recording in which nothing marks them, by the sequence of kernel names that
recurs.

A step is the largest pattern that recurs: runs of names (grams) that occur once in it lie
one period apart, from the first to the last kernel. Layers and micro-batches recur too,
but not with an optimizer in each. What recurs less than three times, or with gaps that
differ, is no pattern: then the recording stays one step.
"""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.steps import assign_steps, step_spans

_GRAM = 3  # kernels in a run of names
_LEAST = 3  # periods
_SLACK = 0.2  # of a period, by which gaps differ: a loss that is printed, a checkpoint
_WHOLE = 0.85  # of a period that counts as one
# what is named so runs once a step: the optimizer's labels, else its work
_OPTIMIZERS = (
    r"(?i)\boptimi[sz]er(?:\.step\b|\W*$)",
    r"(?i)adam|sgd|adagrad|rmsprop|addcdiv|_foreach_(?:add|mul|lerp|sqrt)|multi_tensor",
)


def cut_by_pattern(timeline: Timeline) -> Timeline:
    """The timeline with steps 0, 1, ... where nothing marks any and a pattern recurs
    equally often on all ranks; `meta.provenance["steps"]` then says so.
    """
    spans = timeline.spans
    ranks = spans.groupby("rank").indices
    if timeline.meta.source != "measured" or (spans["step"] != 0).any():
        return timeline
    if any(step_spans(spans.iloc[rows]) is not None for rows in ranks.values()):
        return timeline
    step = np.zeros(len(spans), dtype="int32")
    for rows in ranks.values():
        step[rows] = _steps(spans.iloc[rows])
    # the number of the last step of each rank
    last = {step[rows].max() for rows in ranks.values()}
    if len(last) != 1 or last == {0}:
        return timeline
    text = (
        f"no step marks: {last.pop() + 1} steps found by the pattern of their kernels"
    )
    warnings.warn(text, TraceWarning, stacklevel=3)  # the line that called read_trace
    meta = replace(timeline.meta, provenance=timeline.meta.provenance | {"steps": text})
    return replace(timeline, spans=spans.assign(step=step), meta=meta)


def _steps(spans):
    """Step (n,) of the spans of a rank, 0 where none recurs."""
    rows = _sequence(spans)
    names = spans["name"].cat
    for pattern in _OPTIMIZERS:
        is_optimizer = names.categories.str.contains(pattern)[names.codes]
        if is_optimizer.any():
            break
    codes = names.codes.to_numpy()[rows]
    for positions in _recurring(codes) if is_optimizer.any() else ():
        begin_ns = _begins_ns(spans, rows, positions)
        if len(rows) - positions[-1] >= _WHOLE * np.median(np.diff(positions)):
            begin_ns = np.append(begin_ns, np.iinfo("int64").max)
        piece = assign_steps(spans, _marks(begin_ns))[is_optimizer]
        # a step ends with each piece in which the optimizer runs: one, or a micro-batch
        last = np.unique(piece[piece >= 0])
        pieces = np.diff(last, prepend=-1)
        if len(last) > _LEAST and pieces[0] < pieces[1]:  # the first is no whole step
            pieces = pieces[1:]
            begin_ns = begin_ns[last[0] + 1 :]
            last = last[1:] - last[0] - 1
        if len(last) >= _LEAST and np.ptp(pieces) == 0:
            return assign_steps(spans, _marks(begin_ns[np.r_[0, last + 1]]))
    return np.zeros(len(spans), dtype="int32")


def _marks(begin_ns):
    """Steps, as `step_spans` gives them, each up to the begin of the next."""
    number = np.arange(len(begin_ns) - 1)
    return np.stack([begin_ns[:-1], begin_ns[1:], number], axis=1)


def _sequence(spans):
    """Rows of the busiest compute stream that were launched in the recording, of all
    operators where the host computes, in order of time.
    """
    compute = spans["kind"] == "compute"
    stream = spans["stream"]
    device = compute & (stream >= 0)
    if device.any():
        compute = device
        busy_ns = spans["dur_ns"][device].groupby(stream[device]).sum()
        compute = device & (stream == busy_ns.idxmax())
        launched = compute & spans["correlation"].isin(_launches(spans).index)
        compute = launched if launched.any() else compute
    rows = np.flatnonzero(compute)
    return rows[np.argsort(spans["start_ns"].to_numpy()[rows], kind="stable")]


def _launches(spans):
    """Start of each launch on the host, by correlation."""
    host = spans[(spans["stream"] < 0) & (spans["correlation"] >= 0)]
    return host.drop_duplicates("correlation").set_index("correlation")["start_ns"]


def _recurring(names):
    """Positions of the first gram that recurs regularly from end to end, for each number
    of times that some do, most often first.
    """
    # a gram as one number: names are digits
    base = int(names.max(initial=0)) + 1
    count = max(len(names) - _GRAM + 1, 0)
    grams = sum(
        base**digit * names[digit : digit + count].astype("int64")
        for digit in range(_GRAM)
    )
    at = pd.DataFrame({"gram": grams, "at": np.arange(count)})
    by_gram = at.groupby("gram")["at"]
    at["gap"] = by_gram.diff()
    table = at.groupby("gram").agg(
        times=("at", "size"),
        first=("at", "min"),
        last=("at", "max"),
        gap=("gap", "median"),
        least=("gap", "min"),
        most=("gap", "max"),
    )
    ends = np.maximum(table["first"], len(names) - _GRAM - table["last"])
    regular = table[
        (table["times"] >= _LEAST)
        & (table["least"] >= (1 - _SLACK) * table["gap"])
        & (np.maximum(table["most"], ends) <= (1 + _SLACK) * table["gap"])
    ]
    for _, grams_of_step in sorted(regular.groupby("times"), reverse=True):
        anchor = grams_of_step["first"].idxmin()
        yield at.loc[at["gram"] == anchor, "at"].to_numpy()


def _begins_ns(spans, rows, positions):
    """Begin of the steps on the host: of the outermost operator that launches the kernel
    at each position, and none before it.
    """
    launches = _launches(spans)
    start_ns = spans["start_ns"]
    kernels = spans.iloc[rows]
    launch_ns = kernels["correlation"].map(launches).fillna(kernels["start_ns"])
    host = spans[(spans["kind"] == "cpu") & (spans["stream"] < 0)]
    host_ns = start_ns[host.index].to_numpy()
    end_ns = host_ns + host["dur_ns"].to_numpy()
    begins_ns = []
    for position in positions:
        at_ns = int(launch_ns.iloc[position])
        after_ns = int(launch_ns.iloc[position - 1]) if position else -np.inf
        around = (host_ns <= at_ns) & (end_ns > at_ns) & (host_ns > after_ns)
        begins_ns.append(host_ns[around].min(initial=at_ns))
    return np.array(begins_ns)
