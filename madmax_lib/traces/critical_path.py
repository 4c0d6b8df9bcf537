"""What decides how long a step takes, and how long would it take if something were faster?

The critical path is walked backwards from the last event of a step: each piece of work started, or ended, when the last
of what it waited for had happened (`dependencies`). Between two events lies work of a kind, or a delay: `launch delay`
from a launch to its kernel, `host` between two pieces of a host thread, `wait` for what a trace does not explain. The
parts follow each other without a gap, so that they sum to the time of the step. On a simulated timeline it is the
engine's longest path. `what_if` replays the same graph with other durations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from madmax_lib.intervals import pack, total
from madmax_lib.timeline import BUSY_KINDS, Timeline, with_origin
from madmax_lib.traces.waits.dependencies import Graph, graph
from madmax_lib.units import NS_PER_S

__all__ = ["PATH_KINDS", "critical_path", "faster_kinds", "path_share", "what_if"]

PATH_KINDS = ("host", "launch delay", *BUSY_KINDS, "wait")
_DELAY = {"order": "host", "backward": "host", "launch": "launch delay"}  # others: wait
_PATH = ["rank", "stream", "kind", "name", "start_s", "dur_s", "why", "row"]


def critical_path(timeline: Timeline, step: int | None = None) -> pd.DataFrame:
    """The longest chain of a step (the first with device work if none is given), one row per part, in time order.

    rank, stream, name, row (of the timeline's spans) of the piece that worked or waited to start. kind: one of
    PATH_KINDS. start_s: from the start of the step; the parts follow each other, and dur_s sums to `.attrs["step_s"]`.
    why: what decided when the part began, see `dependencies`; "work" continues the same piece, "start" is the first.
    `.attrs`: start_ns of the step; busy_s {kind: time covered by pieces of the kind, mean over the ranks}.
    Work of earlier steps that still runs counts from the start of the step. Raises ValueError for a step that the
    timeline does not have.
    """
    found = _graph(timeline, step)
    events = _walk(found)
    before = np.r_[-1, events[:-1]]  # the event that decided about each one
    begin_ns = np.where(before >= 0, found.time_ns[before], 0) if len(events) else found.time_ns
    edge = np.full(len(found.time_ns), len(found.why))
    edge[found.target[found.binding]] = np.flatnonzero(found.binding)
    why = np.r_[found.why, ["start"]].astype(object)[edge[events]]
    row = found.pieces.iloc[np.minimum(events // 2, len(found.pieces) - 1)].reset_index(drop=True)
    delay = np.array([_DELAY.get(reason, "wait") for reason in why], dtype=object)
    path = row.assign(
        kind=np.where(events % 2, row["kind"], delay) if len(events) else [],
        start_s=begin_ns / NS_PER_S,
        dur_s=(found.time_ns[events] - begin_ns) / NS_PER_S,
        why=why,
    )[_PATH]
    path = path[path["dur_s"] > 0].reset_index(drop=True)
    start_ns = int(found.pieces["start_ns"].min()) if len(found.pieces) else 0
    step_s = float(found.time_ns.max(initial=0) / NS_PER_S)
    return with_origin(path, timeline, busy_s=_busy_s(found.pieces), start_ns=start_ns, step_s=step_s)


def path_share(path: pd.DataFrame) -> pd.DataFrame:
    """A critical path by kind: kind, path_s, share (0..1) of the step, parts, busy_s (with and without the path)."""
    groups = path.groupby("kind")["dur_s"]
    table = pd.DataFrame({"path_s": groups.sum(), "parts": groups.size()}).reindex(list(PATH_KINDS)).fillna(0)
    table = table.reset_index(names="kind").astype({"parts": "int64"})
    table["share"] = table["path_s"] / max(table["path_s"].sum(), 1e-12)
    table["busy_s"] = table["kind"].map(path.attrs.get("busy_s", {})).astype(float).fillna(0.0)
    table = table[(table["path_s"] > 0) | (table["busy_s"] > 0)].reset_index(drop=True)
    table = table[["kind", "path_s", "share", "parts", "busy_s"]]
    table.attrs.update(path.attrs)
    return table


def what_if(
    timeline: Timeline, faster: dict[str, float] | Sequence[dict[str, float]], step: int | None = None
) -> pd.DataFrame:
    """Time of a step if some of its work were faster, one row per scenario.

    faster: {kind of PATH_KINDS or regular expression in names: factor}, 2 for twice as fast, inf for no time at all;
    several scenarios as a list. Columns: faster (text), factor (NaN if a scenario has several), step_s, saved_s,
    speedup (measured / new). Delays of an edge that decided stay as measured; others count at most the usual delay of
    their kind. What waits for nothing known starts when it did. With factor 1 the step takes what it took.
    A kind that the step does not have changes nothing. Raises ValueError for a factor that is not positive and for a
    name or pattern that the step does not have.
    """
    scenarios = [faster] if isinstance(faster, dict) else list(faster)
    found = _graph(timeline, step)
    own_ns, delay_ns = _durations(found)
    now_s, rows = float(found.time_ns.max(initial=0) / NS_PER_S), []
    for scenario in scenarios:
        of_event, of_edge = _factors(found, scenario)
        step_s = _replay(found, own_ns / of_event, delay_ns / of_edge) / NS_PER_S
        factor = next(iter(set(scenario.values()))) if len(set(scenario.values())) == 1 else float("nan")
        speedup = now_s / step_s if step_s else float("inf") if now_s else 1.0
        rows.append((" + ".join(scenario), factor, step_s, now_s - step_s, speedup))
    table = pd.DataFrame(rows, columns=["faster", "factor", "step_s", "saved_s", "speedup"])
    return with_origin(table, timeline)


def faster_kinds(timeline: Timeline, step: int | None = None) -> pd.DataFrame:
    """`what_if` for each kind on the critical path but waiting: twice as fast, and without taking time."""
    kinds = path_share(critical_path(timeline, step))
    kinds = kinds.loc[(kinds["path_s"] > 0) & (kinds["kind"] != "wait"), "kind"]
    return what_if(timeline, [{kind: factor} for kind in kinds for factor in (2.0, float("inf"))], step)


def _graph(timeline: Timeline, step: int | None) -> Graph:
    """The graph of one step, with what earlier steps left running on the device."""
    spans = timeline.spans
    busy = spans["kind"].isin(BUSY_KINDS)
    if step is not None and step not in timeline.steps:
        raise ValueError(f"step {step} is not in the timeline; it has {timeline.steps or 'no steps'}")
    steps = [step] if step is not None else sorted(set(spans.loc[busy, "step"]) - {-1})[:1]
    if not steps:
        return graph(timeline)
    chosen = (spans["step"] == steps[0]).to_numpy()
    begin_ns = spans.loc[chosen & (spans["kind"] != "memory"), "start_ns"].min()
    end_ns = spans["start_ns"] + spans["dur_ns"]
    own = spans[chosen & busy & (spans["stream"] >= 0)].groupby(["rank", "stream"])["start_ns"].min().rename("own_ns")
    own_ns = spans[["rank", "stream"]].join(own, on=["rank", "stream"])["own_ns"].fillna(begin_ns).clip(lower=begin_ns)
    earlier = spans["step"].between(0, steps[0] - 1) | ((spans["step"] < 0) & (spans["start_ns"] < own_ns))
    left = busy & (spans["stream"] >= 0) & earlier & (end_ns > begin_ns) & (spans["start_ns"] < end_ns[chosen].max())
    if timeline.edges.empty and left.any():
        clipped = spans["start_ns"].mask(left, np.maximum(spans["start_ns"], begin_ns))
        spans = spans.assign(start_ns=clipped, dur_ns=spans["dur_ns"].mask(left, end_ns - clipped))
        timeline, chosen = Timeline(spans, timeline.meta, details=timeline.details), chosen | left.to_numpy()
    return graph(timeline, chosen)


def _walk(found: Graph) -> np.ndarray:
    """Events of the path in time order."""
    decided = np.full(len(found.time_ns), -1)
    decided[found.target[found.binding]] = found.source[found.binding]
    event, path = int(np.argmax(found.time_ns)) if len(decided) else -1, []
    while event >= 0:
        path.append(event)
        event = int(decided[event])
    return np.array(path[::-1], dtype=np.int64)


def _durations(found: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Work before each event and delay of each edge, in ns.

    A piece works from when it has started and all that it waits for inside has happened until its end.
    """
    gap_ns = (found.time_ns[found.target] - found.time_ns[found.source]).astype(float)
    ends = (found.target % 2 == 1) & (found.target < 2 * len(found.pieces))
    own_ns = np.zeros(len(found.time_ns))
    own_ns[found.target[found.binding & ends]] = gap_ns[found.binding & ends]
    delay_ns = np.where(ends, 0.0, gap_ns)
    decides = found.binding & ~ends
    for why in set(found.why[~ends]):
        usual = gap_ns[decides & (found.why == why)]
        other = ~found.binding & (found.why == why)
        delay_ns[other] = np.minimum(delay_ns[other], np.median(usual) if len(usual) else 0.0)
    return own_ns, delay_ns


def _factors(found: Graph, scenario: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    of_event, of_edge = np.ones(len(found.time_ns)), np.ones(len(found.source))
    names = found.pieces["name"].astype("category")
    for key, factor in scenario.items():
        if not factor > 0:
            raise ValueError(f"faster: factor {factor} of {key!r} is not a positive number")
        if key in PATH_KINDS:
            piece = (found.pieces["kind"] == key).to_numpy()
            of_edge[np.array([_DELAY.get(why, "wait") == key for why in found.why], dtype=bool)] *= factor
        else:
            piece = np.array([_in(key, n) for n in names.cat.categories], dtype=bool)[names.cat.codes]
            if not piece.any():
                raise ValueError(f"faster: {key!r} is no kind ({', '.join(PATH_KINDS)}) and in no name of the step")
        of_event[: 2 * len(piece)][np.repeat(piece, 2)] *= factor
    return of_event, of_edge


def _in(pattern: str, name: str) -> bool:
    try:
        return bool(re.search(pattern, name))
    except re.error as error:
        raise ValueError(f"faster: {pattern!r} is not a regular expression: {error}") from None


def _replay(found: Graph, own_ns: np.ndarray, delay_ns: np.ndarray) -> float:
    """When the last event happens, in ns; events without a known reason happen when they did."""
    ready = np.where(np.isin(np.arange(len(found.time_ns)), found.target), 0.0, found.time_ns).tolist()
    weight = (own_ns[found.source] + delay_ns).tolist()
    for source, target, ns in zip(found.source.tolist(), found.target.tolist(), weight, strict=True):
        if (at := ready[source] + ns) > ready[target]:
            ready[target] = at
    return float((np.array(ready) + own_ns).max(initial=0.0))


def _busy_s(pieces: pd.DataFrame) -> dict[str, float]:
    ranks = max(pieces["rank"].nunique(), 1)
    times = pieces.groupby(["kind", "rank"]).apply(
        lambda p: total(pack(p["start_ns"], p["end_ns"] - p["start_ns"])), include_groups=False
    )
    return {kind: float(ns.sum() / ranks / NS_PER_S) for kind, ns in times.groupby(level=0)} if len(times) else {}
