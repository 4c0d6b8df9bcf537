"""Which slice of work does each instant of a thread belong to?

Host spans nest; here they are cut where the innermost one changes. A device span is one
slice.
"""

import numpy as np
import pandas as pd

from madmax_lib.base.intervals import pack, union
from madmax_lib.timeline.timeline import BUSY_KINDS

__all__ = ["IN_FLIGHT", "cut_into_slices", "one_slice_per_span"]

# streams up to here are of one message each, which a thread of the host has sent or
# awaits
IN_FLIGHT = -1_000_000


def one_slice_per_span(spans: pd.DataFrame) -> pd.DataFrame:
    """Simulated spans as slices, one each; what a host does has the kind host."""
    slices = spans[["rank", "stream", "kind", "name", "start_ns"]].assign(
        row=spans.index,
        end_ns=spans["start_ns"] + spans["dur_ns"],
        kind=spans["kind"].astype(object),
    )
    return slices.replace({"kind": {"cpu": "host", "idle": "host"}}).reset_index(
        drop=True
    )


def cut_into_slices(spans: pd.DataFrame) -> pd.DataFrame:
    """Slices of measured spans, host threads first, in their order; annotations count
    where nothing is inside them.
    """
    spans = spans[(spans["stream"] >= 0) | _working(spans)]
    end_ns = spans["start_ns"] + spans["dur_ns"].clip(lower=0)
    work = spans["kind"].isin(BUSY_KINDS) | (
        (spans["kind"] == "cpu") & (spans["stream"] < 0)
    )
    last_ns = end_ns[work].max()  # an annotation may outlive the step it starts in
    annotation = (
        (spans["kind"] == "annotation")
        & (spans["stream"] < 0)
        & (spans["start_ns"] < last_ns)
    )
    spans = spans.assign(
        end_ns=end_ns.where(work, np.minimum(end_ns, last_ns) if work.any() else end_ns)
    )
    host = spans["kind"].isin(
        ("cpu", "annotation")
    )  # without a device, operators are the compute
    spans = spans.assign(
        row=spans.index, kind=spans["kind"].astype(object).mask(host, "host")
    )
    spans = spans[work | (annotation & work.any())]
    spans = spans[["row", "rank", "stream", "kind", "name", "start_ns", "end_ns"]]
    flying = (spans["kind"] == "comm") & _calling(spans)
    spans.loc[flying, "stream"] = IN_FLIGHT - np.arange(flying.sum())
    host = [
        _cut(thread)
        for _, thread in spans[spans["stream"] < 0].groupby(["rank", "stream"])
    ]
    return pd.concat([*host, spans[spans["stream"] >= 0]], ignore_index=True)


def _working(spans: pd.DataFrame) -> pd.Series:
    """Spans of host threads that run operators or calls of the device; where a rank has
    such, others only wait.
    """
    works = (
        (spans["correlation"] >= 0)
        | (spans["op"] >= 0)
        | spans["kind"].isin(BUSY_KINDS)
    )
    works = works & (spans["stream"] < 0) & (spans["kind"] != "annotation")
    rank_works = works.groupby(spans["rank"]).transform("any")
    return (
        works.groupby([spans["rank"], spans["stream"]]).transform("any") | ~rank_works
    )


def _calling(spans: pd.DataFrame) -> pd.Series:
    """Spans of host threads that call collectives."""
    calls = (spans["stream"] < 0) & spans["name"].str.startswith("c10d::")
    return calls.groupby([spans["rank"], spans["stream"]]).transform("any")


def _cut(thread: pd.DataFrame) -> pd.DataFrame:
    """A host thread cut where its innermost span changes; each span keeps a slice at
    its start, even an empty one.
    """
    thread = thread[
        (thread["kind"] == "comm") | ~_inside(thread, thread, "comm")
    ]  # a transfer is one slice
    thread = thread.sort_values(
        ["start_ns", "end_ns"], ascending=[True, False], kind="stable"
    )
    start = thread["start_ns"].to_numpy()
    end = thread["end_ns"].to_numpy()
    number = np.arange(len(thread))
    # at one instant what is running ends first, inner before outer; then spans start,
    # and empty ones end at once
    turn = np.where(end > start, -number, 2 * number + 1)
    times = np.concatenate([start, end])
    ends = np.repeat([False, True], len(thread))
    order = np.lexsort(
        (
            np.concatenate([2 * number, turn]),
            np.concatenate([number >= 0, end <= start]),
            times,
        )
    )
    depth = np.cumsum(np.where(ends[order], -1, 1))
    opened = depth[~ends[order]]  # in the order of starts, which is that of the spans
    base = len(thread) + 1
    keys = np.sort(opened * base + number)
    below = keys[np.searchsorted(keys, (opened - 1) * base + number) - 1]
    parent = np.where((below // base == opened - 1) & (opened > 1), below % base, -1)
    inner = np.concatenate([number, parent])[order][:-1]
    begin = times[order][:-1]
    until = times[order][1:]
    keep = (inner >= 0) & ((until > begin) | ~ends[order][:-1]) & (until <= end[inner])
    cut = thread.iloc[inner[keep]].assign(start_ns=begin[keep], end_ns=until[keep])
    return cut.assign(
        kind=np.where(_inside(cut, thread, "compute"), "compute", cut["kind"])
    )


def _inside(rows: pd.DataFrame, thread: pd.DataFrame, kind: str) -> np.ndarray:
    """Which rows lie within the spans of a kind, (n,) of bool."""
    thread = thread[thread["kind"] == kind]
    spans = union(pack(thread["start_ns"], thread["end_ns"] - thread["start_ns"]))
    at = np.searchsorted(spans[:, 0], rows["start_ns"], side="right") - 1
    return (at >= 0) & (rows["end_ns"].to_numpy() <= np.r_[spans[:, 1], 0][at])
