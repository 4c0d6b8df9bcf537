"""How fast would my model train on my cluster? Both written down here: 4 nodes of 8 L40S on 100 Gbit/s Ethernet."""

import madmax_lib as mm
from madmax_lib.catalog import Cluster, Device, Link, Transformer

L40S = Device(
    "L40S",
    memory_bytes=48e9,
    memory_bandwidth_bytes_per_s=864e9,
    peak_flops={"bf16": 362e12, "fp32": 91.6e12},
    tdp_w=350,
)
CLUSTER = Cluster(
    "my-l40s",
    L40S,
    devices_per_node=8,
    nodes=4,
    intra=Link("PCIe 4.0 x16", 32e9),  # bytes/s per device, one way
    inter=Link("100 Gbit/s a node", 100e9 / 8 / 8),  # 12.5 GB/s shared by eight devices
)
MODEL = Transformer("my-3b", layers=28, hidden=3072, heads=24, ffn=8192, sequence=4096, vocab=128256, gated=True)


def main(global_batch: int = 128):
    """Print the best plans, and what fills the memory of the first under the stack that launches it."""
    found = mm.search(MODEL, CLUSTER, global_batch, space=mm.planner.Space.quick(), top=5, progress=False)
    print(found.table[["plan", "stacks", "launched_s", "step_s", "low_s", "high_s", "mfu"]].to_string(index=False))
    stack = found.table["stacks"].iloc[0].split()[0]
    held = mm.fits(MODEL, CLUSTER, found.best, global_batch=global_batch, software=stack)
    print(held.table.to_string(index=False))
    return found


if __name__ == "__main__":
    main()
