"""What does vTrain measure? Its text traces of one layer on one GPU: operators, their kernels and the gaps between.

A line is start_ns,duration_ns,KIND,...,correlation. TIMESTAMP lines mark on the host where an operator starts and ends
("forward start transformer"); a KERNEL belongs to the operator that was open when the RUNTIME or DRIVER call of its
correlation launched it [vTrain, Bang et al., MICRO 2024, behaviour recorded]. No recorded trace is public.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.atomic import replacing
from madmax_lib.papers.vtrain.graph import Operators
from madmax_lib.units import NS_PER_S

__all__ = ["export", "load_trace", "trace_operators"]

_COLUMNS = ["operator", "kernel", "duration_s", "gap_s"]
_MARK = re.compile(r"\b(forward|backward|WU) (start|end) (embeddings|transformer|logit|loss)\b")
_PARTS = {  # field of Operators -> operators of the trace; the output matrix has no update of its own
    "forward_s": ("forward transformer",), "backward_s": ("backward transformer",),
    "embedding_forward_s": ("forward embeddings",), "embedding_backward_s": ("backward embeddings",),
    "output_forward_s": ("forward logit", "forward loss"), "output_backward_s": ("backward loss", "backward logit"),
    "update_s": ("WU transformer",), "embedding_update_s": ("WU embeddings",),
}  # fmt: skip


@dataclass(frozen=True)
class _Line:
    start_ns: int
    duration_ns: int
    kind: str
    text: str
    correlation: str


def load_trace(path: str | Path) -> pd.DataFrame:
    """The kernels of a trace in the order of their start, one row each.

    Columns: operator (such as "forward transformer"), kernel, duration_s, gap_s to the next kernel of the operator, 0
    after its last one. Kernels that no operator launched are left out. Raises OSError if it cannot be read, ValueError
    naming file and line for a line that is not one, marks that do not pair, or a trace without kernels of operators.
    """
    lines = [_parse(text, f"{path}: line {i}") for i, text in
             enumerate(Path(path).read_text().splitlines(), 1) if text.strip()]  # fmt: skip
    marks = _marks(lines, path)
    launched = {}
    for line in lines:
        if line.kind in ("RUNTIME", "DRIVER"):
            launched.setdefault(line.correlation, line.start_ns)
    rows = []
    for line in sorted((x for x in lines if x.kind == "KERNEL"), key=lambda x: x.start_ns):
        if operator := _open_at(marks, launched.get(line.correlation)):
            rows.append((operator, line.text.split(",")[0], line.start_ns, line.duration_ns))
    if not rows:
        raise ValueError(f"{path}: no kernel was launched inside an operator")
    table = pd.DataFrame(rows, columns=["operator", "kernel", "start_ns", "duration_ns"])
    following_ns = table.groupby("operator", sort=False)["start_ns"].shift(-1)
    gap_ns = (following_ns - table["start_ns"] - table["duration_ns"]).clip(lower=0).fillna(0.0)
    return table.assign(duration_s=table["duration_ns"] / NS_PER_S, gap_s=gap_ns / NS_PER_S)[_COLUMNS]


def trace_operators(trace: pd.DataFrame) -> Operators:
    """Times of vTrain's operators from a trace: kernels and the gaps between them. What the trace lacks takes no time.

    Raises ValueError for a trace without a layer's forward and backward pass.
    """
    total_s = (trace["duration_s"] + trace["gap_s"]).groupby(trace["operator"]).sum()
    for needed in ("forward transformer", "backward transformer"):
        if needed not in total_s:
            raise ValueError(f"the trace has no operator {needed!r}")
    return Operators(**{field: float(total_s.reindex(parts).sum()) for field, parts in _PARTS.items()})


def export(operators: Operators | pd.DataFrame, path: str | Path) -> None:
    """A trace in vTrain's format: kernels as `load_trace` returns them, or one kernel per operator. Whole ns."""
    if isinstance(operators, Operators):
        rows = [(parts[0], parts[0].replace(" ", "_"), getattr(operators, field), 0.0)
                for field, parts in _PARTS.items()]  # fmt: skip
        operators = pd.DataFrame(rows, columns=_COLUMNS)
    if missing := [column for column in _COLUMNS if column not in operators.columns]:
        raise ValueError(f"the kernels lack the column(s) {', '.join(missing)}")
    lines, host_ns, device_ns, correlation = [], 0, 1000, 0
    for operator, kernels in operators.groupby("operator", sort=False):
        phase, _, name = operator.partition(" ")
        lines.append(f"{host_ns},0,TIMESTAMP,{phase} start {name},0")
        for kernel, duration_s, gap_s in kernels[_COLUMNS[1:]].itertuples(index=False):
            correlation, host_ns = correlation + 1, host_ns + 1
            duration_ns, gap_ns = (int(np.rint(value * NS_PER_S)) for value in (duration_s, gap_s))
            lines.append(f"{host_ns},1,RUNTIME,cudaLaunchKernel,{correlation}")
            lines.append(f"{device_ns},{duration_ns},KERNEL,{kernel},0,1,7,[1 1 1],[1 1 1],{correlation}")
            device_ns += duration_ns + gap_ns
        host_ns += 2
        lines.append(f"{host_ns},0,TIMESTAMP,{phase} end {name},0")
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")


def _parse(text: str, where: str) -> _Line:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 4 or not parts[0].isdigit() or not parts[1].isdigit():
        raise ValueError(f"{where} is not start_ns,duration_ns,KIND,...,correlation: {text[:60]!r}")
    return _Line(int(parts[0]), int(parts[1]), parts[2].upper(), ",".join(parts[3:]), parts[-1])


def _marks(lines: list[_Line], path: str | Path) -> list[tuple[int, int, str]]:
    """(start_ns, end_ns, operator) on the host."""
    found, begun = [], {}
    for line in sorted((x for x in lines if x.kind == "TIMESTAMP"), key=lambda x: x.start_ns):
        if not (mark := _MARK.search(line.text)):
            continue
        phase, side, name = mark.groups()
        operator = f"{phase} {name}"
        if (side == "start") == (operator in begun):
            missing = "end" if operator in begun else "start"
            raise ValueError(f"{path}: {line.text!r} at {line.start_ns} ns has no {missing}")
        if side == "start":
            begun[operator] = line.start_ns
        else:
            found.append((begun.pop(operator), line.start_ns, operator))
    if begun:
        raise ValueError(f"{path}: operator {next(iter(begun))!r} does not end")
    return found


def _open_at(marks: list[tuple[int, int, str]], time_ns: int | None) -> str:
    if time_ns is None:
        return ""
    return next((operator for start_ns, end_ns, operator in marks if start_ns <= time_ns <= end_ns), "")
