"""How well did the steps just recorded overlap? A line per rank, printed by a training
loop of somebody else.

`on_trace_ready` is for torch.profiler, `after_trace` for torchtitan's
trace_post_processor, `hf_callback` and `lightning_callback` for the trainers of Hugging
Face and Lightning. Nothing here raises into the loop: what goes wrong is one line on
standard error. torch is the loop's own: it is never imported here.
"""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from madmax_lib.base.units import format_s
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.operators.roofline import mfu
from madmax_lib.traces.read.side_tables import read_side_tables
from madmax_lib.traces.read.timeline_rows import read_file
from madmax_lib.traces.waits.step_times import unmarked

__all__ = ["after_trace", "hf_callback", "lightning_callback", "on_trace_ready"]

_SCHEDULE = {"wait": 5, "warmup": 2, "active": 3, "repeat": 1}


def on_trace_ready(directory: str | Path) -> Callable[[object], None]:
    """For `torch.profiler.profile(on_trace_ready=...)`: write rankN_stepM.json into the
    directory, and print its line.

    The line has the time of a step, how much of the communication compute hides, what
    is exposed, idle time and MFU.
    """

    def ready(prof) -> None:
        _print_of(lambda: _written(prof, Path(directory)))

    return ready


def after_trace(trace_path: str | Path) -> None:
    """Print the line of a trace that has been written: torchtitan's
    `Function.Config(fn=after_trace)`.
    """
    _print_of(lambda: Path(trace_path))


def hf_callback(directory: str | Path, **schedule: int):
    """A callback of a `transformers.Trainer` that profiles some of its steps, writes
    the trace and prints its line.

    schedule: wait, warmup, active and repeat as of torch.profiler.schedule; left out,
    steps 8 to 10 are recorded. Raises ModuleNotFoundError without transformers.
    """
    return _callback(import_module("transformers").TrainerCallback, directory, schedule)


def lightning_callback(directory: str | Path, **schedule: int):
    """The same for a Lightning `Trainer`, of the package lightning or
    pytorch_lightning, whichever is loaded.
    """
    package = next(
        (
            name
            for name in ("lightning.pytorch", "pytorch_lightning")
            if name in sys.modules
        ),
        "lightning",
    )
    return _callback(import_module(package).Callback, directory, schedule)


class _Hooks:
    """Hooks that begin, step and end a profiler; their names are those of both
    trainers.
    """

    def on_train_begin(self, *_, **__) -> None:
        _safely(self._begin)

    def on_step_end(self, *_, **__) -> None:
        _safely(self._step)

    def on_train_end(self, *_, **__) -> None:
        _safely(self._end)

    def on_train_batch_end(self, *_, **__) -> None:
        _safely(self._step)

    on_train_start = on_train_begin
    _profiler = None

    def _begin(self) -> None:
        profiler = sys.modules["torch"].profiler
        when = profiler.schedule(**_SCHEDULE | self._schedule)
        self._profiler = profiler.profile(
            schedule=when,
            on_trace_ready=on_trace_ready(self._directory),
            record_shapes=True,
        )
        self._profiler.start()

    def _step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def _end(self) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is not None:
            profiler.stop()


def _callback(base: type, directory: str | Path, schedule: dict[str, int]):
    if unknown := schedule.keys() - {*_SCHEDULE, "skip_first"}:
        raise ValueError(
            f"{min(unknown)} is not one of {', '.join([*_SCHEDULE, 'skip_first'])}"
        )
    return type(
        "TraceCallback",
        (_Hooks, base),
        {"_directory": directory, "_schedule": schedule},
    )()


def _safely(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"madmax: no summary of the trace: {text}", file=sys.stderr, flush=True)


def _print_of(write: Callable[[], Path]) -> None:
    _safely(lambda: print(_line(write()), flush=True))


def _written(prof, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank{_rank()}_step{prof.step_num}.json"
    prof.export_chrome_trace(str(path))
    return path


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _line(path: Path) -> str:
    """What a trace says, on one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        timeline = read_file(path, "", hta=False, user_kinds=None)
        (rank,) = timeline.ranks
        timeline = replace(
            timeline, side_tables=SideTables(partial(read_side_tables, path, rank))
        )
        timeline = timeline.select(steps=timeline.steps) if timeline.steps else timeline
        used = mfu(timeline)["mfu"].median()
    (row,) = breakdown(timeline).to_dict("records")
    why = next(
        (str(warning.message).partition(":")[0] for warning in caught),
        "few FLOPs are known",
    )
    return (
        f"madmax: rank {rank}, {_times(timeline, row)}, MFU "
        f"{f'{used:.1%}' if used == used else f'unknown ({why})'}"
    )


def _times(timeline: Timeline, row: dict) -> str:
    steps = max(len(timeline.steps), 1)
    total_s = max(row["total_s"], 1e-12)
    comm = "no communication"
    if row["comm_s"] > 0:
        comm = (
            f"{row['overlap']:.0%} of {format_s(row['comm_s'] / steps)} "
            "communication under compute, "
        )
        comm += (
            f"{format_s(row['exposed_comm_s'] / steps)} exposed "
            f"({row['exposed_comm_s'] / total_s:.1%})"
        )
    several = (
        f"{steps} steps of {format_s(total_s / steps)}"
        if steps > 1
        else f"a step of {format_s(total_s)}"
    )
    several += " (no step marks: the whole recording counts as one step)" * unmarked(
        timeline
    )
    return f"{several}: {comm}, {row['idle_s'] / total_s:.0%} idle"
