"""How long does it take to read a trace and break it down, ours beside Holistic Trace
Analysis?

`python benchmarks/trace_read.py [--large] [FILE...]` prints CPU seconds and peak memory
of reading and the breakdown (HTA: TraceAnalysis, overlap and temporal breakdown), each
in a process of its own; "cold" counts start and imports too. Without files: the traces
of at least 50 MB that are found here, and synthetic ones of 100 MB (--large: and 1 GB),
made of copies of df_index_resolver: times stretched and shifted, ids made distinct,
metadata once. A last line is of the same trace as Perfetto's packets (`.pftrace`), which
HTA does not read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from isal import igzip

from madmax_lib.catalog import local_data

FOUND = (
    "hta-samples/df_index_resolver",
    "tracelens-samples/profile_trace_rank_0",
    "tracelens-samples/owlv2_h100",
    "hta-mtia-87MB/mtia_rank_0",
)
SEED = FOUND[0]
SHIFT_US, ID_STEP = 37, 10**7

MEASURE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
what, path = sys.argv[1:]
if what == "hta":
    import logging
    from hta.trace_analysis import TraceAnalysis
    logging.getLogger("hta").setLevel(logging.ERROR)
    def work():
        analysis = TraceAnalysis(trace_files={0: path}, trace_dir="/")
        analysis.get_comm_comp_overlap(visualize=False)
        analysis.get_temporal_breakdown(visualize=False)
else:
    import madmax_lib as mm
    mm.read_trace, mm.breakdown
    if what == "cached":
        mm.breakdown(mm.read_trace(path))
    def work():
        timeline = mm.read_trace(path)
        mm.breakdown(timeline)
        if what == "all":
            list(timeline.side_tables.items())
started = time.process_time(), time.perf_counter()
work()
cpu_s, wall_s = time.process_time() - started[0], time.perf_counter() - started[1]
status = open("/proc/self/status").read()  # ru_maxrss would count what the parent held when it started this process
peak_bytes = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
print(json.dumps([cpu_s, wall_s, peak_bytes, time.process_time()]))
"""  # noqa: E501


def measured(what: str, path: Path, cache: str) -> tuple[float, float, float, float]:
    """CPU seconds, wall seconds and peak bytes of one fresh process, and its CPU
    seconds since it began.
    """
    keep = {
        "XDG_CACHE_HOME": cache,
        "MADMAX_NO_CACHE": "0" if what == "cached" else "1",
    }
    run = [sys.executable, "-c", MEASURE, what, str(path)]
    out = subprocess.run(
        run, env={**os.environ, **keep}, capture_output=True, text=True, check=True
    ).stdout
    return tuple(json.loads(out.splitlines()[-1]))


def synthetic(folder: Path, copies: int) -> Path:
    """A trace as large as `copies` of the seed; JSON text in the form the profiler
    writes.
    """
    text = igzip.decompress(local_data(f"traces/{SEED}.json.gz").read_bytes()).decode()
    start = text.index("[", text.index('"traceEvents"')) + 1
    end = text.rindex("]", 0, text.rindex('"traceName"'))
    events = re.split(r"(?<=\}),(?=\s*\{\s*\"ph\")", text[start:end])
    metadata = [e for e in events if '"ph": "M"' in e]
    others = [e for e in events if '"ph": "M"' not in e]
    zero = min(int(m[1]) for e in others if (m := re.search(r'"ts": (\d+)', e)))
    path = folder / f"rank0_{copies}_copies.json"
    with open(path, "w") as file:
        file.write(text[:start] + ",".join(metadata))
        for copy in range(copies):
            for event in others:
                file.write("," + _moved(event, copy, copies, zero))
        file.write(text[end:])
    return path


def _moved(event: str, copy: int, copies: int, zero: int) -> str:
    event = re.sub(
        r'"ts": (\d+)',
        lambda m: f'"ts": {zero + (int(m[1]) - zero) * copies + SHIFT_US * copy}',
        event,
    )
    event = re.sub(
        r'"(correlation|External id|id)": (\d+)',
        lambda m: f'"{m[1]}": {int(m[2]) + copy * ID_STEP}',
        event,
    )
    if "ProfilerStep" in event:
        event = re.sub(r'"dur": (\d+)', lambda m: f'"dur": {int(m[1]) * copies}', event)
    return event


def row(path: Path, cache: str, repeats: int) -> str:
    """One line of the table; each number is the least of some repeats, HTA's of one
    less.
    """
    ours, every, cached = (
        min(measured(what, path, cache) for _ in range(repeats))
        for what in ("ours", "all", "cached")
    )
    hta = min(measured("hta", path, cache) for _ in range(max(repeats - 1, 1)))
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    size = len(igzip.decompress(path.read_bytes())) if packed else path.stat().st_size
    cells = [f"{path.name.split('.')[0]}{' (gzip)' if packed else ''}", f"{size / 1e6:,.0f}", f"{hta[0]:.2f}",  # noqa: E501
             f"{ours[0]:.3f}", f"{hta[0] / ours[0]:.1f}", f"{cached[0]:.4f}", f"{hta[0] / cached[0]:.0f}",  # noqa: E501
             f"{every[0]:.2f}", f"{hta[3]:.2f}", f"{ours[3]:.2f}", f"{hta[3] / ours[3]:.1f}",
             *(f"{way[2] / 1e6:,.0f}" for way in (hta, ours, every))]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def packets_row(folder: Path, cache: str, repeats: int) -> str:
    """What reading the seed as packets takes, five times over in one file."""
    import madmax_lib as mm

    timeline = mm.read_trace(local_data(f"traces/{SEED}.json.gz"))
    (path,) = mm.export_trace(timeline, folder / "rank0.pftrace")
    path.write_bytes(path.read_bytes() * 5)
    cpu_s, _, peak_bytes, _ = min(measured("ours", path, cache) for _ in range(repeats))
    size_mb = path.stat().st_size / 1e6
    return (
        f"{path.name}: {size_mb:,.0f} MB in {cpu_s:.2f} CPU s, "
        f"{size_mb / cpu_s:.1f} MB per CPU s, peak {peak_bytes / 1e6:,.0f} MB"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--large",
        action="store_true",
        help="also a synthetic trace of 1 GB (HTA takes 5 GB)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    packages = ", ".join(
        f"{name} {version(name)}"
        for name in ("holistictraceanalysis", "pandas", "msgspec", "isal")
    )
    print(
        f"{platform.processor() or platform.machine()}, Python "
        f"{platform.python_version()}, {packages}\n"
    )
    times = [
        "HTA (s)",
        "ours (s)",
        "ratio",
        "cached (s)",
        "ratio",
        "with side tables (s)",
    ]
    times += ["HTA cold (s)", "ours cold (s)", "ratio"]
    heads = ["trace", "MB", *times, "HTA (MB)", "ours (MB)", "with side tables (MB)"]
    print(f"| {' | '.join(heads)} |\n|" + " --- |" * len(heads))
    with tempfile.TemporaryDirectory() as folder:
        for path in given.files or [
            local_data(f"traces/{name}.json.gz") for name in FOUND
        ]:
            print(row(path, folder, given.repeats), flush=True)
        for copies in [] if given.files else [2, 19] if given.large else [2]:
            path = synthetic(Path(folder), copies)
            print(row(path, folder, given.repeats if copies < 10 else 1), flush=True)
            path.unlink()
        if not given.files:
            print(f"\n{packets_row(Path(folder), folder, given.repeats)}")


if __name__ == "__main__":
    main()
