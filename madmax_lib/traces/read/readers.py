"""Readers of trace files: which suffix is read by which module, and what readers say of
a timeline's origin.

The PyTorch profiler's JSON is told by its content, whatever the file is called. A reader
of another format is a row of _READERS; its module is loaded when one of its files is
read, so that it can be taken off.

Keys of `Timeline.meta.provenance` that readers set, every one of them the first four;
ranks are keys as text, as in JSON:

rules        "exact"; "hta": rows, kinds and times as HTA 0.5.0 has them
files        by rank: name and sha256 of its file
threads      by rank: "pid 7 tid 9" of streams -1, -2, ...
warnings     by rank: what is missing, damaged or ambiguous
hosts        by rank: name of its machine
damaged      by rank: why its file ends early
collectives  by name of a span: what a user's table says it is
unread       by name of a file that was left out: the reason
steps        how many were found by their pattern; absent where steps are marked
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


class Reader(NamedTuple):
    """A format that is told by the suffix of its files."""

    suffix: str
    program: str  # that writes such files, as messages name it
    module: str
    function: str  # (paths, kinds) -> Timeline of all files of a run

    def load(self) -> Callable:
        """The function, imported now."""
        return getattr(import_module(self.module), self.function)


_READERS = (
    Reader(".sqlite", "Nsight Systems", "madmax_lib.traces.nsys", "read_exports"),
)
# what a folder is searched for; a file that is named may be called anything. The last
# two are no traces, which reading them says
TRACE_SUFFIXES = (
    *(".json", ".gz", ".bz2", ".xz", ".pftrace", ".perfetto-trace"),
    *(reader.suffix for reader in _READERS),
    *(".pb", ".db"),
)


def reader_of(path: Path) -> Reader | None:
    """Reader of a file by its suffix; None for what the profiler's own reads."""
    return next((reader for reader in _READERS if reader.suffix == path.suffix), None)
