"""How far are predictions from measured rows? Predictions with their intervals, folds, errors, ranks, baseline."""

from __future__ import annotations

import hashlib

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from madmax_lib.calibration.consistency import model_flops
from madmax_lib.calibration.fit import fingerprint, fit, usable
from madmax_lib.calibration.intervals import class_of, quantiles_of
from madmax_lib.calibration.published_rows import read_rows, to_work
from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.timeline import with_origin

__all__ = ["baseline", "errors", "folds", "layout_ranks", "predict", "score"]

_BUCKET_BYTES = 1e9  # 5e8 elements, the default of DeepSpeed
_FOLDS = 10
_ADAPTERS = 0.01  # share of the weights that LoRA trains
_SOFTWARE = {"legacy": "megatron", "deepspeed": "deepspeed", "deepspeed-plain": "deepspeed", "fused": "megatron"}


def predict(rows: pd.DataFrame, parameters: Parameters | None = None) -> pd.DataFrame:
    """A published table with predictions beside it: the same rows and index, and after its columns

    predicted_s, low_s, high_s: seconds of a step and its 90 % interval, by the residual quantiles of the parameters.
    predicted_memory_bytes: peak of the fullest device.
    fits: whether the memory suffices, also for rows whose source reports none.
    supported, reason: whether a row can be predicted, and why not; a contradiction in it is named, but predicted.

    parameters: the shipped constants if None; the shipped quantiles stand in where they have none. What cannot be
    predicted is NaN.
    """
    parameters = parameters or shipped()
    read = read_rows(rows)
    supported = read["supported"].to_numpy(bool)
    result = rows.assign(predicted_s=np.nan, low_s=np.nan, high_s=np.nan, predicted_memory_bytes=np.nan)
    if supported.any():
        part = read[supported]
        predicted = step_time(to_work(part), parameters)["step_s"]
        low, high = np.exp(quantiles_of(part, parameters.residuals or shipped().residuals)).T
        result.loc[supported, "predicted_s"] = predicted
        result.loc[supported, "low_s"] = predicted * low
        result.loc[supported, "high_s"] = predicted * high
        result.loc[supported, "predicted_memory_bytes"] = [_memory_bytes(row) for row in part.to_dict("records")]
    too_large = result["predicted_memory_bytes"].to_numpy(float) > read["memory_bytes"].to_numpy(float)
    reason = np.where(supported, read["violation"], read["reason"])
    return result.assign(fits=supported & ~too_large, supported=supported, reason=reason)


def folds(rows: pd.DataFrame, *, by: str = "group") -> pd.DataFrame:
    """Every usable row predicted by a fit that has not seen its fold.

    rows: a published table or the output of `read_rows`. by: what stays together in one of ten folds, "group" (a source
    and model) or nothing ("random"); or "source", a fold for each. Returns the normalised rows with fold, predicted_s
    and log_error = log(measured / predicted). Which fold a group is in depends on its name only.
    """
    if "supported" not in rows.columns:
        rows = read_rows(rows)
    rows = rows[usable(rows)]
    fold = _fold_of(rows, by)
    predicted = np.full(len(rows), np.nan)
    for number in np.unique(fold):
        out = fold == number
        fitted = fit(rows[~out], starts=1)
        predicted[out] = step_time(to_work(rows[out]), fitted)["step_s"]
    measured = rows["measured_s"].to_numpy(float)
    result = rows.assign(fold=fold, predicted_s=predicted, log_error=np.log(measured / predicted))
    return with_origin(result, {"files": {"rows": {"sha256": fingerprint(rows)}}, "rules": f"folds by {by}"})


def baseline(rows: pd.DataFrame, fold: np.ndarray | None = None) -> np.ndarray:
    """Seconds by one achieved FLOP/s per (device, 16/8/4-bit class): the median of the rows outside the fold.

    rows: normalised. fold: of each row; all rows are their own reference if None. A device and class that no row
    outside the fold has takes the median share of the peak.
    """
    flops = np.array([model_flops(row | {"counts_recompute": False}) for row in rows.to_dict("records")])
    devices = rows[["dp", "tp", "pp", "cp"]].to_numpy(float).prod(axis=1)
    share = flops / rows["measured_s"].to_numpy(float) / devices / rows["peak_gemm"].to_numpy(float)
    keys = pd.Series(rows["gpu"].to_numpy(str) + " " + rows["gemm"].str.split("-").str[-1].to_numpy(str))
    result = np.full(len(rows), np.nan)
    for number in [None] if fold is None else np.unique(fold):
        out = np.ones(len(rows), bool) if fold is None else fold == number
        seen = out if fold is None else ~out
        medians = pd.Series(share[seen]).groupby(keys[seen].to_numpy()).median()
        shares = keys[out].map(medians).fillna(np.median(share[seen])).to_numpy()
        result[out] = flops[out] / (shares * rows["peak_gemm"].to_numpy(float)[out] * devices[out])
    return result


def errors(table: pd.DataFrame, by: str | list[str]) -> pd.DataFrame:
    """Rows, bias (median log error), MAPE and median absolute error (ratios) of `folds` by source, gpu, model, ..."""
    absolute = np.abs(np.expm1(-table["log_error"].astype(float)))
    groups = table.assign(absolute=absolute).groupby(by)
    result = groups["absolute"].agg(rows="size", mape="mean", median="median")
    result.insert(1, "bias", groups["log_error"].median())
    result.attrs.update(table.attrs)
    return result


def score(table: pd.DataFrame) -> dict[str, float]:
    """MAPE and median of dense and of mixture rows (ratios)."""
    by_kind = errors(table.assign(kind=class_of(table)), "kind")
    return {f"{kind} {name}": float(by_kind.at[kind, name]) for kind in by_kind.index for name in ("mape", "median")}


def layout_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Does the model rank the layouts of one model as they were measured? Spearman's correlation by model of `folds`.

    Columns rows and ranks (every run counts), layouts and layout_ranks (runs of one layout, such as those of different
    days, count as their mean). Models with less than four layouts are left out.
    """
    layout = ["dp", "tp", "pp", "heads", "micro_batch", "global_batch", "dtype"]
    table = table.assign(measured_s=table["measured_s"].astype(float))
    rows = {}
    for model, runs in table.groupby("model"):
        means = runs.groupby(layout)[["measured_s", "predicted_s"]].mean()
        ranks = [spearmanr(part["measured_s"], part["predicted_s"]).statistic for part in (runs, means)]
        rows[model] = (len(runs), ranks[0], len(means), ranks[1])
    result = pd.DataFrame.from_dict(rows, orient="index", columns=["rows", "ranks", "layouts", "layout_ranks"])
    return result[result["layouts"] >= 4]


def _fold_of(rows: pd.DataFrame, by: str) -> np.ndarray:
    if by == "source":
        return pd.factorize(rows["source"])[0]
    if by == "random":
        return np.random.default_rng(0).permutation(len(rows)) % _FOLDS
    if by != "group":
        raise ValueError(f"by={by!r} is not one of group, source, random")
    names = sorted(rows["group"].unique(), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return rows["group"].map({name: i % _FOLDS for i, name in enumerate(names)}).to_numpy()


def _memory_bytes(row: dict) -> float:
    """Peak of the fullest device; NaN where the plan has no layout in `simulator.memory.memory`.

    Recompute that a source does not state is the least that fits: none, selective or full.
    """
    stated = "full" if row["recompute_tp"] == 1 else "selective" if "selective" in row["said"] else "none"
    options = [stated] if row["recompute_stated"] or stated != "none" else ["none", "selective", "full"]
    peak = float("nan")
    for recompute in options:
        try:
            peak = _peak_of(row, recompute)
        except (ValueError, KeyError):
            return float("nan")
        if peak <= row["memory_bytes"]:
            break
    return peak


def _peak_of(row: dict, recompute: str) -> float:
    ends = bool(row["ends_as_layers"]) and row["layers"] % row["pp"] > 0 and (row["layers"] + 2) % row["pp"] == 0
    software = _SOFTWARE.get(row["software"], "torch")
    degrees = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave", "zero")
    plan = Plan(
        **{name: int(row[name]) for name in degrees},
        recompute=recompute,
        sequence_parallel=bool(row["sequence_parallel"]),
        shard=int(row["shard"]) if 1 < row["shard"] < row["dp"] * row["cp"] else 0,
        attention="unfused" if row["unfused"] else "flash",
        reduce_fp32=row["gradient_wire_bytes"] == 10,
        bucket_bytes=_BUCKET_BYTES,
        embedding_as_layer=ends,
        head_as_layer=ends,
    )
    table = memory(
        row["shape"],
        plan,
        sequence=int(row["sequence"]),
        dtype=row["dtype"],
        global_batch=int(row["global_batch"]),
        software="torch" if row["zero"] == 3 and software == "megatron" else software,
        fused_loss=bool(row["fused_loss"]),
        trainable=max(float(row["trained"]), _ADAPTERS),
    )
    return peak_bytes(table)
