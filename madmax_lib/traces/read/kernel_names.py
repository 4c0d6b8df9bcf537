"""Under which name is a span written, so that every reader gives it the kind it has?

A kernel's kind is told by its name, for HTA 0.5.0 (hta/utils/utils.py) as for
`read_trace`. A name that both would classify as the span's kind is written as it is;
any other is wrapped so that they do, e.g. `all_reduce layers.3` as
`ncclDevKernel_AllReduce madmax(all_reduce layers.3)`. `original_name` takes the
wrapping off.
"""

import re
from urllib.parse import unquote

import numpy as np
import pandas as pd

from madmax_lib.timeline.kinds import COLLECTIVES, collective_names, kernel_kinds
from madmax_lib.timeline.timeline import BUSY_KINDS, KINDS

__all__ = ["collective_of", "original_name", "written_names"]

_WRAPPED = re.compile(
    r"(?:ncclDevKernel_\w+|kernel|Memcpy|Memset) madmax\((.*)\)", re.DOTALL
)
_ESCAPED = (
    r"%",
    r"(?i)[%cmny]",
    r"(?s).",
)  # characters to escape; the second breaks up Sync, Memcpy, nccl, shmem, ...


def original_name(name: str) -> str:
    """The name of a span as it was before `export_trace` wrapped it; any other name as
    it is.

    >>> original_name("ncclDevKernel_AllReduce madmax(all_reduce layers.3)"), original_name("sgemm")
    ('all_reduce layers.3', 'sgemm')
    """
    match = _WRAPPED.fullmatch(name)
    return unquote(match[1]) if match else name


def written_names(spans: pd.DataFrame, on_device: bool) -> np.ndarray:
    """Names under which the spans are written, (n,) of str."""
    names = spans["name"].cat.categories
    kinds = spans["kind"].cat.categories
    codes = (
        spans["name"].cat.codes.to_numpy().astype(np.int64) * len(KINDS)
        + spans["kind"].cat.codes.to_numpy()
    )
    codes, pair = np.unique(codes, return_inverse=True)
    pairs = [
        (names[code // len(KINDS)], kinds[code % len(KINDS)]) for code in codes.tolist()
    ]
    wrapped = [
        kind in BUSY_KINDS or (kind == "annotation" and not on_device)
        for _, kind in pairs
    ]
    labels = [
        original_name(name) if wrap else name
        for (name, _), wrap in zip(pairs, wrapped, strict=True)
    ]
    for level in _ESCAPED:
        keeps = _keeps_kind(labels, [kind for _, kind in pairs], on_device)
        labels = [
            _wrapped_name(original_name(name), kind, level)
            if wrap and not kept
            else label
            for label, (name, kind), wrap, kept in zip(
                labels, pairs, wrapped, keeps, strict=True
            )
        ]
    return np.array(labels, dtype=object)[pair]


def _keeps_kind(labels: list[str], kinds: list[str], on_device: bool) -> np.ndarray:
    """Whether a name has its kind for the reader and, on a device, for HTA (n,); a copy
    is known by its category.
    """
    ours = kernel_kinds(labels)
    theirs = kernel_kinds(labels, rules="hta")
    kind = np.where(np.isin(kinds, "other"), "memcpy", kinds)
    if not on_device:
        return (ours == "comm") == (kind == "comm")
    return ((ours == kind) | (kind == "memcpy") & (ours == "compute")) & (
        theirs == kind
    )


def _wrapped_name(name: str, kind: str, level: str) -> str:
    prefix = {"memcpy": "Memcpy", "other": "Memset"}.get(kind, "kernel")
    if kind == "comm":
        prefix = "ncclDevKernel_" + "".join(
            word.capitalize() for word in collective_of(name).split("_")
        )
    text = re.sub(
        level, lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode()), name
    )
    return f"{prefix} madmax({text})"


def collective_of(name: str) -> str:
    """Collective that a name tells by our table of kernels or as a word in it, as
    simulated ones do.
    """
    if collective := collective_names([name])[0]:
        return collective
    letters = re.sub(r"[^a-z]", "", name.lower())
    words = [(collective.replace("_", ""), collective) for collective in COLLECTIVES]
    words += [("send", "send_recv"), ("recv", "send_recv")]
    return next(
        (collective for word, collective in words if word in letters), "generic"
    )
