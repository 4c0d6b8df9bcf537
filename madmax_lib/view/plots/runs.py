"""How do training runs look, one alone and strategies side by side? Pictures of their
tables.

Tables are those of `runs.read` and `calibration.run_tables`. What is measured is
filled; hatched is the memory that `simulator.memory` predicts. A run is named by its
strategy.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import bytes_unit, format_bytes, format_s
from madmax_lib.calibration.fit import fingerprint
from madmax_lib.calibration.published.run_tables import steps_files
from madmax_lib.runs.read import PHASES, Run, runs_table
from madmax_lib.timeline.timeline import with_origin
from madmax_lib.view import drawing as draw

__all__ = [
    "plot_beside",
    "plot_losses",
    "plot_run",
    "plot_run_memory",
    "plot_run_phases",
    "plot_shares",
    "plot_speed",
]

_PHASES = dict(
    zip(
        (*PHASES, "other"),
        ("#303030", "#9dbada", "compute", "other", "idle"),
        strict=True,
    )
)
_SHARES = {"compute": "compute", "exposed communication": "comm", "idle": "idle"}
_FEW_STEPS = 20  # up to which there is room for the loss of each
_FEW_PERCENT = 9  # parts below are drawn without a number

_BESIDE = {  # column of a calibration's results, its unit, colour
    "step": ("s", 1e3, "other"),
    "compute": ("compute", 100.0, "compute"),
    "exposed_comm": ("exposed_comm", 100.0, "comm"),
    "overlap": ("overlap", 100.0, "comm"),
}
_UNITS = ("per cent", "ms per step")


def plot_run(run: Run, ax: Axes | None = None) -> Axes:
    """Time of each step of a run by phase, and its loss as text above.

    Raises ValueError for a run that made no step, with its status and the error it
    ended with.
    """
    if not len(run.steps):
        status = run.summary.get("status", "unfinished")
        error = run.summary.get("error", "")
        raise ValueError(f"{run.spec.name} made no step: {status} {error}")
    ax = ax or draw.new_axes(height=2.8)
    parts = _phases(run.steps)
    loss = run.steps["loss"]
    notes = loss.map("{:.2f}".format) if len(parts) <= _FEW_STEPS else None
    ends = draw.bars(ax, parts * 1e3, _PHASES, notes=notes, upright=True, height=0.8)
    ax.set_xticks(range(0, len(parts), max(len(parts) // 10, 1)))
    ax.grid(axis="y")
    title = (
        f"{run.spec.model}, {run.spec.strategy}: "
        f"{format_s(run.summary['step_s']['median'])} per step"
    )
    limits = {"ylim": (0, ends.max() * 1.12), "xlim": (-0.6, len(parts) - 0.4)}
    data = parts.assign(step=run.steps["step"], loss=loss)
    ending = {
        "x": "step (above: loss)",
        "y": "time [ms]",
        "key": _PHASES,
        "where": "beside",
    }
    return draw.finish(ax, data, title, **ending, **limits)


def plot_speed(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Median time of a step by strategy, with its quartiles, by number of split
    dimensions; MFU as text.
    """
    table = runs_table(runs)
    shades = [
        _PHASES["backward"] if odd else _PHASES["forward"]
        for odd in table["dimensions"] % 2
    ]
    notes = [
        f"{row.samples_per_s:.3g} samples/s, MFU {row.mfu:.1%}"
        for row in table.itertuples()
    ]
    ending = {
        "error": (table["step_p25_s"] * 1e3, table["step_p75_s"] * 1e3),
        "notes": notes,
    }
    ending |= {
        "x": "median step [ms], quartiles as line",
        "rows": _strategies(table),
        "origin": {"files": steps_files(runs)},
    }
    fastest = format_s(table["step_s"].min())
    slowest = format_s(table["step_s"].max())
    title = f"{table['model'].iloc[0]}: {fastest} to {slowest} per step"
    return draw.bar_chart(ax, table, table["step_s"] * 1e3, title, shades, **ending)


def plot_losses(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Loss by step of all runs over that of the run on the fewest processes; the title
    tells the largest difference.

    Runs with LoRA train another model; they are left out where others do not have it.
    """
    runs = {name: run for name, run in runs.items() if not run.spec.lora_rank} or runs
    reference = min(runs, key=lambda name: runs[name].spec.plan.world_size)
    first = (
        "one process"
        if runs[reference].spec.plan.world_size == 1
        else runs[reference].spec.strategy
    )
    ax = ax or draw.new_axes(height=3.0, width=5.6)
    rows = [run.steps[["step", "loss"]].assign(run=name) for name, run in runs.items()]
    table = pd.concat(rows, ignore_index=True)
    alone = table[table["run"] == reference]
    table["difference"] = (
        table["loss"] - table["step"].map(alone.set_index("step")["loss"])
    ).abs()
    ax.plot(
        alone["step"],
        alone["loss"],
        color=draw.COLORS["compute"],
        linewidth=3,
        alpha=0.6,
        label=first,
    )
    others = table[table["run"] != reference].sort_values("run", kind="stable")
    labels = dict.fromkeys(others["run"].head(1), "each of the others")
    ring = {
        "marker": "o",
        "markersize": 3,
        "markerfacecolor": "none",
        "linewidth": 0.8,
        "color": draw.COLORS["comm"],
    }
    draw.lines(ax, others, "step", "loss", by="run", labels=labels, **ring)
    draw.legend(ax, where="best")
    ax.grid(axis="y")
    ways = draw.plural(len(runs) - 1, "way")
    model = runs[reference].spec.model
    title = (
        f"{ways} to split {model}: losses differ by "
        f"{table['difference'].max():.0e} at most"
    )
    return draw.finish(
        ax, table, title, origin={"files": steps_files(runs)}, x="step", y="loss"
    )


def plot_run_phases(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Median time of each phase of a step by strategy, on rank 0; other: waiting and
    what has no label.
    """
    table = runs_table(runs)
    counted = [
        runs[name].steps[runs[name].steps["step"] >= runs[name].spec.warmup]
        for name in table["run"]
    ]
    parts = pd.DataFrame([_phases(steps).median() for steps in counted])
    share = (parts["backward"] / parts.sum(axis=1)).median()
    title = f"Backward takes {share:.0%} of a step (median of the strategies)"
    data = table[["run", "strategy", "dimensions", "ranks"]].join(parts)
    ending = {
        "x": "median time on rank 0 [ms]",
        "rows": _strategies(table),
        "key": _PHASES,
        "where": "beside",
    }
    return draw.bar_chart(
        ax,
        data,
        parts * 1e3,
        title,
        _PHASES,
        origin={"files": steps_files(runs)},
        **ending,
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
    title = (
        f"{most['strategy']} exposes most communication: "
        f"{most['exposed_comm']:.0%} of a step"
    )
    ending = {
        "x": "share of the traced steps [%]",
        "rows": _strategies(table),
        "reach": 100,
        "key": _SHARES,
    }
    return draw.bar_chart(ax, table, percent, title, _SHARES, inside=inside, **ending)


def plot_run_memory(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Memory of `memory_table` by strategy: predicted hatched, measured filled below it
    where the runs had GPUs.
    """
    ax = ax or draw.new_axes(height=1.2 + 0.26 * len(table))
    unit, factor = bytes_unit(
        table[["predicted_bytes", "measured_bytes"]].max(axis=None)
    )
    key = {"predicted": draw.fill_of("other", "simulated")}
    if table["measured_bytes"].notna().any():
        key["measured"] = draw.fill_of("other")
    for number, (name, fill) in enumerate(key.items()):
        draw.bars(ax, table[f"{name}_bytes"] / factor, fill, slot=(number, len(key)))
    least, most = (
        format_bytes(size) for size in table["predicted_bytes"].agg(["min", "max"])
    )
    title = f"{table.attrs['model']} needs {least} to {most} per rank, as predicted"
    x = f"memory of a rank at its peak [{unit}]"
    return draw.finish(ax, table, title, x=x, rows=_strategies(table), key=key)


def plot_beside(
    table: pd.DataFrame, what: str = "step", ax: Axes | None = None
) -> Axes:
    """Measured (filled) and predicted (hatched) of each run of a calibration. table:
    its results, by run.

    what: step, in ms, or compute, exposed_comm or overlap, in per cent of the step or
    of the communication.
    """
    name, factor, kind = _BESIDE[what]
    shown = factor * table[[f"measured_{name}", f"predicted_{name}"]]
    ax = ax or draw.new_axes(height=1.4 + 0.34 * len(table))
    for place, (column, source) in enumerate(
        zip(shown, (None, "simulated"), strict=True)
    ):
        notes = shown[column].map("{:.0f}".format)
        draw.bars(
            ax,
            shown[column].fillna(0.0),
            [kind] * len(shown),
            source=source,
            slot=(place, 2),
            notes=notes,
        )
    off = (shown.iloc[:, 1] - shown.iloc[:, 0]).abs()
    title = (
        f"{what.replace('_comm', ' communication').capitalize()} is off by "
        f"{off.mean():.0f} points on average"
    )
    if what == "step":
        off = off / shown.iloc[:, 0]
        title = (
            f"Steps are predicted within {off.median():.1%} (median), "
            f"{off.max():.1%} at worst"
        )
    key = {
        "measured": draw.fill_of(kind),
        "predicted before the run": draw.fill_of(kind, "simulated"),
    }
    rows = [
        f"{run} ({strategy})"
        for run, strategy in zip(table.index, table["strategy"], strict=True)
    ]
    data = table[["strategy"]].join(shown).reset_index()
    origin = with_origin(
        table.copy(),
        {"files": {"results.csv": {"sha256": fingerprint(table.reset_index())}}},
    )
    return draw.finish(
        ax,
        data,
        title,
        x=_UNITS[what == "step"],
        rows=rows,
        key=key,
        columns=2,
        origin=origin,
    )


def _phases(steps: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase and of what is left of the step, one row per step."""
    parts = pd.DataFrame({name: steps[f"{name}_s"] for name in PHASES})
    return parts.assign(
        other=(steps["total_s"] - parts.sum(axis=1)).clip(lower=0)
    ).reset_index(drop=True)


def _strategies(table: pd.DataFrame) -> list[str]:
    """Row labels: strategy and number of dimensions of each run."""
    return [f"{row.strategy}  {row.dimensions}D" for row in table.itertuples()]
