"""How far off is a stack that nobody has met, before and after three of its rows?

    python benchmarks/strangers.py [--contact] [--draws 20] [--judge]

Stacks: those of the published rows, each left out of a refit and read under a name that
no table has, and those of `published_strangers`, which the shipped constants have not
seen. Of each stack three random rows are learned from (`calibration.fit.update`) and the
others predicted, in several draws. Beside ours: `scaled`, the prior's seconds times the
median of measured / predicted of the three rows, and `prior`, the constants without
rows. Errors are medians of |predicted / measured - 1| over rows and draws; inside: share
of the rest within its 90 % interval.

`--contact` judges the prior alone: errors, bias and intervals by how far a row is from
the fit. Known stack: its source left out. Unknown stack: left out whole, priced as
nobody's; its interval and its bias are learned from the other stacks alone. Unknown
generation: its family of devices left out whole; what a generation has of its own is
learned from the other ones, hidden in the same way.

A third of `published_strangers`, by hash, is laid aside for a final judgement: no
decision was made on it. `--judge` shows that third alone, to be looked at once, and the
sentence about it.
"""

import argparse
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
from shipped import beside, new_rows, spread_of_both, strange_rows, unknown_rows

from madmax_lib import catalog
from madmax_lib.calibration import (
    coverage,
    fit,
    folds,
    known_rows,
    level,
    predict,
    read_rows,
)
from madmax_lib.catalog import local_data
from madmax_lib.simulator import width_of

LEARNED = 3  # rows of a stack that are learned from
FEWEST = 6  # rows of a stack that is judged
COLUMNS = ["ours", "scaled", "prior", "inside", "prior inside"]


def published():
    """Rows of the published stacks, and the software by which each was fitted."""
    tables = [catalog.table("published_train")]
    path = local_data("published_more/published_more.csv")
    tables.append(pd.read_csv(path, encoding="utf-8-sig", dtype=str).fillna(""))
    table = pd.concat(tables, ignore_index=True).fillna("")
    return table, read_rows(table)["software"]


def stacks(judge: bool):
    """Name, rows under a name that no table has, and constants that have not seen them."""
    table = new_rows(aside=judge)
    for name, rows in table.groupby("software"):
        yield name, rows, fit.shipped()
    if judge:
        return
    table, software = published()
    known = known_rows()
    known = known[fit.usable(known)]
    for name, rows in table.groupby(software.to_numpy()):
        if name != "none" and len(rows) >= FEWEST:
            others = known[known["software"] != name]
            blind = fit.fit(others, starts=1, near=fit.shipped())
            shipped = fit.shipped()
            prior = "stack_rate:stranger"
            blind = replace(
                blind,
                constants={**blind.constants, prior: shipped.constants[prior]},
                intervals={**blind.intervals, prior: shipped.intervals[prior]},
                residuals=shipped.residuals,
                sensitivities=shipped.sensitivities,
            )
            yield f"{name}, left out", rows.assign(software=f"my own {name}"), blind


def judged(rows, prior, draws):
    """Errors of a stack, medians over rows and draws; None for one with few rows."""
    read = read_rows(rows)
    read = read[fit.usable(read)]
    if len(read) < FEWEST:
        return None
    rows = rows.loc[read.index]
    measured = read["measured_s"].astype(float)
    before = predict(rows, prior)
    random = np.random.default_rng(0)
    parts = []
    for _ in range(draws):
        few = random.choice(len(rows), LEARNED, replace=False)
        rest = np.setdiff1d(np.arange(len(rows)), few)
        own = fit.update(read.iloc[few], prior)
        after = predict(rows.iloc[rest], own)
        factor = np.median((measured / before["predicted_s"]).iloc[few])
        truth = measured.iloc[rest]
        seconds = before["predicted_s"].iloc[rest]
        part = {
            "ours": (after["predicted_s"] / truth - 1).abs(),
            "scaled": (factor * seconds / truth - 1).abs(),
            "prior": (seconds / truth - 1).abs(),
            "inside": truth.between(after["low_s"], after["high_s"]),
            "prior inside": truth.between(
                before["low_s"].iloc[rest], before["high_s"].iloc[rest]
            ),
        }
        parts.append(pd.DataFrame(part))
    table = pd.concat(parts)
    errors = table[COLUMNS[:3]].median()
    inside = table[COLUMNS[3:]].mean()
    bias = np.log(measured / before["predicted_s"]).median()
    return {
        "rows": len(rows),
        **(100 * pd.concat([errors, inside])),
        "slower": np.exp(bias),
    }


def contacts():
    """Rows at first contact: distance, kind, repository, log_error, inside, half_width."""
    known = known_rows()
    known = known[fit.usable(known)]
    prior = fit.shipped()
    by_source = folds(known, by="source")
    unknown = unknown_rows(known, prior)
    sizes = spread_of_both(by_source, unknown)
    # families of devices, a device itself where it has none
    generations = known["family"].where(known["family"] != "other", known["gpu"])
    new_generation = folds(known, by=generations)
    both = folds(known, by=generations, priced=strange_rows())
    # `folds` prices strangers at the prior rate of `bounds`; so does `unknown_rows`
    yield "known stack", by_source.join(coverage(by_source, sizes_of=beside(unknown)))
    for name, rows in unknown.groupby("repository"):
        others = unknown[unknown["repository"] != name]
        # of a stack that is left out, its sources are no known ones either
        sources = known.loc[known["software"].isin([name.split(": ")[1]]), "repository"]
        elsewhere = by_source[~by_source["repository"].isin(sources)]
        distance = f"{name.split(':')[0]}: unknown stack"
        yield distance, with_intervals(rows, spread_of_both(elsewhere, others))
    new_generation = new_generation.assign(pace=0.0)
    for name, rows in new_generation.groupby(generations):
        others = new_generation[generations.loc[new_generation.index] != name]
        learned = sizes | {"generation": spread_of_generations(others, sizes)}
        yield "unknown generation", with_intervals(rows, learned)
    yield "unknown stack and generation", with_intervals(both, sizes)


def spread_of_generations(rows, sizes):
    """What a generation has of its own, so that 90 % of a further one's sources lie
    inside: rows of hidden generations, whose excess over their widths tells.
    """
    excess = rows["log_error"] ** 2 - width_of(rows, sizes) ** 2
    return level(rows, np.sqrt(excess.clip(lower=0.0)) / sizes["quantile"])


def with_intervals(rows, sizes):
    """Strangers whose error and interval are those after the prior was learned."""
    rows = rows.assign(log_error=rows["log_error"] + rows["pace"] * sizes["slower"])
    further = sizes["pace"] * rows["pace"], sizes.get("generation", 0.0)
    width = np.hypot(width_of(rows, sizes), sizes["quantile"] * np.hypot(*further))
    inside = rows["log_error"].abs() <= width
    return rows.assign(inside=inside, half_width=np.sinh(width))


def contact_tables():
    """The judgement of the prior, by distance and kind, and by source."""
    rows = pd.concat([part.assign(distance=name) for name, part in contacts()])
    for by in (["distance"], ["distance", "kind"], ["distance", "repository"]):
        table = summary(rows, by)
        print(table.round(1).to_string(), end="\n\n")
    hidden = rows[rows["distance"].str.contains("generation")]
    print(summary(hidden, ["distance", "family"]).round(1).to_string())


def summary(rows, by):
    """Rows, median error and bias, share inside and median half-width, in percent."""
    groups = rows.assign(error=np.abs(np.expm1(-rows["log_error"]))).groupby(by)
    columns = {
        "rows": groups.size(),
        "error": 100 * groups["error"].median(),
        "slower": 100 * groups["log_error"].median(),
        "inside": 100 * groups["inside"].mean(),
        "half_width": 100 * groups["half_width"].median(),
    }
    return pd.DataFrame(columns)


def at_contact(judge):
    """Rows of `published_strangers` by the shipped constants, as `summary` takes them."""
    rows = new_rows(aside=judge)
    read = read_rows(rows)
    read = read[fit.usable(read)]
    step = predict(rows.loc[read.index])
    measured = read["measured_s"].astype(float)
    is_known = [bool(case.software) for case in read["case"]]
    width = np.log(step["high_s"] / step["predicted_s"])
    return read.assign(
        repository=rows.loc[read.index, "software"],
        log_error=np.log(measured / step["predicted_s"]),
        inside=measured.between(step["low_s"], step["high_s"]),
        half_width=np.sinh(width),
        distance=np.where(is_known, "known stack", "unknown stack"),
    )


def sentence(rows, after):
    """First contact in one sentence. rows: of `at_contact`; after: of `judged`."""
    rows = rows[rows["distance"] == "unknown stack"]
    whole = summary(rows, ["distance"]).iloc[0]
    sources = summary(rows, ["repository"])
    worst = sources["error"].idxmax()
    least = sources["inside"].idxmin()
    return (
        f"A stack it has never met: {whole['error']:.0f} % median error, "
        f"{whole['inside']:.0f} % of {whole['rows']:.0f} runs inside 90 % intervals of "
        f"± {whole['half_width']:.0f} %, the worst source off by "
        f"{sources.at[worst, 'error']:.0f} % ({worst}), the least covered "
        f"{sources.at[least, 'inside']:.0f} % inside ({least}); yours after three runs: "
        f"{after['ours']:.0f} % and {after['inside']:.0f} %."
    )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--draws", type=int, default=20)
    arguments.add_argument("--judge", action="store_true", help="the third laid aside")
    arguments.add_argument("--contact", action="store_true", help="the prior alone")
    arguments = arguments.parse_args()
    warnings.simplefilter("ignore")
    if arguments.contact:
        contact_tables()
        return
    lines = {}
    for name, rows, prior in stacks(arguments.judge):
        if line := judged(rows, prior, arguments.draws):
            lines[name] = line
            print(
                name, {key: round(value, 2) for key, value in line.items()}, flush=True
            )
    table = pd.DataFrame.from_dict(lines, orient="index")
    mean = table.mean()
    print(pd.concat([table, mean.to_frame("mean of stacks").T]).round(2).to_string())
    if arguments.judge:
        rows = at_contact(judge=True)
        for by in (["distance"], ["distance", "kind"], ["distance", "repository"]):
            print(summary(rows, by).round(1).to_string(), end="\n\n")
        print(sentence(rows, mean))


if __name__ == "__main__":
    main()
