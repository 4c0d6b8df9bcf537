"""What does a report cost, beside the numbers that Holistic Trace Analysis gives of the
same ranks?

`python benchmarks/report.py` replicates a trace of 45 MB to 8 ranks, part of one to 512
ranks of 0.2 MB, and prints CPU seconds of fresh processes, imports counted, and the
size of the page. HTA: overlap and temporal breakdown, which are two of the report's
tables.
"""

import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from madmax_lib.catalog import local_data

HTA = """
import logging, sys
from hta.trace_analysis import TraceAnalysis
logging.getLogger("hta").setLevel(logging.ERROR)
analysis = TraceAnalysis(trace_dir=sys.argv[1])
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_temporal_breakdown(visualize=False)
"""
SHIFT_US = 37
CASES = (
    (8, "hta-samples/df_index_resolver", 1.0),
    (512, "param-dlrm-8xV100/worker0_step_12.1694128201545.pt.trace", 0.22),
)


def replicated(folder: Path, ranks: int, name: str, share: float) -> float:
    """Write the first share of a trace's events as that of each rank, shifted in time;
    megabytes of a rank.
    """
    trace = json.loads(
        gzip.decompress(local_data(f"traces/{name}.json.gz").read_bytes())
    )
    events = sorted(
        (e for e in trace["traceEvents"] if "dur" in e), key=lambda e: e["ts"]
    )
    kept, steps = (
        events[: int(len(events) * share)],
        [e for e in events if "ProfilerStep" in str(e.get("name"))],
    )
    kept += (
        [e for e in steps if e not in kept]
        if share < 1
        else [e for e in trace["traceEvents"] if "dur" not in e]
    )
    for rank in range(ranks):
        moved = [
            {**e, "ts": e["ts"] + SHIFT_US * rank} if "ts" in e else e for e in kept
        ]
        about = {
            "distributedInfo": {"rank": rank, "world_size": ranks},
            "traceEvents": moved,
        }
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps(trace | about))
    return path.stat().st_size / 1e6


def cpu_s(command: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of a process and those it starts; NaN where it fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "MADMAX_NO_CACHE": "1"}, capture_output=True
    )
    wall_s, after = (
        time.perf_counter() - started,
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (used, wall_s) if done.returncode == 0 else (float("nan"), float("nan"))


def main() -> None:
    """Print a line per case."""
    print(
        "| ranks | MB each | report CPU (s) | wall (s) | page (MB) | HTA CPU (s) | "
        "HTA wall (s) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks, name, share in CASES:
        with tempfile.TemporaryDirectory() as folder:
            traces, page = Path(folder) / "traces", Path(folder) / "report.html"
            traces.mkdir()
            size = replicated(traces, ranks, name, share)
            ours = cpu_s(
                [
                    sys.executable,
                    "-m",
                    "madmax_lib",
                    "report",
                    str(traces),
                    "-o",
                    str(page),
                ]
            )
            theirs = cpu_s([sys.executable, "-c", HTA, str(traces)])
            cells = [size, *ours, page.stat().st_size / 1e6, *theirs]
        print(
            f"| {ranks} | {' | '.join(f'{cell:.3g}' for cell in cells)} |", flush=True
        )


if __name__ == "__main__":
    main()
