"""Kinds of rows in a trace without a device: communication, compute, and waiting for
communication.

Communication is what annotations of a backend name, on the threads of gloo. Compute is
operators, but an operator that waits for a collective does not compute while it waits:
a functional collective is waited for inside the operator that needs its result, FSDP's
gathers inside nodes of the backward pass. Where a collective ends while such a node
itself is running, and no operator inside of it, the node was waiting: it is not
compute, the operators inside of it are.
"""

from enum import IntEnum

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import KINDS
from madmax_lib.traces.read.event_columns import EventColumns
from madmax_lib.traces.read.nesting import Nest

_OPERATOR = ("cpu_op", "operator")
_CALLS = ("c10d::", "_c10d_functional::")  # they start a collective or wait for one
_WORKS = "aten::"  # operators that compute for as long as they are open
Kind = IntEnum("Kind", KINDS, start=0)  # codes of the kinds of rows


def classify_cpu(columns: EventColumns, kind: np.ndarray, comm: np.ndarray) -> None:
    """Set in kind (n,) which rows are communication and compute. comm: (n,) annotations
    that a kind of communication names.
    """
    is_operator = np.isin(np.array(columns.categories, dtype=object), _OPERATOR)
    operator = is_operator[columns.category] & (kind != Kind.annotation)
    kind[comm] = Kind.comm
    # on a thread that calls c10d, an annotation of communication is the span of an
    # asynchronous send or receive, in flight beside the operators: nothing is inside it
    calls_c10d = operator & begins(columns, _CALLS[0])
    in_flight = np.isin(columns.thread, columns.thread[calls_c10d])
    rows = np.flatnonzero(operator | (comm & ~in_flight))
    spans = pd.DataFrame({"start_ns": columns.start_ns, "stream": columns.thread})
    spans["rank"] = 0
    spans["dur_ns"] = np.maximum(columns.dur_ns, 0)
    nest = Nest(spans, rows)
    calls = begins(columns, *_CALLS)[nest.rows]
    annotation = comm[nest.rows]
    may_wait = ~begins(columns, _WORKS)[nest.rows]
    waits = calls | _woken(columns, nest, comm, may_wait)
    # an operator that waits, or in which something waits, is not compute itself; what is
    # inside of it may be, and inside of any other nothing counts a second time
    waiting_inside = nest.inclusive(waits & ~annotation)
    split = (waiting_inside > 0) & ~calls
    compute = ~(split | calls | annotation | nest.within(~split))
    computing = nest.rows[compute]
    kind[computing] = Kind.compute


def begins(columns: EventColumns, *prefixes: str) -> np.ndarray:
    """Whether the name of each row (n,) begins with a prefix."""
    of_name = [name.startswith(prefixes) for name in columns.names]
    return np.array(of_name, dtype=bool)[columns.name]


def _woken(columns, nest, comm, may_wait):
    """Spans (n,) of the nest, of those that may wait, that are the innermost when a
    collective ends.
    """
    durations = np.maximum(columns.dur_ns[comm], 0)
    ends = columns.start_ns[comm] + durations
    woken = np.zeros(len(nest.rows), dtype=bool)
    for thread in np.unique(nest.thread):
        open_then = nest.at(np.full(len(ends), thread), ends)
        woken[open_then[open_then >= 0]] = True
    return woken & may_wait
