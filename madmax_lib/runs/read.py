"""Files of a run directory: spec.json, env.json, steps.csv and summary.json, also of a
run that was cut short; whose they are, and the step its run goes on at.

steps.csv has one row per step, appended as the run goes on; an empty value is one that
the run cannot tell. One launcher at a time has a directory, and nothing is lost
unasked: one with files of another run is refused. The same run is taken up at its last
checkpoint if it did not complete, and is made again if it did, or if it has no
checkpoint.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from math import isfinite, nan
from pathlib import Path

import pandas as pd

from madmax_lib.base.atomic import write_text
from madmax_lib.catalog import read_object
from madmax_lib.runs.spec import RunSpec

# of a step, also the labels in its traces
PHASES = ("data", "forward", "backward", "optimizer")
COLUMNS = (
    "step",
    "epoch",  # passes over the training data until its end, such as 0.5
    *(f"{name}_s" for name in PHASES),  # of rank 0
    "total_s",  # wall time of rank 0
    "samples",  # real ones of all ranks
    "tokens",  # samples x positions
    "loss",  # mean over the global batch
    "accuracy",  # 0..1
    "validation_loss",
    "validation_accuracy",
    "overflow",  # 1 where the gradient was not finite and the optimizer skipped
    # of rank 0's device, empty on a CPU, and so are the next two
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "memory_peak_bytes",
    "host_rss_bytes",  # of rank 0's process
    "power_w",  # of all devices of the first machine
    "energy_j",
    "utilization",  # of them, 0..1, by NVML
    "temperature_c",  # of the hottest of them, the mean over the step
)
# that earlier runs do not have
_NEW_COLUMNS = {"epoch", "validation_accuracy", "utilization", "temperature_c"}
# Fields of a spec that runs share where their speeds can be compared; ranks and global
# batch may differ, as throughput is per sample.
_SAME_WORK = (
    "model",
    "sizes",
    "sequence",
    "dtype",
    "weights_16bit",
    "adam_8bit",
    "compile",
    "fused_gelu",
    "lora_rank",
)
_QUANTITIES = (
    "samples_per_s",
    "tokens_per_s",
    "epoch_s",
    "mfu",
    "hfu",
    "utilization",
    "loss_last",
    "validation_accuracy_last",
    "host_rss_bytes",
    "energy_per_sample_j",
)


@dataclass(frozen=True)
class Resolved:
    """Values that a launch works out from a spec before the ranks start; "resolved" in
    spec.json.
    """

    plan: str  # text form, with the micro-batch
    ranks: int  # processes
    device: str  # cpu or cuda
    data: str  # that is used, as is the tokenizer
    tokenizer: str
    data_note: str = ""  # why that is not the data asked for, else empty
    # steps that the run was and is started at; at the last it goes on
    starts: tuple[int, ...] = (0,)

    def __post_init__(self):
        object.__setattr__(self, "starts", tuple(self.starts))  # JSON has lists


@dataclass(frozen=True)
class Run:
    """A run directory.

        run = mm.runs.read_run("runs/gpt-tiny_dp2")
        run.steps["loss"].plot()

    directory: its path.
    spec: what was asked for.
    resolved: what followed from it, None for a spec.json written by hand.
    env: where it ran, empty before the ranks have started.
    steps: a row per step, columns as `COLUMNS`.
    summary: of `runs.summary`, empty before the run has ended.
    """

    directory: Path
    spec: RunSpec
    resolved: Resolved | None
    env: dict
    steps: pd.DataFrame
    summary: dict

    @property
    def device_bytes(self) -> float:
        """Most bytes that were allocated on a rank's device, NaN where nothing counted
        them, as on a CPU.
        """
        parts = [*self.summary.get("ranks", ()), self.summary]
        peaks = [part.get("memory_peak_bytes") or 0 for part in parts]
        return float(max(peaks)) or nan


def read_run(directory: str | Path) -> Run:
    """A run directory, complete or not; warns of an MFU above 1, which only a peak that
    is too low can give.

    Raises FileNotFoundError without a spec.json, ValueError for bad content.
    """
    directory = Path(directory)
    spec, resolved = read_spec(directory)
    env = read_json(directory / "env.json")
    path = directory / "summary.json"
    summary = read_json(path)
    for name, kind in {"mfu": float, "step_s": dict, "phases_s": dict}.items():
        value = summary.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"{path}: {name}={value!r} must be of type {kind.__name__}"
            )
    if (mfu := summary.get("mfu") or 0.0) > 1:
        low = f"the peak is too low, {env.get('peak_source')}"
        warnings.warn(f"{directory}: MFU {mfu:.0%}: {low}", stacklevel=2)
    return Run(directory, spec, resolved, env, read_steps(directory), summary)


def read_spec(directory: Path) -> tuple[RunSpec, Resolved | None]:
    """Content of spec.json of a run directory. Raises as `read_run` does."""
    path = directory / "spec.json"
    if not path.exists():
        raise FileNotFoundError(f"{directory}: not a run directory (no spec.json)")
    content = read_json(path)
    resolved = content.pop("resolved", None)
    try:
        return RunSpec.from_dict(content), Resolved(**resolved) if resolved else None
    except (ValueError, TypeError) as error:  # TypeError: no field of Resolved
        raise ValueError(f"{path}: {error}") from None


def read_runs(folder: str | Path) -> dict[str, Run]:
    """All run directories of a folder by their name, in order of it; one with bad files
    is left out with a warning.

    Raises FileNotFoundError if there is none.
    """
    runs = {}
    for path in sorted(Path(folder).glob("*/spec.json")):
        try:
            runs[path.parent.name] = read_run(path.parent)
        except ValueError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    if not runs:
        raise FileNotFoundError(f"{folder}: no run directories here")
    return runs


def runs_table(runs: dict[str, Run]) -> pd.DataFrame:
    """One row per run of `read_runs`, by the number of dimensions that its strategy
    splits.

    dimensions: how many of dp, tp, pp, cp and ep are above 1. reason: of a run that did
    not complete. step_s with its quartiles. bubble: share of a step that rank 0 of a
    pipeline neither computes nor updates. scaling: samples/s per rank over that of the
    run with the fewest, of those that train the same on the same device. samples_per_s,
    tokens_per_s, epoch_s (a pass over the training data), mfu, hfu, utilization (of
    GPUs), losses and accuracies, host_rss_bytes of rank 0, energy_per_sample_j; NaN
    where a run does not tell. Shares are 0..1.
    """
    rows = []
    work = []
    for name, run in runs.items():
        plan = run.spec.plan
        summary = run.summary
        degrees = (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)
        step_s = summary.get("step_s") or {}
        row = {
            "run": name,
            "model": run.spec.model,
            "strategy": run.spec.name.partition("_")[2],
            "ranks": plan.world_size,
            "dimensions": sum(degree > 1 for degree in degrees),
            "status": summary.get("status", "unfinished"),
            "reason": summary.get("error", ""),
            "step_s": step_s.get("median"),
            "step_p25_s": step_s.get("p25"),
            "step_p75_s": step_s.get("p75"),
            "bubble": nan,
        }
        if plan.pp > 1 and row["step_s"]:
            # phases are those of rank 0; what is left of its step is waiting for stages
            busy_s = sum((summary.get("phases_s") or {}).values())
            row["bubble"] = max(1 - busy_s / row["step_s"], 0.0)
        rows.append(row | {quantity: summary.get(quantity) for quantity in _QUANTITIES})
        same = [getattr(run.spec, field) for field in _SAME_WORK]
        work.append(str([run.env.get("device"), *same]))
    numbers = ["step_s", "step_p25_s", "step_p75_s", *_QUANTITIES]
    table = pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))
    # first in a group is the run with the fewest ranks; groupby aligns `work`, which is
    # in order of `runs`, by the index
    table = table.sort_values(["ranks", "run"])
    speeds = table["samples_per_s"] / table["ranks"]
    table["scaling"] = speeds / speeds.groupby(pd.Series(work)).transform("first")
    return table.sort_values(["dimensions", "ranks", "run"], ignore_index=True)


def read_steps(directory: str | Path) -> pd.DataFrame:
    """steps.csv of a run directory, with no rows where it is missing; a last line that
    was cut short is left out.

    Raises ValueError, naming the file, for another table.
    """
    path = Path(directory) / "steps.csv"
    text = ",".join(COLUMNS) + "\n"
    if path.exists():
        text = path.read_text(errors="replace")
    try:
        table = pd.read_csv(StringIO(text[: text.rfind("\n") + 1]), dtype=float)
        if not set(COLUMNS) - _NEW_COLUMNS <= {*table} <= {*COLUMNS}:
            raise ValueError(f"its columns must be {','.join(COLUMNS)}")
        return table.reindex(columns=list(COLUMNS)).astype(
            {"step": int, "samples": int, "tokens": int, "overflow": bool}
        )
    except ValueError as error:
        raise ValueError(f"{path}: not a table of steps, {error}") from None


def read_json(path: Path) -> dict:
    """The object in a JSON file, empty where there is no file. Raises ValueError naming
    the file for other content.
    """
    return read_object(path) if path.exists() else {}


def write_json(path: Path, content: dict) -> None:
    """A file that `read_json` reads, with null for NaN."""
    write_text(path, json.dumps(with_nulls(content), indent=1) + "\n")


def with_nulls(value):
    """The value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_nulls(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# Patterns of what a run leaves: results of all its starts, and files that every start
# writes anew.
_RESULTS = ("steps.csv", "checkpoints", "trace_rank*.json.gz", "memory_rank*")
_OF_A_START = ("env.json", "power.csv", "summary.json", "logs")


class Occupied(FileExistsError):
    """The directory holds another run, or this one is on."""


@contextmanager
def owned(directory: Path) -> Iterator[int]:
    """Make a directory and keep other launchers out of it; a handle that keeps them out
    while a process has it.

    Raises Occupied if one is at work there, OSError for a path that cannot hold a run.
    """
    import fcntl  # not on Windows

    _check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        # a lock of the kernel's: it goes with the last process that has the handle,
        # whatever ends that
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(f"{directory}: a run is in progress there") from None
        except OSError:  # a file system without locks
            pass
        yield handle
    finally:
        os.close(handle)


def starts(directory: Path, spec: RunSpec, resolved: Resolved) -> tuple[int, ...]:
    """The steps that a run was and is started at, the last being the one to go on with;
    changes nothing.

    Raises Occupied for another run, ValueError if this one cannot go on as it began,
    OSError as `owned` does.
    """
    _check_writable(directory)
    before = _earlier_launch(directory, spec)
    completed = read_json(directory / "summary.json").get("status") == "completed"
    if completed or not (checkpoint := last_checkpoint(directory)):
        return (0,)
    done = int(checkpoint.name)
    if not before:
        return (done,)
    # a loss curve of two datasets or a timing of two devices would be nobody's
    for name in ("device", "data", "tokenizer"):
        was = getattr(before, name)
        now = getattr(resolved, name)
        if was != now:
            raise ValueError(
                f"{directory}: its run began with {name} {was}, now it is {now}; "
                "give a new directory"
            )
    return (*(start for start in before.starts if start < done), done)


def clear(directory: Path, done: int) -> None:
    """Remove what a start at step `done` would mix with: all of an earlier run, or what
    it did after that step.
    """
    if done and (steps := directory / "steps.csv").exists():
        # the header, and complete rows of steps that the checkpoint holds
        lines = _text(steps).splitlines(keepends=True)
        rows = [
            line
            for line in lines
            if line.endswith("\n")
            and (not line[0].isdecimal() or int(line.partition(",")[0]) < done)
        ]
        write_text(steps, "".join(rows))
    patterns = _OF_A_START
    if not done:  # spec.json goes last: it says whose files the others are
        patterns = (*_OF_A_START, *_RESULTS, "spec.json")
    for pattern in patterns:
        for path in [*directory.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def refuse(directory: Path, spec: RunSpec, reason: str) -> None:
    """Write down why a run cannot start; what it did before stays. Raises Occupied for
    another run.
    """
    _earlier_launch(directory, spec)
    if not (directory / "spec.json").exists():
        write_json(directory / "spec.json", asdict(spec))
    write_json(directory / "summary.json", {"status": "refused", "error": reason})


def last_checkpoint(directory: Path) -> Path | None:
    """The last complete checkpoint of a run directory; its name is the number of steps
    it holds.

    Raises ValueError where the one that is named is not there.
    """
    folder = directory / "checkpoints"
    latest = folder / "latest"
    if not latest.exists():
        return None
    name = _text(latest)
    if not (name.isdecimal() and (folder / name).is_dir()):
        raise ValueError(
            f"{latest}: names {name[:40]!r}, not a checkpoint here; delete {folder}"
        )
    return folder / name


def _earlier_launch(directory, spec):
    """Values that an earlier launch of a run resolved, None if there was none. Raises Occupied
    for another run.
    """
    if not (directory / "spec.json").exists():
        for pattern in _RESULTS:
            for path in directory.glob(pattern):
                raise Occupied(
                    f"{directory}: holds {path.name} of a run that has no spec.json; "
                    "give a new directory"
                )
        return None
    with suppress(ValueError):  # an unreadable spec.json is another run's
        earlier, resolved = read_spec(directory)
        if earlier == spec:
            return resolved
    raise Occupied(f"{directory}: holds another run; give a new directory")


def _text(path):
    return path.read_text(errors="replace")


def _check_writable(directory):
    ancestors = (directory, *directory.parents)
    nearest = next(path for path in ancestors if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"{directory}: a run needs a directory, this is a file"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory}: is not writable")
