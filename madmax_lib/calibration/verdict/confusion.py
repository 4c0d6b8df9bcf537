"""Verdicts about runs whose truth is known: published ones, made slower and faster."""

import numpy as np
import pandas as pd

from madmax_lib.calibration.verdict.accuracy import coverage
from madmax_lib.calibration.verdict.expect import VERDICTS, verdicts

_FACTORS = (1 / 3, 1 / 2, 1.0, 1.6, 2.0, 3.0)  # that make reported times longer


def confusion(
    table: pd.DataFrame, reference: pd.DataFrame | None = None
) -> pd.DataFrame:
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
    for factor in _FACTORS:
        changed = "slow" if factor > 1 else "suspiciously fast"
        truth = "fine" if factor == 1 else changed
        judged = verdicts(factor * measured_s, table["predicted_s"], high_s)
        for kind, part in pd.Series(judged, table.index).groupby(table["kind"]):
            counts = {name: int((part == name).sum()) for name in VERDICTS}
            right = counts[truth] / max(len(part) - counts["cannot tell"], 1)
            about = {"kind": kind, "factor": factor, "truth": truth, "right": right}
            rows.append(about | counts)
    return pd.DataFrame(rows).sort_values(["kind", "factor"], ignore_index=True)
