"""Roofline and MFU: how far from the limits of its device each operator and each step
runs.

The roofline is Williams et al. 2009: min(peak FLOP/s, FLOPs per byte * bandwidth), with
the rates of the catalog.
"""

import warnings

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import NS_PER_S
from madmax_lib.catalog import Device
from madmax_lib.timeline import Timeline, busy_spans, with_origin
from madmax_lib.traces.diff import op_classes
from madmax_lib.traces.operators.ops import operator_calls, operators
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.tables import largest_first, ratio, stacked
from madmax_lib.traces.waits.step_times import step_periods

_PRODUCTS = ("gemm", "convolution", "attention")
_ENOUGH = 0.5  # of the time of products: below, an MFU from shapes says nothing
_HOST_OPERATOR = (
    r"(?!autograd)\w+::"  # other names on the host stand for what runs inside of them
)


def roofline(timeline: Timeline, device: str | Device | None = None) -> pd.DataFrame:
    """Place of each operator and shape under the roofs of its device, longest
    first.

    rank, name, shapes, dtype, count, device_s, share, flops_per_byte (0 without matrix
    products), flops_per_s, bytes_per_s, peak_flops (of the dtype, NaN where the device
    has none), peak_bytes_per_s, bound (compute or memory: the roof above), roof (0..1:
    achieved / roof). Above 1: the bytes stayed in a cache, rows of a grouped product
    were padding, or a peak is wrong.
    device: a name of the catalog, else the one the timeline names; where the catalog
    lacks that one the roofs are NaN, with a TraceWarning. Raises ValueError for a
    device given that is not known.
    """
    work = operators(timeline, by_shape=True)
    table = work[work["moved_bytes"].notna() & (work["device_s"] > 0)]
    table = largest_first(table, "device_s", "name", "shapes")
    specs = _device_of(timeline, device) if len(table) else None
    table["peak_flops"] = [_peak(specs, dtype) for dtype in table["dtype"]]
    table["peak_bytes_per_s"] = specs.memory_bandwidth_bytes_per_s if specs else np.nan
    # An operator without matrix products stands at the left edge, under the memory
    # roof.
    table["flops_per_byte"] = table["flops_per_byte"].fillna(0.0)
    compute = (table["flops_per_s"] / table["peak_flops"]).fillna(0.0)
    memory = table["bytes_per_s"] / table["peak_bytes_per_s"]
    table["bound"] = np.where(compute >= memory, "compute", "memory") if specs else ""
    # Share of the lower roof: P / min(peak, intensity bandwidth) = max(P / peak, B /
    # bandwidth) [Williams et al. 2009].
    table["roof"] = np.maximum(compute, memory)
    columns = [
        "rank",
        "name",
        "shapes",
        "dtype",
        "count",
        "device_s",
        "share",
        "flops_per_byte",
        "flops_per_s",
        "bytes_per_s",
        "peak_flops",
        "peak_bytes_per_s",
        "bound",
        "roof",
    ]
    return with_origin(table[columns], work, device=specs.name if specs else "")


def products(table: pd.DataFrame) -> pd.DataFrame:
    """The operators of `roofline` with FLOPs, one row per shape of all ranks together,
    longest first.
    """
    rows = table[(table["flops_per_byte"] > 0) & (table["flops_per_s"] > 0)]
    rows = rows.assign(
        flops=rows["flops_per_s"] * rows["device_s"],
        roof=rows["roof"] * rows["device_s"],
    )
    same = [
        "name",
        "shapes",
        "dtype",
        "flops_per_byte",
        "peak_flops",
        "peak_bytes_per_s",
        "bound",
    ]
    by_shape = rows.groupby(same, dropna=False)
    rows = by_shape[["count", "device_s", "flops", "roof"]].sum().reset_index()
    rows = rows.assign(
        flops_per_s=rows["flops"] / rows["device_s"],
        roof=rows["roof"] / rows["device_s"],
    )
    return largest_first(rows, "device_s", "name", "shapes")


def mfu(
    timeline: Timeline,
    device: str | Device | None = None,
    flops_per_step: float | None = None,
) -> pd.DataFrame:
    """Model FLOPs utilisation of each rank and step: rank, step, flops, period_s,
    flops_per_s, mfu (0..1), coverage.

    flops: flops_per_step of one rank if given, else of the recorded shapes, which count
    recomputation too (then it is the hardware's utilisation), NaN without either.
    period_s: as in `steps`, of the last one from its begin to its end. The peak is that
    of the recorded dtypes, by their FLOPs; bf16 where none is recorded.
    coverage: share (0..1) of the time of matrix products, convolutions and attention
    whose FLOPs are known; below 0.5 the mfu of recorded shapes is NaN. Where no shapes
    are recorded, as in a simulated step, a TraceWarning says so.
    device: as for `roofline`.
    """
    table = step_periods(timeline).sort_values(["rank", "step"], ignore_index=True)
    # The last step has no next one to end its period.
    table["period_s"] = table["period_s"].fillna(
        (table["end_ns"] - table["begin_ns"]) / NS_PER_S
    )
    calls, work = operator_calls(timeline)
    table = table.merge(
        _coverage(timeline, calls, work), on=["rank", "step"], how="left"
    )
    # Simulated spans have no shapes; a measured trace may lack them.
    advice = ""
    if timeline.meta.source == "simulated":
        advice = "mm.estimate gives the MFU of a simulated step"
    elif len(calls) and not calls["shapes"].str.contains(r"\d").any():
        advice = "profile with record_shapes=True"
    if advice and flops_per_step is None:
        text = "no shapes of operators are recorded, so their FLOPs are unknown: "
        warnings.warn(text + advice, TraceWarning, stacklevel=2)
    by_dtype = calls.groupby(["rank", "step", "dtype"], observed=True)["flops"]
    by_dtype = by_dtype.sum(min_count=1).dropna().reset_index()
    some = len(table) and (flops_per_step is not None or len(by_dtype))
    specs = _device_of(timeline, device) if some or device is not None else None
    # Time at the peak of each dtype; FLOPs over their sum is the peak of the mix.
    peaks = [_peak(specs, dtype) for dtype in by_dtype["dtype"]]
    by_dtype["peak_s"] = by_dtype["flops"] / peaks
    sums = by_dtype.groupby(["rank", "step"])[["flops", "peak_s"]].sum(min_count=1)
    table = table.merge(sums.reset_index(), how="left")
    peak = ratio(table["flops"], table.pop("peak_s")).fillna(
        _peak(specs, specs.nearest("bf16") if specs else "bf16")
    )
    if flops_per_step is not None:
        table["flops"] = float(flops_per_step)
    table["flops_per_s"] = ratio(table["flops"], table["period_s"])
    # Shapes that tell less than half of the time of products tell no utilisation.
    untold = (flops_per_step is None) & (table["coverage"] < _ENOUGH)
    table["mfu"] = (table["flops_per_s"] / peak).mask(untold)
    columns = ["flops", "period_s", "flops_per_s", "mfu", "coverage"]
    return with_origin(table[["rank", "step", *columns]], timeline)


def _coverage(timeline, calls, work):
    """rank, step, coverage of `mfu`: by kernels, on ranks without a device by
    operators.
    """
    # Position -1, work that no operator launched, reads the False that is appended.
    counted = np.append(calls["counted"].to_numpy(dtype=bool), False)
    kernels = work[["rank", "step"]].assign(
        name=timeline.spans["name"].iloc[work["row"]].astype(object).to_numpy(),
        time_ns=work["dur_ns"],
        counted=counted[work["call"]],
    )
    # Without a device the operators are the work; others stand for what runs inside.
    on_host = ~calls["on_device"].astype(bool)
    host = calls[on_host & calls["name"].str.match(_HOST_OPERATOR)]
    host = host.assign(time_ns=host["self_device_ns"])
    every = stacked([kernels, host[list(kernels)]])
    codes, names = pd.factorize(every["name"])
    is_product = np.isin(op_classes(names), _PRODUCTS)[codes]
    counted = every["counted"].to_numpy(dtype=bool)
    # Time of products whose FLOPs are known, of all time of products.
    every["known_ns"] = every["time_ns"].where(counted, 0)
    every = every[counted | is_product]
    sums = every.groupby(["rank", "step"])[["known_ns", "time_ns"]].sum()
    coverage = ratio(sums["known_ns"], sums["time_ns"])
    return coverage.rename("coverage").reset_index()


def _device_of(timeline, device=None):
    """The device that is given, or the catalog's by the name in the trace; None and a
    TraceWarning for an unknown.
    """
    if isinstance(device, Device):
        return device
    if device is not None:
        return catalog.device(device)
    # Traces name devices in words of the driver; the catalog knows them.
    specs = catalog.device_named(timeline.meta.device)
    name = timeline.meta.device
    what = ""
    if name and len(timeline) and (busy_spans(timeline.spans)["stream"] < 0).all():
        what = f"{name!r} is the timeline's device, but only the host is at work"
    elif not name:
        what = "the timeline names no device"
    elif specs is None:
        what = f"{name!r}, the timeline's device, is not in the catalog"
    if not what:
        return specs
    text = f"{what}: its peaks are unknown; give device=, such as h100-80"
    warnings.warn(text, TraceWarning, stacklevel=3)
    return None


def _peak(device, dtype):
    try:
        return device.peak(dtype) if device else np.nan
    except ValueError:
        return np.nan
