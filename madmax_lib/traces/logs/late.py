"""Who is late in a log, since when, and what it costs the step.

A rank or host is compared with the others of its group in the same step, so that what
all share cancels. Its excess has to last over blocks of steps, and to be more than
equals differ by nature: in level, or against its own time before. All chances are
corrected for the number of ranks and phases that were looked at. It costs the step only
as far as the pace of the job shows it.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import with_origin
from madmax_lib.traces.logs.changes import (
    EDGE,
    best_fit,
    block_edges,
    block_medians,
    changes,
    exact_start,
)
from madmax_lib.traces.logs.log import Log, middle_of

_LEVEL = 0.02  # chance of any false alarm in a log
_STEPS = 8  # of a block at least
# By how much healthy ranks differ, relative to the phase: in their medians, over a
# day, in collectives. In a sample it is 0.7 % of fwd_bwd [torchtitan 0.3.0]. What is
# assumed counts as so many members, and rules where there are fewer than these.
_APART = 0.008
_WANDER = 0.006
_WAITS = 0.05
_MANY = 8
_NORMAL = 1.4826  # standard deviations in a median deviation
# share of the step that is worth a word: cost, and excess whatever it costs
_SMALLEST, _LARGE = 0.002, 0.01
_FOLLOWS = 0.25  # of a pace that follows the work: less is hidden
# phases in which a host waits for its device or for others, or that are the step
_WAITING = ("collect_dist_metrics", "wait_for_training_batch", "step", "train_step")
_NO_WAIT = 0.01  # of the step: what no span holds, such as copies
_WINDOW = 8  # steps


class LateFinding(NamedTuple):
    """A row of `find_late`."""

    rank: int | None
    host: str | None
    phase: str | None
    since_step: int
    cost_share: float
    kind: str
    excess_s: float
    confidence: float


def find_late(log: Log) -> pd.DataFrame:
    """Ranks, hosts and phases that are late, and changes of the pace, worst first.

    rank, host, phase: None where it does not apply. since_step. cost_share: of the
    step. kind: late (the others wait for it), slow (nobody waits in this log), drift
    (grows little by little), change (of all ranks). excess_s: over the others, or the
    time before. confidence. `.attrs["hidden"]`: who is late and costs nothing.
    """
    keys = [key for key in log.phases if key[1] not in _WAITING] or list(log.phases)
    rows = [row for key in keys for row in _of_phase(log, key)]
    rows.sort(key=lambda row: row.excess_s)
    if not log.waits:
        # of phases one inside of the other the longer, which comes last
        rows = list({row[:2]: row for row in rows}.values())
    hidden = [
        f"{row.phase} of {row.host or row.rank}" for row in rows if row.cost_share < 0
    ]
    rows = [row for row in rows if row.cost_share >= 0]
    rows += _of_all(log, rows)
    table = pd.DataFrame(rows, columns=LateFinding._fields).astype({"rank": object})
    table = table.sort_values("cost_share", ascending=False, ignore_index=True)
    return with_origin(table, {}, hidden=hidden)


def _of_phase(log, key):
    """Findings of late ranks and hosts in a phase. cost_share: -1 if hidden."""
    seconds = log.phases[key][:, log.counted]
    members = np.flatnonzero(np.isfinite(seconds).any(axis=1))
    if len(members) < 2:
        return
    # who lacks a step is like the others in it
    missing = np.isnan(seconds)
    seconds = np.where(missing, np.nan_to_num(middle_of(seconds)), seconds)[members]
    # of a collective the late rank's time is the shortest
    lateness = -seconds if log.waits else seconds
    excess = lateness - _lower_median(lateness)
    scale_s = np.median(seconds)
    edges = block_edges(excess.shape[1], _STEPS)
    blocks = block_medians(excess, _STEPS)
    hosts = log.units["host"].to_numpy()[members]
    groups = [np.flatnonzero(hosts == name) for name in dict.fromkeys(hosts)]
    late = [
        (rows, one)
        for rows, one in _beyond(excess, blocks, groups, scale_s, log)
        # a host is late if it has several ranks, and most of them are
        if len(rows) > 1
        and np.sort(blocks[rows, one.since_step :].mean(axis=1))[len(rows) // 3]
        > one.excess_s / 2
    ]
    named = {row for rows, _ in late for row in rows}
    ranks = [np.array([row]) for row in range(len(members)) if row not in named]
    late += _beyond(excess, blocks, ranks, scale_s, log)
    rest = np.delete(seconds, [row for rows, _ in late for row in rows], axis=0)
    busiest = rest.max(axis=0, initial=0.0)
    for rows, one in late:
        since = exact_start(np.median(excess[rows], axis=0), edges, one.since_step)
        cost_s = np.maximum(seconds[rows].max(axis=0) - busiest, 0.0)[since:]
        unit = log.units.iloc[members[rows[0]]]
        yield one._replace(
            rank=unit["rank"] if len(rows) == 1 else None,
            host=unit["host"] if len(rows) > 1 else None,
            phase=key[1],
            since_step=log.steps[log.counted][since],
            cost_share=_cost_share(log, members[rows], one.excess_s, cost_s),
        )


def _lower_median(values):
    """(n,) lower median over members (members, n): where half are late, of the others."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def _beyond(excess, blocks, groups, scale_s, log):
    """Groups of members whose excess (members, steps) is beyond what equals differ by:
    their rows, and a LateFinding whose since_step is a block.

    blocks: (members, blocks) medians of it; scale_s: length of the phase.
    """
    from scipy.stats import norm

    # standard deviation of a block's median, from differences of steps, which are
    # sqrt(2) times as far spread_s: sigma x sqrt(pi / 2 n)
    changes_s = np.median(np.abs(np.diff(excess, prepend=excess[:, :1])), axis=1)
    noise_s = np.array([changes_s[rows].mean() for rows in groups])
    noise_s *= _NORMAL / 2 * np.sqrt(np.pi * blocks.shape[1] / excess.shape[1])
    blocks = np.stack([np.median(blocks[rows], axis=0) for rows in groups])
    blocks = blocks - _lower_median(blocks)
    count, length = blocks.shape
    # beginnings: always, and each block that is far enough from both ends
    firsts = np.append(0, np.arange(EDGE, length - EDGE + 1))
    # (beginnings, blocks) weights of the mean after less the mean before
    after = np.arange(length) >= firsts[:, None]
    weights = after / (length - firsts)[:, None]
    weights = weights - ~after / np.maximum(firsts, 1)[:, None]
    jump = blocks @ weights.T
    jump = jump - _lower_median(jump)
    spread_s = np.where(firsts > 0, _WANDER, _WAITS if log.waits else _APART) * scale_s
    if count >= _MANY:
        # what members show of themselves, beside what is assumed
        seen = _NORMAL * np.median(np.abs(jump), axis=0)
        spread_s = np.sqrt(
            (count * seen**2 + _MANY / 2 * spread_s**2) / (count + _MANY / 2)
        )
    # (members, beginnings)
    sampling = np.outer(noise_s, np.linalg.norm(weights, axis=1))
    score = jump / np.hypot(spread_s, sampling)
    # most of the level is for lateness from the start, the rest for other beginnings
    tests = count * len(log.phases) * np.where(firsts > 0, 5 * len(firsts), 1.25)
    chance = norm.logsf(score) + np.log(tests)  # its logarithm
    best = chance.argmin(axis=1)
    for row in np.flatnonzero(chance.min(axis=1) < np.log(_LEVEL)):
        first = firsts[best[row]]
        excess_s = float(np.median(blocks[row, first:]))
        # one that catches up is as good as the others
        if excess_s <= 0:
            continue
        fit = best_fit(blocks[row])
        kind = "late" if log.together else "slow"
        if fit and fit.kind == "drift" and fit.share > excess_s / 2:
            kind = "drift"
        confidence = -np.expm1(chance[row].min())
        yield (
            groups[row],
            LateFinding(None, None, None, first, 0.0, kind, excess_s, confidence),
        )


def _cost_share(log, rows, excess_s, cost_s):
    """Share of the step that would not be there without the late; -1 if hidden.

    cost_s: (n,) how much longer they take than the slowest other, in the last n steps.
    """
    if log.waits:
        # what the others waited, of their time in all collectives of a round
        whole_s = {name: np.nanmedian(part) for (_, name), part in log.phases.items()}
        return excess_s / sum(whole_s.values())
    since = log.counted.nonzero()[0][-len(cost_s) :]
    pace_s = middle_of(log.own_pace_s[rows][:, since])
    whole_s = np.nanmedian(pace_s)
    pace_s = np.where(np.isfinite(pace_s), pace_s, whole_s)
    share = 1 - np.median(pace_s - cost_s) / whole_s
    is_worth = share >= _SMALLEST or excess_s >= _LARGE * whole_s
    return share if is_worth and not _is_hidden(log, rows, since, pace_s) else -1.0


def _is_hidden(log, rows, since, pace_s):
    """Whether all wait for what is on no host, such as a slower device."""
    from scipy.stats import theilslopes

    if not log.together:
        return False
    work = sum(
        np.nan_to_num(part[:, since])
        for (_, name), part in log.phases.items()
        if name not in (*_WAITING, "post_dataloading_process")  # inside of fwd_bwd
    )
    count = len(since) // _WINDOW * _WINDOW
    if np.median(pace_s - work.max(axis=0)) < _NO_WAIT * np.median(pace_s) or not count:
        return False
    # Waiting fills up what varies, so that the pace does not follow the work; the
    # device may be a step behind, so sums of some steps are compared.
    busy = work[rows].max(axis=0)
    sums = [part[:count].reshape(-1, _WINDOW).sum(axis=1) for part in (pace_s, busy)]
    return theilslopes(*sums).slope < _FOLLOWS


def _of_all(log, rows):
    """Changes and drifts of the pace that no late rank explains."""
    has_pace = np.isfinite(log.pace_s) & log.counted
    pace_s = log.pace_s[has_pace]
    steps = log.steps[has_pace]
    for one in changes(pace_s):
        since = steps[one.at]
        # a rank that drifts makes the job drift; a change begins where its cause does
        if any(
            row.kind == one.kind
            or (
                row.cost_share > one.share / 2
                and abs(row.since_step - since) <= np.ptp(steps) / 20
            )
            for row in rows
        ):
            continue
        cut = one.at or len(steps) // 2
        excess_s = one.share * np.median(pace_s[:cut])
        # what the host's spans do not show has no phase; halves of a drift are half of
        # its growth apart
        grown_s = {None: excess_s / (2 if one.at else 4)}
        for (_, name), part in log.phases.items():
            middle = middle_of(part[:, has_pace])
            if name not in _WAITING and np.isfinite(middle).all():
                grown_s[name] = np.median(middle[cut:]) - np.median(middle[:cut])
        phase = max(grown_s, key=grown_s.get)
        share = one.share / (1 + one.share)
        yield LateFinding(
            None, None, phase, since, share, one.kind, excess_s, one.confidence
        )
