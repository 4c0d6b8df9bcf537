"""Events of a trace file as typed structs, and what the file says beside them."""

import functools
import json
import operator
import warnings
from dataclasses import dataclass, field
from decimal import Context
from pathlib import Path
from typing import Any

import msgspec

from madmax_lib.catalog import data_file

# text of a number to Decimal; what is none becomes NaN and what is beyond all bounds
# Infinity, which costs no time
EXACT = Context(prec=50, Emin=-400, Emax=400, traps=[]).create_decimal


# no time is as large (the year 2065), and the sum of three fits into int64: zero of the
# file, start and duration
FAR_NS = 3 * 10**18


# top-level key of an export: a simulation is never taken for a measurement
SOURCE_KEY = "madmaxSource"


class NotATrace(ValueError):
    """A file that cannot be read as a profiler trace."""


class OtherContent(NotATrace):
    """A sound file that is no trace, such as a configuration or a log."""


class TraceWarning(UserWarning):
    """A trace was read, but something in it was missing, damaged or ambiguous."""


# keys of an event's args, by the fields of Args and of what extends them
ARGS_KEYS = json.loads(data_file("trace_args.json").read_text())


class Args(msgspec.Struct, frozen=True, gc=False, rename=ARGS_KEYS):
    """The fields of an event's args that we use; any type, because tools write ids as
    numbers or text.
    """

    stream: Any = -1
    correlation: Any = -1
    external_id: Any = -1
    external_id_new: Any = None
    external_id_old: Any = None
    size_bytes: Any = None
    collective: Any = None
    in_elements: Any = None
    out_elements: Any = None
    dtype: Any = None
    group: Any = None
    group_rank: Any = None
    group_ranks: Any = None
    # this and the next: of Ascend's profiler, whose events have no category
    connection: Any = None
    task: Any = None
    # JSON text that a kernel of a CUDA graph was captured with, as cuspy writes it
    annotation: Any = None


class _Fields(msgspec.Struct, gc=False):
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class Event(_Fields, gc=False):
    """One trace event; ts and dur in microseconds."""

    ph: Any = None


class _Complete(_Fields, tag_field="ph", tag="X", gc=False):
    ph = "X"


class _Phase(msgspec.Struct, tag_field="ph", gc=False):
    """An event whose phase decides what is read of it; of no interest unless it is
    complete.
    """

    dur = cat = None


_PHASES = "BEIiCbneSTpFstfPNODMVvRc()"  # Chrome trace event format, all but X
# events with a known phase, decoded without the fields of any but complete ones; Event
# reads what this refuses
QUICK = functools.reduce(
    operator.or_,
    (type(f"_Phase{p}", (_Phase,), {}, tag=p, gc=False) for p in _PHASES),
    _Complete,
)


@dataclass
class RawTrace:
    """Facts of a file beside its events, filled while `chrome.decode_pieces` runs."""

    path: Path
    envelope: dict = field(default_factory=dict)  # every top-level key but traceEvents
    events: int = 0
    skipped: int = 0  # events that could not be read
    nameless: int = 0  # events with a duration and no category: could be anything
    lost_bytes: int = 0  # text after the last complete event of a truncated file
    damage: str = ""  # why the file ended early
    lost_keys: bool = False  # what stands before the events could not be read

    @property
    def base_ns(self) -> int:
        """Zero of the file's times, in ns since 1970; 0 if it does not say."""
        base_ns = self.envelope.get("baseTimeNanoseconds", 0)
        return base_ns if isinstance(base_ns, int) and abs(base_ns) < FAR_NS else 0

    def warn(self, text: str) -> None:
        """A TraceWarning about this file."""
        warnings.warn(f"{self.path}: {text}", TraceWarning, stacklevel=2)

    def warn_of_loss(self) -> None:
        """Warnings for a file that was not read whole."""
        if self.lost_keys:
            self.warn("the keys before the events could not be read")
        if self.damage:
            begun = f"the last {self.lost_bytes} bytes read and all that should follow"
            self.warn(
                f"{self.damage}; kept {self.events} complete events, lost {begun}"
            )
        if self.skipped:
            self.warn(
                f"skipped {self.skipped} unreadable of {self.events + self.skipped} "
                "events"
            )
