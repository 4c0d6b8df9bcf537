"""Work of the device by operator and by module.

A kernel belongs to the innermost operator that is open on the launching thread when the
launch starts; launch and kernel share a correlation. FLOPs and bytes come from recorded
shapes (`op_flops`) and are counted once, at the innermost operator that has them and,
on a rank with a device, launched work: capturing a graph computes nothing.
"""

import re
import warnings

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import Timeline, busy_spans, cached_per_timeline, with_origin
from madmax_lib.traces.operators.op_flops import operator_costs
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.nesting import Nest, thread_of
from madmax_lib.traces.tables import largest_first, ratio, stacked
from madmax_lib.traces.waits.launch import device_work

OUTSIDE = "outside of operators"
_MODULE = re.compile(r"^nn\.Module: ")
_TF32 = re.compile(
    r"tf32|tensorop_s1688gemm", re.IGNORECASE
)  # cuBLAS and CUTLASS kernels on fp32 inputs


def operators(timeline: Timeline, *, by_shape: bool = False) -> pd.DataFrame:
    """Work of each operator on each rank, longest own device time first.

    count: calls. host_s, device_s: with the operators inside; self_host_s,
    self_device_s: without. Device time is the sum of the kernels and copies launched,
    `kernels` their number; on ranks without device it is the host's. share: of the
    rank's self_device_s, 0..1. flops, moved_bytes: NaN where unknown and where an
    operator inside counts them;
    flops_per_s, bytes_per_s, flops_per_byte: of the calls that count. by_shape: one row
    per shapes (of the inputs) and dtype. Device work that no recorded operator launched
    is a row OUTSIDE. A rank without recorded operators, as in a simulation, has its
    device spans as rows.
    """
    keys = ["rank", "name", "shapes", "dtype"] if by_shape else ["rank", "name"]
    calls, work = operator_calls(timeline)
    calls = stacked([calls, _without_operator(timeline.spans, calls, work)])
    # A call inside of one of the same name (and shapes) is in its time already.
    once = ~calls["shape_again" if by_shape else "again"].to_numpy(dtype=bool)
    sums = pd.DataFrame(
        {
            **calls[keys].astype({"shapes": str} if by_shape else {}),
            "count": calls["calls"],
            "host_s": calls["host_ns"] * once,
            "device_s": calls["device_ns"] * once,
            "self_host_s": calls["self_host_ns"],
            "self_device_s": calls["self_device_ns"],
            "kernels": calls["kernels"] * once,
            "flops": calls["flops"],
            "moved_bytes": calls["moved_bytes"],
            "flops_per_s": calls["device_ns"] * calls["flops"].notna(),
            "bytes_per_s": calls["device_ns"] * calls["moved_bytes"].notna(),
        }
    )
    # min_count: a sum in which nothing is known is NaN, not 0.
    table = sums.groupby(keys, observed=True).sum(min_count=1).reset_index()
    table = _in_seconds(table, "self_device_s")
    # So far these two held the device time of the calls that count.
    table["flops_per_s"] = ratio(table["flops"], table["flops_per_s"])
    table["bytes_per_s"] = ratio(table["moved_bytes"], table["bytes_per_s"])
    table["flops_per_byte"] = ratio(table["flops"], table["moved_bytes"])
    return with_origin(largest_first(table, "self_device_s", *keys), timeline)


def modules(timeline: Timeline) -> pd.DataFrame:
    """Work of each nn.Module on each rank, longest own device time first; empty, with a
    TraceWarning, without module spans.

    module: name as recorded, type: its class, inside: the module around its first call.
    count: calls. host_s, device_s,
    flops: with the modules inside, self_device_s without. backward_s: the part of
    device_s spent by backward operators; they belong to the module whose forward
    operator has their sequence number. share: of the rank's device time in modules,
    0..1. flops_per_s: flops / device_s. What is computed again for the backward pass
    counts where it was recorded, which may be outside of the module around it.
    """
    spans = timeline.spans
    calls, work = operator_calls(timeline)
    is_module = spans["name"].str.contains(_MODULE) & (spans["stream"] < 0)
    if not is_module.any():
        text = "no modules are recorded: profile with with_stack=True"
        warnings.warn(text, TraceWarning, stacklevel=2)
    nest = Nest(spans, np.flatnonzero(is_module))
    # Without a device the operators themselves are the work; else the kernels are.
    host_ns = calls["self_device_ns"].mask(calls["on_device"], 0)
    launched = work[work["launch_row"] >= 0]
    thread = np.r_[calls["thread"], launched["thread"]]
    start_ns = np.r_[calls["start_ns"], launched["launch_ns"]]
    device_ns = np.r_[host_ns, launched["dur_ns"]]
    module, backward = _module_of(nest, calls, thread, start_ns, spans)
    flops = np.r_[calls["flops"].fillna(0), np.zeros(len(launched))]
    work_of = {
        "device_s": device_ns,
        "backward_s": device_ns * backward,
        "flops": flops,
    }
    in_module = {key: nest.sums(module, values) for key, values in work_of.items()}
    names = spans["name"].iloc[nest.rows].astype(object)
    names = names.str.replace(_MODULE, "", regex=True).to_numpy()
    # Time of a module inside of itself (a recursive call) is counted by the outer one.
    once = ~nest.within(True, names)
    table = pd.DataFrame(
        {
            "rank": spans["rank"].to_numpy()[nest.rows],
            "module": names,
            "inside": np.append(names, "")[nest.parent],
            "count": 1,
            "host_s": (nest.end - nest.start) * once,
            "self_device_s": in_module["device_s"],
            **{key: nest.inclusive(ns) * once for key, ns in in_module.items()},
        }
    )
    how = dict.fromkeys(table.columns[2:], "sum") | {"inside": "first"}
    # In order of time, so that "inside" is the module around the first call.
    table = table.iloc[np.argsort(nest.start, kind="stable")]
    table = table.groupby(["rank", "module"], observed=True).agg(how).reset_index()
    types = table["module"].astype(str).str.replace(r"_\d+$", "", regex=True)
    table.insert(2, "type", types)
    table = _in_seconds(table, "self_device_s")
    has_flops = calls["flops"].notna().any()
    table["flops"] = table["flops"].astype(float) if has_flops else np.nan
    table["flops_per_s"] = ratio(table["flops"], table["device_s"])
    table = largest_first(table, "self_device_s", "rank", "module")
    return with_origin(table, timeline)


def kernels(timeline: Timeline) -> pd.DataFrame:
    """Every kernel and copy by rank and name, longest first: rank, kind, name, count,
    total_s, mean_s, min_s, max_s,
    std_s, share (of the rank's sum, 0..1).
    """
    spans = busy_spans(timeline.spans)
    how = {
        "count": "size",
        "total_s": "sum",
        "mean_s": "mean",
        "min_s": "min",
        "max_s": "max",
        "std_s": "std",
    }
    by_name = spans.groupby(["rank", "kind", "name"], observed=True)["dur_ns"]
    table = _in_seconds(by_name.agg(**how).reset_index(), "total_s")
    return with_origin(largest_first(table, "total_s", "rank", "name"), timeline)


@cached_per_timeline
def operator_calls(timeline: Timeline) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per call of an operator, and `device_work` with the call that each is
    launched in (position, -1 without).

    Times in ns; flops and moved_bytes only where they count. counted: its own, or those
    of a call around it. again,
    shape_again: the call is inside of one of the same name, of the same name and
    shapes.
    """
    spans = timeline.spans
    table = timeline.side_tables["operators"]
    host = (spans["stream"] < 0) & ~spans["kind"].isin(("annotation", "comm"))
    table = table[host.to_numpy()[table["row"]]]
    nest = Nest(spans, table["row"])
    table = table.iloc[nest.order].reset_index(drop=True)
    work = device_work(timeline)
    work["thread"] = np.append(thread_of(spans), -1)[work["launch_row"]]
    call = nest.at(work["thread"].to_numpy(), work["launch_ns"].to_numpy())
    call[work["launch_row"] < 0] = -1
    host_ns = nest.end - nest.start
    # Clocks of threads may make the inner calls longer than the outer one.
    self_ns = np.maximum(host_ns - nest.sums(nest.parent, host_ns), 0)
    own_ns = nest.sums(call, work["dur_ns"])
    rank = spans["rank"].to_numpy()[nest.rows]
    # A rank that has any work on a device computes there.
    on_device = np.isin(rank, work["rank"].unique())
    calls = pd.DataFrame(
        {
            "row": nest.rows,
            "rank": rank,
            "thread": nest.thread,
            "step": spans["step"].to_numpy()[nest.rows],
            "name": spans["name"].iloc[nest.rows].astype(object).to_numpy(),
            "shapes": table["shapes"].astype(object),
            "sequence": table["sequence"],
            "forward_thread": table["forward_thread"],
            "start_ns": nest.start,
            "calls": 1,
            "host_ns": host_ns,
            "self_host_ns": self_ns,
            "on_device": on_device,
            "device_ns": np.where(on_device, nest.inclusive(own_ns), host_ns),
            "self_device_ns": np.where(on_device, own_ns, self_ns),
            "kernels": nest.inclusive(
                nest.sums(call, np.ones(len(work), dtype="int64"))
            ),
        }
    )
    labels = {"again": calls["name"], "shape_again": calls["name"] + calls["shapes"]}
    for column, label in labels.items():
        calls[column] = nest.within(True, label)
    is_tf32 = spans["name"].str.contains(_TF32).to_numpy()[work["row"]]
    tf32 = nest.inclusive(nest.sums(call, is_tf32)) > 0
    costs = operator_costs(table.assign(name=calls["name"]))
    return _with_costs(nest, calls, costs, tf32), work.assign(call=call)


def _with_costs(nest, calls, costs, tf32):
    """Calls with dtype, and with FLOPs and bytes where they count. tf32: (n,) whether
    one of its kernels computes so.
    """
    # An operator that launched nothing, as in the capture of a graph, moved nothing.
    is_idle = calls["on_device"] & (calls["kernels"] == 0)
    costs.loc[is_idle, ["flops", "moved_bytes"]] = np.nan
    products, movers = _counted(nest, costs)
    return calls.assign(
        dtype=costs["dtype"].mask(tf32 & (costs["dtype"] == "fp32"), "tf32"),
        flops=costs["flops"].where(products),
        moved_bytes=costs["moved_bytes"].where(movers),
        counted=products | nest.within(products),
    )


def _counted(nest, costs):
    """Calls that count their FLOPs, and calls that count their bytes, so that nothing
    counts twice.

    FLOPs: those without a call inside that has FLOPs. Bytes: the same, and outside of
    them every call that does not pass on more than half of its bytes to those inside
    (aten::relu_ does to aten::clamp_min_).
    """
    flops = costs["flops"].notna()
    moved_bytes = costs["moved_bytes"].fillna(0)
    # No other call inside of it has FLOPs.
    product = flops & (nest.inclusive(flops) == 1)
    # At most half as much again is moved inside of it: it is the one that works.
    works = nest.inclusive(moved_bytes) <= 1.5 * moved_bytes
    return product, product | (works & ~flops & ~nest.within(product))


def _without_operator(spans, calls, work):
    """Device work as rows of `operator_calls`: what no operator launched, by name on
    ranks without operators.
    """
    work = work[work["call"] < 0]
    recorded = work["rank"].isin(calls["rank"].unique())
    work = work.assign(name=spans["name"].iloc[work["row"]].astype(object).to_numpy())
    work["name"] = work["name"].where(~recorded, OUTSIDE)
    by_name = work.groupby(["rank", "name"])["dur_ns"]
    rows = by_name.agg(device_ns="sum", calls="size").reset_index()
    return rows.assign(
        self_device_ns=rows["device_ns"],
        host_ns=0,
        self_host_ns=0,
        kernels=rows["calls"],
        shapes="",
        dtype="",
        flops=np.nan,
        moved_bytes=np.nan,
        again=False,
        shape_again=False,
    )


def _module_of(nest, calls, thread, start_ns, spans):
    """Place in the modules' nest (m,), -1 without, of work that starts on a thread, and
    whether it is backward work.

    The innermost of the module and the backward operator around them decides; a
    backward operator stands for the module of the last forward operator with its
    sequence number, which is the one that made its node.
    """
    numbered = calls["sequence"] >= 0
    backward = calls["forward_thread"] > 0
    forward = calls[numbered & ~backward].sort_values("start_ns", kind="stable")
    # Several forward operators may share a number: the last made the backward node.
    forward = forward.drop_duplicates(["rank", "sequence"], keep="last")
    forward["place"] = nest.at(
        forward["thread"].to_numpy(), forward["start_ns"].to_numpy()
    )
    forward_module = forward[["rank", "sequence", "place"]]
    back = Nest(spans, calls.loc[numbered & backward, "row"].to_numpy())
    back_calls = calls.set_index("row").loc[back.rows, ["rank", "sequence"]]
    of_back = back_calls.merge(forward_module, how="left")["place"].fillna(-1)
    direct = nest.at(thread, start_ns)
    through = back.at(thread, start_ns)
    direct_ns, through_ns = (
        np.r_[n.start, -1][at] for n, at in ((nest, direct), (back, through))
    )
    through_module = np.r_[of_back.to_numpy(dtype="int64"), -1][through]
    # The innermost decides: the backward operator began after the module around it.
    is_backward = (through_module >= 0) & (through_ns >= direct_ns)
    return np.where(is_backward, through_module, direct), is_backward


def _in_seconds(table, column):
    """The table with its times, which are in ns, in seconds, and the share of the rank
    that a column is.
    """
    times = [name for name in table if name.endswith("_s")]
    table[times] = table[times].astype(float) / NS_PER_S
    of_rank = table.groupby("rank")[column].transform("sum")
    return table.assign(share=ratio(table[column], of_rank))
