"""Predicted memory as snapshots of PyTorch's allocator, for its viewer
[pytorch.org/memory_viz] and for `traces.read_snapshot`.
"""

import itertools
import math
import pickle
from pathlib import Path

import pandas as pd

from madmax_lib.base.atomic import replacing

_FIRST = 1 << 40  # address of the first block
# what comes and goes in a step, in this order: a pass holds the loss, then the
# backward pass of a layer
_COMES = "alloc"
_GOES = ("free_requested", "free_completed")
_MOMENTS = (
    ("always", _COMES),
    ("pass", _COMES),
    ("loss", _COMES),
    ("loss", *_GOES),
    ("backward", _COMES),
    ("backward", *_GOES),
    ("pass", *_GOES),
    ("step", _COMES),
    ("step", *_GOES),
)


def export_snapshot(table: pd.DataFrame, directory: str | Path) -> list[Path]:
    """Write what `memory` says as a snapshot for each pipeline stage, `rank{stage}.pickle`
    in a directory that is made if needed; the paths in order of stage.

    Every component is a block in a segment of its own (bytes rounded up), whose stack
    is its name; times are counted, a us for each event. Raises OSError for a directory
    that is none. See also: mm.memory, mm.traces.read_snapshot.
    """
    paths = []
    for stage, parts in table[table["size_bytes"] > 0].groupby("stage"):
        sizes = [math.ceil(size) for size in parts["size_bytes"]]
        ends = itertools.accumulate(sizes, initial=_FIRST)
        blocks = []
        for name, size, address in zip(parts["component"], sizes, ends, strict=False):
            frames = [{"name": name, "filename": "predicted.py", "line": 0}]
            block = {"size": size, "requested_size": size, "frames": frames}
            blocks.append(block | {"address": address, "state": "inactive"})
        paths.append(Path(directory).expanduser() / f"rank{stage}.pickle")
        with replacing(paths[-1]) as part:
            part.write_bytes(pickle.dumps(_snapshot(blocks, parts["phase"])))
    return paths


def _snapshot(blocks, phases):
    events = []
    segments = []
    for block, phase in zip(blocks, phases, strict=True):
        size = block["size"]
        here = size if phase == "always" else 0
        if here:
            block["state"] = "active_allocated"
        sizes = {"total_size": size, "allocated_size": here, "active_size": here}
        sizes |= {"requested_size": here, "segment_type": "large", "blocks": [block]}
        segment = {"device": 0, "address": block["address"], "stream": 0, "frames": []}
        segments.append(segment | sizes)
        events.append(_event("segment_alloc", block))
    for moment, *actions in _MOMENTS:
        for block, phase in zip(blocks, phases, strict=True):
            if phase == moment:
                events += [_event(action, block) for action in actions]
    for time_us, event in enumerate(events):
        event["time_us"] = time_us
    return {"segments": segments, "device_traces": [events]}


def _event(action, block):
    about = {"addr": block["address"], "size": block["size"], "stream": 0}
    return {"action": action, "frames": block["frames"], **about}
