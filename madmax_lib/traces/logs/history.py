"""A series of runs: which turned slower first, and what differs in their contracts."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import with_origin
from madmax_lib.traces.logs.changes import EDGE, every_change
from madmax_lib.traces.logs.read import read_log

# what an entry of a contract is about, by its name; others are of the method
_ABOUT = {
    "machine": r"device|gpu|driver|host|node|cpu|nccl|cuda|rocm|kernel|clock|power",
    "code": r"version|commit|git|torch|python|package|library|image",
    "method": "",
}


def history(directory: str | Path) -> pd.DataFrame:
    """Runs of a folder in order of their names: run, steps, step_s (median).

    `.attrs`: first_slow (the first run of the slower ones, "" if none is: then drift, by
    how much the series grows steadily, and limits of what is seen), growth, confidence,
    differs: what all runs from there have otherwise than all before, from
    JSON files beside their logs (name, before, after, about: machine, method, code).
    """
    rows = []
    contracts = []
    for run in sorted(Path(directory).iterdir()):
        table = run / "steps.csv"  # of `madmax train`
        try:
            times_s = read_log(table if table.exists() else run).step_s
        except ValueError:  # no log
            continue
        rows.append([run.name, len(times_s), np.median(times_s)])
        files = {file.stem: json.loads(file.read_text()) for file in run.glob("*.json")}
        contracts.append(pd.json_normalize([files]).astype(str))
    if not rows:
        raise ValueError(f"{directory}: no folder here holds the log of a run")
    table = pd.DataFrame(rows, columns=["run", "steps", "step_s"])
    logs = np.log(table["step_s"].to_numpy(float))
    every = list(every_change(logs))
    newest = _newest(logs[max((one.at for one in every), default=0) :])
    growing = sorted((one for one in every if one.share > 0), key=lambda one: one.at)
    one = next((one for one in growing if one.kind == "change"), None)
    if one is None:
        # where a line fits better than a step no run is the first
        drift = np.expm1(max((one.share for one in growing), default=0.0))
        limits = (
            f"a slower run shows with {EDGE} runs or more on each side of the change"
        )
        attrs = {"first_slow": "", "drift": drift, "limits": limits, "differs": []}
        return with_origin(table, {}, **attrs, **newest)
    facts = pd.concat(contracts)
    before = facts[: one.at]
    after = facts[one.at :]
    # what is one thing before and another after; the results of a run always differ
    is_one = (before.nunique() == 1) & (after.nunique() == 1)
    differs = pd.DataFrame({"before": before.iloc[0], "after": after.iloc[0]})
    differs = differs[is_one & (differs["before"] != differs["after"])]
    differs["about"] = [
        next(about for about, words in _ABOUT.items() if re.search(words, name))
        for name in differs.index
    ]
    return with_origin(
        table,
        {},
        first_slow=table["run"][one.at],
        growth=np.expm1(one.share),
        confidence=one.confidence,
        differs=differs.rename_axis("name").reset_index().to_dict("records"),
        **newest,
    )


def _newest(logs: np.ndarray) -> dict:
    """Growth of the last of logarithms over those before it, and 1 - the chance that one
    more run like them is as slow.
    """
    from scipy.stats import t as student

    *before, last = logs
    growth = last - np.mean(before) if before else np.nan
    # of one more value, which scatters beside a mean that does: s sqrt(1 + 1 / n)
    count = len(before)
    spread = np.std(before, ddof=1) * np.sqrt(1 + 1 / count) if count > 2 else np.nan
    # times of a log may be rounded to the same
    confidence = student.cdf(growth / (spread + 1e-12), count - 1)
    return {"newest_growth": np.expm1(growth), "newest_confidence": confidence}
