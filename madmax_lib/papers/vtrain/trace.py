"""Operators of vTrain as they were measured: from its own text traces, and from a step
of a transformer under torch's profiler.

vTrain profiles one layer on one GPU between init_trace and finish_trace; marks on the
host say which operator is open, and a kernel belongs to the one that its launch is in
[Bang et al., MICRO 2024, behaviour recorded]. A line of its trace is
start_ns,duration_ns,KIND,...,correlation.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.catalog import data_file
from madmax_lib.papers.vtrain.config import Config
from madmax_lib.papers.vtrain.graph import Operators
from madmax_lib.timeline import Timeline
from madmax_lib.traces import read_trace
from madmax_lib.traces.operators.ops import operator_calls

# field of Operators by operator of a trace; the output matrix has no update of its own
_FIELD = pd.read_csv(data_file("papers/vtrain/operators.csv"), index_col=0)["field"]
_LINE = (
    r"\s*(?P<start_ns>\d+),(?P<dur_ns>\d+),(?P<kind>\w+),(?P<text>.*?(?P<id>[^,]*))$"
)
_MARK = r"(?P<phase>forward|backward|WU) (?P<side>start|end) (?P<name>\w+)"
# each layer calls attention once: its forward and its backward operator, the unfused
# ones where a trace lacks the fused
_ATTENTION = (
    (r"^aten::scaled_dot_product_attention$", r"::_scaled_dot_product_\w+_backward$"),
    (r"^aten::softmax$", r"::_softmax_backward_data$"),
)
# parts of a pass in order of time
_FORWARD = ("forward embeddings", "forward transformer", "forward logit")
_BACKWARD = ("backward logit", "backward transformer", "backward embeddings")
_ENGINE = "autograd::engine"  # around a gradient's operators
_COMMUNICATION = r"c10d::|nccl:|record_param_comms"


def load_trace(path: str | Path) -> Operators:
    """Operators of a trace of vTrain, with the gaps between their kernels; what it
    lacks takes no time.

    Raises OSError if it cannot be read, ValueError for a line or a mark that is none,
    and for a trace without a layer forward and backward.
    """
    text = pd.Series(Path(path).read_text().splitlines(), dtype=str)
    lines = text[text.str.strip() != ""].str.extract(_LINE)
    if (unread := lines["kind"].isna()).any():
        raise ValueError(
            f"{path}: line {unread.idxmax() + 1} is not "
            "start_ns,duration_ns,KIND,...,correlation"
        )
    lines = lines.astype({"start_ns": "int64", "dur_ns": "int64"})
    lines = lines.sort_values("start_ns", kind="stable")
    marks = lines[lines["kind"] == "TIMESTAMP"]
    marks = marks[["start_ns"]].join(marks["text"].str.extract(_MARK)).dropna()
    operator = marks["phase"] + " " + marks["name"]
    begins = marks["side"] == "start"
    by_turns = begins.tolist() == [True, False] * (len(marks) // 2)
    if not by_turns or (operator[begins].tolist() != operator[~begins].tolist()):
        raise ValueError(f"{path}: an operator starts or ends without the other mark")
    marks = marks[["start_ns"]].assign(operator=operator.where(begins))
    launches = lines[lines["kind"].isin(["RUNTIME", "DRIVER"])].drop_duplicates("id")
    launches = pd.merge_asof(launches[["start_ns", "id"]], marks, on="start_ns")
    kernels = lines[lines["kind"] == "KERNEL"]
    kernels = kernels.merge(launches[["id", "operator"]].dropna(), on="id")
    # kernel, gap, kernel, ..., kernel: from the start of the first to the last one's end
    ends_ns = kernels["start_ns"] + kernels["dur_ns"]
    name = kernels["operator"]
    total_ns = ends_ns.groupby(name).max() - kernels["start_ns"].groupby(name).min()
    for needed in ("forward transformer", "backward transformer"):
        if needed not in total_ns:
            raise ValueError(f"{path}: no kernel was launched in {needed!r}")
    return _operators(total_ns)


def measured(path: Path, config: Config) -> Operators:
    """Operators from a trace of vTrain, or from a folder or file of torch's profiler.

    Raises as `load_trace`, `mm.read_trace` and `operators_of` do.
    """
    if path.is_dir() or ".json" in path.suffixes:
        return operators_of(read_trace(path), config)
    return load_trace(path)


def operators_of(timeline: Timeline, config: Config) -> Operators:
    """Operators of a recorded step of a transformer: compute alone, without gaps and
    communication, the median of ranks and steps.

    A layer is what lies between two calls of attention, whatever their number. config:
    sizes of a layer and of the embedding, by whose weights the update is divided.
    Raises ValueError for a trace without operators, with fewer than two layers, or with
    several micro-batches a step.
    """
    calls, _ = operator_calls(timeline)
    calls = calls[calls["step"].isin(timeline.steps or [-1])]
    if not calls["name"].str.startswith(_ENGINE).any():
        raise ValueError("the trace has no operators of a backward pass")
    steps = calls.sort_values("start_ns", kind="stable").groupby(["rank", "step"])
    total_ns = pd.DataFrame([_step_ns(step) for _, step in steps]).median()
    # gradients of L layers, and of L layers with the embedding
    sizes = config.shape._replace(pp=1)
    inner_bytes = sizes.gradient_bytes(first=False, last=False)
    embedding_bytes = sizes.gradient_bytes(first=True, last=False) - inner_bytes
    layer_bytes = inner_bytes / sizes.layers
    layers = total_ns["layers"]
    ns_per_byte = total_ns["WU"] / (layers * layer_bytes + embedding_bytes)
    total_ns["WU transformer"] = ns_per_byte * layer_bytes
    total_ns["WU embeddings"] = ns_per_byte * embedding_bytes
    return _operators(total_ns)


def _step_ns(calls):
    """Nanoseconds by operator, WU of the whole model, and the number of layers."""
    start_ns = calls["start_ns"]
    engine = calls["name"].str.startswith(_ENGINE)
    ends_ns = start_ns + calls["host_ns"]
    is_forward = start_ns < start_ns[engine].min()
    is_update = start_ns >= ends_ns[engine].max()
    communicates = calls["name"].str.match(_COMMUNICATION)
    calls = calls.assign(self_ns=calls["self_device_ns"].mask(communicates, 0))
    forward = calls[is_forward]
    backward = calls[~is_forward & ~is_update]
    for names in _ATTENTION:
        forward_at, backward_at = (
            np.flatnonzero(part["name"].str.contains(name) & ~part["again"])
            for part, name in zip((forward, backward), names, strict=True)
        )
        if len(forward_at) == len(backward_at) > 1:
            break
    else:
        raise ValueError(
            f"attention is called {len(forward_at)} times forward and "
            f"{len(backward_at)} backward: vTrain's operators need two layers or more "
            "and one micro-batch a step"
        )
    about = {"WU": calls.loc[is_update, "self_ns"].sum(), "layers": len(forward_at)}
    forward_ns = _parts_ns(forward, forward_at, _FORWARD)
    return about | forward_ns | _parts_ns(backward, backward_at, _BACKWARD)


def _parts_ns(calls, attention, parts):
    """Time of a pass before its layers, of a layer (mean) and after the layers, by the
    names of the parts; attention: places of its calls.
    """
    self_ns = calls["self_ns"].to_numpy()
    layer_ns = self_ns[attention[0] : attention[-1]].sum() / (len(attention) - 1)
    # The first layer begins where the calls before its attention are no longer those
    # before the attention of the second. Calls of hooks (DDP's buckets, FSDP) have no
    # number of a gradient and come as they like.
    numbered = np.flatnonzero(calls["sequence"] >= 0)
    names = calls["name"].iloc[numbered].tolist()
    begin, second = np.searchsorted(numbered, attention[:2])
    period = second - begin
    while begin and names[begin - 1] == names[begin - 1 + period]:
        begin -= 1
    before_ns = self_ns[: numbered[begin]].sum()
    after_ns = self_ns.sum() - before_ns - len(attention) * layer_ns
    return dict(zip(parts, (before_ns, layer_ns, max(after_ns, 0.0)), strict=True))


def _operators(total_ns):
    """Operators of nanoseconds by the names of a trace."""
    seconds = total_ns.reindex(_FIELD.index, fill_value=0) / NS_PER_S
    return Operators(**seconds.groupby(_FIELD).sum())
