"""Does the mixed-cluster planner's cost meet a testbed on which one device is slower? A
line per partition.

    python benchmarks/mixed_testbed.py MACHINE -o build/mixed

MACHINE: the directory of a calibration of two hosts. A GPT runs in two stages, one of
them on half a core, under every partition of its layers that leaves none out; beside
each step stands `hetero.cost` of the same plan, from the machine's constants and a
device of half the rates.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

import madmax_lib as mm
from madmax_lib.planner import hetero
from madmax_lib.runs import RunSpec, launch_all, read_run

SIZES = {"layers": 6, "hidden": 192, "heads": 8, "kv_heads": 4, "ffn": 576}
BATCH, FIRST, SLOW = 8, (2, 3, 4, 5), 0.5


def main() -> None:
    """Run, price, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/mixed"))
    options = parser.parse_args()
    machine = mm.machine(options.machine)
    device = machine.cluster.device
    rates = {name: SLOW * peak for name, peak in device.peak_flops.items()}
    slow = replace(
        device,
        peak_flops=rates,
        memory_bandwidth_bytes_per_s=SLOW * device.memory_bandwidth_bytes_per_s,
    )
    nodes = [
        replace(
            machine.cluster,
            name=name,
            device=replace(of, name=name),
            devices_per_node=1,
            nodes=1,
        )
        for name, of in (("whole", device), ("half", slow))
    ]
    runs = {}
    for order in ((1.0, SLOW), (SLOW, 1.0)):
        for first in FIRST:
            what = {
                "sizes": SIZES,
                "global_batch": BATCH,
                "speed": order,
                "steps": 11,
                "warmup": 1,
                "device": "cpu",
            }
            where = {
                "hosts": 2,
                "network": machine.provenance["network"],
                "timeout_s": 240.0,
            }
            runs[first, order] = RunSpec(
                "gpt-tiny", f"pp2.first{first}.mb1", **what, **where
            )
    folders = {key: options.output / f"first{key[0]}-{key[1][0]:g}" for key in runs}
    for key, folder in folders.items():  # one by one: a start has one speed
        if not (folder / "summary.json").exists():
            launch_all({folder: runs[key]})
    rows = []
    for (first, order), folder in folders.items():
        spec, measured_s = (
            runs[first, order],
            read_run(folder).summary["step_s"]["median"],
        )
        names = ("whole", "half") if order[0] == 1 else ("half", "whole")
        plan = hetero.HeteroPlan(
            names, (1, 1), ((1, 1), (1, 1)), BATCH, (0, first + 1, SIZES["layers"] + 2)
        )
        what = {
            "cluster": nodes,
            "global_batch": BATCH,
            "dtype": machine.dtype,
            "parameters": machine.parameters,
        }
        cost_s = hetero.cost(plan, model=spec.shapes, recompute=("none",), **what) / 1e3
        rows.append(
            {
                "first": first,
                "speeds": str(order),
                "cost_s": cost_s,
                "measured_s": measured_s,
            }
        )
    table = pd.DataFrame(rows)
    table["error"] = table["cost_s"] / table["measured_s"] - 1
    print(table.to_string(index=False, float_format="{:.3f}".format))
    errors, ranks = (
        np.abs(table["error"]),
        table.groupby("speeds")[["cost_s", "measured_s"]].idxmin(),
    )
    same = (ranks["cost_s"] == ranks["measured_s"]).sum()
    print(
        f"mean {errors.mean():.1%}, worst {errors.max():.1%}; same best partition in "
        f"{same} of {len(ranks)} orders"
    )


if __name__ == "__main__":
    main()
