"""Is this run normal? Verdicts about reported runs of sources left out, as they are and
made slower and faster.

    python benchmarks/expect.py

Each source is predicted by a fit without its rows, and its interval comes from the
other sources. A reported run is taken as fine; the same run with its time made 1.6, 2
and 3 times longer is slow, 2 and 3 times shorter suspiciously fast. Beside ours: the
same rule on one achieved rate per GPU and data type (the median over the other
sources), whose interval holds 90 % of the other sources' rows. `right` counts verdicts
that decide. Three minutes.
"""

import numpy as np
import pandas as pd

from madmax_lib.calibration import (
    baseline,
    coverage,
    fit,
    folds,
    known_rows,
    verdicts,
)

ORDINARY = 1.5  # slowness of layouts that somebody would run
FACTORS = (1 / 3, 1 / 2, 1.0, 1.6, 2.0, 3.0)  # that make reported times longer
VERDICTS = ("fine", "slow", "suspiciously fast", "cannot tell")
SHOWN = {"factor": "{:.2f}", "right": "{:.1%}"}


def confusion(table, reference=None):
    """Verdicts about reported runs as they are, and made slower and faster: a row per
    class and factor.

    table, reference: of `folds`, as in `accuracy.coverage`. Columns kind, factor (of
    the measured time), truth, right (share of the verdicts that decide) and the number
    of each of `expect.VERDICTS`.
    """
    # half_width is sinh(w) of an interval from exp(-w) to exp(w)
    log_width = np.arcsinh(coverage(table, reference)["half_width"])
    high_s = table["predicted_s"] * np.exp(log_width)
    measured_s = table["measured_s"].astype(float)
    rows = []
    for factor in FACTORS:
        changed = "slow" if factor > 1 else "suspiciously fast"
        truth = "fine" if factor == 1 else changed
        judged = verdicts(factor * measured_s, table["predicted_s"], high_s)
        for kind, part in pd.Series(judged, table.index).groupby(table["kind"]):
            counts = {name: int((part == name).sum()) for name in VERDICTS}
            decided = len(part) - counts["cannot tell"]
            about = {"kind": kind, "factor": factor, "truth": truth}
            about["right"] = counts[truth] / max(decided, 1)
            rows.append(about | counts)
    return pd.DataFrame(rows).sort_values(["kind", "factor"], ignore_index=True)


def by_one_rate(table):
    """Share right of dense runs and mixtures by one rate, per factor of the time."""
    source, measured = (
        pd.factorize(table["repository"])[0],
        table["measured_s"].to_numpy(float),
    )
    predicted, high = baseline(table, source), np.zeros(len(table))
    error = np.abs(np.log(measured / predicted))
    for number in np.unique(source):
        high[source == number] = np.exp(np.quantile(error[source != number], 0.9))
    rows = {}
    for factor, truth in {
        1.0: "fine",
        1.6: "slow",
        2.0: "slow",
        0.5: "suspiciously fast",
    }.items():
        said = verdicts(factor * measured, predicted, predicted * high)
        rows[factor] = {"right of all (%)": 100 * np.mean(said == truth)}
        rows[factor]["cannot tell (%)"] = 100 * np.mean(said == "cannot tell")
    return pd.DataFrame.from_dict(rows, orient="index").round(1)


def show(title, table):
    print(
        f"\n{title}\n{table.to_string(index=False, formatters={k: v.format for k, v in SHOWN.items()})}"  # noqa: E501
    )


def main():
    rows = known_rows()
    rows = rows[fit.usable(rows)]
    left_out, known = folds(rows, by="source"), folds(rows)
    sweep = left_out["source"].str.contains("ultrascale")
    ordinary = fit.slowness(left_out) <= ORDINARY
    show("sources left out, without the sweep", confusion(left_out[~sweep], left_out))
    show(
        "the sweep of layouts, those within 1.5 x of the best",
        confusion(left_out[sweep & ordinary], left_out),
    )
    show("known stacks, a model of theirs left out", confusion(known[~sweep], left_out))
    print(
        "\none rate per GPU and data type, sources left "
        f"out\n{by_one_rate(left_out[~sweep])}"
    )


if __name__ == "__main__":
    main()
