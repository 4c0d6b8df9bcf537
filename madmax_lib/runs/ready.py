"""A line per rank on the steps just recorded, printed by a training loop of somebody
else.

`on_trace_ready` is for torch.profiler, `after_trace` for torchtitan's
trace_post_processor, `hf_callback` and `lightning_callback` for the trainers of Hugging
Face and Lightning. Nothing here raises into the loop: what goes wrong is one line on
standard error. torch is the loop's own: it is never imported here.
"""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from madmax_lib.base import format_s
from madmax_lib.runs.record import rank_and_ranks, safely

# Five steps to settle (allocator, autotuning), two under a profiler that warms up.
_SCHEDULE = {"wait": 5, "warmup": 2, "active": 3, "repeat": 1}


def on_trace_ready(directory: str | Path) -> Callable[[object], None]:
    """Handler of `torch.profiler.profile(on_trace_ready=...)`: writes rankN_stepM.json
    into the directory, and prints its line.

    The line has the time of a step, how much of the communication compute hides, what
    is exposed, idle time and MFU.
    """

    def write(prof):
        path = Path(directory) / f"rank{rank_and_ranks()[0]}_step{prof.step_num}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        prof.export_chrome_trace(str(path))
        return path

    # the trace is written inside the guard: a full disk may not end the loop either
    return lambda prof: safely(lambda: _print_summary(write(prof)))


def after_trace(trace_path: str | Path) -> None:
    """Print the line of a trace that has been written: torchtitan's
    `Function.Config(fn=after_trace)`.
    """
    safely(lambda: _print_summary(trace_path))


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
    # Lightning checks the class of its callbacks, and the two packages have one each
    packages = ("lightning.pytorch", "pytorch_lightning")
    package = next((name for name in packages if name in sys.modules), "lightning")
    return _callback(import_module(package).Callback, directory, schedule)


class _Hooks:
    """Hooks that begin, step and end a profiler; their names are those of both
    trainers.
    """

    _profiler = None

    def on_train_begin(self, *_, **__):
        safely(self._begin)

    def on_step_end(self, *_, **__):
        if self._profiler is not None:
            safely(self._profiler.step)

    def on_train_end(self, *_, **__):
        profiler = self._profiler
        self._profiler = None  # a hook that comes late finds none
        if profiler is not None:
            safely(profiler.stop)

    # Lightning's words for the same moments
    on_train_start = on_train_begin

    def on_train_batch_end(self, *_, **__):
        self.on_step_end()

    def _begin(self):
        profiler = sys.modules["torch"].profiler
        self._profiler = profiler.profile(
            schedule=profiler.schedule(**_SCHEDULE | self._schedule),
            on_trace_ready=on_trace_ready(self._directory),
            record_shapes=True,  # MFU counts FLOPs from them
        )
        self._profiler.start()


def _callback(base, directory, schedule):
    names = [*_SCHEDULE, "skip_first"]
    if unknown := schedule.keys() - {*names}:
        raise ValueError(f"{min(unknown)} is not one of {', '.join(names)}")
    fields = {"_directory": directory, "_schedule": schedule}
    # the base class is known only here, when the trainer's package is loaded
    return type("TraceCallback", (_Hooks, base), fields)()


def _print_summary(path):
    # late, and by the front door: analyses and pandas load when a trace is there
    import madmax_lib as mm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader; the line tells what matters
        timeline = mm.read_trace(path)
    print(f"madmax: {summary_line(timeline)}", flush=True)


def summary_line(timeline) -> str:
    """The recorded steps of a timeline in a line: the median of their time,
    communication under compute and exposed, idle time and MFU; means over the ranks.
    """
    import madmax_lib as mm

    steps = timeline.steps
    note = mm.traces.step_note(timeline)
    if steps:
        timeline = timeline.select(steps=steps)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        mfu = mm.traces.mfu(timeline)["mfu"].median()
    if mfu == mfu:  # not NaN
        mfu_text = f"{mfu:.1%}"
    else:
        messages = [str(reason.message).partition(":")[0] for reason in reasons]
        mfu_text = f"unknown ({(messages or ['few FLOPs are known'])[0]})"
    row = mm.breakdown(timeline).mean()
    total_s = max(row["total_s"], 1e-12)
    count = max(len(steps), 1)
    times = f"{count} steps" if count > 1 else "a step"
    # without marks the recording is one step
    step_s = mm.traces.step_s(timeline) if steps else total_s
    times += f" of {format_s(step_s)}"
    if note:
        times += f" ({note})"
    ranks = timeline.ranks
    who = f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0]}"
    idle = f"{row['idle_s'] / total_s:.0%} idle"
    return f"{who}, {times}: {_comm_text(row, count)}, {idle}, MFU {mfu_text}"


def _comm_text(row, steps):
    """Communication of a step, the part under compute and the part exposed."""
    if not row["comm_s"]:
        return "no communication"
    comm = format_s(row["comm_s"] / steps)
    exposed = format_s(row["exposed_comm_s"] / steps)
    share = row["exposed_comm_s"] / max(row["total_s"], 1e-12)
    overlap = 1 - row["exposed_comm_s"] / row["comm_s"]
    hidden = f"{overlap:.0%} of {comm} communication under compute"
    return f"{hidden}, {exposed} exposed ({share:.1%})"
