"""The reason why a run failed: the first rank that did, and the end of its log."""

import re
import shutil
import signal
from pathlib import Path

from madmax_lib.runs.read import read_json
from madmax_lib.runs.spec import RunSpec

__all__ = ["current", "failure", "python_error"]

_TAIL_LINES = 15  # of a log that an error shows
_FULL_BYTES = 2**20  # a disk with less is full
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .*")  # last line of a traceback
# in torchrun's table of failures, where a negative exit code is a signal
_SIGNALLED = re.compile(r"rank\s+: (\d+) .*\n\s+exitcode\s+: -(\d+)")
# begins what torchrun itself logs: level, month and day
_TORCHRUN = re.compile(r"^[EWI]\d{4} \d\d:", re.MULTILINE)


def current(directories: list[Path]) -> Path:
    """The first directory of a start that has no summary: its run is on."""
    unfinished = (path for path in directories if not (path / "summary.json").exists())
    return next(unfinished, directories[-1])


def python_error(text: str) -> str:
    """The first line of a log that names an exception, empty if none does."""
    match = _ERROR.search(text)
    return match[0] if match else ""


def failure(spec: RunSpec, directories: list[Path]) -> tuple[str, str]:
    """Status and text of a start that failed: the first rank that did, with the end of
    its log.
    """
    logs = current(directories) / "logs"
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
        want = ", perhaps by the system for want of memory" * (name == "SIGKILL")
        error = f"ended by signal {number} ({name}){want}"
        return {"rank": int(rank), "status": "failed", "error": error}
    return None


def _end_of(log, text):
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"end of {log}:", *lines]) if lines else f"{log} is empty"
