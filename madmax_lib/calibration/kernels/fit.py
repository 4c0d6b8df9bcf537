"""Rates of kernels and collectives from measured tables: the facts of
`data/kernel_rates.csv`, of these tables or your own.

    fit_rates(read_kernels(["bench"])).to_csv("kernel_rates.csv", index=False)

fits tables (CSV or Parquet, files or folders). The file, in the folder MADMAX_CATALOG,
takes the place of ours. A table has a row per measured call:

  operation   gemm, attention, delta_rule, moe or another kernel, or a collective of
              one node
  device, dtype, seconds, source   source is optional
  m, n, k     of a gemm
  batch, sequence, heads, kv_heads, head_dim   of attention, forward and causal, and
              of the gated delta rule
  ranks, size_bytes   of a collective: the whole buffer, as nccl-tests count
  flops, size_bytes   of another kernel: what it computes and moves

or the columns of `madmax bench` (kernels.csv, collectives.csv).
`benchmarks/aiconfigurator.py` has made ours, of tables of NVIDIA's aiconfigurator
[github.com/ai-dynamo/aiconfigurator, systems/data].
"""

from dataclasses import asdict, fields, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from madmax_lib.base.collectives import COLLECTIVES, bus_factor
from madmax_lib.catalog import tables
from madmax_lib.catalog.kernel_rates import OPERANDS, KernelRate, rates_from
from madmax_lib.simulator.parts import work_of

COLUMNS = [  # of `data/kernel_rates.csv`
    *("operation", "device", "dtype", "ranks", "from_bytes"),
    *(field.name for field in fields(KernelRate)),
    *("spread", "rows", "source"),
]
_KERNEL = ["operation", "device", "dtype"]
_COLLECTIVE = ["operation", "device", "ranks"]
_SHAPE = ("m", "n", "k", "batch", "sequence", "heads", "kv_heads", "head_dim")
_AMOUNTS = ("flops", "size_bytes")
_ONE_IN = 4  # rows that are held out
# Smaller products are those of serving a few requests, ruled by launches
_LEAST = 256
_LEAST_ROWS = 6  # of an operation on a device
# latency_s, shares of the data sheet's FLOP/s and bytes/s, lost depth: where a fit
# starts, and its bounds. Caches may give more bytes/s than memory has.
_START = np.log([5e-6, 0.6, 0.4, 100.0])
_BOUNDS = (np.log([1e-6, 0.01, 0.02, 0.1]), np.log([2e-3, 1.0, 3.0, 3000.0]))
# weight of the start: what rows say nothing about stays there
_PRIOR = 0.01
_OUTLIER = 0.05  # relative errors beyond it count less than by their square
# standard deviation over the median of the absolute value, of a normal distribution
_SIGMA = 1.4826
# of the error of a simpler form: what a form must reach to be taken instead
_BETTER = 0.9


def fit_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Facts of a table in the layout above: rows of `data/kernel_rates.csv`.

    Collectives have two rows for a number of ranks, the second from the size
    `from_bytes` on, with the bus bandwidth of nccl-tests as bytes_per_s. spread:
    standard deviation of log(measured / fitted). What has fewer than six rows on a
    device is left out.
    """
    table = table.assign(
        ranks=table.get("ranks", np.nan),
        source=table.get("source", ""),
    )
    of_links = table["operation"].isin(COLLECTIVES)
    facts = []
    for (operation, device, dtype), rows in table[~of_links].groupby(_KERNEL):
        about = {"operation": operation, "device": device, "dtype": dtype}
        facts += [about | fact for fact in _kernel_facts(rows)]
    for (operation, device, ranks), rows in table[of_links].groupby(_COLLECTIVE):
        about = {"operation": operation, "device": device, "ranks": ranks}
        facts += [about | fact for fact in _collective_facts(rows)]
    return pd.DataFrame(facts, columns=COLUMNS).astype({"in_waves": float})


def kernel_errors(table: pd.DataFrame, facts: pd.DataFrame) -> pd.Series:
    """Logarithm of priced over measured seconds of each row, by facts of `fit_rates`
    and for what they lack by those of other devices.
    """
    errors = pd.Series(np.nan, index=table.index)
    for (operation, device), rows in table.groupby(["operation", "device"]):
        if operation in COLLECTIVES:
            rates = rates_from(facts, device, operation)
            seconds = rates.seconds(rows["size_bytes"], rows["ranks"])
            errors[rows.index] = np.log(seconds / rows["seconds"])
            continue
        for dtype, part in rows.groupby("dtype"):
            rates = rates_from(facts, device, operation, dtype)
            work = _work(part, rates.device.sms)
            errors[part.index] = np.log(rates.seconds(work) / part["seconds"])
    return errors


def held_out(table: pd.DataFrame) -> pd.Series:
    """Whether a row is one of the quarter that a check of the form leaves out, by a
    hash of what it measured.
    """
    names = [name for name in (*_KERNEL, "ranks", *_SHAPE, *_AMOUNTS) if name in table]
    text = table[names].astype(str).agg(" ".join, axis=1)
    return pd.util.hash_pandas_object(text, index=False) % _ONE_IN == 0


def _work(rows, sms):
    """Work of rows of one operation and dtype."""
    names = [name for name in (*_SHAPE, *_AMOUNTS) if name in rows]
    shape = {name: rows[name].to_numpy(dtype=float) for name in names}
    return work_of(rows["operation"].iloc[0], shape, rows["dtype"].iloc[0], sms)


def _kernel_facts(rows):
    """The fact of a kernel on a device, of the form that fits best; none where too few
    rows are left.
    """
    products = [name for name in "mnk" if name in rows]
    rows = rows[~(rows[products] < _LEAST).any(axis=1)]
    device = tables.device(rows["device"].iloc[0])
    if len(rows) < _LEAST_ROWS:
        return []
    work = _work(rows, device.sms)
    operation, dtype = rows[["operation", "dtype"]].iloc[0]
    ideal = KernelRate(
        latency_s=1.0,
        flops_per_s=device.peak_flops[OPERANDS.get(dtype, dtype)],
        bytes_per_s=device.memory_bandwidth_bytes_per_s,
        lost_depth=float(np.ndim(work.depth) > 0),
    )
    forms = [ideal]
    if operation in ("gemm", "delta_rule"):
        forms = [replace(ideal, in_waves=in_waves) for in_waves in (False, True)]
    # a launch before the kernel, or one that ends in the kernel's shadow
    forms += [replace(form, latency_s=0.0, issue_s=1.0) for form in forms]
    fits = [_fit(form, work, rows["seconds"]) for form in forms]
    best = fits[0]
    for fit in fits[1:]:
        best = fit if fit.error < _BETTER * best.error else best
    return [asdict(best.rate) | _about(rows, best.error)]


class _Fit(NamedTuple):
    rate: KernelRate
    error: float  # median of the relative ones


def _fit(form, work, seconds):
    """The rate of a form with the least relative errors."""
    measured = np.log(seconds.to_numpy())

    def rate_of(logs):
        latency_s, share, memory_share, depth = np.exp(logs)
        return replace(
            form,
            latency_s=form.latency_s * latency_s,
            issue_s=form.issue_s * latency_s,
            flops_per_s=form.flops_per_s * share,
            bytes_per_s=form.bytes_per_s * memory_share,
            lost_depth=form.lost_depth * depth,
        )

    def residuals(logs):
        errors = np.log(rate_of(logs).seconds(work)) - measured
        return np.append(errors, _PRIOR * (logs - _START))

    solution = least_squares(
        residuals, _START, bounds=_BOUNDS, loss="soft_l1", f_scale=_OUTLIER
    )
    rate = rate_of(solution.x)
    errors = np.abs(np.log(rate.seconds(work)) - measured)
    return _Fit(rate, float(np.median(errors)))


def _about(rows, error):
    """Columns of a fact that tell of its rows."""
    return {
        "spread": _SIGMA * error,
        "rows": len(rows),
        "source": "; ".join(sorted(rows["source"].unique())),
    }


def _collective_facts(rows):
    """Facts of two regimes of sizes, parted where the errors are least; none where too
    few sizes were measured.
    """
    points = rows.groupby("size_bytes")["seconds"].median()
    sizes, seconds = points.index.to_numpy(dtype=float), points.to_numpy()
    if len(points) < _LEAST_ROWS:
        return []
    # a line needs three points
    parts = (_Parts(sizes, seconds, at) for at in range(3, len(points) - 2))
    best = min(parts, key=lambda each: each.error)
    ranks = rows["ranks"].iloc[0]
    wires = bus_factor(rows["operation"].iloc[0], ranks)
    facts = []
    for from_bytes, (latency_s, byte_s) in zip(
        (0.0, best.from_bytes), best.lines, strict=True
    ):
        fact = {"from_bytes": from_bytes, "latency_s": latency_s}
        fact |= {"bytes_per_s": float(wires / byte_s)} | _about(rows, best.error)
        facts.append(fact)
    return facts


class _Parts:
    """Lines t = latency + size byte_s through the points below and from number `at`."""

    def __init__(self, sizes, seconds, at):
        self.from_bytes = sizes[at]
        self.lines = []
        fitted_s = []
        for part in (slice(at), slice(at, None)):
            # least squares of relative errors, both constants positive
            columns = np.column_stack([np.ones_like(sizes[part]), sizes[part]])
            line, _ = nnls(columns / seconds[part, None], np.ones(len(columns)))
            self.lines.append(np.maximum(line, [1e-7, 1e-15]))
            fitted_s.append(columns @ self.lines[-1])
        errors = np.abs(np.log(np.concatenate(fitted_s) / seconds))
        self.error = float(np.mean(errors))
