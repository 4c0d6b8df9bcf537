"""How far off is a stack that nobody has met, before and after three of its rows?

    python benchmarks/strangers.py [--draws 20] [--judge]

Stacks: those of the published rows, each left out of a refit and read under a name that
no table has, and those of `published_strangers`, which the shipped constants have not
seen. Of each stack three random rows are learned from (`calibration.fit.update`) and the
others predicted, in several draws. Beside ours: `scaled`, the prior's seconds times the
median of measured / predicted of the three rows, and `prior`, the constants without
rows. Errors are medians of |predicted / measured - 1| over rows and draws; inside: share
of the rest within its 90 % interval.

A third of `published_strangers`, by hash, is laid aside for a final judgement: no
decision was made on it. `--judge` shows that third alone, to be looked at once.
"""

import argparse
import hashlib
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration import fit, known_rows, predict, read_rows
from madmax_lib.catalog import local_data

LEARNED = 3  # rows of a stack that are learned from
FEWEST = 6  # rows of a stack that is judged
COLUMNS = ["ours", "scaled", "prior", "inside", "prior inside"]


def is_laid_aside(row):
    """Whether a row of `published_strangers` belongs to the final judgement."""
    names = ("source", "table_row", "model", "gpu", "n_gpus", "global_batch")
    text = "|".join(row[name] for name in names)
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 3 == 0


def strangers(judge: bool):
    """Rows of `published_strangers` that can be judged by their time: the two thirds to
    decide by, or the third laid aside.
    """
    path = local_data("published_strangers/rows.csv")
    table = pd.read_csv(path, encoding="utf-8-sig", dtype=str, keep_default_na=False)
    aside = table.apply(is_laid_aside, axis=1)
    table = table[(aside == judge) & (table["score"] == "1")]
    return table.drop(columns=["license", "kind", "score", "implied_mfu_pct"])


def published():
    """Rows of the published stacks, and the software by which each was fitted."""
    tables = [catalog.table("published_train")]
    path = local_data("published_more/published_more.csv")
    tables.append(pd.read_csv(path, encoding="utf-8-sig", dtype=str).fillna(""))
    table = pd.concat(tables, ignore_index=True).fillna("")
    return table, read_rows(table)["software"]


def stacks(judge: bool):
    """Name, rows under a name that no table has, and constants that have not seen them."""
    table = strangers(judge)
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
            widths = {
                field: getattr(fit.shipped(), field)
                for field in ("residuals", "sensitivities")
            }
            yield (
                f"{name}, left out",
                rows.assign(software=f"my own {name}"),
                replace(blind, **widths),
            )


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


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--draws", type=int, default=20)
    arguments.add_argument("--judge", action="store_true", help="the third laid aside")
    arguments = arguments.parse_args()
    warnings.simplefilter("ignore")
    lines = {}
    for name, rows, prior in stacks(arguments.judge):
        if line := judged(rows, prior, arguments.draws):
            lines[name] = line
            print(
                name, {key: round(value, 2) for key, value in line.items()}, flush=True
            )
    table = pd.DataFrame.from_dict(lines, orient="index")
    table.loc["mean of stacks"] = table.mean()
    print(table.round(2).to_string())


if __name__ == "__main__":
    main()
