"""Plans per CPU second of `mm.search`, its peak memory, and the ratio to a scalar loop over `mm.estimate`.

python benchmarks/search.py [--nodes 512] [--batch 4096]
"""

import argparse
import resource
import time

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.planner import plan_of
from madmax_lib.simulator import memory, peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4096)
    arguments = parser.parse_args()
    model, cluster = mm.model("gpt3-175b"), mm.cluster("dgx-a100", nodes=arguments.nodes)
    mm.estimate(model, cluster, mm.Plan(dp=cluster.world_size), global_batch=cluster.world_size)  # tables are read
    start = time.process_time()
    result = mm.search(model, cluster, arguments.batch, progress=False)
    seconds = time.process_time() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    scalar = scalar_seconds(model, cluster, arguments.batch, result)
    print(f"{result.evaluated:,} plans of {model.name} on {cluster.world_size:,} devices, {result.feasible:,} fit")
    print(f"{seconds:.1f} CPU s, {result.evaluated / seconds:,.0f} plans per CPU s, peak {peak_mb:.0f} MB")
    print(f"a scalar loop: {1 / scalar:,.0f} plans per CPU s, ratio {scalar * result.evaluated / seconds:,.0f}")
    for row in catalog.table("search_published").itertuples():
        plans, theirs_s = float(row.plans), float(row.seconds)
        ratio = result.evaluated / seconds / (plans / theirs_s)
        print(f"{row.tool}: {plans:,.0f} in {theirs_s:,.0f} CPU s, ratio {ratio:,.0f}")


def scalar_seconds(model, cluster, batch: int, result) -> float:
    """CPU seconds of one plan in a loop of estimate and memory."""
    plans = [plan_of(row) for row in result.table.to_dict("records")]
    start = time.process_time()
    for plan in plans:
        mm.estimate(model, cluster, plan, global_batch=batch)
        peak_bytes(memory(model, plan, global_batch=batch))
    return (time.process_time() - start) / len(plans)


if __name__ == "__main__":
    main()
