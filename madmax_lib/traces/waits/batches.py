"""Batches of a server: prefill or decode, for how many requests and tokens, and how
fast.

Engines mark each batch with an annotation: vLLM
`execute_context_2(6144)_generation_3(3)`, with sums in the brackets or counts alone in
other versions; SGLang `step[EXTEND bs=2 toks=6144]`; ATOM `decode[bs=3/4 tok=3]`.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import Timeline, with_origin
from madmax_lib.traces.tables import covered, ends_ns, ratio
from madmax_lib.traces.waits.launch import device_work

# requests and tokens that are prefilled, then those that are decoded
_VLLM = re.compile(
    r"^execute_(?:\w*?_)?(?:context|new)_(\d+)(?:\((?:sq)?(\d+)[^)]*\))?"
    r"_(?:generation|cached)_(\d+)(?:\((?:sq)?(\d+))?"
)
# SGLang and ATOM: phase, requests, tokens
_OTHERS = re.compile(
    r"^(?:step\[)?(EXTEND|DECODE|MIXED|prefill|decode)\b"
    r".*?\bbs=(\d+)(?:.*?\btok(?:s|en)?=(\d+))?"
)


def batches(timeline: Timeline) -> pd.DataFrame:
    """Every batch of an engine that serves, by rank and time: rank, step, phase,
    requests, tokens, start_s, wall_s, period_s, device_s, tokens_per_s.

    phase: prefill, decode or mixed. tokens: that the batch reads or makes, NaN where
    its name does not tell. start_s: from the first span. wall_s: its annotation on the
    host. period_s: to the next batch, NaN for the last. device_s: time in which kernels
    run that it has launched. tokens_per_s: over the period, of the last over wall_s.
    """
    spans = require_type("timeline", timeline, Timeline).spans
    marks = spans[(spans["kind"] == "annotation") & (spans["stream"] < 0)]
    batch_of = {name: _batch(name) for name in marks["name"].unique()}
    names = [name for name, batch in batch_of.items() if batch]
    # One engine may mark a batch in its own words and in another's: vLLM's count first.
    names = [name for name in names if _VLLM.match(name)] or names
    table = marks.loc[marks["name"].isin(names)]
    table = table[["rank", "step", "name", "start_ns", "dur_ns"]]
    table = table.sort_values(["rank", "start_ns"], ignore_index=True)
    batch = [batch_of[name] for name in table["name"]]
    batch = pd.DataFrame(batch, columns=_Batch._fields)
    types = {"phase": object, "requests": "int64", "tokens": "float64"}
    table = table.join(batch.astype(types))
    zero_ns = spans["start_ns"].min() if len(spans) else 0
    table["start_s"] = (table["start_ns"] - zero_ns) / NS_PER_S
    table["wall_s"] = table["dur_ns"] / NS_PER_S
    table["period_s"] = table.groupby("rank")["start_s"].shift(-1) - table["start_s"]
    table["device_s"] = _device_s(timeline, table)
    lasts_s = table["period_s"].fillna(table["wall_s"])
    table["tokens_per_s"] = ratio(table["tokens"], lasts_s)
    return with_origin(table.drop(columns=["name", "start_ns", "dur_ns"]), timeline)


class _Batch(NamedTuple):
    """Batch as its name tells it; tokens NaN where the name does not."""

    phase: str
    requests: int
    tokens: float


def _batch(name):
    """The batch that an annotation marks, None for another annotation.

    >>> _batch("execute_context_2(6144)_generation_3(3)")
    _Batch(phase='mixed', requests=5, tokens=6147.0)
    >>> _batch("step[DECODE bs=64]")
    _Batch(phase='decode', requests=64, tokens=64.0)
    """
    if match := _VLLM.match(name):
        prefills = int(match[1])
        decodes = int(match[3])
        # A request that is decoded makes one token; prompts have any length.
        decoded = int(match[4] or 0) or decodes
        prefilled = (float(match[2] or 0) or np.nan) if prefills else 0.0
        phase = "prefill" if prefills else "decode"
        if prefills and decodes:
            phase = "mixed"
        return _Batch(phase, prefills + decodes, prefilled + decoded)
    if match := _OTHERS.match(name):
        phase = match[1].lower().replace("extend", "prefill")
        requests = int(match[2])
        unknown = requests if phase == "decode" else np.nan
        return _Batch(phase, requests, float(match[3] or unknown))
    return None


def _device_s(timeline, table):
    """Time of the kernels that were launched during each batch (n,)."""
    work = device_work(timeline)
    work = work[work["launch_row"] >= 0]
    device_s = np.zeros(len(table))
    for rank, batches in table.groupby("rank"):
        kernels = work[work["rank"] == rank]
        launch_ns = kernels["launch_ns"].to_numpy()
        number = np.searchsorted(batches["start_ns"], launch_ns, side="right") - 1
        inside = (number >= 0) & (launch_ns < ends_ns(batches).to_numpy()[number])
        row = batches.index.to_numpy()[number[inside]]
        for batch, part in kernels[inside].groupby(row):
            start, end = covered(part).T
            device_s[batch] = (end - start).sum() / NS_PER_S
    return device_s
