"""What does a server do when: prefill or decode, for how many requests and tokens, and
how fast?

Engines mark each batch with an annotation: vLLM
`execute_context_2(6144)_generation_3(3)`, with sums in the brackets or counts alone in
other versions; SGLang `step[EXTEND bs=2 toks=6144]`; ATOM `decode[bs=3/4 tok=3]`.
"""

import re

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type
from madmax_lib.base.intervals import pack, total
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.timeline import Timeline, with_origin
from madmax_lib.traces.waits.launch import device_work

__all__ = ["batches"]

_VLLM = re.compile(
    r"^execute_(?:\w*?_)?(?:context|new)_(\d+)(?:\((?:sq)?(\d+)[^)]*\))?_(?:generation|cached)_(\d+)(?:\((?:sq)?(\d+))?"
)
_OTHERS = re.compile(
    r"^(?:step\[)?(EXTEND|DECODE|MIXED|prefill|decode)\b.*?\bbs=(\d+)(?:.*?\btok(?:s|en)?=(\d+))?"
)


def batches(timeline: Timeline) -> pd.DataFrame:
    """Every batch of an engine that serves, by rank and time: rank, step, phase,
    requests, tokens, start_s, wall_s,
    period_s, device_s, tokens_per_s.

    phase: prefill, decode or mixed. tokens: that the batch reads or makes, NaN where
    its name does not tell. start_s: from the first span. wall_s: its annotation on the
    host. period_s: to the next batch, NaN for the last. device_s: time in which kernels
    run that it has launched. tokens_per_s: over the period, of the last over wall_s.
    """
    spans = require_type("timeline", timeline, Timeline).spans
    marks = spans[(spans["kind"] == "annotation") & (spans["stream"] < 0)]
    told = {name: batch for name in marks["name"].unique() if (batch := _told(name))}
    own = [name for name in told if _VLLM.match(name)] or list(
        told
    )  # one engine may mark in its and in another's words
    table = marks.loc[
        marks["name"].isin(own), ["rank", "step", "name", "start_ns", "dur_ns"]
    ]
    table = table.sort_values(["rank", "start_ns"], ignore_index=True)
    about = pd.DataFrame(
        [told[name] for name in table["name"]], columns=["phase", "requests", "tokens"]
    )
    table = pd.concat(
        [
            table,
            about.astype({"phase": object, "requests": "int64", "tokens": "float64"}),
        ],
        axis=1,
    )
    table["start_s"] = (
        table["start_ns"] - (spans["start_ns"].min() if len(spans) else 0)
    ) / NS_PER_S
    table["wall_s"] = table["dur_ns"] / NS_PER_S
    table["period_s"] = table.groupby("rank")["start_s"].shift(-1) - table["start_s"]
    table["device_s"] = _device_s(timeline, table)
    lasts = table["period_s"].fillna(table["wall_s"])
    table["tokens_per_s"] = table["tokens"] / lasts.where(lasts > 0)
    return with_origin(table.drop(columns=["name", "start_ns", "dur_ns"]), timeline)


def _told(name: str) -> tuple[str, int, float] | None:
    """Phase, requests and tokens that the name of a batch tells.

    >>> _told("execute_context_2(6144)_generation_3(3)"), _told("step[DECODE bs=64]")
    (('mixed', 5, 6147.0), ('decode', 64, 64.0))
    """
    if match := _VLLM.match(name):
        read, read_tokens, made, made_tokens = (
            None if text is None else int(text) for text in match.groups()
        )
        tokens = float((read_tokens if read else 0) or (np.nan if read else 0)) + float(
            made_tokens or made
        )
        return (
            "mixed" if read and made else "prefill" if read else "decode",
            read + made,
            tokens,
        )
    if match := _OTHERS.match(name):
        phase = {"extend": "prefill"}.get(match[1].lower(), match[1].lower())
        requests = int(match[2])
        return (
            phase,
            requests,
            float(match[3] or (requests if phase == "decode" else np.nan)),
        )
    return None


def _device_s(timeline: Timeline, table: pd.DataFrame) -> np.ndarray:
    """Time of the kernels that were launched during each batch (n,)."""
    work = device_work(timeline)
    device_s = np.zeros(len(table))
    for rank, rows in table.groupby("rank").groups.items():
        own = work[(work["rank"] == rank) & (work["launch_row"] >= 0)]
        start_ns = table.loc[rows, "start_ns"].to_numpy()
        batch = np.searchsorted(start_ns, own["launch_ns"], side="right") - 1
        within = (
            own["launch_ns"].to_numpy()
            < np.append(start_ns + table.loc[rows, "dur_ns"].to_numpy(), 0)[batch]
        )
        own = own.assign(
            batch=np.where(within & (batch >= 0), rows.to_numpy()[batch], -1)
        )
        for at, part in own[own["batch"] >= 0].groupby("batch"):
            device_s[at] = total(pack(part["start_ns"], part["dur_ns"])) / NS_PER_S
    return device_s
