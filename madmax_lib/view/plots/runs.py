"""How do training runs look, one alone and strategies side by side? Pictures of what `runs.read` reads.

What is measured is filled; hatched is the memory that `simulator.memory.memory` predicts. A run is named by its
strategy.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from madmax_lib.accounting import breakdown
from madmax_lib.runs.read import Run, runs_table
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.traces.read.cache import content_sha256
from madmax_lib.traces.read.kineto import read_trace
from madmax_lib.units import bytes_unit, format_bytes, format_s
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, kind_legend, new_axes

__all__ = [
    "memory_table",
    "plot_losses",
    "plot_run",
    "plot_run_memory",
    "plot_run_phases",
    "plot_shares",
    "plot_speed",
    "trace_breakdowns",
]  # fmt: skip

_PHASES = {"data": "#303030", "forward": "#9dbada", "backward": COLORS["compute"], "optimizer": COLORS["other"],
           "other": COLORS["idle"]}  # fmt: skip
_SHARES = {"compute": "compute", "exposed_comm": "comm", "idle": "idle"}  # column: kind
_FEW_STEPS = 20  # up to which there is room for the loss of each
_FEW_PERCENT = 9  # parts below are drawn without a number


def plot_run(run: Run, ax: Axes | None = None) -> Axes:
    """Time of each step of a run by phase, and its loss as text above.

    Raises ValueError for a run that made no step, with its status and the error it ended with.
    """
    if not len(run.steps):
        told = run.summary
        raise ValueError(f"{run.spec.name} made no step: {told.get('status', 'unfinished')} {told.get('error', '')}")
    ax = ax or new_axes(height=2.8)
    parts = _parts(run.steps)
    _stack(ax, parts * 1e3, _PHASES, horizontal=False)
    top_ms = float(parts.sum(axis=1).max() * 1e3)
    if len(parts) <= _FEW_STEPS:
        above = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        for step, (total_s, loss) in enumerate(zip(parts.sum(axis=1), run.steps["loss"], strict=True)):
            ax.annotate(f"{loss:.2f}", (step, total_s * 1e3), **above)
    ax.set(xlabel="step (above: loss)", ylabel="time [ms]", ylim=(0, top_ms * 1.12), xlim=(-0.6, len(parts) - 0.4))
    ax.set_xticks(range(0, len(parts), max(len(parts) // 10, 1)))
    ax.grid(axis="y")
    ax.set_title(f"{run.spec.model}, {run.spec.strategy}: {format_s(run.summary['step_s']['median'])} per step")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return keep_data(ax, parts.assign(step=run.steps["step"], loss=run.steps["loss"]))


def plot_speed(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Median time of a step by strategy, with its quartiles, by number of split dimensions; MFU as text."""
    table = runs_table(runs)
    ax = ax or new_axes(height=1.2 + 0.26 * len(table))
    low, high = table["step_s"] - table["step_p25_s"], table["step_p75_s"] - table["step_s"]
    shades = [COLORS["compute"] if odd else "#9dbada" for odd in table["dimensions"] % 2]
    error = {"xerr": np.stack([low, high]) * 1e3, "error_kw": {"elinewidth": 0.8, "capsize": 2}}
    ax.barh(range(len(table)), table["step_s"] * 1e3, height=0.7, color=shades, **error)
    for place, row in enumerate(table.itertuples()):
        text = f"{row.samples_per_s:.3g} samples/s, MFU {row.mfu:.1%}"
        ax.annotate(text, (row.step_p75_s * 1e3, place), (5, 0), textcoords="offset points", va="center", fontsize=7)
    _strategy_axis(ax, table)
    ax.set(xlabel="median step [ms], quartiles as line", xlim=(0, table["step_p75_s"].max() * 1e3 * 1.45))
    reach = f"{format_s(table['step_s'].min())} to {format_s(table['step_s'].max())} per step"
    ax.set_title(f"{table['model'].iloc[0]} on {_machine(runs)}: {reach}")
    return keep_data(ax, table, _origin(runs))


def plot_losses(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Loss by step of all runs over that of the run on one process; the title tells the largest difference.

    Runs with LoRA train another model and are left out. Raises ValueError if no run is on one process.
    """
    runs = {name: run for name, run in runs.items() if not run.spec.lora_rank}
    reference = next((name for name, run in runs.items() if run.spec.plan.world_size == 1), None)
    if reference is None:
        raise ValueError(f"none of the runs {', '.join(runs)} is on one process")
    ax = ax or new_axes(height=3.0, width=5.6)
    rows = [run.steps[["step", "loss"]].assign(run=name) for name, run in runs.items()]
    table = pd.concat(rows, ignore_index=True)
    base = runs[reference].steps.set_index("step")["loss"]
    table["difference"] = (table["loss"] - table["step"].map(base)).abs()
    ax.plot(base.index, base, color=COLORS["compute"], linewidth=3, alpha=0.6, label="one process")
    label, ring = "each of the others", {"marker": "o", "markersize": 3, "markerfacecolor": "none"}
    for _, part in table[table["run"] != reference].groupby("run"):
        ax.plot(part["step"], part["loss"], color=COLORS["comm"], linewidth=0.8, label=label, **ring)
        label = None
    ax.legend()
    ax.set(xlabel="step", ylabel="loss")
    ax.grid(axis="y")
    worst = table["difference"].max()
    ways = f"{len(runs) - 1} way{'s' if len(runs) > 2 else ''}"
    ax.set_title(f"{ways} to split {runs[reference].spec.model}: losses differ by {worst:.0e} at most")
    return keep_data(ax, table, _origin(runs))


def plot_run_phases(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Median time of each phase of a step by strategy, on rank 0; other: waiting and what has no label."""
    table = runs_table(runs)
    ax = ax or new_axes(height=1.4 + 0.26 * len(table))
    counted = {name: run.steps[run.steps["step"] >= run.spec.warmup] for name, run in runs.items()}
    parts = pd.DataFrame([_parts(counted[name]).median() for name in table["run"]])
    _stack(ax, parts * 1e3, _PHASES)
    _strategy_axis(ax, table)
    ax.set(xlabel="median time on rank 0 [ms]")
    share = (parts["backward"] / parts.sum(axis=1)).median()
    ax.set_title(f"Backward takes {share:.0%} of a step (median of the strategies)")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return keep_data(ax, table[["run", "strategy", "dimensions", "ranks"]].join(parts), _origin(runs))


def trace_breakdowns(runs: dict[str, Run]) -> pd.DataFrame:
    """Breakdown of the traced steps of each run, mean of its ranks: shares of the time, and overlap.

    Columns: run, strategy, dimensions, ranks, compute, exposed_comm, idle (0..1), overlap. From breakdown.csv where a
    run has one (it was slimmed), else from its traces. attrs carry the files.
    """
    rows, files = [], {}
    for row in runs_table(runs).itertuples():
        path = runs[row.run].directory / "breakdown.csv"
        if path.exists():
            table, told = pd.read_csv(path), {"breakdown.csv": content_sha256(path)}
        else:
            table = breakdown(read_trace(runs[row.run].directory))
            told = {file["name"]: file["sha256"] for file in table.attrs["provenance"]["files"].values()}
        files |= {f"{row.run}/{name}": sha256 for name, sha256 in told.items()}
        shares = {name: (table[f"{name}_s"] / table["total_s"]).mean() for name in _SHARES}
        about = {"run": row.run, "strategy": row.strategy, "dimensions": row.dimensions, "ranks": row.ranks}
        overlap = table["overlap"].mean() if row.ranks > 1 else np.nan  # one process has nothing to hide
        rows.append(about | shares | {"overlap": overlap})
    found = pd.DataFrame(rows)
    found.attrs["provenance"] = {"files": files}
    return found


def plot_shares(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Shares of a traced step by strategy, of `trace_breakdowns`: compute, exposed communication, idle and other."""
    ax = ax or new_axes(height=1.4 + 0.26 * len(table))
    stack = _stack(ax, table[list(_SHARES)] * 100, {name: COLORS[kind] for name, kind in _SHARES.items()})
    for name, bars in zip(_SHARES, stack, strict=True):
        texts = [f"{bar.get_width():.0f}%" if bar.get_width() > _FEW_PERCENT else "" for bar in bars]
        ax.bar_label(bars, texts, label_type="center", fontsize=7, color="white" if name == "compute" else "black")
    _strategy_axis(ax, table)
    ax.set(xlabel="share of the traced steps [%]", xlim=(0, 100))
    split = table[table["ranks"] > 1]
    most = split.loc[split["exposed_comm"].idxmax()] if len(split) else None
    ax.set_title("One process does not communicate" if most is None else
                 f"{most['strategy']} exposes most communication: {most['exposed_comm']:.0%} of a step")  # fmt: skip
    kind_legend(ax, list(_SHARES.values()), {"comm": "exposed communication"})
    return keep_data(ax, table)


def memory_table(runs: dict[str, Run]) -> pd.DataFrame:
    """Memory of the fullest rank's device by run, beside its plan and status.

    predicted_bytes: allocated at the peak, of `mm.memory` in the habits of this project's runs: gradients are views
    into DDP's buckets, low-rank training has gradients of its updates alone. measured_bytes:
    torch.cuda.max_memory_allocated, NaN on a CPU, where nothing counts allocations (host_rss_bytes holds Python and
    torch too). A run out of memory has its plan and prediction here, and what its first steps took.
    """
    told = runs_table(runs)[["run", "strategy", "dimensions", "status"]]
    rows = []
    for run in (runs[name] for name in told["run"]):
        peaks = [rank["memory_peak_bytes"] for rank in run.summary.get("ranks", ())]
        peaks = [size for size in (*peaks, run.summary.get("memory_peak_bytes")) if size is not None]
        rows.append({"plan": str(run.spec.plan), "predicted_bytes": _predicted(run),
                     "measured_bytes": float(max(peaks, default=np.nan))})  # fmt: skip
    return told.join(pd.DataFrame(rows))


def plot_run_memory(runs: dict[str, Run], ax: Axes | None = None) -> Axes:
    """Memory of `memory_table` by strategy: predicted hatched, measured filled below it where the runs had GPUs."""
    table = memory_table(runs)
    ax = ax or new_axes(height=1.2 + 0.26 * len(table))
    unit, factor = bytes_unit(table[["predicted_bytes", "measured_bytes"]].max(axis=None))
    measured, places = table["measured_bytes"].notna().any(), np.arange(len(table))
    height = 0.36 if measured else 0.72
    ax.barh(places - (height / 2 if measured else 0), table["predicted_bytes"] / factor, height=height,
            label="predicted", **fill_of("other", "simulated"))  # fmt: skip
    if measured:
        ax.barh(places + height / 2, table["measured_bytes"] / factor, height=height, label="measured",
                **fill_of("other", None))  # fmt: skip
        ax.legend()
    _strategy_axis(ax, table)
    least, most = (format_bytes(size) for size in table["predicted_bytes"].agg(["min", "max"]))
    known = "" if measured else "; a CPU measures none"
    ax.set(xlabel=f"memory of a rank at its peak [{unit}]{known}")
    ax.set_title(f"{runs[table['run'].iloc[0]].spec.model} needs {least} to {most} per rank, as predicted")
    return keep_data(ax, table, _origin(runs))


def _predicted(run: Run) -> float:
    """Bytes allocated at the peak of the fullest rank."""
    spec, job = run.spec, run.env.get("job", {})
    trainable = job.get("trained_local_parameters", 1) / job.get("local_parameters", 1)
    stack = "deepspeed" if spec.engine == "deepspeed" else "torch"
    table = memory(spec.shapes, spec.plan, sequence=spec.sequence or None, dtype=spec.dtype, stack=stack,
                   global_batch=spec.global_batch, trainable=trainable)  # fmt: skip
    return peak_bytes(table[(table["component"] != "buckets") | (stack != "torch")], allocated=True)


def _parts(steps: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase and of what is left of the step, one row per step."""
    parts = pd.DataFrame({name: steps[f"{name}_s"] for name in _PHASES if name != "other"})
    return parts.assign(other=(steps["total_s"] - parts.sum(axis=1)).clip(lower=0)).reset_index(drop=True)


def _stack(ax: Axes, parts: pd.DataFrame, colors: dict[str, str], *, horizontal: bool = True) -> list[BarContainer]:
    """Columns of a table as bars upon each other, a row each."""
    begin, places, drawn = np.zeros(len(parts)), range(len(parts)), []
    for name, color in colors.items():
        size, look = parts[name].to_numpy(), {"color": color, "label": name}
        drawn.append(ax.barh(places, size, left=begin, height=0.75, **look) if horizontal else
                     ax.bar(places, size, bottom=begin, **look))  # fmt: skip
        begin = begin + size
    return drawn


def _strategy_axis(ax: Axes, table: pd.DataFrame) -> None:
    """A row per run, the first on top, with its strategy and number of dimensions."""
    ax.set_yticks(range(len(table)), [f"{row.strategy}  {row.dimensions}D" for row in table.itertuples()])
    ax.set_ylim(len(table) - 0.4, -0.6)


def _machine(runs: dict[str, Run]) -> str:
    """Device and cores of the first run."""
    env = next(iter(runs.values())).env
    return f"{env['cores']} CPU cores" if env.get("backend") != "nccl" else env["device"]


def _origin(runs: dict[str, Run]) -> pd.DataFrame:
    """An empty table that carries the steps.csv of the runs as its origin."""
    origin = pd.DataFrame()
    files = {f"{name}/steps.csv": content_sha256(run.directory / "steps.csv") for name, run in runs.items()}
    origin.attrs["provenance"] = {"files": files}
    return origin
