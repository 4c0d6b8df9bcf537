"""Names under which spans are written, so that every reader gives them their kind.

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

_WRAPPED = re.compile(
    r"(?:ncclDevKernel_\w+|kernel|Memcpy|Memset) madmax\((.*)\)", re.DOTALL
)
# characters to escape, in three attempts; the second breaks up Sync, Memcpy, nccl,
# shmem, ..., the last leaves no letter
_ESCAPED = (r"%", r"(?i)[%cmny]", r"(?s).")


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
    # a million spans have some hundred pairs of name and kind: one code for each pair,
    # (n,) the number of its pair
    codes = spans["name"].cat.codes.to_numpy().astype("int64") * len(KINDS)
    codes += spans["kind"].cat.codes.to_numpy()
    codes, pair = np.unique(codes, return_inverse=True)
    labels = []
    kinds_of_labels = []
    may_wrap = []
    for name_code, kind_code in zip(*np.divmod(codes, len(KINDS)), strict=True):
        kind = kinds[kind_code]
        wraps = kind in BUSY_KINDS or (kind == "annotation" and not on_device)
        name = names[name_code]
        labels.append(original_name(name) if wraps else name)
        kinds_of_labels.append(kind)
        may_wrap.append(wraps)
    for level in _ESCAPED:
        is_right = _keeps_kind(labels, kinds_of_labels, on_device)
        for i in np.flatnonzero(~is_right & np.array(may_wrap, dtype=bool)):
            name = original_name(labels[i])
            labels[i] = _wrapped_name(name, kinds_of_labels[i], level)
    return np.array(labels, dtype=object)[pair]


def _keeps_kind(labels, kinds, on_device):
    """Whether a name has its kind for the reader and, on a device, for HTA (n,); a copy
    is known by its category.
    """
    ours = kernel_kinds(labels)
    theirs = kernel_kinds(labels, rules="hta")
    # HTA's kinds are three: memsets are memory to it
    kind = np.where(np.isin(kinds, "other"), "memcpy", kinds)
    if not on_device:
        return (ours == "comm") == (kind == "comm")
    our_kind = (ours == kind) | ((kind == "memcpy") & (ours == "compute"))
    return our_kind & (theirs == kind)


def _wrapped_name(name, kind, level):
    prefix = {"memcpy": "Memcpy", "other": "Memset"}.get(kind, "kernel")
    if kind == "comm":
        words = collective_of(name).split("_")
        prefix = "ncclDevKernel_" + "".join(word.capitalize() for word in words)

    def percent_encoded(match):
        return "".join(f"%{byte:02x}" for byte in match[0].encode())

    text = re.sub(level, percent_encoded, name)
    return f"{prefix} madmax({text})"


def collective_of(name: str) -> str:
    """Collective that a name tells by our table of kernels or as a word in it, as
    simulated ones do.
    """
    if collective := collective_names([name])[0]:
        return collective
    # all_reduce, all-reduce, AllReduce: letters alone
    letters = re.sub(r"[^a-z]", "", name.lower())
    words = {collective.replace("_", ""): collective for collective in COLLECTIVES}
    words |= {"send": "send_recv", "recv": "send_recv"}
    return next((words[word] for word in words if word in letters), "generic")
