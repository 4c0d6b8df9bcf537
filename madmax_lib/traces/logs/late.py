"""Who is late in a log, since when, and what it costs the step.

A rank or host is compared with the others of its group in the same step, so that what
all share cancels. Its excess has to last over blocks of steps, and to be more than
equals differ by nature: in level, in the gap to the next ones, or against its own time
before. All chances are corrected for the number of ranks and phases that were looked
at. It costs the step only as far as the pace of the job shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import with_origin
from madmax_lib.traces.logs.changes import (
    better_fit,
    block_edges,
    changes,
    exact_start,
)
from madmax_lib.traces.logs.log import Log, Phase, middle_of, numbered_steps

COLUMNS = ["rank", "host", "phase", "since_step", "cost_share", "kind"]
COLUMNS += ["excess_s", "confidence"]
_LEVEL = 0.01  # chance of any false alarm in a log
_BLOCKS = 40
_STEPS = 8  # of a block at least
_EDGE = 3  # blocks on each side of a beginning
_MANY = 8  # members that show by themselves how much equals differ
# By how much medians of healthy ranks differ, relative to the phase: floors, with few
# members and with many; and how they wander within a day. Healthy ranks of a sample
# with planted facts differ by 0.7 % in fwd_bwd [torchtitan 0.3.0, host spans].
_APART = {"few": 0.008, "many": 0.003, "waits": 0.05, "wander": 0.003}
_NORMAL = 1.4826
_SMALLEST = 0.002  # share of the step that is worth a word
_LARGE = 0.01  # excess, as a share of the step, that is worth one whatever it costs
_NO_WAIT = 0.01  # of the work: what no span holds, such as copies
_WINDOW = 8  # steps
_RARELY = 0.2  # of the steps
_FOLLOWS = 0.5  # of the slope that the pace would have if all steps waited for it
_WHOLE = ("step", "train_step")
# phases in which a host waits for its device or for others
_WAITING = ("collect_dist_metrics", "wait_for_training_batch", *_WHOLE)


@dataclass(frozen=True)
class _Late:
    """Members of a group that are late together in a phase: a rank, or a host's."""

    phase: str
    members: np.ndarray  # rows of units
    first: int  # column of the phase's steps that count
    excess_s: float
    confidence: float
    kind: str = "late"


def find_late(log: Log) -> pd.DataFrame:
    """Ranks, hosts and phases that are late, and changes of the pace, worst first.

    rank, host, phase: None where it does not apply. since_step. cost_share: of the
    step. kind: late (the others wait for it), slow (nobody waits in this log), drift
    (grows little by little), change (of the whole job). excess_s: over the median of
    its group. confidence. `.attrs["hidden"]`: ranks that are late and cost nothing.
    """
    hidden = []
    rows = []
    every = list(_all_late(log))
    taken = np.unique(np.concatenate([late.members for late in every] or [[]]))
    for late in every:
        cost = _cost(log, late, taken)
        rank, host = _named(log, late.members)
        steps = log.phases[late.phase].steps
        since = _counted(log, log.phases[late.phase]).steps[late.first]
        since = int(since if late.first else steps.min())
        row = [rank, host, late.phase, since, cost.share]
        kind = late.kind if log.together or late.kind != "late" else "slow"
        row += [kind, late.excess_s, late.confidence]
        shows = cost.share >= _SMALLEST or cost.excess_share >= _LARGE
        (rows if shows and not cost.is_hidden else hidden).append(row)
    rows += _of_the_job(log, rows)
    table = pd.DataFrame(rows, columns=COLUMNS).astype({"rank": object})
    table = table.sort_values("cost_share", ascending=False, ignore_index=True)
    names = [
        f"{rank if rank is not None else host} in {phase}"
        for rank, host, phase, *_ in hidden
    ]
    return with_origin(table, {**log.origin}, hidden=names)


def _counted(log, phase):
    """The phase in the steps that count."""
    keep = numbered_steps(log, phase)
    return Phase(
        phase.seconds[:, keep],
        phase.steps[keep],
        phase.group,
        phase.parent,
        phase.waits,
    )


def _all_late(log) -> Iterator[_Late]:
    """Late ranks and hosts of all phases; of a phase and its parent the one that says
    more.
    """
    names = [name for name in log.phases if name not in _WAITING] or list(log.phases)
    every = []
    for name in names:
        phase = _counted(log, log.phases[name])
        for group in np.unique(phase.group[phase.group >= 0]):
            some = np.isfinite(phase.seconds).any(axis=1)
            members = np.flatnonzero((phase.group == group) & some)
            if len(members) > 1 and phase.seconds.shape[1]:
                every += _of_group(log, name, phase, members, len(names))
    for late in every:
        inside = [
            other
            for other in every
            if log.phases[other.phase].parent == late.phase
            and set(other.members) == set(late.members)
        ]
        parent = log.phases[late.phase].parent
        around = [
            o
            for o in every
            if o.phase == parent and set(o.members) == set(late.members)
        ]
        # named is the inner one where it explains most of the outer
        if any(other.excess_s > 0.7 * late.excess_s for other in inside):
            continue
        if any(late.excess_s <= 0.7 * other.excess_s for other in around):
            continue
        yield late


def _of_group(log, name, phase, members, tests):
    """Late ranks and hosts of a group in a phase."""
    seconds = phase.seconds[members]
    # of a collective the late rank's is the shortest
    sign = -1.0 if phase.waits else 1.0
    scale_s = float(np.nanmedian(seconds))
    excess = sign * seconds
    excess -= _lower_median(excess)
    edges = block_edges(
        seconds.shape[1], max(min(seconds.shape[1] // _STEPS, _BLOCKS), 1)
    )
    parts = np.split(excess, edges[1:-1], axis=1)
    blocks = np.stack([_medians(part) for part in parts], axis=1)
    natural = _Natural(scale_s, phase.waits, tests)
    noise = _block_noise(excess, seconds.shape[1] / blocks.shape[1])
    hosts = log.units["host"].to_numpy()[members]
    names = [host for host in dict.fromkeys(hosts) if host]
    late = []
    if 1 < len(names) < len(members):
        rows = [np.flatnonzero(hosts == host) for host in names]
        by_host = np.stack([np.median(blocks[of], axis=0) for of in rows])
        by_host -= _lower_median(by_host)
        of_host = np.array([noise[of].mean() for of in rows])
        for one, found in natural.late(by_host, of_host):
            # its ranks are late alike, or it is one of them
            levels = np.median(blocks[rows[one]][:, found.first :], axis=1)
            if np.mean(levels > found.excess_s / 2) > 2 / 3 and len(rows[one]) > 1:
                late.append((rows[one], found))
    taken = {row for rows, _ in late for row in rows}
    late += [
        (np.array([one]), found)
        for one, found in natural.late(blocks, noise)
        if one not in taken
    ]
    for rows, found in late:
        first = found.first
        if first:
            of_step = np.nanmedian(excess[rows], axis=0)
            first = exact_start(np.nan_to_num(of_step), edges, first)
        yield _Late(
            name, members[rows], first, found.excess_s, found.confidence, found.kind
        )


def _lower_median(values):
    """(steps,) lower median over the members: where half are late it is of the others."""
    ordered = np.sort(values, axis=0)  # what is missing comes last
    count = np.isfinite(ordered).sum(axis=0)
    middle = np.maximum(count - 1, 0) // 2
    return np.take_along_axis(ordered, middle[None], axis=0)[0]


def _medians(part):
    """(members,) medians of a block of steps, 0 where a member has none of them."""
    if np.isfinite(part).all():
        return np.median(part, axis=1)
    some = np.isfinite(part).any(axis=1)
    result = np.zeros(len(part))
    result[some] = np.nanmedian(part[some], axis=1)
    return result


@dataclass(frozen=True)
class _Found:
    """Lateness of a member: since which block, and by how much."""

    first: int
    excess_s: float
    confidence: float
    kind: str


@dataclass(frozen=True)
class _Natural:
    """What equals differ by, and who is beyond it."""

    scale_s: float  # length of the phase
    waits: bool
    tests: int  # phases that are looked at

    def late(
        self, blocks: np.ndarray, noise: np.ndarray
    ) -> Iterator[tuple[int, _Found]]:
        """Members of (members, blocks) of excess that are late: row and lateness.

        noise: (members,) standard deviation of a block by that of its steps.
        """
        level = np.median(blocks, axis=1)
        noise = np.maximum(noise, _noise(blocks))
        start = self._since(blocks, noise)
        error = noise / np.sqrt(blocks.shape[1])
        chance = np.minimum(self._of_level(level, error), self._of_gap(level))
        for row in np.flatnonzero(np.minimum(chance, start.chance) < _LEVEL):
            first = int(start.first[row])
            after = float(np.median(blocks[row, first:]))
            # a beginning is one if most of the excess came with it
            if start.chance[row] >= _LEVEL or start.jump_s[row] < after / 2:
                first = 0
                after = float(level[row])
            if after <= 0:
                continue
            fit = better_fit(blocks[row]) if blocks.shape[1] > 2 * _EDGE else None
            is_drift = fit is not None and fit.kind == "drift" and fit.share > after / 2
            confidence = 1 - min(chance[row], start.chance[row])
            kind = "drift" if is_drift else "late"
            yield row, _Found(first, after, float(confidence), kind)

    def _floor_s(self, many):
        share = _APART["waits"] if self.waits else _APART["many" if many else "few"]
        return share * self.scale_s

    def _of_level(self, level, error):
        """(members,) chance that any equal one is so high above the middle."""
        from scipy.stats import norm

        count = len(level)
        apart = level - _lower_median(level[:, None])
        spread_s = self._floor_s(count >= _MANY)
        if count >= _MANY:
            spread_s = max(spread_s, _NORMAL * np.median(np.abs(apart)))
        chance = norm.sf(apart / np.hypot(spread_s, error))
        return np.minimum(chance * count * self.tests, 1.0)

    def _of_gap(self, level):
        """(members,) chance of the gap below the highest ones, if tails are alike."""
        from scipy.stats import f as fisher

        # Renyi: i (X_(i) - X_(i+1)) of the largest values are independent and
        # exponential with one mean, so their ratio follows F(2, 2 m).
        count = len(level)
        chance = np.ones(count)
        if count < 2 * _MANY:
            return chance
        order = np.argsort(-level, kind="stable")
        gaps = -np.diff(level[order]) * np.arange(1, count)
        few = min(_MANY, count // _MANY)
        tail = max(count // 10, _MANY)
        for place in range(few):
            mean_s = gaps[place + 1 : place + 1 + tail].mean()
            ratio = gaps[place] / max(mean_s, 1e-12)
            p = fisher.sf(ratio, 2, 2 * tail) * few * self.tests
            # who stands above a gap is beyond it too
            above = order[: place + 1]
            chance[above] = np.minimum(chance[above], p)
        return chance

    def _since(self, blocks, noise):
        """Best beginning of each member, by its jump beside that of the others."""
        from scipy.stats import norm

        count, length = blocks.shape
        firsts = np.arange(_EDGE, length - _EDGE + 1)
        none = np.zeros(count)
        if not len(firsts):
            return _Since(none.astype(int), none, np.ones(count))
        total = np.cumsum(blocks, axis=1)
        before = total[:, firsts - 1] / firsts
        after = (total[:, -1:] - total[:, firsts - 1]) / (length - firsts)
        jump = after - before
        if count >= _MANY:
            jump = jump - np.median(jump, axis=0)
        wander_s = np.full(
            len(firsts),
            self._floor_s(many=True) if self.waits else _APART["wander"] * self.scale_s,
        )
        if count >= _MANY:
            wander_s = np.maximum(wander_s, _NORMAL * np.median(np.abs(jump), axis=0))
        else:
            wander_s = wander_s * 2
        sampling = np.sqrt(1 / firsts + 1 / (length - firsts))
        score = jump / np.hypot(wander_s, noise[:, None] * sampling)
        best = score.argmax(axis=1)
        row = np.arange(count)
        p = norm.sf(score[row, best]) * count * self.tests * len(firsts)
        return _Since(firsts[best], jump[row, best], np.minimum(p, 1.0))


@dataclass(frozen=True)
class _Since:
    """Best beginning of each member (members,)."""

    first: np.ndarray
    jump_s: np.ndarray
    chance: np.ndarray


def _block_noise(excess, length):
    """(members,) standard deviation of a median of so many steps, if these are
    independent.
    """
    if excess.shape[1] < 2:
        return np.zeros(len(excess))
    step_s = np.nanmedian(np.abs(np.diff(excess, axis=1)), axis=1)
    # that of a difference of two is sqrt(2) times, of a median sqrt(pi / 2 n) times
    return _NORMAL * np.nan_to_num(step_s) / np.sqrt(2) * np.sqrt(np.pi / 2 / length)


def _noise(blocks):
    """(members,) standard deviation of a block, from differences of neighbours."""
    if blocks.shape[1] < _MANY:
        return np.zeros(len(blocks))
    return _NORMAL * np.median(np.abs(np.diff(blocks, axis=1)), axis=1) / np.sqrt(2)


def _named(log, members):
    """Rank and host that a finding names: of one member its rank, of several the host."""
    unit = log.units.iloc[members[0]]
    if len(members) == 1:
        return int(unit["rank"]), None
    return None, unit["host"]


@dataclass(frozen=True)
class _Cost:
    """Cost of late members."""

    share: float  # of the step, that would not be there if they were like the others
    excess_share: float  # of the step, that they work longer than others
    is_hidden: bool = False  # whether the pace does not show their work


def _cost(log, late, taken):
    """What late members cost. taken: rows of all that are late."""
    phase = _counted(log, log.phases[late.phase])
    if phase.waits:
        # what the others waited, of their time in all collectives of a round
        whole_s = sum(np.nanmedian(one.seconds) for one in log.phases.values())
        return _Cost(late.excess_s / whole_s, late.excess_s / whole_s)
    pace_s = log.pace_s[None, log.counted]
    if log.own_pace_s is not None:
        pace_s = log.own_pace_s[late.members][:, log.counted]
    pace_s = middle_of(pace_s[:, late.first :])
    work = _work(log, late, phase)
    own = work[late.members].max(axis=0)
    same = np.flatnonzero(phase.group == phase.group[late.members[0]])
    rest = np.setdiff1d(same, taken)
    others = work[rest if len(rest) else same].max(axis=0)
    # The pace is that of the slowest: cost = max(0, own work - most work of the others)
    cost_s = np.maximum(own - others, 0.0)
    has_pace = np.isfinite(pace_s).any()
    pace_s = pace_s if has_pace else own
    whole_s = np.nanmedian(pace_s)
    share = float((whole_s - np.nanmedian(pace_s - cost_s)) / whole_s)
    is_hidden = False
    if log.together and has_pace and log.own_pace_s is not None:
        # all wait for what is on no host, such as their device
        idle_s = np.nanmedian(pace_s - work[same].max(axis=0))
        is_hidden = idle_s > _NO_WAIT * whole_s and not _pace_follows(
            own, np.mean(cost_s > 0), pace_s
        )
    return _Cost(share, late.excess_s / whole_s, is_hidden)


def _work(log, late, phase):
    """Work of all processes (processes, steps) since the members are late.

    Phases in which the late are as much shorter hold the waiting of the others.
    """
    group = phase.group
    rest = np.setdiff1d(np.flatnonzero(group == group[late.members[0]]), late.members)
    top = _outermost(log, late.phase)
    work = np.zeros((len(group), phase.seconds.shape[1] - late.first), np.float32)
    for name, other in log.phases.items():
        is_part = name not in _WAITING and other.parent in ("", *_WHOLE)
        if name != top and not (is_part and len(other.steps) == len(log.steps)):
            continue
        part = np.nan_to_num(_counted(log, other).seconds[:, late.first :])
        of_late = part[late.members].max(axis=0)
        shorter_s = np.median(np.median(part[rest], axis=0) - of_late)
        if name == top or shorter_s < late.excess_s / 2:
            work += part
    return work


def _outermost(log, name):
    """The phase of the step that a phase is inside of."""
    while (parent := log.phases[name].parent) not in ("", *_WHOLE):
        name = parent
    return name


def _pace_follows(own, costs, pace_s):
    """Whether the pace of the late moves with their work, in the share `costs` of the
    steps that wait for it. Waiting for a slower device fills up what varies.
    """
    known = np.isfinite(pace_s)
    count = known.sum() // _WINDOW
    if count < _EDGE:
        return False
    # the device may be a step behind: sums of some steps are compared
    apart = []
    for values in (own, pace_s):
        sums = values[known][: count * _WINDOW].reshape(count, _WINDOW).sum(axis=1)
        sums = sums - np.median(sums)
        most = 3 * _NORMAL * np.median(np.abs(sums))
        apart.append(np.clip(sums, -most, most))
    work, pace = apart
    slope = work @ pace / max(work @ work, 1e-30)
    return slope > _FOLLOWS * max(costs, _RARELY)


def _of_the_job(log, rows):
    """Changes and drifts of the pace that no late rank explains."""
    known = np.isfinite(log.pace_s) & log.counted
    steps = log.steps[known]
    for one in changes(log.pace_s[known]):
        since = int(steps[one.at])
        near = len(steps) / 20
        explained = [
            row
            for row in rows
            if row[4] > one.share / 2
            and abs(np.searchsorted(steps, row[3]) - one.at) <= near
        ]
        if explained:
            continue
        phase, grown_s = _grown(log, known, one.at)
        # what the host's spans do not show has no phase
        name = phase if grown_s > one.share * np.median(log.pace_s[known]) / 2 else None
        excess_s = one.share * float(np.median(log.pace_s[known][: max(one.at, 1)]))
        yield [
            None,
            None,
            name,
            since,
            one.share / (1 + one.share),
            one.kind,
            excess_s,
            one.confidence,
        ]


def _grown(log, known, at):
    """The phase whose median over ranks grew most, and by how much."""
    grown = {None: 0.0}
    for name, phase in log.phases.items():
        if name in _WAITING or len(phase.steps) != len(log.steps):
            continue
        middle = np.nan_to_num(np.nanmedian(phase.seconds[:, known], axis=0))
        cut = at or len(middle) // 2
        grown[name] = float(np.median(middle[cut:]) - np.median(middle[:cut]))
    best = max(grown, key=grown.get)
    return best, grown[best]
