"""A verdict for CI: did B get slower than A by a threshold or more, how surely, and
through which operations?

Compared are a step's time, its exposed communication, the peak of memory, and each
operation that takes 2 % of a step, over the steps that are neither warm-up nor cut: the
mean without the smallest and the largest quarter. Steps that follow each other are
alike, so a block bootstrap [Kuensch 1989] draws runs of steps, with all ranks of a step
together, since they wait for one another; Student's t with as many degrees of freedom
as there are blocks makes the interval. Two runs of the same code are further apart than
that, how far no single recording tells: three quarters of the spread of the steps are
added for it, a guess (`benchmarks/gate.py` judges it), unless five recordings or more
show it. Where the host does the work, other work on it slows every operation by a
common factor, and that may be all: a quantity has to be slower than the operations are
in the median, beyond their spread around it. Holm's method [1979], weighted, keeps the
chance of any false alarm below 5 %. A quantity is slower if it surely grew, and not
surely by less than 4/5 of the threshold, so that what grows by the threshold is found.
The recordings pass only if that much is known of the step itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type, same_fields
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, busy_spans, with_origin
from madmax_lib.traces.diff import op_names
from madmax_lib.traces.operators.memory import peak
from madmax_lib.traces.tables import ratio, require_growth
from madmax_lib.traces.waits.step_times import steps

_LEVEL = 0.05
_POWER = 0.8
_DRAWS = 500
_SEED = 0
# of steps at either end: the mean of the others is robust, and finer than a median
_TRIM = 0.25
# share of a step below which an operation does not count, and how many do
_SMALLEST = 0.02
_MOST = 20
_WEIGHTS = {
    "step_s": 0.5,
    "exposed_comm_s": 0.2,
}  # of the level; the operations share the rest
_NORMAL = 1.349  # standard deviations between the quartiles of a normal distribution
_MORE = "give several recordings of each, five or more in all"
# of a recording for a verdict; recordings of both sides for the spread between them
_LEAST_STEPS = 4
_LEAST_RUNS = 5
# of the spread of the steps; of the threshold; of that, of a step
_RUNS_APART = 0.75
_BOUND = 0.8
_MINOR = 1 / 3
_NEGLIGIBLE = 0.05  # of what grew most: explains nothing
# standard deviation per median deviation; operations whose median means something
_MAD = 1.4826
_SEVERAL = 4


@dataclass(frozen=True, repr=False)
class GateResult:
    """Verdict of `gate`.

    verdict: fail, if a quantity is slower; cannot tell, if the noise, or too few steps,
        hide whether the step is; else pass, whatever is unknown of its parts.
    passed: whether the verdict is pass.
    too_few: empty, or which recording has fewer than four steps that count: its times
        are measured and not judged.
    table: quantity (step_s, exposed_comm_s, peak_bytes, or an operation), kind, unit
        (of a and b: s per step and rank, or bytes), a, b, ratio (b / a), low, high (its
        90 % interval), p (that it did not grow, adjusted for all quantities),
        detectable (growth that is found in 80 % of cases, 0.03 is 3 %), verdict:
        slower; cannot tell; minor, slower by less than a third of the threshold of a
        whole step; fine.
    explanation: up to three operations that grew most: operation, kind, rank (-1: all
        alike), a_s, b_s, difference_s (per step), ratio. Of a collective the rank that
        waits least counts.
    threshold: as given.
    host_factor: factor by which a host's operations changed in the median, which may be the
        machine's; 1 on a device, and where enough recordings show how far runs are
        apart.
    """

    verdict: str
    table: pd.DataFrame = field(repr=False)
    explanation: pd.DataFrame = field(repr=False)
    threshold: float = 0.03
    host_factor: float = 1.0
    too_few: str = ""

    @property
    def passed(self) -> bool:
        """Whether the step is known not to be slower, and no quantity is."""
        return self.verdict == "pass"

    __eq__ = same_fields

    def __repr__(self):
        verdict = self.table["verdict"]
        slower = self.table[verdict == "slower"]
        unclear = self.table[verdict == "cannot tell"]
        lines = [f"{self.verdict} at {self.threshold:.3g}"]
        lines += [self.too_few] if self.too_few else []
        for row in slower.itertuples():
            ends = f"{row.low - 1:+.1%} to {row.high - 1:+.1%}"
            lines.append(f"{row.quantity}: {row.ratio - 1:+.1%} ({ends})")
        for row in self.explanation.itertuples() if len(slower) else ():
            rank = "" if row.rank == -1 else f" on rank {row.rank}"
            grew_ms = row.difference_s * 1e3
            lines.append(f"  {row.operation}{rank}: {grew_ms:+.3g} ms")
        operations = unclear["kind"].isin(BUSY_KINDS)
        for row in unclear[~operations].itertuples():
            is_known = np.isfinite(row.detectable)
            share = f"{row.detectable:.1%}" if is_known else "an unknown growth"
            lines.append(
                f"{row.quantity}: cannot tell at {self.threshold:.3g}, measured "
                f"{row.ratio - 1:+.1%}, {share} is the least it could show"
            )
        lines += [f"nor of {operations.sum()} operations"] if operations.any() else []
        if abs(self.host_factor - 1) > self.threshold:
            lines += [
                f"all operations take {self.host_factor:.3g} times as long: the machine, "
                f"or other work on it? {_MORE}"
            ]
        return "\n".join(lines)


def gate(
    a: Timeline | Sequence[Timeline],
    b: Timeline | Sequence[Timeline],
    threshold: float = 0.03,
) -> GateResult:
    """Whether `b` got slower than `a` by the threshold or more, in any quantity of a
    step.

    a, b: recordings of the same training, or lists of them: with five or more in all
    the spread between recordings is known. threshold: smallest growth that matters,
    0.03 for 3 %; a growth that is surely smaller passes. Raises ValueError for a
    threshold outside of 0..1, for timelines without a step that counts, of other ranks
    than the rest, or of files that were not read whole.
    """
    require_growth("threshold", threshold)
    sides = []
    for name, side in (("a", a), ("b", b)):
        timelines = list(side) if isinstance(side, (list, tuple)) else [side]
        if not timelines:
            raise ValueError(f"{name} is an empty list, not a recording")
        timelines = [require_type(name, one, Timeline) for one in timelines]
        sides.append([_Recording(one) for one in timelines])
    every = [one for side in sides for one in side]
    _check_whole([one.timeline for one in every])
    table, factor = _tested(sides, threshold)
    too_few = next(filter(None, (one.too_few for one in every)), "")
    if too_few:
        table.loc[table["kind"] != "memory", "verdict"] = "cannot tell"
    of_step = table["verdict"][table["quantity"] == "step_s"].item()
    verdict = "cannot tell" if of_step == "cannot tell" else "pass"
    if (table["verdict"] == "slower").any():
        verdict = "fail"
    order = {"slower": 0, "cannot tell": 1, "minor": 2, "fine": 3}
    table = table.assign(severity=table["verdict"].map(order), growth=-table["ratio"])
    table = table.sort_values(["severity", "growth"], ignore_index=True)
    table = table.drop(columns=["severity", "growth"])
    files = {
        f"{label}{number}": one.timeline.meta.provenance.get("files", {})
        for label, side in zip("ab", sides, strict=True)
        for number, one in enumerate(side, 1)
    }
    return GateResult(
        verdict=verdict,
        table=with_origin(table, {"files": files}),
        explanation=with_origin(_explained(*sides), {"files": files}),
        threshold=threshold,
        host_factor=factor,
        too_few=too_few,
    )


def _check_whole(timelines):
    """Raise ValueError where recordings differ in their ranks, or a file ended early:
    less work looks like a gain.
    """
    ranks = [set(timeline.spans["rank"].unique().tolist()) for timeline in timelines]
    for present in ranks:
        if missing := sorted(set.union(*ranks) - present):
            raise ValueError(
                f"one recording has no trace of rank {missing[0]}, which another "
                "has; a gate needs the same ranks in all"
            )
    for timeline in timelines:
        provenance = timeline.meta.provenance
        for rank in map(str, timeline.ranks):
            if damage := provenance.get("damaged", {}).get(rank):
                name = provenance["files"][rank]["name"]
                raise ValueError(f"{name}: {damage}; a gate needs complete recordings")


class _Recording:
    """Quantities of the steps of one timeline.

    values: (steps, quantities) s, mean over ranks. operations: (rank, step) x (kind,
    operation) s. peak_bytes: NaN where the recording has no events of an allocator.
    too_few: why its steps are not judged, else empty.
    """

    def __init__(self, timeline):
        table = steps(timeline)
        left_out = table.loc[table["warmup"] | table["cut"], "step"]
        counted = table[~table["step"].isin(left_out) & (table["total_s"] > 0)]
        spans = timeline.spans
        busy_on_device = spans["kind"].isin(BUSY_KINDS) & (spans["stream"] >= 0)
        self.timeline = timeline
        self.on_device = bool(busy_on_device.any())
        by_step = counted.groupby("step")
        values = by_step[["step_s", "exposed_comm_s"]].mean().dropna()
        self.too_few = ""
        if len(values) < _LEAST_STEPS:
            self.too_few = _too_few_steps(timeline, len(values))
        if not len(values):
            raise ValueError(self.too_few)
        self.operations = _operations(timeline, list(values.index))
        per_step = self.operations.groupby("step").mean()
        # An operation of one name in two kinds counts once.
        self.values = values.join(per_step.T.groupby("operation").sum().T)
        has_memory = len(timeline.side_tables["memory"])
        self.peak_bytes = peak(timeline)["peak_bytes"].max() if has_memory else np.nan

    def location(self, names):
        """Location of each quantity (n,), in logarithms."""
        values = self.values.reindex(columns=names, fill_value=0.0).to_numpy()
        count = len(values)
        # Block bootstrap [Kuensch 1989]: blocks of about count^(1/3) steps keep what
        # makes neighbours alike; each draw joins as many as cover the steps.
        block = max(round(count ** (1 / 3)), 1)
        shape = (_DRAWS, -(-count // block))
        starts = np.random.default_rng(_SEED).integers(count, size=shape)
        # (draws, blocks, steps of a block) -> (draws, steps), wrapped round at the end
        rows = (starts[:, :, None] + np.arange(block)) % count
        rows = rows.reshape(_DRAWS, -1)[:, :count]
        with np.errstate(divide="ignore", invalid="ignore"):
            # blocks of b among n steps vary less than they should, by 1 - b / n
            correction = np.sqrt(np.divide(count, count - block))
            low, high = np.quantile(values, [0.25, 0.75], axis=0)
            # of a lone step inf x 0: how sure it is is not known
            return _Location(
                middle=np.log(_middle(values[None])[0]),
                error=np.log(_middle(values[rows])).std(axis=0) * correction,
                spread=(high - low) / _NORMAL / np.median(values, axis=0),
                blocks=count / block,
            )


@dataclass(frozen=True)
class _Location:
    """Location of the quantities of a recording, as logarithms."""

    middle: np.ndarray  # (n,) log of the mean without the outer quarters
    error: np.ndarray  # (n,) its standard error
    spread: np.ndarray  # (n,) of the steps, relative to their median
    blocks: float  # of steps that may be taken for independent


def _too_few_steps(timeline, count):
    files = timeline.meta.provenance.get("files", {})
    name = next(iter(files.values()), {}).get("name", "timeline")
    advice = "mark steps with profiler.step()"
    if steps(timeline)["annotated"].any():
        most = _LEAST_STEPS + 2
        advice = f"record {most} or more, as the first may be warm-up and the last cut"
    rule = f"a gate needs {_LEAST_STEPS}; {advice}"
    return f"{name}: {count} steps that are neither warm-up nor cut; {rule}"


def _operations(timeline, counted):
    """Seconds by (rank, step) and (kind, operation), zero where a step has none."""
    spans = timeline.spans
    spans = busy_spans(spans[spans["step"].isin(counted)])
    names = spans["name"].cat.remove_unused_categories()
    short = np.array(op_names(list(names.cat.categories)), dtype=object)
    parts = {
        "operation": short[names.cat.codes],
        "kind": spans["kind"].astype(str),
        "seconds": spans["dur_ns"] / NS_PER_S,
    }
    keys = ["rank", "step", "kind", "operation"]
    seconds = spans.assign(**parts).groupby(keys)["seconds"].sum()
    table = seconds.unstack(["kind", "operation"])
    cells = pd.MultiIndex.from_product([timeline.ranks, counted], names=keys[:2])
    return table.reindex(cells).fillna(0.0)


def _middle(values):
    """Mean without the smallest and largest quarter, over the axis before the last."""
    # As robust as a median, and less coarse.
    cut = int(_TRIM * values.shape[-2])
    return np.sort(values, axis=-2)[..., cut : values.shape[-2] - cut, :].mean(axis=-2)


def _tested(sides, threshold):
    """The table of a `GateResult`, and the factor that the operations of a host share."""
    from scipy.stats import t as student

    names = _names(sides)
    every = [one for side in sides for one in side]
    kinds = {name: kind for one in every for kind, name in one.operations.columns}
    kind = np.array([kinds.get(name, "") for name in names], dtype=object)
    compared = _compared(sides, names, kind == "compute")
    error = compared.error
    freedom = compared.freedom
    growth = compared.log_b - compared.log_a
    width = student.ppf(1 - _LEVEL, freedom) * error
    # Any part of what a host's operations share may be the machine's.
    least = growth - max(compared.shared, 0.0)
    most = growth - min(compared.shared, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = student.sf(least / error, freedom)
    exact = np.where(least > 0, 0.0, 1.0)
    # Share of the level that each quantity gets (n,).
    operations = [name for name in names if name not in _WEIGHTS]
    rest = (1 - sum(_WEIGHTS.values())) / max(len(operations), 1)
    weights = np.array([_WEIGHTS.get(name, rest) for name in names])
    weights = weights / weights.sum()
    # Growth that a test at this level finds with the stated power:
    #   (t_level + t_power) error
    level_t = student.ppf(1 - _LEVEL * weights, freedom)
    shows = (level_t + student.ppf(_POWER, freedom)) * error
    table = pd.DataFrame(
        {
            "quantity": names,
            "kind": kind,
            "unit": "s",
            "a": np.exp(compared.log_a),
            "b": np.exp(compared.log_b),
            "ratio": np.exp(growth),
            "low": np.exp(least - width),
            "high": np.exp(most + width),
            "p": _holm(np.where(error == 0, exact, chance), weights),
            "detectable": np.expm1(shows + abs(compared.shared)),
        }
    )
    table = _with_peak(table, sides)
    is_exact = table["kind"] == "memory"
    bound = np.where(is_exact, 1.0, _BOUND)
    small = table["high"] < 1 + threshold * bound
    sure = table["p"] < _LEVEL
    grown_s = table["b"] - table["a"]
    minor = (grown_s < _MINOR * threshold * table["a"].iloc[0]) & ~is_exact
    verdicts = ["fine", "minor", "slower"]
    rules = [small, sure & minor, sure]
    table["verdict"] = np.select(rules, verdicts, "cannot tell")
    return table, float(np.exp(compared.shared))


def _with_peak(table, sides):
    """The table with the peak of memory, which is exact, where both sides have it."""
    a, b = (np.mean([one.peak_bytes for one in side]) for side in sides)
    if np.isfinite(a) and np.isfinite(b) and a > 0:
        table.loc[len(table)] = {
            "quantity": "peak_bytes",
            "kind": "memory",
            "unit": "bytes",
            "a": a,
            "b": b,
            "ratio": b / a,
            "low": b / a,
            "high": b / a,
            "p": float(b <= a),
            "detectable": 0.0,
        }
    return table


def _names(sides):
    """Quantities that both sides have and that take a share of a step that counts."""
    shares = []
    for side in sides:
        parts = pd.concat([one.values.mean() for one in side], axis=1)
        mean = parts.fillna(0.0).mean(axis=1)
        # Share of a step that a quantity takes on this side.
        shares.append(mean / mean["step_s"])
    both = pd.concat(shares, axis=1).dropna()
    most = both.max(axis=1)
    large = most[(most >= _SMALLEST) & (both.min(axis=1) > 0)]
    operations = large.drop(list(_WEIGHTS), errors="ignore").nlargest(_MOST)
    return [*(name for name in _WEIGHTS if name in large), *operations.index]


@dataclass(frozen=True)
class _Compared:
    """Both sides as logarithms of their quantities."""

    log_a: np.ndarray  # (n,) means over the recordings of each side
    log_b: np.ndarray
    error: np.ndarray  # (n,) standard error of the difference
    freedom: float  # its degrees of freedom
    shared: float = 0.0  # log of the factor that all operations of a host share


def _compared(sides, names, computes):
    """The comparison of quantities. computes: (n,) whether a quantity is an operation
    that computes.
    """
    locations = [[one.location(names) for one in side] for side in sides]
    middles = [np.array([one.middle for one in side]) for side in locations]
    log_a, log_b = (middle.mean(axis=0) for middle in middles)
    within = _variance_of_means([[one.error for one in side] for side in locations])
    counts = [len(side) for side in sides]
    if sum(counts) >= _LEAST_RUNS:
        # Enough recordings show themselves how far apart two runs of one code are:
        # pooled variance of the recordings, of a difference of two means.
        squares = sum(middle.var(axis=0) * len(middle) for middle in middles)
        freedom = sum(counts) - 2
        between = squares / freedom * sum(1 / count for count in counts)
        return _Compared(log_a, log_b, np.sqrt(np.maximum(between, within)), freedom)
    spread = _variance_of_means([[one.spread for one in side] for side in locations])
    variance = within + _RUNS_APART**2 * spread
    freedom = sum(one.blocks for side in locations for one in side) - sum(counts)
    if all(one.on_device for side in sides for one in side):
        return _Compared(log_a, log_b, np.sqrt(variance), freedom)
    growth = (log_b - log_a)[computes]
    if len(growth) < _SEVERAL:
        # What so few operations share cannot be told from what each does.
        growth = np.append(growth, (log_b - log_a)[0])
        shared = float(growth[np.abs(growth).argmax()])
    else:
        shared = float(np.median(growth))
        deviation = np.median(np.abs(growth - shared))
        variance = variance + (_MAD * deviation) ** 2
        freedom = min(freedom, len(growth) - 1)
    return _Compared(log_a, log_b, np.sqrt(variance), freedom, shared)


def _variance_of_means(deviations):
    """Variance (n,) of the difference of two means, from the standard deviations of
    their recordings: sum over sides of sum(sigma^2) / count^2.
    """
    return sum(
        (np.array(side) ** 2).sum(axis=0) / len(side) ** 2 for side in deviations
    )


def _holm(p, weights):
    """Adjusted p (n,): below a level with at most that chance of any false alarm.

    >>> _holm(np.array([0.01, 0.04]), np.array([0.5, 0.5])).tolist()
    [0.02, 0.04]
    """
    # Holm 1979, weighted: the k-th smallest p / w may use the level that the ones
    # before it have left, w_k / (w_k + w_k+1 + ...).
    order = np.argsort(p / weights, kind="stable")
    left = weights[order][::-1].cumsum()[::-1]
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(
        np.maximum.accumulate(p[order] * left / weights[order]), 1.0
    )
    return adjusted


def _explained(a, b):
    """The explanation of a `GateResult`."""
    means = []
    for side in (a, b):
        # Geometric mean over the recordings, as in `_compared`.
        times_s = pd.concat([_by_rank(one) for one in side], axis=1).fillna(0.0)
        with np.errstate(divide="ignore"):
            logs = np.log(times_s).T.groupby(level=0).mean().T
        means.append(np.exp(logs))
    before, after = means[0].align(means[1], fill_value=0.0)
    grew_s = (after - before).drop(columns=-1)
    comm = before.index.get_level_values("kind") == "comm"
    one_rank = grew_s.max(axis=1) >= 1.5 * grew_s.mean(axis=1)
    one_rank &= ~comm & (grew_s.shape[1] > 1)
    rank = grew_s.idxmax(axis=1).where(one_rank, -1)
    table = rank.rename("rank").reset_index()
    table = table[["operation", "kind", "rank"]]
    for column, times_s in (("a_s", before), ("b_s", after)):
        of_rank = [times_s.loc[key, number] for key, number in rank.items()]
        # Of a collective the rank that waits least shows the transfer.
        shortest = times_s.drop(columns=-1).min(axis=1)
        table[column] = np.where(comm, shortest, of_rank)
    table["difference_s"] = table["b_s"] - table["a_s"]
    table["ratio"] = ratio(table["b_s"], table["a_s"])
    table = table.nlargest(3, "difference_s").reset_index(drop=True)
    return table[table["difference_s"] > _NEGLIGIBLE * table["difference_s"].max()]


def _by_rank(one):
    """Middle of the seconds of a step: a row per (kind, operation), a column per rank,
    and -1 for their mean.
    """
    parts = dict(iter(one.operations.groupby("rank")))
    parts[-1] = one.operations.groupby("step").mean()
    by_rank = {rank: _middle(part.to_numpy()[None])[0] for rank, part in parts.items()}
    return pd.DataFrame(by_rank, index=one.operations.columns)
