"""How fast was a run, really? steps.csv and what is known of the run, to throughput,
MFU, HFU, memory and energy.

Throughput is the real samples of the steps that count over their wall time. Left out
are warm-up steps, short batches, steps whose optimizer was skipped (overflow) and,
where at least three others remain, profiled ones. MFU = model FLOPs / (wall time x
peak) [PaLM, arXiv 2204.02311], HFU counts recomputed work too. Waiting for data is in
the wall time; `data_share` tells its part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

import pandas as pd

from madmax_lib.catalog.models import Transformer
from madmax_lib.runs.read import PHASES, read_run, write_json

__all__ = ["PROFILED", "counted_steps", "flops_per_sample", "write_summary"]

PROFILED = range(1, 5)  # steps under the profiler: one to warm it up, three recorded
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
    reason[steps["step"].isin(profiled)] = "profiled"
    reason[steps["samples"] < largest] = "short"
    reason[steps["overflow"].astype(bool)] = "overflow"
    for start in starts:
        reason[steps["step"].between(start, start + warmup, inclusive="left")] = (
            "warm-up"
        )
    if ((reason == "") | (reason == "profiled")).sum() and (
        reason == ""
    ).sum() < _LEAST:
        reason[reason == "profiled"] = ""
    dropped = {
        name: int((reason == name).sum())
        for name in ("warm-up", "short", "overflow", "profiled")
    }
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
    again = {
        "none": 0.0,
        "selective": _core_flops(shapes, sequence),
        "full": forward - _ends_flops(shapes, sequence),
    }
    model = (2 if frozen else 3) * forward
    counted = "2 x forward (frozen weights)" if frozen else "3 x forward"
    formula = (
        f"model: {counted}, matrix products only, attention dense; hardware: "
        f"plus recompute={recompute}"
    )
    return {
        "forward": forward,
        "model": model,
        "hardware": model + again[recompute],
        "formula": formula,
    }


def _summarise(
    steps: pd.DataFrame,
    *,
    flops: Mapping[str, float],
    devices: int,
    peak_flops: float = nan,
    power_cap_w: float = nan,
    **counting,
) -> dict:
    """Throughput, times, use of the devices, memory and energy of the steps that count.

    steps: the columns of steps.csv. flops: of `flops_per_sample`. peak_flops: FLOP/s of
    one device, NaN if unknown.
    power_cap_w: of all devices. counting: arguments of `counted_steps`. What cannot be
    told is NaN. Raises ValueError for a table without the columns needed.
    """
    needed = ("step", "samples", "tokens", "total_s", "overflow", "loss")
    if missing := [name for name in needed if name not in steps.columns]:
        raise ValueError(f"steps lack the column(s) {', '.join(missing)}")
    counted, dropped = counted_steps(steps, **counting)
    wall_s, samples, tokens = (
        float(counted[name].sum()) for name in ("total_s", "samples", "tokens")
    )
    rate = samples / wall_s if wall_s else nan
    share = rate / (devices * peak_flops)
    return {
        "steps": len(steps),
        "steps_counted": len(counted),
        "steps_dropped": dropped,
        "includes_profiled": bool(
            counted["step"].isin(counting.get("profiled", ())).any()
        ),
        "step_s": _quartiles(counted["total_s"]),
        "phases_s": {
            name: _aggregate(counted, f"{name}_s", "median") for name in PHASES
        },
        "samples_per_s": rate,
        "tokens_per_s": tokens / wall_s if wall_s else nan,
        "data_share": _aggregate(counted, "data_s", "sum") / wall_s if wall_s else nan,
        "mfu": share * flops["model"],
        "hfu": share * flops["hardware"],
        "flops_per_sample": dict(flops),
        "peak_flops_per_device": peak_flops,
        "devices": devices,
        "loss_first": _last(steps.head(1), "loss"),
        "loss_last": _last(steps, "loss"),
        "accuracy_last": _last(steps, "accuracy"),
        "validation_loss_last": _last(steps, "validation_loss"),
        "validation_accuracy_last": _last(steps, "validation_accuracy"),
        "memory_peak_bytes": _aggregate(steps, "memory_peak_bytes", "max"),
        "host_rss_bytes": _aggregate(steps, "host_rss_bytes", "max"),
        **_energy(counted, samples, tokens, power_cap_w),
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
    figures = _summarise(
        run.steps,
        flops=flops_per_sample(
            spec.shapes, spec.sequence, spec.plan.recompute, frozen=spec.lora_rank > 0
        ),
        devices=spec.plan.world_size,
        peak_flops=env.get("peak_flops") or nan,
        power_cap_w=env.get("power_cap_w") or nan,
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
        **{name: env.get(name) for name in ("device", "peak_source", "power_source")},
    }
    summary = about | figures | more
    write_json(directory / "summary.json", summary)
    return summary


def _core_flops(shapes: Transformer, sequence: int) -> float:
    """Scores and their product with the values, of all layers."""
    return 4 * sequence**2 * shapes.core_width * shapes.layers


def _ends_flops(shapes: Transformer, sequence: int) -> float:
    """Embedding and head, which are not recomputed."""
    if not shapes.image:
        return shapes.forward_flops(1, sequence) - replace(
            shapes, vocab=0
        ).forward_flops(1, sequence)
    patches = 2 * (sequence - 1) * 3 * shapes.patch**2 * shapes.hidden
    return patches + 2 * shapes.hidden * shapes.classes


def _energy(
    counted: pd.DataFrame, samples: float, tokens: float, cap_w: float
) -> dict[str, float]:
    joule = (
        counted["energy_j"].sum(min_count=max(len(counted), 1))
        if "energy_j" in counted
        else nan
    )
    parts = {"power_w": counted["total_s"].sum(), "energy_per_step_j": len(counted)}
    parts |= {"energy_per_sample_j": samples, "energy_per_token_j": tokens}
    energy = {
        name: float(joule / count) if count else nan for name, count in parts.items()
    }
    return energy | {"power_cap_w": cap_w, "power_share": energy["power_w"] / cap_w}


def _quartiles(values: pd.Series) -> dict[str, float]:
    """Median, quartiles and mean."""
    return {
        "median": values.median(),
        "p25": values.quantile(0.25),
        "p75": values.quantile(0.75),
        "mean": values.mean(),
    }


def _aggregate(table: pd.DataFrame, column: str, how: str) -> float:
    return float(table[column].agg(how)) if column in table and len(table) else nan


def _last(table: pd.DataFrame, column: str) -> float:
    values = table[column].dropna() if column in table else ()
    return float(values.iloc[-1]) if len(values) else nan
