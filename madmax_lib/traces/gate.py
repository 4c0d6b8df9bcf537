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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_number, require_type
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, with_origin
from madmax_lib.traces.diff import op_names
from madmax_lib.traces.operators.memory import peak
from madmax_lib.traces.waits.step_times import steps

__all__ = ["GateResult", "gate"]

_LEVEL = 0.05
_POWER = 0.8
_DRAWS = 500
_SEED = 0
# of the steps at either end: the mean of the others is as robust as a median and less
# coarse
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
# of each side; recordings of both sides for the spread between them
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

    passed: whether no quantity is slower. Quantities of which nobody can tell do not
        fail it.
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
    alike: factor by which a host's operations changed in the median, which may be the
        machine's; 1 on a device, and where enough recordings show how far runs are
        apart.
    """

    passed: bool
    table: pd.DataFrame = field(repr=False)
    explanation: pd.DataFrame = field(repr=False)
    threshold: float = 0.03
    alike: float = 1.0

    def __repr__(self) -> str:
        slower, unclear = (
            self.table[self.table["verdict"] == verdict]
            for verdict in ("slower", "cannot tell")
        )
        lines = [f"{'passed' if self.passed else 'failed'} at {self.threshold:.3g}"]
        for row in slower.itertuples():
            lines.append(
                f"{row.quantity}: {row.ratio - 1:+.1%} ({row.low - 1:+.1%} to "
                f"{row.high - 1:+.1%})"
            )
        if len(slower):
            lines += [
                f"  {_place(row)}: {row.difference_s * 1e3:+.3g} ms"
                for row in self.explanation.itertuples()
            ]
        operations = unclear["kind"].isin(BUSY_KINDS)
        for row in unclear[~operations].itertuples():
            said = f"cannot tell at {self.threshold:.3g}"
            lines.append(
                f"{row.quantity}: {said}, in this noise {row.detectable:.1%} is the "
                "least that shows"
            )
        lines += [f"nor of {operations.sum()} operations"] if operations.any() else []
        if abs(self.alike - 1) > self.threshold:
            lines += [
                f"all operations take {self.alike:.3g} times as long: the machine, "
                f"or work beside? {_MORE}"
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
    threshold outside of 0..10, for timelines with fewer than four steps that count, of
    other ranks than the rest, or of files that were not read whole.
    """
    if not 0 < require_number("threshold", threshold) < 10:
        raise ValueError(
            f"threshold={threshold!r} is not a share above 0, such as 0.03 for 3 %"
        )
    sides = [
        [_Recording(one) for one in _several(name, side)]
        for name, side in (("a", a), ("b", b))
    ]
    _check_whole([one.timeline for side in sides for one in side])
    table, alike = _tested(sides, threshold)
    order = {"slower": 0, "cannot tell": 1, "minor": 2, "fine": 3}
    table = table.sort_values(
        ["verdict", "ratio"], key=lambda c: c.map(order) if c.name == "verdict" else -c
    )
    table = table.reset_index(drop=True)
    named = [
        (f"{label}{n}", one)
        for label, side in zip("ab", sides, strict=True)
        for n, one in enumerate(side, 1)
    ]
    files = {
        label: one.timeline.meta.provenance.get("files", {}) for label, one in named
    }
    return GateResult(
        passed=not (table["verdict"] == "slower").any(),
        table=with_origin(table, {"files": files}),
        explanation=with_origin(_explained(*sides), {"files": files}),
        threshold=threshold,
        alike=alike,
    )


def _check_whole(timelines: list[Timeline]) -> None:
    """Raise ValueError where recordings differ in their ranks, or a file ended early:
    less work looks like a gain.
    """
    ranks = [set(timeline.spans["rank"].unique().tolist()) for timeline in timelines]
    for missing in (sorted(set.union(*ranks) - own) for own in ranks):
        if missing:
            raise ValueError(
                f"one recording has no trace of rank {missing[0]}, which another "
                "has; a gate needs all of both"
            )
    for rank, provenance in (
        (str(rank), one.meta.provenance) for one in timelines for rank in one.ranks
    ):
        if damage := provenance.get("damaged", {}).get(rank):
            raise ValueError(
                f"{provenance['files'][rank]['name']}: {damage}; a gate needs whole "
                "recordings"
            )


class _Recording:
    """Quantities of the steps of one timeline.

    values: (steps, quantities) s, mean over ranks. operations: (rank, step) x (kind,
    operation) s. peak_bytes: NaN where the recording has no events of an allocator.
    """

    def __init__(self, timeline: Timeline):
        table = steps(timeline)
        left_out = table.loc[table["warmup"] | table["cut"], "step"]
        table = table[~table["step"].isin(left_out)]
        on_device = (
            timeline.spans["kind"].isin(BUSY_KINDS) & (timeline.spans["stream"] >= 0)
        ).any()
        self.on_device = bool(on_device)
        pace = (
            "period_s" if on_device and table["period_s"].notna().any() else "wall_s"
        )  # a host may run ahead
        values = (
            table.rename(columns={pace: "step_s"})
            .groupby("step")[["step_s", "exposed_comm_s"]]
            .mean()
            .dropna()
        )
        if len(values) < _LEAST_STEPS:
            name = next(
                iter(timeline.meta.provenance.get("files", {}).values()), {}
            ).get("name", "timeline")
            more = (
                f"record {_LEAST_STEPS + 2} or more: the first may be warm-up, "
                "the last cut"
            )
            more = (
                more
                if steps(timeline)["annotated"].any()
                else "mark steps with profiler.step()"
            )
            rule = f"a gate needs {_LEAST_STEPS}; {more}"
            raise ValueError(
                f"{name}: {len(values)} steps that are neither warm-up nor cut, {rule}"
            )
        self.timeline = timeline
        self.operations = _operations(timeline, list(values.index))
        by_name = (
            self.operations.groupby("step").mean().T.groupby("operation").sum().T
        )  # of one name in two kinds too
        self.values = values.join(by_name)
        self.peak_bytes = (
            peak(timeline)["peak_bytes"].max()
            if len(timeline.side_tables["memory"])
            else np.nan
        )

    def location(
        self, names: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """log of each quantity's middle (n,), its standard error (n,), the steps'
        spread (n,), the number of blocks.
        """
        values = self.values.reindex(columns=names, fill_value=0.0).to_numpy()
        count = len(values)
        block = max(round(count ** (1 / 3)), 1)
        starts = np.random.default_rng(_SEED).integers(
            count, size=(_DRAWS, -(-count // block))
        )
        rows = ((starts[:, :, None] + np.arange(block)) % count).reshape(_DRAWS, -1)[
            :, :count
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.log(_middle(values[rows])).std(axis=0) * np.sqrt(
                count / (count - block)
            )
            low, high = np.quantile(values, [0.25, 0.75], axis=0)
            spread = (high - low) / _NORMAL / np.median(values, axis=0)
            return np.log(_middle(values[None])[0]), error, spread, count / block


def _operations(timeline: Timeline, counted: list[int]) -> pd.DataFrame:
    """Seconds by (rank, step) and (kind, operation), zero where a step has none."""
    spans = timeline.spans
    spans = spans[spans["kind"].isin(BUSY_KINDS) & spans["step"].isin(counted)]
    names = spans["name"].cat.remove_unused_categories()
    short = np.array(op_names(list(names.cat.categories)), dtype=object)
    parts = {
        "operation": short[names.cat.codes],
        "kind": spans["kind"].astype(str),
        "seconds": spans["dur_ns"] / NS_PER_S,
    }
    keys = ["rank", "step", "kind", "operation"]
    table = (
        spans[["rank", "step"]]
        .assign(**parts)
        .groupby(keys)["seconds"]
        .sum()
        .unstack(["kind", "operation"])
    )
    cells = pd.MultiIndex.from_product(
        [timeline.ranks, counted], names=["rank", "step"]
    )
    return table.reindex(cells).fillna(0.0)


def _middle(values: np.ndarray) -> np.ndarray:
    """Mean without the smallest and largest quarter, over the axis before the last."""
    cut = int(_TRIM * values.shape[-2])
    return np.sort(values, axis=-2)[..., cut : values.shape[-2] - cut, :].mean(axis=-2)


def _tested(
    sides: list[list[_Recording]], threshold: float
) -> tuple[pd.DataFrame, float]:
    """The table of a `GateResult`, and the factor that the operations of a host share."""
    from scipy.stats import t as student

    names = _names(sides)
    kinds = {
        operation: kind
        for side in sides
        for one in side
        for kind, operation in one.operations.columns
    }
    kind = [kinds.get(name, "") for name in names]
    (mean_a, mean_b), error, freedom, alike = _compared(
        sides, names, np.array(kind) == "compute"
    )
    table = pd.DataFrame({"quantity": names, "kind": kind})
    table["a"] = np.exp(mean_a)
    table["b"] = np.exp(mean_b)
    growth = mean_b - mean_a
    table["ratio"] = np.exp(growth)
    width = student.ppf(1 - _LEVEL, freedom) * error
    # any part of it may be the machine's
    least = growth - max(alike, 0.0)
    most = growth - min(alike, 0.0)
    table["low"] = np.exp(least - width)
    table["high"] = np.exp(most + width)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(
            error > 0, student.sf(least / error, freedom), np.where(least > 0, 0.0, 1.0)
        )
    weights = _weights(names)
    table["p"] = _holm(p, weights)
    shows = (
        student.ppf(1 - _LEVEL * weights, freedom) + student.ppf(_POWER, freedom)
    ) * error
    table["detectable"] = np.expm1(shows + abs(alike))
    memory = [np.mean([one.peak_bytes for one in side]) for side in sides]
    if np.isfinite(memory).all() and memory[0] > 0:
        ratio = memory[1] / memory[0]
        known = {
            "ratio": ratio,
            "low": ratio,
            "high": ratio,
            "p": float(ratio <= 1),
            "detectable": 0.0,
        }
        table.loc[len(table)] = {
            "quantity": "peak_bytes",
            "kind": "memory",
            "a": memory[0],
            "b": memory[1],
            **known,
        }
    exact = table["kind"] == "memory"
    table.insert(2, "unit", np.where(exact, "bytes", "s"))
    small = table["high"] < 1 + threshold * np.where(exact, 1.0, _BOUND)
    sure = table["p"] < _LEVEL
    minor = (table["b"] - table["a"] < _MINOR * threshold * table["a"].iloc[0]) & ~exact
    table["verdict"] = np.select(
        [small, sure & minor, sure], ["fine", "minor", "slower"], "cannot tell"
    )
    return table, float(np.exp(alike))


def _names(sides: list[list[_Recording]]) -> list[str]:
    """Quantities that both sides have and that take a share of a step that counts."""
    means = [
        pd.concat([one.values.mean() for one in side], axis=1).fillna(0.0).mean(axis=1)
        for side in sides
    ]
    shares = pd.concat([mean / mean["step_s"] for mean in means], axis=1).dropna()
    large = shares[(shares.max(axis=1) >= _SMALLEST) & (shares.min(axis=1) > 0)].max(
        axis=1
    )
    operations = large.drop(["step_s", "exposed_comm_s"], errors="ignore").nlargest(
        _MOST
    )
    return [
        name for name in ("step_s", "exposed_comm_s") if name in large.index
    ] + list(operations.index)


def _compared(
    sides: list[list[_Recording]], names: list[str], computes: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray, float, float]:
    """Mean logarithms (n,) of both sides, the error (n,) of their difference, its
    degrees of freedom, and how much of
    the difference may be the machine's. computes: (n,) whether a quantity is an
    operation that computes.
    """
    found = [[one.location(names) for one in side] for side in sides]
    places, errors, spreads = (
        [np.array([one[at] for one in side]) for side in found] for at in range(3)
    )
    within, apart = (
        sum((v**2).sum(axis=0) / len(v) ** 2 for v in values)
        for values in (errors, spreads)
    )
    counts = [len(side) for side in sides]
    means = [place.mean(axis=0) for place in places]
    freedom = sum(blocks for side in found for *_, blocks in side) - sum(counts)
    if sum(counts) >= _LEAST_RUNS:
        squares = sum(
            ((place - place.mean(axis=0)) ** 2).sum(axis=0) for place in places
        )
        between = squares / (sum(counts) - 2) * sum(1 / count for count in counts)
        return means, np.sqrt(np.maximum(between, within)), sum(counts) - 2, 0.0
    variance = within + _RUNS_APART**2 * apart
    if all(one.on_device for side in sides for one in side):
        return means, np.sqrt(variance), freedom, 0.0
    growth = (means[1] - means[0])[computes]
    if len(growth) < _SEVERAL:  # what they share cannot be told from what each does
        every = np.append(growth, (means[1] - means[0])[0])
        return means, np.sqrt(variance), freedom, float(every[np.abs(every).argmax()])
    alike = float(np.median(growth))
    variance = variance + (_MAD * np.median(np.abs(growth - alike))) ** 2
    return means, np.sqrt(variance), min(freedom, len(growth) - 1), alike


def _weights(names: list[str]) -> np.ndarray:
    """Share of the level that each quantity gets (n,)."""
    operations = [name for name in names if name not in _WEIGHTS]
    rest = (1 - sum(_WEIGHTS.values())) / max(len(operations), 1)
    weights = np.array([_WEIGHTS.get(name, rest) for name in names])
    return weights / weights.sum()


def _holm(p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Adjusted p (n,): below a level with at most that chance of any false alarm.

    >>> _holm(np.array([0.01, 0.04]), np.array([0.5, 0.5])).tolist()
    [0.02, 0.04]
    """
    order = np.argsort(p / weights, kind="stable")
    left = weights[order][::-1].cumsum()[::-1]
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(
        np.maximum.accumulate(p[order] * left / weights[order]), 1.0
    )
    return adjusted


def _explained(a: list[_Recording], b: list[_Recording]) -> pd.DataFrame:
    """The explanation of a `GateResult`."""
    tables = [
        pd.concat([_by_rank(one) for one in side], axis=1).fillna(0.0)
        for side in (a, b)
    ]
    with np.errstate(divide="ignore"):  # means of recordings are those of `_compared`
        tables = [np.exp(np.log(table).T.groupby(level=0).mean().T) for table in tables]
    tables = [
        table.reindex(tables[0].index.union(tables[1].index), fill_value=0.0)
        for table in tables
    ]
    grew = tables[1] - tables[0]
    comm = grew.index.get_level_values("kind") == "comm"
    rows = []
    for at, (kind, operation) in enumerate(grew.index):
        own = grew.iloc[at].drop(-1)
        columns = [table.iloc[at] for table in tables]
        rank = (
            -1
            if comm[at] or own.max() < 1.5 * own.mean() or len(own) == 1
            else own.idxmax()
        )
        a_s, b_s = (one.drop(-1).min() if comm[at] else one[rank] for one in columns)
        rows.append(
            (
                operation,
                kind,
                rank,
                a_s,
                b_s,
                b_s - a_s,
                b_s / a_s if a_s > 0 else np.nan,
            )
        )
    table = pd.DataFrame(
        rows,
        columns=["operation", "kind", "rank", "a_s", "b_s", "difference_s", "ratio"],
    )
    table = table.nlargest(3, "difference_s").reset_index(drop=True)
    return table[table["difference_s"] > _NEGLIGIBLE * table["difference_s"].max()]


def _by_rank(one: _Recording) -> pd.DataFrame:
    """Middle of the seconds of a step: a row per (kind, operation), a column per rank,
    and -1 for their mean.
    """
    parts = dict(iter(one.operations.groupby("rank"))) | {
        -1: one.operations.groupby("step").mean()
    }
    by_rank = {rank: _middle(part.to_numpy()[None])[0] for rank, part in parts.items()}
    return pd.DataFrame(by_rank, index=one.operations.columns)


def _several(name: str, side: Timeline | Sequence[Timeline]) -> list[Timeline]:
    timelines = list(side) if isinstance(side, (list, tuple)) else [side]
    if not timelines:
        raise ValueError(f"{name} is an empty list, not a recording")
    return [require_type(name, one, Timeline) for one in timelines]


def _place(row) -> str:
    return row.operation if row.rank == -1 else f"{row.operation} on rank {row.rank}"
