"""Critical path of a step: what decides how long it takes, and how long would it take
if something were faster?

The critical path is walked backwards from the last event of a step: each slice of work
started, or ended, when the last of what it waited for had happened (`dependencies`).
Between two events lies work of a kind, or a delay: `launch delay` from a launch to its
kernel, `host` between two slices of a host thread, `wait` for what a trace does not
explain. The parts follow each other without a gap, so that they sum to the time of the
step. On a simulated timeline it is the engine's longest path. `what_if` replays the
same graph with other durations.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from madmax_lib.base.intervals import pack, total
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, with_origin
from madmax_lib.traces.waits.dependencies import Graph, dependency_graph, longest_path
from madmax_lib.traces.waits.idle import launch_bound
from madmax_lib.traces.waits.launch import launches
from madmax_lib.traces.waits.links import transfer_times
from madmax_lib.traces.waits.step_times import median_step

PATH_KINDS = ("host", "launch delay", *BUSY_KINDS, "wait")
_DELAY = {"order": "host", "backward": "host", "launch": "launch delay"}  # others: wait
_LAUNCH_CALLS = r"^(cuda|cu|hip)\w*(Launch|MemcpyAsync|MemsetAsync)"
_PATH = ["rank", "stream", "kind", "name", "start_s", "dur_s", "why", "row"]


def critical_path(timeline: Timeline, step: int | None = None) -> pd.DataFrame:
    """The longest chain of a step (if none is given the median one of `median_step`), a
    row per part, in time order.

    rank, stream, name, row (of the timeline's spans) of the slice that worked or waited
    to start. kind: one of PATH_KINDS. start_s: from the start of the step; the parts
    follow each other, and dur_s sums to `.attrs["step_s"]`.
    why: what decided when the part began, see `dependencies`; "work" continues the same
    slice, "start" is the first. `.attrs`: step; its start_ns; busy_s {kind: time
    covered by slices of the kind, mean over the ranks}. Work of earlier steps that
    still runs counts from the start of the step. Raises ValueError for a step that the
    timeline does not have.
    """
    chosen = median_step(timeline, step)
    graph = _graph_of_step(timeline, chosen)
    events = _walk(graph)
    # A part lasts from the event before to its own.
    before = np.r_[-1, events[:-1]]  # the event that decided about each one
    begin_ns = (
        np.where(before >= 0, graph.time_ns[before], 0)
        if len(events)
        else graph.time_ns
    )
    # Edge that decided each event; the last entry of why, "start", where none did.
    edge = np.full(len(graph.time_ns), len(graph.why))
    edge[graph.target[graph.binding]] = np.flatnonzero(graph.binding)
    why = np.r_[graph.why, ["start"]].astype(object)[edge[events]]
    row = graph.slices.iloc[np.minimum(events // 2, len(graph.slices) - 1)].reset_index(
        drop=True
    )
    # Slices in flight have lanes of their own: users see the stream of the span.
    row["stream"] = timeline.spans["stream"].to_numpy()[row["row"]]
    delay = np.array([_DELAY.get(reason, "wait") for reason in why], dtype=object)
    path = row.assign(
        kind=np.where(events % 2, row["kind"], delay) if len(events) else [],
        start_s=begin_ns / NS_PER_S,
        dur_s=(graph.time_ns[events] - begin_ns) / NS_PER_S,
        why=why,
    )[_PATH]
    path = path[path["dur_s"] > 0].reset_index(drop=True)
    start_ns = int(graph.slices["start_ns"].min()) if len(graph.slices) else 0
    step_s = float(graph.time_ns.max(initial=0) / NS_PER_S)
    about = {
        "step": next(iter(chosen), -1),
        "busy_s": _busy_s(graph.slices),
        "start_ns": start_ns,
        "step_s": step_s,
    }
    return with_origin(path, timeline, **about)


def path_share(path: pd.DataFrame) -> pd.DataFrame:
    """A critical path by kind: kind, path_s, share (0..1) of the step, parts, busy_s
    (with and without the path).
    """
    groups = path.groupby("kind")["dur_s"]
    table = (
        pd.DataFrame({"path_s": groups.sum(), "parts": groups.size()})
        .reindex(list(PATH_KINDS))
        .fillna(0)
    )
    table = table.reset_index(names="kind").astype({"parts": "int64"})
    table["share"] = table["path_s"] / max(table["path_s"].sum(), 1e-12)
    table["busy_s"] = (
        table["kind"].map(path.attrs.get("busy_s", {})).astype(float).fillna(0.0)
    )
    table = table[(table["path_s"] > 0) | (table["busy_s"] > 0)].reset_index(drop=True)
    return with_origin(table[["kind", "path_s", "share", "parts", "busy_s"]], path)


def what_if(
    timeline: Timeline,
    faster: dict[str, float] | Sequence[dict[str, float]],
    step: int | None = None,
    *,
    collectives: pd.DataFrame
    | Callable[[str, int, int, float], float | None]
    | None = None,
    ranks: int | None = None,
    devices_per_node: int | None = None,
) -> pd.DataFrame:
    """Time of a step if some of its work were faster, its links others or its ranks
    more, one row per scenario.

    faster: {kind of PATH_KINDS or regular expression in names: factor}, 2 for twice as
    fast, inf for no time at all; several scenarios as a list, {} for none. step: if
    None the median one of `median_step`.
    Columns: faster (text), factor (NaN if a scenario has several), step_s, saved_s,
    speedup (measured / new, NaN where nothing is left), step (that was replayed). It is
    one step replayed: step_s has no interval; replay others to see how they spread.
    With factor 1 the step takes what it took. A kind that the step does not have
    changes nothing. Work starts a delay (as from a launch to its kernel) after the last
    of what it waits for: the measured delay where that is what came last in the trace;
    else that one, which may contain waiting, cut to the median delay of its kind. Work
    that waits for nothing that the trace shows starts when it did.

    collectives: other links: a table as `collectives.MeasuredCollectives` takes it, or
    a function of kind, ranks, nodes and bytes that gives the seconds of a call, None
    where it is as it was; factors divide these. ranks: of all, where data parallelism
    has more than in the trace; each rank works as it did. Without a table collectives
    then grow as their busiest link's bytes do. devices_per_node: tells the nodes of a
    group; without it they are those that the table has for a group of its size, one for
    a function. Raises ValueError for a factor that is not positive, for a name or
    pattern that the step does not have, for a table of other calls, and for ranks that
    do not fit.
    """
    for name, count in (("ranks", ranks), ("devices_per_node", devices_per_node)):
        if count is not None and type(count) is not int:
            raise ValueError(f"{name}={count!r} is not a number of devices")
    scenarios = [faster] if isinstance(faster, dict) else list(faster)
    chosen = median_step(timeline, step)
    graph = _graph_of_step(timeline, chosen)
    own_ns, delay_ns = _durations(graph)
    if other := collectives is not None or ranks is not None:
        own_ns = transfer_times(
            timeline, graph, own_ns, collectives, ranks, devices_per_node
        )
    words = [
        *["other links"] * (collectives is not None),
        *[f"{ranks} ranks"] * (ranks is not None),
    ]
    # Measured: what the speed-up compares with.
    now_s = float(graph.time_ns.max(initial=0) / NS_PER_S)
    rows = []
    for scenario in scenarios:
        of_event, of_edge = _factors(graph, scenario)
        step_s = longest_path(graph, own_ns / of_event, delay_ns / of_edge) / NS_PER_S
        factor = (
            next(iter(set(scenario.values())))
            if len(set(scenario.values())) == 1 and not other
            else float("nan")
        )
        speedup = now_s / step_s if step_s else float("nan") if now_s else 1.0
        rows.append(
            (" + ".join([*scenario, *words]), factor, step_s, now_s - step_s, speedup)
        )
    table = pd.DataFrame(
        rows, columns=["faster", "factor", "step_s", "saved_s", "speedup"]
    )
    return with_origin(table.assign(step=next(iter(chosen), -1)), timeline)


def faster_kinds(timeline: Timeline, step: int | None = None) -> pd.DataFrame:
    """`what_if` for each kind on the critical path but waiting: twice as fast, and
    without taking time.
    """
    kinds = path_share(critical_path(timeline, step))
    kinds = kinds.loc[(kinds["path_s"] > 0) & (kinds["kind"] != "wait"), "kind"]
    return what_if(
        timeline,
        [{kind: factor} for kind in kinds for factor in (2.0, float("inf"))],
        step,
    )


def launch_gain(timeline: Timeline) -> pd.DataFrame:
    """Gain by a compiler or a CUDA graph: the median step of `median_step`,
    replayed with cheaper launches.

    scenario: as measured; free launches: they take none of the host's time, but kernels
    start as long after them as they did; graph of kernels: kernels start at once too;
    graph of the step: the host's work between launches goes as well, so that the host
    is always ahead. The last is the most that a graph can gain; that fused kernels also
    move fewer bytes is not in it. step_s, saved_s, speedup, step. launches, bound_s:
    kernels launched, and device time that waited for a launch (`launch_bound`), means
    over the ranks. A host that launches nothing, as on a CPU, has only the first and
    the last scenario. Raises ValueError for a simulated timeline, whose host is not
    simulated.
    """
    if timeline.meta.source == "simulated":
        raise ValueError(
            "the host of a simulated timeline is not simulated: there are no "
            "launches to be replayed"
        )
    calls = launches(timeline)
    bound = launch_bound(timeline)
    if chosen := median_step(timeline):
        calls, bound = (table[table["step"] == chosen[0]] for table in (calls, bound))
    scenarios = {"as measured": {"host": 1.0}}
    if len(calls):
        scenarios["free launches"] = {_LAUNCH_CALLS: np.inf}
        scenarios["graph of kernels"] = {_LAUNCH_CALLS: np.inf, "launch delay": np.inf}
    # A graph leaves the host nothing to do between launches.
    scenarios["graph of the step"] = {"host": np.inf, "launch delay": np.inf}
    ranks = max(len(timeline.ranks), 1)
    table = what_if(timeline, list(scenarios.values())).drop(
        columns=["faster", "factor"]
    )
    table = table.assign(
        launches=len(calls) / ranks, bound_s=bound["launch_bound_s"].sum() / ranks
    )
    table.insert(0, "scenario", list(scenarios))
    return with_origin(table, timeline)


def _graph_of_step(timeline: Timeline, steps: list[int]):
    """The graph of one step, or of all where there is none, with what earlier steps
    left running on the device.
    """
    spans = timeline.spans
    busy = spans["kind"].isin(BUSY_KINDS)
    if not steps:
        return dependency_graph(timeline)
    chosen = (spans["step"] == steps[0]).to_numpy()
    begin_ns = spans.loc[chosen & (spans["kind"] != "memory"), "start_ns"].min()
    end_ns = spans["start_ns"] + spans["dur_ns"]
    # Work without a step is of an earlier one where it starts before the first kernel of
    # the step on its stream.
    on_device = busy & (spans["stream"] >= 0)
    lane = [spans["rank"], spans["stream"]]
    kernel_ns = spans["start_ns"].where(chosen & on_device)
    first_kernel_ns = kernel_ns.groupby(lane).transform("min").fillna(begin_ns)
    earlier = (spans["step"] < 0) & (
        spans["start_ns"] < first_kernel_ns.clip(lower=begin_ns)
    )
    earlier |= spans["step"].between(0, steps[0] - 1)
    left = on_device & earlier & (end_ns > begin_ns)
    left &= spans["start_ns"] < end_ns[chosen].max()
    if timeline.edges.empty and left.any():
        # What earlier steps left running counts from the start of this one.
        clipped = spans["start_ns"].mask(left, np.maximum(spans["start_ns"], begin_ns))
        spans = spans.assign(
            start_ns=clipped, dur_ns=spans["dur_ns"].mask(left, end_ns - clipped)
        )
        timeline = Timeline(spans, timeline.meta, side_tables=timeline.side_tables)
        chosen = chosen | left.to_numpy()
    return dependency_graph(timeline, chosen)


def _walk(graph: Graph):
    """Events of the path in time order."""
    decided = np.full(len(graph.time_ns), -1)
    decided[graph.target[graph.binding]] = graph.source[graph.binding]
    event = int(np.argmax(graph.time_ns)) if len(decided) else -1
    path = []
    while event >= 0:
        path.append(event)
        event = int(decided[event])
    return np.array(path[::-1], dtype=np.int64)


def _durations(graph: Graph):
    """Work before each event and delay of each edge, in ns.

    A slice works from when it has started and all that it waits for inside has happened
    until its end.
    """
    gap_ns = (graph.time_ns[graph.target] - graph.time_ns[graph.source]).astype(float)
    ends = (graph.target % 2 == 1) & (graph.target < 2 * len(graph.slices))
    own_ns = np.zeros(len(graph.time_ns))
    # Work before an end is the gap to what came last; waiting inside a slice is none.
    own_ns[graph.target[graph.binding & ends]] = gap_ns[graph.binding & ends]
    delay_ns = np.where(ends, 0.0, gap_ns)
    decides = graph.binding & ~ends
    for why in set(graph.why[~ends]):
        # A delay that did not decide may contain waiting: cut to the median of its
        # kind.
        usual = gap_ns[decides & (graph.why == why)]
        other = ~graph.binding & (graph.why == why)
        delay_ns[other] = np.minimum(
            delay_ns[other], np.median(usual) if len(usual) else 0.0
        )
    return own_ns, delay_ns


def _factors(graph: Graph, scenario: dict[str, float]):
    """Factors by which a scenario shortens the work before each event and the delay of
    each edge.
    """
    of_event = np.ones(len(graph.time_ns))
    of_edge = np.ones(len(graph.source))
    delay_kind = np.array([_DELAY.get(why, "wait") for why in graph.why], dtype=object)
    for key, factor in scenario.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not (is_number and factor > 0):
            raise ValueError(
                f"faster: factor {factor!r} of {key!r} is not a positive number"
            )
        if key in PATH_KINDS:
            faster = (graph.slices["kind"] == key).to_numpy()
            of_edge[delay_kind == key] *= factor
        else:
            faster = _named(graph.slices["name"], key)
        # Slice i has the events 2i and 2i + 1; further events have no slice.
        of_event[: 2 * len(faster)][np.repeat(faster, 2)] *= factor
    return of_event, of_edge


def _named(names: pd.Series, pattern: str):
    """Whether each name (n,) matches; ValueError for a pattern that none does."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        text = f"faster: {pattern!r} is not a regular expression: {error}"
        raise ValueError(text) from None
    matching = [name for name in names.unique() if search(name)]
    if not matching:
        raise ValueError(
            f"faster: {pattern!r} is no kind ({', '.join(PATH_KINDS)}) and in no "
            "name of the step"
        )
    return names.isin(matching).to_numpy()


def _busy_s(slices: pd.DataFrame):
    ranks = max(slices["rank"].nunique(), 1)
    times = slices.groupby(["kind", "rank"]).apply(
        lambda p: total(pack(p["start_ns"], p["end_ns"] - p["start_ns"])),
        include_groups=False,
    )
    return (
        {
            kind: float(ns.sum() / ranks / NS_PER_S)
            for kind, ns in times.groupby(level=0)
        }
        if len(times)
        else {}
    )
