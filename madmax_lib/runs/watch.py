"""End of a rank when nobody is left to end it: it watches torchrun and the launcher, and
logs to a file of its own.

torchrun puts its ranks into sessions of their own, so that they outlive it if it is
killed at once.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_LOOK_S = 1.0
_ALONE = 75  # exit status, EX_TEMPFAIL of sysexits.h
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def die_with_parent() -> None:
    """Have the kernel of Linux end this process with the one that started it, even
    where it is stopped or stuck.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def guard() -> None:
    """End this process within a second or two of its parent's or the launcher's end.

    The launcher's process id is in MADMAX_LAUNCHER; without it only the parent is
    watched.
    """
    parent = os.getppid()
    launcher = int(os.environ.get("MADMAX_LAUNCHER", 0))

    def lives(process):
        try:
            os.kill(process, 0)  # signal 0 only asks
        except ProcessLookupError:
            return False
        except PermissionError:  # it lives, as somebody else's
            pass
        return True

    def look():
        while os.getppid() == parent and (not launcher or lives(launcher)):
            time.sleep(_LOOK_S)
        os._exit(_ALONE)  # other threads may be stuck in a collective

    die_with_parent()
    threading.Thread(target=look, daemon=True).start()


def write_to(log: Path) -> None:
    """Send standard output and error of this process, also of libraries in C, to a
    file.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(handle, stream.fileno())
    os.close(handle)


def end(processes: Sequence[subprocess.Popen], grace_s: float) -> None:
    """End processes, which end their own; what is left after `grace_s` is killed."""
    until_s = time.monotonic() + grace_s
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
