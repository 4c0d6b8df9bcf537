"""How is a run started, watched and ended? torchrun as a subprocess, from a notebook, papermill, CI, Slurm or Kaggle.

`launch` checks, writes spec.json, starts one process per rank (CUDA and NCCL where present, else gloo with one thread
each) and waits. Whatever happens, the directory stays readable and no process is left: torchrun ends the other ranks
when one dies, `launch` ends torchrun when it is interrupted, and ranks end themselves when torchrun or the launcher has
vanished (`runs.train`). torch is imported by the ranks only.
On several machines, `prepare(spec, directory, nodes=N)` a directory that all of them see and start on each `torchrun
--nnodes N --node-rank K --nproc-per-node RANKS --master-addr HOST -m madmax_lib.runs.train DIRECTORY`; under Slurm by
`srun --ntasks-per-node 1`, K being $SLURM_NODEID. Power is then that of the machine of rank 0.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from madmax_lib.atomic import write_text
from madmax_lib.datasets import PROJECT
from madmax_lib.runs import testbed
from madmax_lib.runs.checks import deepspeed_locks
from madmax_lib.runs.data.batches import Data
from madmax_lib.runs.read import Resolved, Run, last_checkpoint, read_json, read_run, read_spec, write_json
from madmax_lib.runs.spec import RunSpec, check
from madmax_lib.runs.summary import write_summary

__all__ = ["RunError", "gpu_count", "launch", "measure_links", "prepare", "resolve", "sweep", "train_command"]

_POLL_S = 0.1
_GRACE_S = 20.0  # for torchrun to end its ranks before it is killed
_ALONE_S = 2.0  # for ranks that lost torchrun to end themselves
_TAIL_LINES = 15  # of a log that an error shows
_SIGNALLED = re.compile(r"rank\s+: (\d+) .*\n\s+exitcode\s+: -(\d+)")  # in torchrun's table of failures
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .*")
_TORCHRUN = re.compile(r"^[EWI]\d{4} \d\d:", re.MULTILINE)  # begins what torchrun itself logs
_FILES_OF_A_START = ("env.json", "power.csv", "summary.json", "logs")
_FILES_OF_A_RUN = (*_FILES_OF_A_START, "spec.json", "steps.csv", "trace_rank*.json.gz", "memory_rank*", "checkpoints")


class RunError(RuntimeError):
    """A run that started and did not complete. directory: what it left; status: as in its summary.json."""

    def __init__(self, message: str, directory: Path, status: str):
        super().__init__(message)
        self.directory, self.status = directory, status


class _Terminated(BaseException):
    """SIGTERM came while a run was on."""


def launch(spec: RunSpec, directory: str | Path, *, check: bool = True) -> Path:
    """Run a spec and return its directory: spec.json env.json steps.csv summary.json trace_rank{r}.json.gz logs/.

    An earlier run of the same spec there is replaced, or, if it did not complete, taken up at its last checkpoint. With
    check=False a run that fails returns its directory too, the reason being in its summary.json (status and error).
    Raises, before a process is started and in one line, ValueError for a spec that cannot run here, FileExistsError for
    a directory with another run, FileNotFoundError for missing weights or power log, ModuleNotFoundError for a missing
    package; and RunError with the end of the log of the rank that failed.
    """
    directory = prepare(spec, directory)
    device = read_spec(directory)[1].device
    with _terminable(), tempfile.TemporaryDirectory() as scratch:
        status, error = _run(spec, directory, _environment(device, Path(scratch)))
    if status == "completed":
        return directory
    write_summary(directory, status, error.splitlines()[0])
    if check:
        raise RunError(error, directory, status)
    return directory


def sweep(specs: Iterable[RunSpec], folder: str | Path) -> dict[str, Run]:
    """Run specs one after another, each in the directory of its name, and read them; what is complete there is kept.

    A run that fails, or that cannot run here, does not stop the others: its summary.json says why. Raises
    FileExistsError for a directory with another run.
    """
    runs = {}
    for spec in specs:
        directory = Path(folder) / spec.name
        earlier = read_run(directory) if (directory / "spec.json").exists() else None
        if not earlier or earlier.spec != spec or earlier.summary.get("status") != "completed":
            try:
                launch(spec, directory, check=False)
            except (ValueError, OSError, ImportError) as error:  # before a process was started
                _starts(directory, spec)
                write_json(directory / "spec.json", asdict(spec))
                write_json(directory / "summary.json", {"status": "refused", "error": str(error)})
        runs[spec.name] = read_run(directory)
    return runs


def prepare(spec: RunSpec, directory: str | Path, *, nodes: int = 1) -> Path:
    """Check a spec and write the spec.json of its directory, with what follows from it under "resolved".

    nodes: machines it will run on; with several, this one may lack their GPUs, so that the spec must name the device.
    Raises as `launch` does before it starts a process.
    """
    resolved = resolve(spec, nodes)
    directory = Path(directory).expanduser().resolve()
    resolved = replace(resolved, starts=_starts(directory, spec))
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    write_json(directory / "spec.json", asdict(spec) | {"resolved": asdict(resolved)})
    return directory


def resolve(spec: RunSpec, nodes: int = 1) -> Resolved:
    """What a launch of a spec would run here. Raises as `launch` does before it starts a process; writes nothing."""
    gpus = gpu_count() if spec.device != "cpu" else 0
    device = check(spec, gpus, nodes)
    if gpus and (device, spec.dtype) == ("cuda", "bf16"):  # where a GPU does not compute in it, torch would emulate it
        import torch

        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name()
            raise ValueError(f"dtype='bf16', but {name} does not compute in it; give dtype='fp16'")
    data = _load_data(spec)
    tokenizer = "bytes" if data.note else spec.tokenizer
    return Resolved(str(spec.plan), spec.plan.world_size, device, data.name, tokenizer, data.note)


def gpu_count() -> int:
    """CUDA (or ROCm) devices that a run may use; torch is asked only where the system shows a driver."""
    drivers = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
    if not find_spec("torch") or not any(Path(driver).exists() for driver in drivers):
        return 0
    import torch

    return torch.cuda.device_count()


def _load_data(spec: RunSpec) -> Data:
    """The data of a run, loaded once here so that the ranks find it; a fall-back is announced and its reason kept."""
    shapes, data = spec.shapes, spec.get_data(spec.download)
    if data.classes > shapes.classes:
        raise ValueError(f"data {data.name} has {data.classes} classes, {spec.model} tells {shapes.classes} apart")
    if data.vocab > shapes.vocab:
        raise ValueError(f"data {data.name} has {data.vocab} tokens, {spec.model} knows {shapes.vocab}")
    return data


def _starts(directory: Path, spec: RunSpec) -> tuple[int, ...]:
    """The steps that a run was and is started at, the last being the one to go on with; clears what is in the way.

    Where the same spec did not complete there, that is its last checkpoint, and rows of later steps are cut off; else
    it is 0, and what an earlier run left is removed.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory}: a run needs a directory, this is a file")
    if not (directory / "spec.json").exists():
        return (0,)
    try:
        earlier, resolved = read_spec(directory)
    except ValueError:
        earlier = None
    if earlier != spec:
        raise FileExistsError(f"{directory}: holds another run; give a new directory")
    checkpoint = last_checkpoint(directory)
    if not checkpoint or read_json(directory / "summary.json").get("status") == "completed":
        _remove(directory, _FILES_OF_A_RUN)
        return (0,)
    done = int(checkpoint.name)
    rows = (directory / "steps.csv").read_text().splitlines(keepends=True)[: 1 + done]
    write_text(directory / "steps.csv", "".join(rows))
    _remove(directory, _FILES_OF_A_START)
    return (*(start for start in resolved.starts if start < done), done)


def _remove(directory: Path, patterns: Iterable[str]) -> None:
    for path in [path for pattern in patterns for path in directory.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _environment(device: str, scratch: Path) -> dict[str, str]:
    """Environment of the ranks. Jobs that share a compile cache may read each other's half-written files."""
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "MADMAX_LAUNCHER": str(os.getpid()),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
    if device == "cpu":
        added["OMP_NUM_THREADS"] = "1"
    return {**os.environ, **added}


def train_command(spec: RunSpec, directory: str | Path) -> list[str]:
    """Command that starts the ranks of the run prepared in a directory."""
    spread = {"hosts": spec.hosts, "network": spec.network, "speed": spec.speed}
    return testbed.command(spec.plan.world_size, "madmax_lib.runs.train", directory, **spread)


def measure_links(
    path: Path | str = "", size: str = "normal", *, ranks: int = 0, hosts: int = 1, network: str = "", timeout_s=600.0
) -> int:
    """Time the collectives of all GPUs here, or of two processes, into a CSV; without a path only see if they answer.

    hosts, network: as in `RunSpec`. Returns the number of ranks. Raises RuntimeError with the reason of the first rank
    that failed, or TimeoutExpired.
    """
    device, ranks = "cuda" if gpu_count() else "cpu", ranks or gpu_count() or 2
    if path:
        Path(path).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [path, size] if path else []
        command = testbed.command(ranks, "madmax_lib.runs.measure.links", *arguments, hosts=hosts, network=network)
        environment = _environment(device, Path(scratch))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks failed: {next(iter(_ERROR.findall(done.stderr)), 'no reason given')}")
    return ranks


def _run(spec: RunSpec, directory: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Status and error of a run; processes that it started are gone when this returns or raises."""
    command = train_command(spec, directory)
    with (directory / "logs" / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            stalled = _wait(process, directory / "steps.csv", spec.timeout_s)
        except BaseException:
            _end(process)
            write_summary(directory, "interrupted", "the launcher was interrupted")
            raise
        if stalled:
            _end(process)
            locks = ", ".join(map(str, deepspeed_locks() if spec.engine == "deepspeed" else ()))
            why = f"; DeepSpeed waits for stale lock files, delete them: {locks}" if locks else ""
            return "stalled", f"{spec.name}: no step within timeout_s={spec.timeout_s:g} s{why}"
        if process.returncode < 0:  # torchrun itself was killed, its ranks see that within a second
            time.sleep(_ALONE_S)
            return "failed", f"{spec.name}: torchrun was ended by signal {-process.returncode}"
    return ("completed", "") if process.returncode == 0 else _failure(spec, directory)


def _wait(process: subprocess.Popen, steps: Path, timeout_s: float) -> bool:
    """Wait for the end of a process; True if it makes no progress: no new step for longer than the timeout."""
    changed_s, size_bytes = time.monotonic(), 0
    while process.poll() is None:
        time.sleep(_POLL_S)
        now_bytes = steps.stat().st_size if steps.exists() else 0
        if now_bytes != size_bytes:
            changed_s, size_bytes = time.monotonic(), now_bytes
        if time.monotonic() - changed_s > timeout_s + _GRACE_S:  # ranks that wait for another end themselves
            return True
    return False


def _end(process: subprocess.Popen) -> None:
    """End torchrun, which ends its ranks; ranks that lose it end themselves."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(spec: RunSpec, directory: Path) -> tuple[str, str]:
    """Status and text of a run that failed: the first rank that did, with the end of its log."""
    logs = directory / "logs"
    launcher = (logs / "launcher.log").read_text(errors="replace")
    failures = [read_json(path) for path in logs.glob("failure_rank*.json")]
    first = min(failures, key=lambda failure: failure["time_s"], default={})
    signals = [(int(rank), signal.Signals(int(number))) for rank, number in _SIGNALLED.findall(launcher)]
    for rank, number in signals[::-1]:
        if number != signal.SIGTERM:  # torchrun's own
            want = ", perhaps by the system for want of memory" if number == signal.SIGKILL else ""
            first = {"rank": rank, "status": "failed", "error": f"ended by signal {number.value} ({number.name}){want}"}
    if not first:
        output = _TORCHRUN.split(launcher)[0].strip() or launcher
        return "failed", f"{spec.name} failed before its ranks began\n{_tail(output)}"
    rank, status = first["rank"], first["status"]
    log = logs / f"rank{rank}.log"
    text = _tail((log if log.exists() else logs / "launcher.log").read_text(errors="replace"))
    return status, f"{spec.name}, plan {spec.plan}, {status} on rank {rank}: {first['error']}\nend of {log}:\n{text}"


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])


@contextmanager
def _terminable():
    """SIGTERM ends the run first and this process then; only the main thread can be told of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM) from None  # where SIGTERM was ignored
    finally:
        signal.signal(signal.SIGTERM, before)
