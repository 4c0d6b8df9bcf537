"""How long does it take to tell who holds a GPU's memory, ours beside pt-snap-cli and
torch's own viewer?

`python benchmarks/snapshots.py [--large] [--peer PYTHON] [FILE...]` prints CPU seconds
and peak memory of a fresh process each, imports not counted in the time. Ours reads the
snapshot, replays it and names the holders of the peak; pt-snap-cli (PYTHON of an
environment that has it) replays it into SQLite; torch loads it and makes the page that
a browser opens (`_memory_viz.trace_plot`), or its table of segments (`segsum`). The
peaks should be equal. Without files: the real steps that are found here. --large: also
a made-up history of 1 GB, with the stacks of one of them; making it takes 6 GB of
memory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import random
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

from madmax_lib.catalog import local_data

FOUND = ("cs336-train-step", "ftcourse-old")
MIB, BASE = 1 << 20, 0x7F00_0000_0000
LARGE_BYTES, EVENT_BYTES = 1_000_000_000, 130

MEASURE = """
import json, sys, time
what, path, out = sys.argv[1:]
if what == "ours":
    import madmax_lib as mm
    mm.traces.snapshot_held, mm.traces.read_snapshot, mm.traces.snapshot_peak
    def work():
        snapshot = mm.traces.read_snapshot(path)
        mm.traces.snapshot_held(snapshot)
        peak = mm.traces.snapshot_peak(snapshot).iloc[0]
        return int(peak["peak_bytes"])
elif what == "pt-snap-cli":
    import glob, sqlite3
    from pt_snap_cli.cli import app
    def work():
        app(["import", path, "-o", out, "--no-focus"], standalone_mode=False)
        base = sqlite3.connect(glob.glob(out + "/*.db")[0])
        return base.execute("select max(allocated) from trace_entry_0").fetchone()[0]
else:
    import pickle
    from torch.cuda._memory_viz import segsum, trace_plot
    def work():
        with open(path, "rb") as file:
            data = pickle.load(file)
        text = trace_plot(data) if what == "torch's page" else segsum(data)
        open(out + "/page", "w").write(text)
started = time.process_time()
found = work()
seconds = time.process_time() - started
status = open("/proc/self/status").read()
peak_bytes = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
print()
print(json.dumps([seconds, peak_bytes, found]))
"""  # noqa: E501


def measured(python: str, what: str, path: Path) -> tuple[float, int, int | None] | str:
    """CPU seconds, peak bytes and what a fresh process found; the last line of its
    error if it fails.
    """
    with tempfile.TemporaryDirectory() as out:
        run = subprocess.run(
            [python, "-c", MEASURE, what, str(path), out],
            capture_output=True,
            text=True,
            cwd=out,
        )
    return (
        tuple(json.loads(run.stdout.splitlines()[-1]))
        if run.returncode == 0
        else run.stderr.splitlines()[-1]
    )


def large(path: Path, real: Path, size_bytes: int = LARGE_BYTES) -> None:
    """A history of steps that take blocks of a segment and give them back in reverse,
    with the stacks of a real one.
    """
    draw, events = random.Random(0), []
    stacks = [
        e["frames"]
        for e in pickle.loads(gzip.decompress(real.read_bytes()))["device_traces"][0]
    ]
    times_us = count(1_748_730_219_596_671, 7)

    def log(action: str, address: int, size: int, frames: list) -> None:
        about = {"action": action, "addr": address, "size": size, "stream": 0}
        events.append({**about, "time_us": next(times_us), "frames": frames})

    while len(events) * EVENT_BYTES < size_bytes:
        address, live = BASE, []
        for _ in range(2000):
            size = draw.randrange(1, 1 << 22) + MIB
            live.append((address, size))
            log("alloc", address, size, list(draw.choice(stacks)))
            address += -(-size // 512) * 512
        for address, size in reversed(live):
            frames = list(draw.choice(stacks))
            log("free_requested", address, size, frames)
            log("free_completed", address, size, frames)
    total = 2000 * (6 << 20)
    block = {
        "address": BASE,
        "size": total,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": total,
        "stream": 0,
        "segment_type": "large",
    }
    segments = [segment | {"is_expandable": False, "frames": [], "blocks": [block]}]
    with open(path, "wb") as file:
        pickle.dump({"segments": segments, "device_traces": [events]}, file, protocol=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--large", action="store_true", help="also a made-up one of 1 GB"
    )
    parser.add_argument("--peer", help="Python of an environment with pt-snap-cli")
    options = parser.parse_args()
    real = [local_data(f"snapshots/{name}.pickle.gz") for name in FOUND]
    tools = {
        "ours": sys.executable,
        "pt-snap-cli": options.peer,
        "torch's page": sys.executable,
    }
    tools["torch's table"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        files = list(options.files)
        for path in real if not files else ():  # the peers read no packed ones
            files.append(Path(folder) / path.stem)
            files[-1].write_bytes(gzip.decompress(path.read_bytes()))
        if options.large:
            files.append(Path(folder) / "large.pickle")
            large(files[-1], real[0])
        print(
            "| snapshot | MB | tool | CPU (s) | memory (MB) | allocated at the peak "
            "(bytes) |",
            "| --- " * 6 + "|",
            sep="\n",
        )
        for path in files:
            for tool, python in tools.items():
                if python:
                    result = measured(python, tool, path)
                    row = [path.stem, f"{path.stat().st_size / 1e6:,.1f}", tool]
                    failed = isinstance(result, str)
                    row += (
                        [result, "", ""]
                        if failed
                        else [
                            f"{result[0]:.2f}",
                            f"{result[1] / 1e6:,.0f}",
                            result[2] or "",
                        ]
                    )
                    print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
