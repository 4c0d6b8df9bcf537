"""Start, watch and end of a run: torchrun as a subprocess, from a notebook, papermill, CI,
Slurm or Kaggle.

`launch` checks, writes spec.json, starts one process per rank (CUDA and NCCL where
present, else gloo with one thread each) and waits. Whatever happens, the directory
stays readable and no process is left: torchrun ends the other ranks when one dies,
`launch` ends torchrun when it is interrupted, and ranks end themselves when torchrun or
the launcher has vanished (`runs.train`). torch is imported by the ranks only. On
several machines, `prepare(spec, directory, nodes=N)` a directory that all of them see
and start on each

    torchrun --nnodes N --node-rank K --nproc-per-node RANKS --master-addr HOST
        -m madmax_lib.runs.train DIRECTORY

under Slurm by `srun --ntasks-per-node 1`, K being $SLURM_NODEID. Power is then that of
the machine of rank 0.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from madmax_lib.base import require_type
from madmax_lib.catalog import PROJECT
from madmax_lib.runs import testbed
from madmax_lib.runs.checks import deepspeed_locks
from madmax_lib.runs.read import (
    Occupied,
    Resolved,
    Run,
    clear,
    owned,
    read_json,
    read_run,
    refuse,
    starts,
    write_json,
)
from madmax_lib.runs.spec import RunSpec, check
from madmax_lib.runs.summary import write_summary
from madmax_lib.runs.watch import end

_TAIL_LINES = 15  # of a log that an error shows
_FULL_BYTES = 2**20  # a disk with less is full
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .*")  # last line of a traceback
# in torchrun's table of failures, where a negative exit code is a signal
_SIGNALLED = re.compile(r"rank\s+: (\d+) .*\n\s+exitcode\s+: -(\d+)")
# begins what torchrun itself logs: level, month and day
_TORCHRUN = re.compile(r"^[EWI]\d{4} \d\d:", re.MULTILINE)


_POLL_S = 0.1
_GRACE_S = 20.0  # for torchrun to end its ranks before it is killed
_ALONE_S = 2.0  # for ranks that lost torchrun to end themselves
# Variables that ranks do not inherit: defaults of torchrun's options, and what another
# run is spread over.
_NOT_INHERITED = ("PET_", "MADMAX_TESTBED_")
# Fields that are equal for runs of the same processes.
_OF_PROCESSES = ("device", "engine", "hosts", "network", "speed")
# Files that only a driver makes: NVIDIA's, AMD's, and that of Windows' Linux.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


class RunError(RuntimeError):
    """A run that started and did not complete. directory: what it left; status: as in
    its summary.json.
    """

    def __init__(self, message: str, directory: Path, status: str):
        super().__init__(message)
        self.directory = directory
        self.status = status


class _Terminated(BaseException):
    """SIGTERM came while a run was on."""


def launch(spec: RunSpec, directory: str | Path, *, check: bool = True) -> Path:
    """Run a spec and return its directory: spec.json env.json steps.csv summary.json
    trace_rank{r}.json.gz logs/.

    An earlier run of the same spec there is replaced, or, if it did not complete, taken
    up at its last checkpoint. With check=False a run that fails returns its directory
    too, the reason being in its summary.json (status and error). Raises, before a
    process is started and in one line, ValueError for a spec that cannot run here,
    FileExistsError for a directory with another run, FileNotFoundError for missing
    weights or power log, ModuleNotFoundError for a missing package; and RunError with
    the end of the log of the rank that failed. See also: mm.RunSpec, mm.read_trace,
    mm.runs.read_run.
    """
    resolved = resolve(require_type("spec", spec, RunSpec))
    directory = _absolute(directory)
    with owned(directory) as lock:
        _write_spec(spec, directory, resolved)
        status, error = _start(spec, [directory], resolved.device, [lock])
    if check and status != "completed":
        raise RunError(error, directory, status)
    return directory


def launch_all(specs: Mapping[Path, RunSpec]) -> None:
    """Run specs in their directories, those that follow each other on the same
    processes in one start.

    A run that fails ends its start, and the others go on in a further one; its
    summary.json says why. Raises as `launch` does before a process is started, here
    also for specs that come later.
    """
    specs = {_absolute(directory): spec for directory, spec in specs.items()}
    waiting = dict(specs)

    def processes(directory):
        spec = specs[directory]
        fields = [getattr(spec, name) for name in _OF_PROCESSES]
        return [spec.plan.world_size, *fields]

    devices = {}
    with ExitStack() as stack:
        locks = [stack.enter_context(owned(directory)) for directory in waiting]
        for directory, spec in waiting.items():
            resolved = resolve(spec)
            _write_spec(spec, directory, resolved)
            devices[directory] = resolved.device
        while waiting:
            # as many as follow each other on the same processes share a start
            _, same = next(groupby(waiting, processes))
            together = list(same)
            _start(specs[together[0]], together, devices[together[0]], locks)
            for directory in together:
                del waiting[directory]
                if read_json(directory / "summary.json").get("status") != "completed":
                    break  # it ended the start; those behind it have not begun


def sweep(specs: Iterable[RunSpec], folder: str | Path) -> dict[str, Run]:
    """Run specs one after another, each in the directory of its name, and read them;
    what is complete there is kept.

    A run that fails, or that cannot run here, does not stop the others: its
    summary.json says why. Raises FileExistsError for a directory with another run.
    """
    runs = {}
    for spec in specs:
        directory = _absolute(folder) / spec.name
        earlier = read_run(directory) if (directory / "spec.json").exists() else None
        same = earlier and earlier.spec == spec
        if not (same and earlier.summary.get("status") == "completed"):
            try:
                launch(spec, directory, check=False)
            except Occupied:
                raise
            except (ValueError, OSError, ImportError) as error:
                refuse(directory, spec, str(error))
        runs[spec.name] = read_run(directory)
    return runs


def prepare(spec: RunSpec, directory: str | Path, *, nodes: int = 1) -> Path:
    """Check a spec and write the spec.json of its directory, with what follows from it
    under "resolved".

    nodes: machines it will run on; with several, this one may lack their GPUs, so that
    the spec must name the device. Raises as `launch` does before it starts a process.
    """
    resolved = resolve(spec, nodes=nodes)
    directory = _absolute(directory)
    with owned(directory):
        _write_spec(spec, directory, resolved)
    return directory


def _write_spec(spec, directory, resolved):
    """Clear what is in the way of a run, and write its spec.json."""
    resolved = replace(resolved, starts=starts(directory, spec, resolved))
    clear(directory, resolved.starts[-1])
    (directory / "logs").mkdir(exist_ok=True)
    write_json(directory / "spec.json", asdict(spec) | {"resolved": asdict(resolved)})


def _absolute(directory):
    return Path(directory).expanduser().resolve()


def resolve(
    spec: RunSpec, directory: str | Path | None = None, nodes: int = 1
) -> Resolved:
    """Values that a launch of a spec, into a directory, would run with here.

    Raises as `launch` does before it starts a process; writes nothing.
    """
    gpus = gpu_count() if spec.device != "cpu" else 0
    device = check(spec, gpus, nodes)
    if gpus and (device, spec.dtype) == ("cuda", "bf16"):
        import torch

        # torch would emulate it, and a run would measure the emulation
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name()
            raise ValueError(
                f"dtype='bf16', but {name} does not compute in it; give dtype='fp16'"
            )
    data = _load_data(spec)
    resolved = Resolved(
        plan=str(spec.plan),
        ranks=spec.plan.world_size,
        device=device,
        data=data.name,
        tokenizer="bytes" if data.note else spec.tokenizer,
        data_note=data.note,
    )
    if directory is None:
        return resolved
    return replace(resolved, starts=starts(_absolute(directory), spec, resolved))


def gpu_count() -> int:
    """CUDA (or ROCm) devices that a run may use; torch is asked only where the system
    shows a driver.
    """
    has_driver = any(Path(driver).exists() for driver in _DRIVERS)
    if not has_driver or not find_spec("torch"):
        return 0
    import torch

    return torch.cuda.device_count()


def _load_data(spec):
    """The data of a run, loaded once here so that the ranks find it; a fall-back is
    announced and its reason noted.
    """
    shapes = spec.shapes
    data = spec.get_data(spec.download)
    if data.classes > shapes.classes:
        raise ValueError(
            f"data {data.name} has {data.classes} classes, "
            f"{spec.model} has {shapes.classes} classes"
        )
    if data.vocab > shapes.vocab:
        raise ValueError(
            f"data {data.name} has {data.vocab} tokens, "
            f"{spec.model} knows {shapes.vocab}"
        )
    return data


def _environment(device, scratch):
    """Environment of the ranks, this process's with the run's own variables."""
    paths = [str(PROJECT), os.environ.get("PYTHONPATH")]
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "MADMAX_LAUNCHER": str(os.getpid()),
        # jobs that share a compile cache may read each other's half-written files
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
    if device == "cpu":
        added["OMP_NUM_THREADS"] = "1"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_INHERITED)
    }
    return inherited | added


def train_command(spec: RunSpec, *directories: str | Path) -> list[str]:
    """Command that starts the ranks of the runs prepared in directories."""
    return testbed.command(
        spec.plan.world_size,
        "madmax_lib.runs.train",
        *directories,
        hosts=spec.hosts,
        network=spec.network,
        speed=spec.speed,
    )


def measure_links(
    path: Path | str = "",
    size: str = "normal",
    *,
    ranks: int = 0,
    hosts: int = 1,
    network: str = "",
    timeout_s=600.0,
) -> int:
    """Time the collectives of all GPUs here, or of two processes, into a CSV; without a
    path only see if they answer.

    hosts, network: as in `RunSpec`. Returns the number of ranks. Raises RuntimeError
    with the reason of the first rank that failed, or TimeoutExpired.
    """
    device = "cuda" if gpu_count() else "cpu"
    ranks = ranks or gpu_count() or 2
    if path:
        Path(path).unlink(missing_ok=True)
    command = testbed.command(
        ranks,
        "madmax_lib.runs.measure.links",
        *([path, size] if path else []),
        hosts=hosts,
        network=network,
    )
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command,
            env=_environment(device, Path(scratch)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    if done.returncode:
        error = _ERROR.search(done.stderr)
        reason = error[0] if error else "no reason given"
        raise RuntimeError(f"{ranks} ranks failed: {reason}")
    return ranks


def _start(spec, directories, device, locks):
    """Status and error of a start of prepared runs; if it failed, they are in the
    summary of the run that ended it.
    """
    with _terminable(), tempfile.TemporaryDirectory() as scratch:
        environment = _environment(device, Path(scratch))
        status, error = _run(spec, directories, environment, locks)
        if status != "completed":
            failed = _current(directories)
            try:
                write_summary(failed, status, error.splitlines()[0])
            except (OSError, ValueError) as lost:  # such as a full disk
                text = f"{error}\nit left no summary: {lost}"
                raise RunError(text, failed, status) from None
    return status, error


def _run(spec, directories, environment, locks):
    """Status and error of a run, or of the first that ends a start; the processes are
    gone when this returns.
    """
    command = train_command(spec, *directories)
    steps = [directory / "steps.csv" for directory in directories]
    with (directories[0] / "logs" / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process alone
            pass_fds=locks,  # the directories stay locked while a rank lives
        )
        try:
            stalled = _wait(process, steps, spec.timeout_s)
        except BaseException:
            end([process], _GRACE_S)
            with suppress(OSError, ValueError):
                reason = "the launcher was interrupted"
                write_summary(_current(directories), "interrupted", reason)
            raise
        if stalled:
            end([process], _GRACE_S)
            error = f"{spec.name}: no step within timeout_s={spec.timeout_s:g} s"
            if spec.engine == "deepspeed" and (locked := deepspeed_locks()):
                stale = ", ".join(map(str, locked))
                error += f"; DeepSpeed waits for stale lock files, delete them: {stale}"
            return "stalled", error
        # torchrun itself was killed: its ranks see that within a second
        if process.returncode < 0:
            time.sleep(_ALONE_S)
            error = f"torchrun was ended by signal {-process.returncode}"
            return "failed", f"{spec.name}: {error}"
    return ("completed", "") if process.returncode == 0 else _failure(spec, directories)


def _wait(process, steps, timeout_s):
    """Wait for the end of a process; True if it makes no progress: no new step for
    longer than the timeout.
    """
    changed_s = time.monotonic()
    size_bytes = 0
    # ranks that wait for another one end themselves at timeout_s, so give them time
    most_s = timeout_s + _GRACE_S
    while process.poll() is None:
        time.sleep(_POLL_S)
        now_bytes = sum(path.stat().st_size for path in steps if path.exists())
        if now_bytes != size_bytes:
            changed_s = time.monotonic()
            size_bytes = now_bytes
        if time.monotonic() - changed_s > most_s:
            return True
    return False


@contextmanager
def _terminable():
    """SIGTERM ends the run first and this process then."""
    # Python hands signals to the main thread alone
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise _Terminated

    earlier_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, earlier_handler)
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM) from None  # where SIGTERM was ignored
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)


def _current(directories):
    """The first directory of a start that has no summary: its run is on."""
    unfinished = (path for path in directories if not (path / "summary.json").exists())
    return next(unfinished, directories[-1])


def _failure(spec, directories):
    """Status and text of a start that failed: the first rank that did, with the end of
    its log.
    """
    logs = _current(directories) / "logs"
    launcher_log = directories[0] / "logs" / "launcher.log"
    launcher = launcher_log.read_text(errors="replace")
    failures = [read_json(path) for path in logs.glob("failure_rank*.json")]
    # ranks that wait for the first one in a collective fail later, by its end
    first = min(failures, key=lambda failure: failure["time_s"], default=None)
    first = _killed(launcher) or first
    if not first:
        if shutil.disk_usage(logs).free < _FULL_BYTES:
            full = f"no space is left on the disk of {logs.parent}"
            return "failed", f"{spec.name} failed, and {full}"
        output = _TORCHRUN.split(launcher)[0].strip() or launcher
        lines = _ERROR.findall(output) or output.strip().splitlines()
        reason = (lines or ["no reason given"])[-1]
        text = f"{spec.name} failed before its ranks began: {reason}"
        return "failed", f"{text}\n{_end_of(launcher_log, output)}"
    rank = first["rank"]
    status = first["status"]
    log = logs / f"rank{rank}.log"
    output = log.read_text(errors="replace") if log.exists() else launcher
    text = f"{spec.name}, plan {spec.plan}, {status} on rank {rank}: {first['error']}"
    return status, f"{text}\n{_end_of(log, output)}"


def _killed(launcher):
    """Failure of the first rank that a signal ended, other than torchrun's own SIGTERM;
    it could not write one.
    """
    for rank, number in _SIGNALLED.findall(launcher):
        name = signal.Signals(int(number)).name
        if name == "SIGTERM":
            continue
        # Linux kills the largest process where memory runs out
        want = ", perhaps by the system, out of memory" * (name == "SIGKILL")
        error = f"ended by signal {number} ({name}){want}"
        return {"rank": int(rank), "status": "failed", "error": error}
    return None


def _end_of(log, text):
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"end of {log}:", *lines]) if lines else f"{log} is empty"
