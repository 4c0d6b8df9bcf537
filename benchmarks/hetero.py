"""How long does the heterogeneous planner take, beside the original Metis?

`python benchmarks/hetero.py` prints CPU seconds and peak memory of
`planner.hetero.plan`, each case in a fresh process with one thread: rows 2 and 4 of the
Metis fork's Table 1, and two larger clusters. Profiles are made and turned into prices
before the clock starts; that time is shown apart. The original's CPU seconds (its base
and its strategy mode) were recorded on another day by running it unmodified; row 4 is
its authors' own account of about 30 minutes a trial. The peak is of the whole process,
imports included. Then the error of `planner.hetero.predict` on 26 measured steps of 12
V100 and 4 T4, beside that of their source's own model (AMP).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

ORIGINAL_S = {"row 2": (40.3, 15.8), "row 4": (1800.0, None)}
SPEEDS = {
    "A100": 1.0,
    "V100": 3.5,
    "H100": 0.45,
}  # time of a layer over that on an A100; the third is invented
CASES = {  # layers, GPUs of each type, global batch
    "row 2": (20, {"V100": 32, "A100": 32}, 128),
    "row 4": (40, {"V100": 128, "A100": 128}, 128),
    "1,024 GPUs, two types": (96, {"V100": 512, "A100": 512}, 128),
    "1,024 GPUs, two types, 2,048 samples": (96, {"V100": 512, "A100": 512}, 2048),
    "4,096 GPUs, three types": (96, {"A100": 2048, "V100": 1024, "H100": 1024}, 128),
    "4,096 GPUs, three types, 2,048 samples": (
        96,
        {"A100": 2048, "V100": 1024, "H100": 1024},
        2048,
    ),
}


def measure(name: str, memory_factor: float) -> dict:
    """Plan one case in this process: cost, CPU seconds with and without the profiles,
    sweeps, peak memory in MB.
    """
    from madmax_lib.papers.metis import generate_profiles
    from madmax_lib.planner.hetero import (
        Node,
        plan,
        problem,
    )  # loads them before the clock starts

    layers, gpus, global_batch = CASES[name]
    kinds = {"V100": (16, 50), "A100": (80, 46), "H100": (80, 46)}
    nodes = [
        Node.of_file(device, device, 4, *kinds[device], 10)
        for device in gpus
        for _ in range(gpus[device] // 4)
    ]
    started = time.process_time()
    profiles = generate_profiles(
        layers, 128, slowdown={device: SPEEDS[device] for device in gpus}
    )
    given = problem(
        profiles=profiles,
        cluster=nodes,
        global_batch=global_batch,
        memory_factor=memory_factor,
    )
    loaded = time.process_time()
    best = plan(given, progress=False)
    return {
        "cost_ms": best.cost_ms,
        "plan_s": time.process_time() - loaded,
        "profiles_s": loaded - started,
        "sweeps": best.sweeps,
        "stages": len(best.plan.device_groups),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Print the table."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], float(sys.argv[2]))))
        return
    print(
        "| case | memory | cost (ms) | stages | sweeps | CPU (s) | profiles (s) | "
        "original (s) | ratio | peak (MB) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name in CASES:
        for factor in (1, 0):
            command = [sys.executable, __file__, name, str(factor)]
            run = subprocess.run(
                command, capture_output=True, text=True, check=True, env=one_thread
            )
            row = json.loads(run.stdout)
            original_s = [seconds for seconds in ORIGINAL_S.get(name, ()) if seconds]
            cells = [
                name,
                "counted" if factor else "left aside",
                f"{row['cost_ms']:,.2f}",
                row["stages"],
                row["sweeps"],
                f"{row['plan_s']:.2f}",
                f"{row['profiles_s']:.2f}",
                " / ".join(f"{seconds:,.4g}" for seconds in original_s) or "-",
                " / ".join(f"{seconds / row['plan_s']:,.4g}" for seconds in original_s)
                or "-",
                f"{row['peak_mb']:,.0f}",
            ]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
    print_errors()


def print_errors() -> None:
    """Print errors of predicted steps on mixed GPUs, ours and the peer's."""
    from madmax_lib import catalog
    from madmax_lib.planner.hetero import predict

    steps = predict(catalog.table("published_mixed", numbers=True))
    print("\n| model | mean error | median | largest |\n| --- | --- | --- | --- |")
    for name, column in (("ours", "predicted_s"), ("AMP", "source_prediction_s")):
        error = (steps[column] / steps["iteration_time_s"] - 1).abs()
        print(
            f"| {name} | {error.mean():.1%} | {error.median():.1%} | "
            f"{error.max():.1%} |"
        )


if __name__ == "__main__":
    main()
