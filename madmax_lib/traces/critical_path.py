"""Critical path of a step: what decides how long it takes, and how long would it take
if something were faster?

A step lasts from the end of the device work of the step before it to the end of its own
(`recurring`). The critical path is walked backwards from there: each slice of work
started, or ended, when the last of what it waited for had happened (`dependencies`).
Between two events lies work of a kind, or a delay: `launch delay` from a launch to its
kernel, `host` between two slices of a host thread, `wait` for what a trace does not
explain. The parts follow each other without a gap, so that they sum to the time of the
step. On a simulated timeline it is the engine's longest path. `what_if` replays
consecutive steps with other durations, until they repeat.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S, format_s, pack, total
from madmax_lib.timeline import BUSY_KINDS, Timeline, rank_breakdown, with_origin
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.tables import unseen_ranks
from madmax_lib.traces.waits.idle import launch_bound
from madmax_lib.traces.waits.launch import launches
from madmax_lib.traces.waits.links import transfer_times
from madmax_lib.traces.waits.recurring import (
    Recurring,
    Round,
    on_device,
    recurring_steps,
    step_ends,
)

PATH_KINDS = ("host", "launch delay", *BUSY_KINDS, "wait")
_DELAY = {"order": "host", "backward": "host", "launch": "launch delay"}  # others: wait
_LAUNCH_CALLS = r"^(cuda|cu|hip)\w*(Launch|MemcpyAsync|MemsetAsync)"
_PATH = ["rank", "stream", "kind", "name", "start_s", "dur_s", "why", "row"]
_WHAT_IF = [
    "faster",
    "factor",
    "step_s",
    "low_s",
    "high_s",
    "saved_s",
    "speedup",
    "compute_s",
    "comm_s",
    "exposed_comm_s",
    "idle_s",
    "overlap",
    "exposed_share",
    "decided_by",
]
_DRAINS = 0.05  # more than a replay may miss what was measured
_FEW = 0.1  # of the kernels: that few operators do not call them
_TIGHT_NS = 0.5  # times of one event differ by less


def critical_path(timeline: Timeline, step: int | None = None) -> pd.DataFrame:
    """The longest chain of a step, a row per part, in time order; if none is given, of
    the step of median time among those that `what_if` replays.

    rank, stream, name, row (of the timeline's spans) of the slice that worked or waited
    to start. kind: one of PATH_KINDS. start_s: from the end of the device work of the
    step before, or from the first event where nothing before is recorded; the parts
    follow each other, and dur_s sums to `.attrs["step_s"]`.
    why: what decided when the part began, see `dependencies`; "work" continues the same
    slice, "start" is the first. `.attrs`: step; its start_ns; busy_s {kind: time
    of the step's slices of the kind, mean over the ranks}. Raises ValueError for a step
    that the timeline does not have.
    """
    chosen = _median_of(timeline, recurring_steps(timeline, step))
    steps = Recurring.of(timeline, chosen)
    graph = steps.graph
    recorded = steps.recorded
    weight_ns = steps.weight_ns(steps.own_ns, steps.delay_ns)
    path = _path(steps, recorded, weight_ns)
    row = graph.slices.iloc[
        np.minimum(path["event"] // 2, len(graph.slices) - 1)
    ].reset_index(drop=True)
    # Slices in flight have lanes of their own: users see the stream of the span.
    row["stream"] = timeline.spans["stream"].to_numpy()[row["row"]]
    begin_ns = recorded.end_ns[0]
    path = row.assign(
        kind=path["kind"],
        start_s=(path["begin_ns"] - begin_ns) / NS_PER_S,
        dur_s=path["dur_ns"] / NS_PER_S,
        why=path["why"],
    )[_PATH]
    path = path[path["dur_s"] > 0].reset_index(drop=True)
    zero_ns = int(graph.slices["start_ns"].min()) if len(graph.slices) else 0
    of_step = graph.slices[steps.inside[: 2 * len(graph.slices) : 2]]
    ranks = max(of_step["rank"].nunique(), 1)
    busy_s = dict.fromkeys(of_step["kind"], 0.0)
    for (kind, _), part in of_step.groupby(["kind", "rank"]):
        busy_ns = total(pack(part["start_ns"], part["end_ns"] - part["start_ns"]))
        busy_s[kind] += busy_ns / ranks / NS_PER_S
    about = {
        "step": next(iter(steps.numbers), -1),
        "busy_s": busy_s,
        "start_ns": zero_ns + int(begin_ns),
        "step_s": float(recorded.step_ns.sum() / NS_PER_S),
    }
    return with_origin(path, timeline, **about)


def path_share(path: pd.DataFrame) -> pd.DataFrame:
    """A critical path by kind: kind, path_s, share (0..1) of the step, parts, busy_s
    (with and without the path).
    """
    groups = path.groupby("kind")["dur_s"]
    table = groups.agg(path_s="sum", parts="size").reindex(PATH_KINDS, fill_value=0)
    table = table.reset_index(names="kind").astype({"path_s": float})
    table["share"] = table["path_s"] / max(table["path_s"].sum(), 1e-12)
    busy_s = path.attrs.get("busy_s", {})
    table["busy_s"] = [busy_s.get(kind, 0.0) for kind in table["kind"]]
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
    """Time of the step that recurs if some of its work were faster, its links others or
    its ranks more, one row per scenario.

    faster: {kind of PATH_KINDS or regular expression in names: factor}, 2 for twice as
    fast, inf for no time at all; several scenarios as a list, {} for none. step: the
    one to repeat; if None all consecutive ones but warm-up, one after the other.

    Columns: faster (text), factor (NaN if a scenario has several), step_s, low_s and
    high_s (shortest and longest of the replayed steps), saved_s, speedup (replayed as
    it is / new, NaN where nothing is left); of the new step, means over the ranks:
    compute_s, comm_s, exposed_comm_s, idle_s, overlap, exposed_share (of step_s) and
    decided_by (the kind with most time on its critical path); measured_s (median time
    of the recorded steps), replay_error ({} / measured_s - 1), steps (how many are
    replayed), step (the one of median time). A kind that the step does not have changes
    nothing.

    Steps are replayed until their time repeats, host and device each at its pace, and
    step_s is the median measured one times what all of them change together. Work
    starts a delay (as from a launch to its kernel) after the last of what it waits for:
    the measured delay where that is what came last in the trace; else that one, which
    may contain waiting, cut to the median delay of its kind. A TraceWarning, also in
    `.attrs["limits"]`, tells where a replay cannot be right, and what would help.

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
    steps = Recurring.of(timeline, step)
    own_ns = steps.own_ns
    if other := collectives is not None or ranks is not None:
        own_ns = transfer_times(
            timeline, steps.graph, own_ns, collectives, ranks, devices_per_node
        )
    words = ["other links"] if collectives is not None else []
    words += [f"{ranks} ranks"] if ranks is not None else []
    now = _Now.of(timeline, steps)
    limits = now.limits
    if not (timeline.spans["stream"] >= 0).any():
        limits += _limits_on_host(timeline, scenarios, ranks)
    rows = []
    for scenario in scenarios:
        of_event, of_edge = _factors(steps.graph, scenario)
        weight_ns = steps.weight_ns(own_ns / of_event, steps.delay_ns / of_edge)
        factors = set(scenario.values())
        row = {
            "faster": " + ".join([*scenario, *words]),
            "factor": factors.pop() if len(factors) == 1 and not other else np.nan,
        }
        rows.append(row | now.row(timeline, steps, weight_ns))
    table = pd.DataFrame(rows, columns=_WHAT_IF)
    table = table.assign(
        measured_s=now.measured_s,
        replay_error=now.error,
        steps=max(len(steps.numbers), 1),
        step=_median_of(timeline, steps.numbers or [-1]),
    )
    for text in limits:
        warnings.warn(text, TraceWarning, stacklevel=2)
    return with_origin(table, timeline, limits=limits)


def _limits_on_host(timeline, scenarios, ranks):
    """Limits of a replay where the host is the device."""
    kind = timeline.spans["kind"]
    is_few = (kind == "cpu").sum() < _FEW * (kind == "compute").sum()
    if is_few and any("compute" in scenario for scenario in scenarios):
        yield (
            "no operators around the kernels were recorded: marks of steps count as host "
            "work, so that faster kernels change nothing"
        )
    if ranks is not None:
        yield f"{ranks} ranks: assuming that each has its own device, here cores"


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
    """Gain by a compiler or a CUDA graph: the steps of `what_if`, replayed with
    cheaper launches.

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
            "a simulated timeline has no host, and so no launches to replay"
        )
    calls = launches(timeline)
    bound = launch_bound(timeline)
    chosen = _median_of(timeline, recurring_steps(timeline))
    if chosen is not None:
        calls, bound = (table[table["step"] == chosen] for table in (calls, bound))
    scenarios = {"as measured": {"host": 1.0}}
    if len(calls):
        scenarios["free launches"] = {_LAUNCH_CALLS: np.inf}
        scenarios["graph of kernels"] = {_LAUNCH_CALLS: np.inf, "launch delay": np.inf}
    # A graph leaves the host nothing to do between launches.
    scenarios["graph of the step"] = {"host": np.inf, "launch delay": np.inf}
    ranks = max(len(timeline.ranks), 1)
    table = what_if(timeline, list(scenarios.values()))
    table = table.drop(columns=["faster", "factor"])
    table = table.assign(
        launches=len(calls) / ranks, bound_s=bound["launch_bound_s"].sum() / ranks
    )
    table.insert(0, "scenario", list(scenarios))
    return with_origin(table, timeline)


def _median_of(timeline, numbers):
    """The step of median time (the lower) of some, None of none."""
    if len(numbers) < 2:
        return next(iter(numbers), None)
    took_ns = step_ends(timeline).reindex(timeline.steps).diff()
    took_ns = took_ns.loc[numbers].dropna().sort_values(kind="stable")
    return int(took_ns.index[(len(took_ns) - 1) // 2]) if len(took_ns) else numbers[0]


@dataclass(frozen=True)
class _Now:
    """Steps as they are: measured, and replayed with nothing changed."""

    measured_s: float  # median
    step_s: float  # replayed
    scale: float  # of the mean step to the median one
    queued: bool  # whether only the recorded queue keeps their pace
    weight_ns: np.ndarray
    replay: Round
    limits: list[str]  # why a replay may not be right

    @classmethod
    def of(cls, timeline, steps):
        """Steps of a timeline, replayed as they are."""
        recorded_s = steps.recorded.step_ns / NS_PER_S
        measured_s = float(np.median(recorded_s)) if len(recorded_s) else 0.0
        mean_s = recorded_s.mean() if len(recorded_s) else 0.0
        scale = measured_s / mean_s if mean_s > 0 else 1.0
        weight_ns = steps.weight_ns(steps.own_ns, steps.delay_ns)
        replay = steps.replay(weight_ns)
        step_s = scale * _mean_s(replay)
        queued = step_s > (1 + _DRAINS) * measured_s
        limits = _limits(timeline, steps)
        if queued:
            limits.append(
                f"repeated, a step takes {format_s(step_s)}, as recorded "
                f"{format_s(measured_s)}: a host or rank is using up a "
                "lead. Replayed once, with that lead; record more steps, or without "
                "stacks, to see which of the two lasts"
            )
            replay = steps.replay(weight_ns, queued)
            step_s = scale * _mean_s(replay)
        now = cls(measured_s, step_s, scale, queued, weight_ns, replay, limits)
        if not queued and abs(now.error) > _DRAINS:
            limits.append(
                f"replayed unchanged, a step is {now.error:+.0%} off the measured "
                f"{format_s(measured_s)}: the trace does not say what it waits for"
            )
        return now

    @property
    def error(self):
        """Replayed over measured time, - 1."""
        return self.step_s / self.measured_s - 1 if self.measured_s else 0.0

    def row(self, timeline, steps, weight_ns):
        """Columns of `what_if` with other weights."""
        replay = self.replay
        if not np.array_equal(weight_ns, self.weight_ns):
            replay = steps.replay(weight_ns, self.queued)
        all_s = replay.step_ns / NS_PER_S
        step_s = self.scale * _mean_s(replay)
        speedup = self.step_s / step_s if step_s else np.nan if self.step_s else 1.0
        parts_s = _parts_s(timeline, steps, replay) * self.scale / max(len(all_s), 1)
        comm_s = parts_s["comm_s"]
        exposed_s = parts_s["exposed_comm_s"]
        path = _path(steps, replay, weight_ns).groupby("kind")["dur_ns"].sum()
        return {
            "step_s": step_s,
            "low_s": min(all_s.min(initial=np.inf), step_s),
            "high_s": max(all_s.max(initial=0.0), step_s),
            "saved_s": self.step_s - step_s,
            "speedup": speedup,
            "compute_s": parts_s["compute_s"],
            "comm_s": comm_s,
            "exposed_comm_s": exposed_s,
            "idle_s": max(step_s - parts_s["busy_s"], 0.0),
            "overlap": 1 - exposed_s / comm_s if comm_s else np.nan,
            "exposed_share": exposed_s / step_s if step_s else 0.0,
            "decided_by": path.idxmax() if len(path) else "",
        }


def _mean_s(replay):
    return float(replay.step_ns.mean() / NS_PER_S) if len(replay.step_ns) else 0.0


def _limits(timeline, steps):
    """Why a replay of recorded steps may not be right, and what would help."""
    if timeline.meta.source == "simulated" or not steps.numbers:
        return []
    limits = []
    if steps.alone:
        limits.append(
            "one step is recorded, from its first event to its last: overlap with "
            "the next one does not show; record three steps or more"
        )
    if (steps.graph.slices["kind"] == "comm").any():
        limits += unseen_ranks(timeline)
    return limits


def _parts_s(timeline, steps, replay):
    """Seconds of the replayed steps by what the device does, means over the ranks."""
    slices = steps.graph.slices
    works = np.flatnonzero(on_device(slices) & steps.inside[: 2 * len(slices) : 2])
    start_ns = replay.time_ns[2 * works].round().astype("int64")
    end_ns = replay.time_ns[2 * works + 1].round().astype("int64")
    slices = slices.iloc[works]
    spans = timeline.spans.iloc[slices["row"]].reset_index(drop=True)
    kind = pd.Categorical(slices["kind"], timeline.spans["kind"].cat.categories)
    spans = spans.assign(start_ns=start_ns, dur_ns=end_ns - start_ns, kind=kind)
    table = rank_breakdown(Timeline(spans, timeline.meta))
    table["busy_s"] = table["total_s"] - table["idle_s"]
    return table.astype(float).mean().fillna(0.0)


def _path(steps, replay, weight_ns):
    """Parts of the critical path of a replay, in order of time: event at their end,
    begin_ns, dur_ns, kind, why.
    """
    graph = steps.graph
    time_ns = replay.time_ns
    begin_ns, *ends_ns = replay.end_ns
    # An edge decides about an event whose time it gives; of several the first does.
    gives_ns = time_ns[graph.source] + weight_ns
    tight = np.flatnonzero(np.abs(gives_ns - time_ns[graph.target]) < _TIGHT_NS)[::-1]
    edge = np.full(len(time_ns), len(graph.why))
    edge[graph.target[tight]] = tight
    source = np.r_[graph.source, -1][edge]
    events = []
    last = steps.ends[-1] if ends_ns else np.zeros(0, dtype="int64")
    event = int(last[np.argmax(time_ns[last])]) if len(last) else -1
    # Items of lists are read faster than those of arrays.
    decided = source.tolist()
    at_ns = time_ns.tolist()
    while event >= 0 and at_ns[event] > begin_ns:
        events.append(event)
        event = decided[event]
    events = np.array(events[::-1], dtype="int64")
    before = source[events]
    from_ns = np.where(before >= 0, time_ns[before], begin_ns).clip(min=begin_ns)
    why = np.full(len(events), "start", dtype=object)
    why[before >= 0] = graph.why[edge[events][before >= 0]]
    delay = np.array([_DELAY.get(reason, "wait") for reason in why], dtype=object)
    of_slice = np.minimum(events // 2, len(graph.slices) - 1)
    kind = graph.slices["kind"].to_numpy(dtype=object)[of_slice]
    return pd.DataFrame(
        {
            "event": events,
            "begin_ns": from_ns,
            "dur_ns": time_ns[events] - from_ns,
            "kind": np.where(events % 2 == 1, kind, delay),
            "why": why,
        }
    )


def _factors(graph, scenario):
    """Factors by which a scenario shortens the work before each event and the delay of
    each edge.
    """
    of_event = np.ones(len(graph.time_ns))
    of_edge = np.ones(len(graph.source))
    delay_kind = pd.Series(graph.why).map(_DELAY).fillna("wait").to_numpy()
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


def _named(names, pattern):
    """Whether each name (n,) matches; ValueError for a pattern that none does."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        text = f"faster: {pattern!r} is not a regular expression: {error}"
        raise ValueError(text) from None
    matching = [name for name in names.unique() if search(name)]
    if not matching:
        raise ValueError(
            f"faster: {pattern!r} is not a kind ({', '.join(PATH_KINDS)}) and in no "
            "name of the step"
        )
    return names.isin(matching).to_numpy()
