"""Why did a run fail? The first rank that did, and the end of its log."""

import re
import shutil
import signal
from pathlib import Path

from madmax_lib.runs.read import read_json
from madmax_lib.runs.spec import RunSpec

__all__ = ["current", "failure"]

_TAIL_LINES = 15  # of a log that an error shows
_FULL_BYTES = 2**20  # a disk with less is full
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .*")
_SIGNALLED = re.compile(
    r"rank\s+: (\d+) .*\n\s+exitcode\s+: -(\d+)"
)  # in torchrun's table of failures
_TORCHRUN = re.compile(
    r"^[EWI]\d{4} \d\d:", re.MULTILINE
)  # begins what torchrun itself logs


def current(directories: list[Path]) -> Path:
    """The first directory of a start that has no summary: its run is on."""
    return next(
        (
            directory
            for directory in directories
            if not (directory / "summary.json").exists()
        ),
        directories[-1],
    )


def failure(spec: RunSpec, directories: list[Path]) -> tuple[str, str]:
    """Status and text of a start that failed: the first rank that did, with the end of
    its log.
    """
    logs = current(directories) / "logs"
    launcher = (directories[0] / "logs" / "launcher.log").read_text(errors="replace")
    failures = [read_json(path) for path in logs.glob("failure_rank*.json")]
    first = min(failures, key=lambda failure: failure["time_s"], default={})
    signals = [
        (int(rank), signal.Signals(int(number)))
        for rank, number in _SIGNALLED.findall(launcher)
    ]
    for rank, number in signals[::-1]:
        if number != signal.SIGTERM:  # torchrun's own
            want = (
                ", perhaps by the system for want of memory"
                if number == signal.SIGKILL
                else ""
            )
            first = {
                "rank": rank,
                "status": "failed",
                "error": f"ended by signal {number.value} ({number.name}){want}",
            }
    if not first:
        if shutil.disk_usage(logs).free < _FULL_BYTES:
            return (
                "failed",
                f"{spec.name} failed, and no space is left on the disk of {logs.parent}",
            )
        output = _TORCHRUN.split(launcher)[0].strip() or launcher
        reason = (
            _ERROR.findall(output) or output.strip().splitlines() or ["no reason given"]
        )[-1]
        text = _end_of(directories[0] / "logs" / "launcher.log", output)
        return "failed", f"{spec.name} failed before its ranks began: {reason}\n{text}"
    rank = first["rank"]
    status = first["status"]
    log = logs / f"rank{rank}.log"
    text = _end_of(log, log.read_text(errors="replace") if log.exists() else launcher)
    return (
        status,
        f"{spec.name}, plan {spec.plan}, {status} on rank {rank}: "
        f"{first['error']}\n{text}",
    )


def _end_of(log: Path, text: str) -> str:
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"end of {log}:", *lines]) if lines else f"{log} is empty"
