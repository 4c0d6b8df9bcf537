"""The constants that the workbench ships: those of all its rows, with the intervals
that sources left out give, and with what stacks left out say of stacks nobody has met.

    python benchmarks/shipped.py

writes `madmax_lib/data/parameters.json`, unless the same constants stand there already.

Each stack of the published rows is left out of a refit whole and priced as software
that is in no table. Their errors say how much slower than its kind a stranger runs its
kernels, and how far strangers scatter (`spread_of_both`); `with_prior` puts that into
`stack_rate:stranger`. A third of `published_strangers`, by hash, is laid aside for a
final judgement: nothing is learned from it.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import loky
import numpy as np
import pandas as pd
from scipy.stats import norm, t

from madmax_lib.calibration import (
    FittingScale,
    class_of,
    fit,
    folds,
    known_rows,
    level,
    read_rows,
    spread,
    to_steps,
    usable,
    weighted_quantile,
    with_errors,
)
from madmax_lib.catalog import STRANGER, local_data
from madmax_lib.simulator import (
    PARTS,
    Parameters,
    bounds,
    constant_index,
    load,
    save,
    step_time,
    width_of,
)

_INSIDE = 0.9  # share of the rows that shall lie in their interval
_CLOSE = 1.5  # slowness of layouts that somebody would choose between
_FEWEST = 3  # sources; Student's t has heavy tails below
# squared shares that hold slopes down; slopes below `_LEAST` matter to nobody
_RIDGE = 0.3
_LEAST = 0.03
_PRIOR = f"stack_rate:{STRANGER}"
_SIGMAS = 1.645  # from the middle of a normal distribution to the ends of its 90 %
# what says which run a row is; and columns that are about rows, not runs
_KEYS = (
    "source",
    "table_row",
    "model",
    "gpu",
    "n_gpus",
    "global_batch",
)
_ABOUT = [
    "license",
    "kind",
    "score",
    "implied_mfu_pct",
]
# relative differences: where the fit stops, which another machine's arithmetic shifts,
# and digits that the file has
_SAME_CONSTANTS = 1e-4
_SAME_INTERVALS = 1e-3
# Variables that BLAS and LAPACK read once, when numpy loads them. Sums of several
# threads are rounded in another order, which moves where a fit stops.
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}


def ship(path: str | Path) -> Parameters:
    """Fit the constants of all `known_rows` and write them with their intervals.

    The intervals are those that sources left out give. A file that has the same
    constants and intervals, but for digits that the fit leaves open, stays as it is.
    The fit runs in a process of its own, on one thread whatever the machine has.
    """
    rows = known_rows()
    with loky.ProcessPoolExecutor(1, env=_ONE_THREAD) as process:
        fitted = process.submit(_fitted, rows[usable(rows)]).result()
    if Path(path).exists() and _same(present := load(path), fitted):
        return present
    save(fitted, path)
    return fitted


def _fitted(rows):
    """The constants of rows with their intervals."""
    fitted = fit.fit(rows)
    fitted = replace(fitted, sensitivities=sensitivities(rows, fitted))
    # errors of further sources and stacks set the components, those of further models
    # the width of a comparison
    without_source = folds(rows, by="source", near=fitted)
    without_model = folds(rows, near=fitted)
    strangers = unknown_rows(rows, fitted)
    widths = spread_of_both(without_source, strangers) | comparison_widths(
        without_model
    )
    return with_prior(fitted, widths)


def _same(a, b):
    """From the same rows, and no further apart than fits on two machines are."""
    same_rows = a.provenance["sha256"] == b.provenance["sha256"]
    if not same_rows or a.fitted != b.fitted or set(a.residuals) != set(b.residuals):
        return False
    same_constants = (
        np.isclose(value, b.constants[name], rtol=_SAME_CONSTANTS)
        for name, value in a.constants.items()
    )
    same_intervals = (
        np.isclose(size, b.residuals[name], rtol=_SAME_INTERVALS)
        for name, size in a.residuals.items()
    )
    return all(same_constants) and all(same_intervals)


def new_rows(*, aside: bool = False) -> pd.DataFrame:
    """Rows of `published_strangers` that can be judged by their time: two thirds to
    learn from, or the third laid aside.

    Raises FileNotFoundError where no data directory has them.
    """
    path = local_data("published_strangers/rows.csv")
    table = pd.read_csv(path, encoding="utf-8-sig", dtype=str, keep_default_na=False)
    keys = table[list(_KEYS)].agg("|".join, axis=1)
    hashes = [int(hashlib.sha256(key.encode()).hexdigest(), 16) for key in keys]
    is_aside = np.array([number % 3 == 0 for number in hashes])
    table = table[(is_aside == aside) & (table["score"] == "1")]
    # names that no table has are meant so: no warning
    return table.drop(columns=_ABOUT).assign(like=STRANGER)


def strange_rows() -> pd.DataFrame:
    """The `fit.known_rows`, each read as one of a software that nobody knows."""
    return known_rows(software="unknown", like=STRANGER)


def unknown_rows(rows: pd.DataFrame, near: Parameters) -> pd.DataFrame:
    """Errors of strangers before anything is learned of them, as `spread_of_both`
    takes them; repository names the stack.

    rows: `fit.known_rows`, those that are usable. near: a fit of them. Rows of
    `published_strangers` are missing where no data directory has them.
    """
    # a stranger's rate and its width before any is learned, as fits of folds have them
    intervals = {k: v for k, v in near.intervals.items() if k != _PRIOR}
    constants = {**near.constants, _PRIOR: bounds().at[_PRIOR, "start"]}
    near = replace(near, constants=constants, intervals=intervals)
    # compiled or captured in graphs it is the same stack
    stacks = rows["software"].str.replace("-(compiled|graph)$", "", regex=True)
    left_out = folds(rows, by=stacks, near=near, priced=strange_rows())
    parts = [left_out.assign(repository="left out: " + stacks[left_out.index])]
    with suppress(FileNotFoundError):
        read = read_rows(new_rows())
        read = read[usable(read)]
        is_new = [case.software.rates == STRANGER for case in read["case"]]
        new = with_errors(read[is_new], near)
        parts.append(new.assign(repository="new: " + new["software"]))
    result = pd.concat(parts, ignore_index=True)
    # the open variance without that of the prior, which is what is sought
    of_prior = bounds().at[_PRIOR, "sigma"] ** 2 * result["pace"] ** 2
    result["constants"] = np.maximum(result["constants"] - of_prior, 0.0)
    return result


def spread_of_both(table: pd.DataFrame, strangers: pd.DataFrame) -> dict[str, float]:
    """The sizes of `intervals.spread` by `validate.folds` by source and `unknown_rows`,
    and pace: the spread of the log rate of strangers.

    90 % of a further stack lie inside an interval of the quantile that known ones have.
    """
    both = [table.assign(unknown=0.0), strangers.assign(unknown=strangers["pace"])]
    sizes = spread(pd.concat(both))
    rest = strangers["log_error"] + strangers["pace"] * sizes["slower"]
    # a row is inside from the spread on at which rest^2 = known^2 + (q p spread)^2
    excess = np.maximum(rest**2 - width_of(strangers, sizes) ** 2, 0.0)
    spreads = np.sqrt(excess) / (sizes["quantile"] * strangers["pace"].abs())
    return sizes | {"pace": level(strangers, spreads)}


def comparison_widths(table: pd.DataFrame) -> dict[str, float]:
    """Log half-widths of one run over another of the same source and model, by class.

    What machine and software do to all runs alike cancels in (measured / predicted), so
    plans are compared more surely than they are timed. Every group counts alike,
    whatever its pairs; keys are "layouts dense" and "layouts mixture".
    """
    table = table[fit.slowness(table) <= _CLOSE]
    widths = {}
    for name, rows in table.groupby(class_of(table), sort=False):
        scores = []
        weights = []
        groups = 0
        for _, errors in rows.groupby("group")["log_error"]:
            errors = errors.to_numpy(float)
            # indices of the upper triangle: each pair of runs once
            first, second = np.triu_indices(len(errors), 1)
            pairs = np.abs(errors[first] - errors[second])
            scores += pairs.tolist()
            weights += [1 / max(len(pairs), 1)] * len(pairs)
            groups += len(pairs) > 0
        if scores:
            # few groups show too little of the spread, by as much as t exceeds the
            # normal
            freedom = max(groups, _FEWEST) - 1
            end = (1 + _INSIDE) / 2
            widening = float(t.ppf(end, freedom) / norm.ppf(end))
            width = weighted_quantile(np.array(scores), np.array(weights))
            widths[f"layouts {name}"] = width * widening
    return widths


def sensitivities(
    rows: pd.DataFrame, parameters: Parameters
) -> dict[str, dict[str, float]]:
    """Slopes of log step_s by name of a constant and part of the step.

    A slope is the relative change of a step that consists of that part over the
    relative change of the constant. Least squares of the slopes of the rows of the fit
    over the shares of the parts; so a table of plans gets its intervals without a slope
    of its own.
    """
    steps = to_steps(rows)
    scale = FittingScale.of(parameters.fitted)
    point = scale.point(parameters.constants)
    row_of = parameters.uncertainty[0]
    fitted = [row_of[name] for name in scale.names]
    slopes = np.zeros((len(rows), len(bounds())))
    slopes[:, fitted] = fit.gradient(steps, scale, point, parameters)
    times = step_time(steps, parameters)
    # (n, parts) shares of each step
    shares = np.stack([times[part] for part in PARTS], axis=1)
    shares = shares / times["step_s"][:, None]
    result = {}
    for name in bounds()["name"].loc[list(scale.names)].unique():
        constant = np.broadcast_to(constant_index(steps, name, row_of), len(rows))
        moved = np.isin(constant, fitted)
        # ridge: a further row per part that pulls its slope to 0
        pull = np.vstack([shares[moved], np.sqrt(_RIDGE) * np.eye(len(PARTS))])
        of_steps = np.r_[slopes[moved, constant[moved]], np.zeros(len(PARTS))]
        of_parts = np.linalg.lstsq(pull, of_steps, rcond=None)[0].tolist()
        large = {
            part: slope
            for part, slope in zip(PARTS, of_parts, strict=True)
            if abs(slope) > _LEAST
        }
        if large:
            result[name] = large
    return result


def beside(strangers: pd.DataFrame) -> Callable[[pd.DataFrame, str], dict[str, float]]:
    """Sizes by the rows of other sources than one, and by the strangers of others, as
    `calibration.coverage` takes them.
    """

    def sizes_of(others, source):
        elsewhere = ~strangers["source"].str.startswith(source)
        return spread_of_both(others, strangers[elsewhere])

    return sizes_of


def with_prior(parameters: Parameters, sizes: dict[str, float]) -> Parameters:
    """Constants with the sizes of `spread_of_both` as their residuals, and with what
    these say of strangers.
    """
    residuals = dict(sizes)
    slower = residuals.pop("slower")
    # the interval's `constants` component counts it by that factor
    sigma = residuals.pop("pace") / residuals["constants"]
    rate = float(bounds().at[_PRIOR, "start"] * np.exp(-slower))
    factor = float(np.exp(_SIGMAS * sigma))
    return replace(
        parameters,
        constants={**parameters.constants, _PRIOR: rate},
        intervals={**parameters.intervals, _PRIOR: (rate / factor, rate * factor)},
        residuals=residuals,
    )


if __name__ == "__main__":
    ship(Path(str(files("madmax_lib") / "data" / "parameters.json")))
