"""Throughput, MFU, HFU, memory and energy of a run, from its steps.csv and its spec.

Throughput is the real samples of the steps that count over their wall time. Left out
are warm-up steps, short batches, steps whose optimizer was skipped (overflow) and,
where at least three others remain, profiled ones. Waiting for data is in the wall time;
`data_share` tells its part.

    MFU = model FLOPs / (wall time x peak)      [PaLM, arXiv 2204.02311, appendix B]

HFU counts recomputed work too.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

import pandas as pd

from madmax_lib.catalog import Transformer
from madmax_lib.runs.read import PHASES, read_run, write_json

PROFILED = range(1, 5)  # steps under the profiler: one to warm it up, three recorded
_LAST = ("loss", "accuracy", "validation_loss", "validation_accuracy")
_LEAST = 3  # a median of fewer steps says little


def counted_steps(
    steps: pd.DataFrame,
    warmup: int = 0,
    profiled: range = range(0),
    starts: Sequence[int] = (0,),
) -> tuple[pd.DataFrame, dict[str, int]]:
    """The steps that count, and how many are left out for which reason: warm-up, short,
    overflow, profiled.

    starts: the steps that the run was started at, each with `warmup` steps to warm up.
    """
    largest = steps["samples"].max() if len(steps) else 0
    reason = pd.Series("", index=steps.index, dtype=object)
    # a later line overrules an earlier one
    reason[steps["step"].isin(profiled)] = "profiled"
    reason[steps["samples"] < largest] = "short"
    reason[steps["overflow"].astype(bool)] = "overflow"
    for start in starts:
        reason[steps["step"].between(start, start + warmup - 1)] = "warm-up"
    if (reason == "").sum() < _LEAST:
        reason[reason == "profiled"] = ""
    causes = ("warm-up", "short", "overflow", "profiled")
    dropped = {cause: int((reason == cause).sum()) for cause in causes}
    return steps[reason == ""], dropped


def flops_per_sample(
    shapes: Transformer,
    sequence: int = 0,
    recompute: str = "none",
    frozen: bool = False,
) -> dict:
    """FLOPs of a training step per sample: forward, model (what the step needs),
    hardware (with recomputed work).

    frozen: the weights have no gradients (LoRA), so that backward is one forward and
    not two; adapters do not count.
    """
    sequence = sequence or shapes.sequence
    forward = shapes.forward_flops(1, sequence)
    recomputed = 0.0
    if recompute == "selective":
        # scores, and their product with the values: 2 S^2 width each, in every layer
        recomputed = 4 * sequence**2 * shapes.core_width * shapes.layers
    elif recompute == "full":
        # all layers, but neither embedding nor head: what one more layer would take
        deeper = replace(shapes, layers=shapes.layers + 1)
        layer = deeper.forward_flops(1, sequence) - forward
        recomputed = shapes.layers * layer
    # the backward pass takes two products for one of the forward pass: the gradient of
    # its input, and that of a weight, unless the weight is frozen
    passes = 2 if frozen else 3
    counted = f"{passes} x forward" + " (frozen weights)" * frozen
    products = f"model: {counted}, matrix products only, attention dense"
    return {
        "forward": forward,
        "model": passes * forward,
        "hardware": passes * forward + recomputed,
        "formula": f"{products}; hardware: plus recompute={recompute}",
    }


def _summarise(
    steps,
    *,
    flops,
    devices,
    env,
    **counting,
):
    """Throughput, times, use of the devices, memory and energy of the steps that count.

    steps: the columns of steps.csv. flops: of `flops_per_sample`. env: peak_flops
    (FLOP/s of one device), power_cap_w (of all) and epoch_samples, where they are
    known. counting: arguments of `counted_steps`. What cannot be told is NaN.
    """
    counted, dropped = counted_steps(steps, **counting)
    peak_flops, power_cap_w, epoch_samples = (
        env.get(name) or nan for name in ("peak_flops", "power_cap_w", "epoch_samples")
    )
    wall_s = float(counted["total_s"].sum()) or nan
    samples = float(counted["samples"].sum())
    tokens = float(counted["tokens"].sum())
    step_s = counted["total_s"]
    peak = devices * peak_flops
    rate = samples / wall_s
    profiled = counted["step"].isin(counting.get("profiled", ()))
    return {
        "steps": len(steps),
        "steps_counted": len(counted),
        "steps_dropped": dropped,
        "includes_profiled": bool(profiled.any()),
        "step_s": {
            "median": step_s.median(),
            "p25": step_s.quantile(0.25),
            "p75": step_s.quantile(0.75),
            "mean": step_s.mean(),
        },
        "phases_s": {
            name: _aggregate(counted, f"{name}_s", "median") for name in PHASES
        },
        "samples_per_s": rate,
        "tokens_per_s": tokens / wall_s,
        "epochs": _last(steps, "epoch"),
        "epoch_s": epoch_samples / rate,
        "data_share": _aggregate(counted, "data_s", "sum") / wall_s,
        "mfu": rate * flops["model"] / peak,
        "hfu": rate * flops["hardware"] / peak,
        "flops_per_sample": dict(flops),
        "peak_flops_per_device": peak_flops,
        "devices": devices,
        "loss_first": _last(steps.head(1), "loss"),
        **{f"{name}_last": _last(steps, name) for name in _LAST},
        "memory_peak_bytes": _aggregate(steps, "memory_peak_bytes", "max"),
        "host_rss_bytes": _aggregate(steps, "host_rss_bytes", "max"),
        **_energy(counted, power_cap_w),
        "utilization": _aggregate(counted, "utilization", "mean"),
    }


def write_summary(directory: Path, status: str, error: str = "", **more) -> dict:
    """Summary of a run directory, complete or not, written to its summary.json.

    status: completed, failed, out-of-memory, stalled or interrupted; error: one line;
    more: further entries.
    """
    run = read_run(directory)
    spec = run.spec
    env = run.env
    frozen = spec.lora_rank > 0
    flops = flops_per_sample(spec.shapes, spec.sequence, spec.plan.recompute, frozen)
    figures = _summarise(
        run.steps,
        flops=flops,
        devices=spec.plan.world_size,
        env=env,
        warmup=spec.warmup,
        profiled=PROFILED if spec.profile else range(0),
        starts=run.resolved.starts,
    )
    about = {
        "status": status,
        "error": error,
        "model": spec.model,
        "strategy": spec.strategy,
        "plan": str(spec.plan),
        "data": env.get("data", spec.data),
        "parameters": spec.shapes.parameters,
    }
    for name in ("device", "peak_source", "power_source"):
        about[name] = env.get(name)
    summary = about | figures | more
    write_json(directory / "summary.json", summary)
    return summary


def _energy(counted, cap_w):
    """Mean power, and energy by what it is spread over; NaN if a step has none."""
    joule = nan
    if len(counted) and "energy_j" in counted:
        joule = counted["energy_j"].sum(skipna=False)
    spread_over = {
        "power_w": counted["total_s"].sum(),
        "energy_per_step_j": len(counted),
        "energy_per_sample_j": counted["samples"].sum(),
        "energy_per_token_j": counted["tokens"].sum(),
    }
    energy = {
        name: float(joule / amount) if amount else nan
        for name, amount in spread_over.items()
    }
    return energy | {"power_cap_w": cap_w, "power_share": energy["power_w"] / cap_w}


def _aggregate(table, column, how):
    return float(table[column].agg(how)) if column in table and len(table) else nan


def _last(table, column):
    values = table[column].dropna() if column in table else ()
    return float(values.iloc[-1]) if len(values) else nan
