"""Profiler of one rank, and the trace that it writes.

It skips some steps, warms up on one and records some, once. The trace is written by
`on_trace_ready`: exported after the loop it would be empty.
"""

import gzip
import re
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from madmax_lib.base.atomic import replacing


def profiler(
    path: Path, device: str, memory: bool = False, *, wait: int = 1, active: int = 3
) -> profile:
    """Profiler of one rank that writes to `path` (.json.gz) without the machine's name;
    `step` it after each step.

    memory: with the allocator's events; of a GPU a snapshot too, beside the trace as
    memory_rank{r}.pickle. wait: steps that it skips first. active: that it records.
    """
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    if memory and on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def write(done):
        if memory and on_gpu:
            name = path.name.replace("trace", "memory").replace(".json.gz", ".pickle")
            torch.cuda.memory._dump_snapshot(str(path.with_name(name)))
            torch.cuda.memory._record_memory_history(enabled=None)
        _write_trace(done, path)

    return profile(
        activities=activities,
        # the first step is unlike the others, and a recording profiler starts slowly
        schedule=schedule(wait=wait, warmup=1, active=active, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=memory,
    )


def _write_trace(done, path):
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        done.export_chrome_trace(str(raw))
        text = raw.read_text(encoding="utf-8")
    # a trace may be published: it names neither the machine nor a folder of it
    text = re.sub(r'"host_name": "[^"]*",\s*', "", text)
    text = re.sub(r'("traceName": )"[^"]*"', rf'\1"{path.name}"', text)
    with replacing(path) as temporary:
        # no time in the header: equal traces are equal files
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))
