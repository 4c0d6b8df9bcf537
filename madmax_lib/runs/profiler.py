"""Which steps of a run are traced, and how is the trace written? One file per rank that `read_trace` opens.

The first step waits, one warms the profiler up, three are recorded, once. The trace is written by `on_trace_ready`:
exported after the loop it would be empty. Written as .json.gz, without the name of the machine.
"""

from __future__ import annotations

import gzip
import re
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from madmax_lib.atomic import replacing

__all__ = ["profiler"]


def profiler(path: Path, device: str) -> profile:
    """Profiler of one rank that writes its trace to `path` (.json.gz); call its `step` after each training step."""
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])],
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: _write(done, path),
        record_shapes=True,
    )


def _write(done: profile, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        done.export_chrome_trace(str(raw))
        text = raw.read_text(encoding="utf-8")
    text = re.sub(r'"host_name": "[^"]*",\s*', "", text)
    text = re.sub(r'("traceName": )"[^"]*"', rf'\1"{path.name}"', text)
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
