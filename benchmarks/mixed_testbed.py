"""Does the mixed-cluster planner's cost meet a testbed on which one device is slower? A
line per partition.

    python benchmarks/mixed_testbed.py MACHINE -o build/mixed --repeats 2 --layers 6 --hidden 192

MACHINE: the directory of a calibration of two hosts. A GPT runs in two stages, both on
a core or one of them on half of it, under four partitions of its layers; beside the
median of the repeats stands `hetero.cost` of the same plan, from the machine's
constants and a device of half the rates. The load of the machine is printed: where
others want its cores, a device that is not slowed is slow too.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

import madmax_lib as mm
from madmax_lib.planner import hetero
from madmax_lib.runs import RunSpec, launch_all, read_run

HEADS = {"heads": 8, "kv_heads": 4}
BATCH = 8
SLOW = 0.5
ORDERS = ((1.0, 1.0), (1.0, SLOW), (SLOW, 1.0))


def main() -> None:
    """Run, price, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/mixed"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=192)
    options = parser.parse_args()
    layers, hidden = options.layers, options.hidden
    sizes = HEADS | {"layers": layers, "hidden": hidden, "ffn": 3 * hidden}
    machine = mm.machine(options.machine)
    device = machine.cluster.device
    rates = {name: SLOW * peak for name, peak in device.peak_flops.items()}
    slow = replace(
        device,
        peak_flops=rates,
        memory_bandwidth_bytes_per_s=SLOW * device.memory_bandwidth_bytes_per_s,
    )
    one_each = {"devices_per_node": 1, "nodes": 1}
    devices = {1.0: replace(device, name="whole"), SLOW: replace(slow, name="half")}
    nodes = {
        speed: replace(machine.cluster, name=of.name, device=of, **one_each)
        for speed, of in devices.items()
    }
    network = machine.provenance["network"]
    where = {"hosts": 2, "network": network, "device": "cpu", "timeout_s": 240.0}
    what = {"sizes": sizes, "global_batch": BATCH, "steps": 11, "warmup": 1}
    given = {
        "global_batch": BATCH,
        "dtype": machine.dtype,
        "parameters": machine.parameters,
        "recompute": ("none",),
    }
    rows = []
    for order in ORDERS:
        for first in range(layers // 2 - 1, layers // 2 + 3):
            spec = RunSpec(
                "gpt-tiny", f"pp2.first{first}.mb1", speed=order, **what, **where
            )
            steps_s = []
            for repeat in range(options.repeats):
                stem = f"first{first}-{order[0]:g}-{order[1]:g}-{repeat}"
                folder = options.output / stem
                if not (folder / "summary.json").exists():
                    launch_all({folder: spec})  # one by one: a start has one speed
                steps_s.append(read_run(folder).summary["step_s"]["median"])
            names = tuple(dict.fromkeys(devices[speed].name for speed in order))
            cuts = (0, first + 1, layers + 2)
            plan = hetero.HeteroPlan(names, (1, 1), ((1, 1), (1, 1)), BATCH, cuts)
            cluster = [nodes[speed] for speed in order]
            cost_ms = hetero.cost(plan, model=spec.shapes, cluster=cluster, **given)
            row = {"first": first, "speeds": str(order), "cost_s": cost_ms / 1e3}
            rows.append(row | {"measured_s": np.median(steps_s)})
    table = pd.DataFrame(rows)
    table["error"] = table["cost_s"] / table["measured_s"] - 1
    print(table.to_string(index=False, float_format="{:.3f}".format))
    by_order = table.groupby("speeds")
    ranks = by_order[["cost_s", "measured_s"]].idxmin()
    same = (ranks["cost_s"] == ranks["measured_s"]).sum()
    for speeds, errors in by_order["error"]:
        print(
            f"{speeds}: mean {errors.abs().mean():.1%}, worst {errors.abs().max():.1%}"
        )
    print(
        f"same best partition in {same} of {len(ranks)} orders; load "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
