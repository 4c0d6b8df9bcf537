"""torchtitan's structured logs: spans of the host, a JSON object per line and a file per
process and start.

Durations are the `value` of ends (a monotonic clock); the pace is the difference of the
ends of steps on one clock, as clocks of hosts differ. Format: torchtitan 0.3.0,
observability/structured_logger/jsonl_handler.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from isal import igzip

from madmax_lib.traces.logs.log import PACE, Log, assembled

_BLOCK_BYTES = 1 << 22
_HIDDEN = (
    "host spans: a slow GPU or link delays all ranks alike, which does not show here"
)


class _Line(msgspec.Struct, gc=False):
    """Fields of a line that are read."""

    log_type: str
    log_type_name: str
    time_us: int = 0
    step: int | None = None
    value: Any = None
    step_tags: list[str] = []
    rank: int = -1
    source: str = ""
    host_name: str = ""


def blocks(path: Path, size_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """Whole lines of a file, some MB at a time; compressed or not."""
    with path.open("rb") as file:
        reader = igzip.open if file.read(2) == b"\x1f\x8b" else open
    rest = b""
    with reader(path, "rb") as file:
        try:
            while data := file.read(size_bytes):
                lines, _, rest = (rest + data).rpartition(b"\n")
                yield lines
        except EOFError:  # a compressed file that ends early
            pass
    yield rest


def decoded(path: Path, kind: type, lost: Counter) -> Iterator[list]:
    """Objects of the lines of a file, in blocks; lines that are none are counted."""
    decoder = msgspec.json.Decoder(kind)
    for block in blocks(path):
        try:
            yield decoder.decode_lines(block)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            for line in filter(None, block.splitlines()):
                try:
                    yield [decoder.decode(line)]
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    lost["lines are cut or no JSON"] += 1


def read_torchtitan(paths: Sequence[Path]) -> Log:
    """The log of a job, of the files of its processes.

    A later start of a process overrides the steps that it repeats. Processes with one
    source and rank that ran at the same time are two. Raises ValueError where no file
    has the end of a step.
    """
    files = [frame for frame in map(_read, paths) if len(frame)]
    files.sort(key=lambda frame: frame.attrs["first_us"])
    if not files:
        raise ValueError(f"{paths[0]}: no finished step in this log")
    processes = defaultdict(list)
    for frame in files:
        about = frame.attrs
        same = processes[about["source"], about["rank"]]
        # it began when another had ended: a restart
        before = next(
            (f for f in same if f.attrs["last_us"] <= about["first_us"]), None
        )
        if before is not None:
            same[:] = [other for other in same if other is not before]
            frame = pd.concat([before[before.index < frame.index[0]], frame])
            frame.attrs = about
        same.append(frame)
    frames = [frame for _, same in sorted(processes.items()) for frame in same]
    units = pd.DataFrame([frame.attrs for frame in frames])
    notes = [_HIDDEN]
    if missing := set(range(units["rank"].max())) - {*units["rank"]}:
        notes.append(f"no file of rank {', '.join(map(str, sorted(missing)[:8]))}")
    tags = {}
    for frame in files:
        tags |= frame.attrs["tags"]
        for what, count in frame.attrs["lost"].items():
            notes.append(f"{frame.attrs['file']}: {count} {what}")
    return assembled(
        pd.concat(dict(enumerate(frames))),
        units[["rank", "host", "file"]],
        tags=tags,
        source="torchtitan",
        together={*units["source"]} == {"training"},
        notes=tuple(notes),
    )


def _read(path):
    """Frame of a file: seconds of phases by step."""
    rows = []
    tags = {}
    first = _Line("", "")
    lost = Counter()
    for lines in decoded(path, _Line, lost):
        # Branches on log_type first: instants and scalars have such names too.
        rows += [
            (line.step, line.log_type_name, line.value, line.time_us)
            for line in lines
            if line.value is not None
            and line.log_type == "event"
            and line.step is not None
        ]
        tags |= {
            line.step: "+".join(line.step_tags) for line in lines if line.step_tags
        }
        first = (*lines[:1], first)[0]
    table = pd.DataFrame(rows, columns=["step", "phase", "ms", "us"])
    frame = table.pivot_table("ms", "step", "phase", "sum").astype("float32") / 1e3
    frame.columns = [(first.source, name.removesuffix("_end")) for name in frame]
    ends_us = table.groupby("step")["us"].max()
    follows = ends_us.index.to_series().diff() == 1
    frame[PACE] = ends_us.diff().where(follows) / 1e6
    tags |= dict.fromkeys(frame.index[:1], "start")
    frame.attrs = {"rank": first.rank, "source": first.source, "host": first.host_name}
    frame.attrs |= {"file": str(path), "tags": tags, "lost": lost}
    frame.attrs |= {"first_us": table["us"].min(), "last_us": table["us"].max()}
    return frame
