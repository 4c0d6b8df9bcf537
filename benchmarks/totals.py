"""What do trainings take? Device-hours of the best plan with its goodput, beside what
owners published.

    python benchmarks/totals.py [--write]

Devices, batch and sequence are as published where they are stated
(`data/training_totals.csv` says where not). The factor and width of each row come from
the other releases. --write: the predictions into that table.
"""

import argparse
import warnings

import numpy as np

from madmax_lib import catalog
from madmax_lib.planner import campaign, practice, published_totals


def predicted(row):
    """Device-hours of the best plan, and the factor to which its step is known."""
    what = {
        "global_batch": int(row.global_batch),
        "sequence": int(row.sequence),
        "dtype": row.dtype,
    }
    answer = campaign(
        row.model,
        row.tokens,
        row.cluster,
        devices=int(row.devices),
        software=row.software,
        **what,
    )
    print(
        f"{row.release:12} {row.model:12} {answer.best['plan']:60} MFU "
        f"{answer.best['mfu']:.1%}",
        flush=True,
    )
    best = answer.best
    return best["device_hours"] / practice()[0], best["high_s"] / best["step_s"]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--write", action="store_true", help="into data/training_totals.csv"
    )
    arguments = arguments.parse_args()
    warnings.simplefilter("ignore")
    table = published_totals()
    hours, ratios = np.transpose([predicted(row) for row in table.itertuples()])
    table["now_hours"] = np.round(hours).astype(int)
    factors, widths = np.transpose([practice(release) for release in table["release"]])
    table["ratio"] = factors * table["now_hours"] / table["device_hours"]
    table["inside"] = np.abs(np.log(table["ratio"])) <= np.hypot(widths, np.log(ratios))
    print(
        table[
            [
                "release",
                "model",
                "device_hours",
                "predicted_hours",
                "now_hours",
                "ratio",
                "inside",
            ]
        ].to_string()
    )
    judged = table[table["judged"] == 1]
    print(
        f"{judged['inside'].sum()} of {len(judged)} inside, median ratio "
        f"{judged['ratio'].median():.2f}",
        end=", ",
    )
    print(
        f"practice: factor {practice()[0]:.2f}, 90 % within a factor of "
        f"{np.exp(practice()[1]):.2f} beyond the step"
    )
    if arguments.write:
        rows = catalog.table("training_totals")
        now = {"predicted_hours": table["now_hours"], "high_over_step": ratios.round(3)}
        rows.assign(**now).to_csv(
            str(catalog.data_file("training_totals.csv")), index=False
        )


if __name__ == "__main__":
    main()
