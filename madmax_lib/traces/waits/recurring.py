"""Steps as they recur: consecutive steps of a graph, replayed again and again.

A step lasts from the end of the last device work of the step before to the end of its
own, whatever the host does meanwhile: the work of a step is what its part of the host
launches, and a host that runs ahead stays ahead. After the last of the steps the first
one follows again, on each stream and thread and with the waits with which it followed
the step before it, until the time that they take repeats.

Host threads and streams are lanes, in which events follow each other. With S the sum of
weights along a lane, only those events are left to evaluate for which something else
than the event before may decide:

    at(v) - S(v) = max(at(v - 1) - S(v - 1), at(u) + weight(u, v) - S(v) for other u)
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from madmax_lib.timeline import BUSY_KINDS, Timeline, busy_spans, ends_ns
from madmax_lib.traces.waits.dependencies import (
    HELD_BACK_NS,
    LAUNCH_NS,
    Graph,
    dependency_graph,
)
from madmax_lib.traces.waits.longest_path import longest_paths
from madmax_lib.traces.waits.step_times import steps

_BEYOND = np.iinfo("int32").max  # step of what follows all steps
_ALONG = ("work", "order", "stream")  # reasons of edges along a lane
_MOST_SPANS = 300_000  # in steps that are replayed together
_ROUNDS = 24  # steps that are replayed until they repeat, at most
_SAME = 1e-4  # rounds that differ by less are alike


@dataclass(frozen=True, eq=False)
class Round:
    """Events of one round of some steps; those outside of the steps as recorded."""

    time_ns: np.ndarray  # (events,) from the start of the graph
    end_ns: np.ndarray  # (1 + steps,) of the work before, and of that of each step

    @property
    def step_ns(self) -> np.ndarray:
        """Time (steps,) of each step."""
        return np.diff(self.end_ns)


@dataclass(frozen=True, eq=False)
class Recurring:
    """Consecutive steps of a timeline, with the graph of their work and of the step
    before.
    """

    graph: Graph
    numbers: list[int]  # of the steps that are replayed, empty where there are none
    # whether nothing before them is recorded: all is one step, from first to last event
    alone: bool
    inside: np.ndarray  # (events,) whether they are of these steps
    ends: list[np.ndarray]  # of each step: events at which its device work ends
    begin_ns: float  # end of the device work of the step before
    own_ns: np.ndarray  # (events,) as `durations` gives it
    delay_ns: np.ndarray  # (edges,) likewise

    @classmethod
    def of(cls, timeline: Timeline, step: int | None = None) -> "Recurring":
        """The steps of `recurring_steps`."""
        numbers = recurring_steps(timeline, step)
        number = _work_steps(timeline)
        before, alone = _before(timeline, number, numbers)
        keep = None
        if numbers:
            keep = (number >= before) & (number <= numbers[-1])
            keep &= (number >= 0) | (timeline.spans["stream"] >= 0).to_numpy()
        graph = dependency_graph(timeline, keep)
        slices = graph.slices
        of_slice = number[slices["row"].to_numpy()]
        of_steps = np.isin(of_slice, numbers or of_slice)
        inside = np.zeros(len(graph.time_ns), dtype=bool)
        inside[: 2 * len(slices)] = np.repeat(of_steps, 2)
        # The events at which their ranks met.
        meets = (graph.target >= 2 * len(slices)) & inside[graph.source]
        inside[graph.target[meets]] = True
        ends = on_device(slices) | alone
        each = [of_slice == number for number in numbers] or [of_steps]
        events = [2 * np.flatnonzero(ends & one) + 1 for one in each]
        earlier = 2 * np.flatnonzero(ends & ~of_steps) + 1
        return cls(
            graph,
            numbers,
            alone,
            inside,
            [ended for ended in events if len(ended)],
            float(graph.time_ns[earlier].max(initial=0)),
            *durations(graph),
        )

    @cached_property
    def _lanes(self):
        return _Lanes.of(self.graph, self.inside)

    @property
    def recorded(self) -> Round:
        """The steps as they were measured."""
        return self._round(self.graph.time_ns, self.begin_ns)

    def weight_ns(self, own_ns: np.ndarray, delay_ns: np.ndarray) -> np.ndarray:
        """Weights (edges,) of work before events (events,) and delays (edges,)."""
        return delay_ns + own_ns[self.graph.target]

    def replay(self, weight_ns: np.ndarray, queued: bool = False) -> Round:
        """The steps with other weights of their edges, once they repeat.

        They begin with a host that is no step ahead; queued: once, with all that was
        launched when they began, as it was measured.
        """
        lanes = self._lanes
        graph = self.graph
        if not len(graph.time_ns):
            return self.recorded
        along_ns = np.zeros(len(graph.time_ns))
        along_ns[graph.target[lanes.along]] = weight_ns[lanes.along]
        sum_ns = np.cumsum(along_ns)
        weight_ns = sum_ns[graph.source] + weight_ns - sum_ns[graph.target]
        weight = weight_ns[lanes.used].tolist()
        tail_ns = np.full(len(lanes.last), self.begin_ns)
        if queued:
            tail_ns = graph.time_ns[lanes.earlier].astype(float)
        tail_ns[lanes.earlier < 0] = -np.inf
        free = lanes.unexplained
        free_ns = graph.time_ns[free] - sum_ns[free] - self.begin_ns
        end_ns = self.begin_ns
        took_ns = np.nan
        rounds = 1 if queued or self.alone else -(-_ROUNDS // max(len(self.ends), 1))
        for _ in range(rounds):
            at = np.full(lanes.count, -np.inf)
            at[lanes.number[free]] = free_ns + end_ns
            at = np.r_[at, tail_ns - sum_ns[lanes.earlier]].tolist()
            at = longest_paths(lanes.source, lanes.target, weight, at)
            time_ns = np.array(at)[lanes.number] + sum_ns
            time_ns = np.where(self.inside, time_ns, graph.time_ns)
            tail_ns = np.where(lanes.last >= 0, time_ns[lanes.last], -np.inf)
            now = self._round(time_ns, end_ns)
            before_ns = took_ns
            took_ns = now.end_ns[-1] - end_ns
            end_ns = now.end_ns[-1]
            if abs(took_ns - before_ns) <= _SAME * took_ns:
                break
        return now

    def _round(self, time_ns, begin_ns):
        ends_ns = [time_ns[events].max() for events in self.ends]
        # Where steps are mixed up on the device one may end before the one before.
        ends_ns = np.maximum.accumulate([begin_ns, *ends_ns])
        return Round(time_ns, ends_ns.astype(float))


@dataclass(frozen=True, eq=False)
class _Lanes:
    """Edges that may decide, between the events that are left to evaluate, and one
    further event for each lane: the last that the steps before left on it.
    """

    along: np.ndarray  # (edges,) whether they run along a lane
    used: np.ndarray  # (edges,) whether they may decide
    source: list[int]  # (used edges,)
    target: list[int]  # (used edges,)
    number: np.ndarray  # (events,) of the last evaluated event of their lane
    count: int  # of evaluated events
    # evaluated events without an edge: they happen as long after the step before as
    # they did
    unexplained: np.ndarray
    last: np.ndarray  # (lanes,) last event of the steps, -1 without
    earlier: np.ndarray  # (lanes,) last event before their first one, -1 without

    @classmethod
    def of(cls, graph, inside):
        """The edges into the events inside of some steps."""
        lanes = graph.slices.groupby(["rank", "stream"], sort=False)
        # Events of meetings are on no lane: on a last one of their own.
        lane = np.full(len(inside), lanes.ngroups)
        lane[: 2 * len(graph.slices)] = np.repeat(lanes.ngroup().to_numpy(), 2)
        event = np.arange(len(inside))
        last = np.full(lanes.ngroups + 1, -1)
        np.maximum.at(last, lane[inside], event[inside])
        first = np.full(len(last), len(inside))
        np.minimum.at(first, lane[inside], event[inside])
        before = ~inside & (event < first[lane]) & (last[lane] >= 0)
        earlier = np.full(len(last), -1)
        np.maximum.at(earlier, lane[before], event[before])
        earlier[-1] = -1
        source = graph.source
        target = graph.target
        along = (source == target - 1) & np.isin(graph.why, _ALONG)
        from_inside = inside[source]
        # Left to evaluate is what does not only follow the event before it.
        follows = np.zeros(len(inside), dtype=bool)
        follows[target[along & from_inside]] = True
        follows[target[~along | ~from_inside]] = False
        evaluated = inside & ~follows
        number = np.cumsum(evaluated) - 1
        count = int(evaluated.sum())
        # What the steps follow is told by the last event on its lane.
        from_lane = source <= earlier[lane[source]]
        used = evaluated[target] & (from_inside | from_lane)
        node = np.where(from_inside, number[source], count + lane[source])
        evaluated[target[used]] = False
        return cls(
            along,
            used,
            node[used].tolist(),
            number[target[used]].tolist(),
            number,
            count,
            np.flatnonzero(evaluated),
            last,
            earlier,
        )


def recurring_steps(timeline: Timeline, step: int | None = None) -> list[int]:
    """The steps that a replay repeats: the one that is named, or the last ones that are
    neither warm-up nor cut and follow another step.

    Where none does, the first; of a simulated timeline always one. Raises
    ValueError for a step that the timeline does not have.
    """
    numbers = timeline.steps
    if step is not None or len(numbers) < 2 or len(timeline.edges):
        return timeline.one_step(step)
    table = steps(timeline)
    steady = table.loc[~(table["warmup"] | table["cut"]).astype(bool), "step"]
    follow = [number for number in numbers[1:] if number in set(steady)]
    most = max(_MOST_SPANS * len(numbers) // max(len(timeline), 1), 1)
    return follow[-most:] or timeline.one_step()


def step_ends(timeline: Timeline) -> pd.Series:
    """End in ns of the last device work of each step, of all ranks."""
    busy = busy_spans(timeline.spans)
    device = busy[busy["stream"] >= 0]
    busy = device if len(device) else busy
    return ends_ns(busy).groupby(busy["step"]).max().drop(-1, errors="ignore")


def on_device(slices: pd.DataFrame) -> np.ndarray:
    """Work (n,) of a device; of operators where the host is the device, else all."""
    busy = slices["kind"].isin(BUSY_KINDS).to_numpy()
    device = busy & (slices["stream"] >= 0).to_numpy()
    for work in (device, busy):
        if work.any():
            return work
    return ~busy


def _work_steps(timeline):
    """Step (n,) of each span; what is between two steps belongs to the first.

    Before all steps of a rank it is -1, after them _BEYOND.
    """
    spans = timeline.spans.reset_index(drop=True)
    lane = spans["stream"].where(spans["stream"] >= 0, -1)
    step = spans["step"].where(spans["step"] >= 0).astype(float)
    in_order = step.iloc[np.argsort(spans["start_ns"], kind="stable")]
    lanes = in_order.groupby([spans["rank"], lane])
    before = lanes.ffill()
    number = before.mask(lanes.bfill().isna() & before.notna(), _BEYOND)
    number = number.where(in_order.isna(), in_order).fillna(-1)
    return number.sort_index().to_numpy(dtype="int64")


def _before(timeline, number, replayed):
    """Step before the replayed ones, and whether they stand alone.

    Before the first step, -1, is what earlier ones left running on the device.
    """
    numbers = timeline.steps
    if not replayed or len(timeline.edges):
        return min(replayed, default=-1), True
    earlier = [number for number in numbers if number < replayed[0]]
    if earlier:
        return earlier[-1], False
    spans = timeline.spans
    left = spans[(number == -1) & (spans["stream"] >= 0)]
    first_ns = spans.loc[number == replayed[0], "start_ns"].min()
    if ends_ns(busy_spans(left)).max() > first_ns:
        return -1, False
    return replayed[0], True


def durations(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Work (events,) before each event and delay (edges,) of each edge, in ns.

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
        # kind, of those that are none themselves.
        usual_ns = gap_ns[decides & (graph.why == why) & (gap_ns < HELD_BACK_NS)]
        most_ns = LAUNCH_NS if why == "launch" else 0.0
        if len(usual_ns):
            most_ns = np.median(usual_ns)
        other = ~graph.binding & (graph.why == why)
        delay_ns[other] = np.minimum(delay_ns[other], most_ns)
    return own_ns, delay_ns
