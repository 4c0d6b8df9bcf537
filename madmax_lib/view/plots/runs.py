"""Pictures of training runs, one alone and strategies side by side.

Tables are those of `runs.read` and `calibration.published.run_rows`. What is measured is
filled; hatched is the memory that `simulator.memory` predicts. A run is named by its
strategy.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import bytes_unit, format_bytes, format_s
from madmax_lib.calibration.fit import fingerprint
from madmax_lib.calibration.published.run_rows import steps_files
from madmax_lib.catalog import data_file
from madmax_lib.runs.read import PHASES, Run, runs_table
from madmax_lib.timeline import with_origin
from madmax_lib.view.drawing import (
    COLORS,
    DARK,
    SERIES,
    bar_chart,
    bars,
    fill_of,
    finish,
    line_key,
    lines,
    new_axes,
    plural,
)

_PHASE_COLORS = ("#303030", "#9dbada", "compute", "other", "idle")
_PHASES = dict(zip((*PHASES, "other"), _PHASE_COLORS, strict=True))
_SHARES = {"compute": "compute", "exposed communication": "comm", "idle": "idle"}
_FEW_PERCENT = 9  # parts below are drawn without a number


# of a calibration's results: column behind measured_ and predicted_, factor to what is
# drawn (ms or per cent), fill and axis
_QUANTITIES = pd.read_csv(data_file("view/run_quantities.csv"), index_col="what")


def plot_run(run: Run, ax: Axes | None = None) -> Axes:
    """Time of each step of a run by phase.

    Raises ValueError for a run that made no step, with its status and the error it
    ended with.
    """
    if run.steps.empty:
        status = run.summary.get("status", "unfinished")
        error = run.summary.get("error", "")
        raise ValueError(f"{run.spec.name} made no step: {status} {error}")
    ax = ax or new_axes(height=2.8)
    parts = _phases(run.steps)
    count = len(parts)
    loss = run.steps["loss"]
    colors = [COLORS.get(fill, fill) for fill in _PHASES.values()]
    parts.mul(1e3).plot.bar(ax=ax, stacked=True, color=colors, width=0.8, rot=0)
    ax.set_xticks(range(0, count, max(count // 10, 1)))  # ten or so
    ax.grid(axis="y")
    median = format_s(run.summary["step_s"]["median"])
    return finish(
        ax,
        parts.assign(step=run.steps["step"], loss=loss),
        f"{run.spec.model}, {run.spec.strategy}: {median} per step, loss "
        f"{loss.iloc[0]:.2f} to {loss.iloc[-1]:.2f}",
        x="step",
        y="time [ms]",
        xlim=(-0.6, count - 0.4),
        key=_PHASES,
        where="beside",
    )


def plot_speed(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Median time of a step by strategy, with its quartiles, by number of split
    dimensions; MFU as text.
    """
    table = runs_table(runs)
    quartiles_ms = (table["step_p25_s"] * 1e3, table["step_p75_s"] * 1e3)
    fastest = format_s(table["step_s"].min())
    slowest = format_s(table["step_s"].max())
    return bar_chart(
        ax,
        table,
        table["step_s"] * 1e3,
        f"{table['model'].iloc[0]}: {fastest} to {slowest} per step",
        x="median step [ms], with its quartiles",
        rows=_strategies(table),
        origin={"files": steps_files(runs)},
        error=quartiles_ms,
        notes=[
            f"{row.samples_per_s:.3g} samples/s, MFU {row.mfu:.1%}"
            for row in table.itertuples()
        ],
    )


def plot_losses(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Loss by step of all runs over that of the run on the fewest processes; the title
    tells the largest difference.

    Runs with LoRA train another model; they are left out where others do not have it.
    """
    runs = {name: run for name, run in runs.items() if not run.spec.lora_rank} or runs
    # fewest processes: nothing is split, or least
    reference = min(runs, key=lambda name: runs[name].spec.plan.world_size)
    spec = runs[reference].spec
    label = "one process" if spec.plan.world_size == 1 else spec.strategy
    ax = ax or new_axes(height=3.0, width=5.6)
    table = pd.concat(
        [run.steps[["step", "loss"]].assign(run=name) for name, run in runs.items()],
        ignore_index=True,
    )
    alone = table[table["run"] == reference]
    # against the reference at the same step
    same_step = table["step"].map(alone.set_index("step")["loss"])
    table["difference"] = (table["loss"] - same_step).abs()
    wide = {"color": DARK, "lw": 3, "alpha": 0.4}
    thin = {"color": SERIES[0], "lw": 0.8}
    others = [line_key("each of the others", **thin)] if len(runs) > 1 else []
    lines(ax, alone, "step", "loss", **wide)
    lines(ax, table[table["run"] != reference], "step", "loss", units="run", **thin)
    ax.grid(axis="y")
    ways = plural(len(runs) - 1, "way")
    most = table["difference"].max()
    return finish(
        ax,
        table,
        f"{ways} to split {spec.model}: losses differ by {most:.0e} at most",
        x="step",
        y="loss",
        key=[line_key(label, **wide), *others],
        where="best",
        origin={"files": steps_files(runs)},
    )


def plot_run_phases(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Median time of each phase of a step by strategy, on rank 0; other: waiting and
    what has no label.
    """
    table = runs_table(runs)
    medians = []
    for run in map(runs.get, table["run"]):
        # the first steps compile and allocate
        counted = run.steps[run.steps["step"] >= run.spec.warmup]
        medians.append(_phases(counted).median())
    parts = pd.DataFrame(medians)
    share = (parts["backward"] / parts.sum(axis=1)).median()
    return bar_chart(
        ax,
        table[["run", "strategy", "dimensions", "ranks"]].join(parts),
        parts * 1e3,
        f"Backward takes {share:.0%} of a step (median of the strategies)",
        x="median time on rank 0 [ms]",
        rows=_strategies(table),
        key=_PHASES,
        where="beside",
        origin={"files": steps_files(runs)},
        fill=_PHASES,
    )


def plot_shares(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Shares of a traced step by strategy, of `trace_breakdowns`: compute, exposed
    communication, idle and other.
    """
    percent = (
        table[["compute", "exposed_comm", "idle"]].set_axis(list(_SHARES), axis=1) * 100
    )
    inside = percent.map(lambda size: f"{size:.0f}%" if size > _FEW_PERCENT else "")
    most = table.loc[table["exposed_comm"].idxmax()]
    return bar_chart(
        ax,
        table,
        percent,
        f"{most['strategy']} exposes most communication: "
        f"{most['exposed_comm']:.0%} of a step",
        x="share of the traced steps [%]",
        rows=_strategies(table),
        reach=100,
        key=_SHARES,
        fill=_SHARES,
        inside=inside,
    )


def plot_run_memory(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Memory of `memory_table` by strategy: predicted hatched, measured filled below it
    where the runs had GPUs.
    """
    ax = ax or new_axes(height=1.2 + 0.26 * len(table))
    largest = table[["predicted_bytes", "measured_bytes"]].max(axis=None)
    unit, factor = bytes_unit(largest, binary=True)
    key = {"predicted": fill_of("memory", "simulated")}
    # runs on CPUs have no allocator to ask
    if table["measured_bytes"].notna().any():
        key["measured"] = fill_of("memory")
    for number, (name, fill) in enumerate(key.items()):
        bars(ax, table[f"{name}_bytes"] / factor, fill=fill, slot=(number, len(key)))
    # what every run has
    predicted = table["predicted_bytes"]
    least = format_bytes(predicted.min(), binary=True)
    most = format_bytes(predicted.max(), binary=True)
    return finish(
        ax,
        table,
        f"{table.attrs['model']} needs {least} to {most} per rank, as predicted",
        x=f"memory of a rank at its peak [{unit}]",
        rows=_strategies(table),
        key=key,
    )


def plot_beside(
    table: pd.DataFrame, what: str = "step", ax: Axes | None = None
) -> Axes:
    """Measured (filled) and predicted (hatched) of each run of a calibration. table:
    its results, by run.

    what: step, in ms, or compute, exposed_comm or overlap, in per cent of the step or
    of the communication.
    """
    column, factor, fill, axis = _QUANTITIES.loc[what]
    numbers = factor * table[[f"measured_{column}", f"predicted_{column}"]]
    measured, predicted = (numbers[name] for name in numbers)
    # rows of nothing beside nothing are counted in the title
    seen = (numbers >= 1).any(axis=1)
    key = {
        "measured": fill_of(fill),
        "predicted before the run": fill_of(fill, "simulated"),
    }
    ax = ax or new_axes(height=1.4 + 0.34 * seen.sum())
    for number, (paint, values) in enumerate(zip(key.values(), numbers, strict=True)):
        lengths = numbers.loc[seen, values]
        notes = lengths.map("{:.0f}".format)
        bars(ax, lengths.fillna(0.0), fill=paint, slot=(number, 2), notes=notes)
    off = (predicted - measured).abs()
    name = what.replace("_comm", " communication").capitalize()
    title = (
        f"{name} is off by {plural(round(off.mean()), 'point')} on average, "
        f"{off.max():.0f} at worst ({off.idxmax()})"
    )
    if not seen.all():
        few = f"{(~seen).sum()} of {len(seen)} runs"
        title += f"\nNot drawn: {few}, below 1% both measured and predicted"
    # times differ by machine: relative errors compare, points do not
    if what == "step":
        error = off / measured
        title = (
            f"Steps are predicted within {error.median():.1%} (median), "
            f"{error.max():.1%} at worst"
        )
    # of the numbers: the file itself may be written again
    results = {"sha256": fingerprint(table.reset_index())}
    runs = table["strategy"][seen].items()
    return finish(
        ax,
        table[["strategy"]].join(numbers).reset_index(),
        title,
        x=axis,
        rows=[f"{run} ({strategy})" for run, strategy in runs],
        key=key,
        columns=2,
        origin=with_origin(table.copy(), {"files": {"results.csv": results}}),
    )


def _phases(steps):
    """Seconds of each phase and of what is left of the step, one row per step."""
    parts = pd.DataFrame({name: steps[f"{name}_s"] for name in PHASES})
    rest_s = steps["total_s"] - parts.sum(axis=1)
    return parts.assign(other=rest_s.clip(lower=0)).reset_index(drop=True)


def _strategies(table):
    """Row labels: strategy and number of dimensions of each run."""
    return [f"{row.strategy}  {row.dimensions}D" for row in table.itertuples()]
