"""Plans per CPU second of `mm.search` and of `mm.estimate`, peak memory, and the ratio
to a scalar loop.

python benchmarks/search.py [--nodes 512] [--batch 4096]
"""

import argparse
import resource
import time
from dataclasses import replace

import numpy as np
import pandas as pd

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.planner import Space, plan_of
from madmax_lib.simulator import memory, peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4096)
    arguments = parser.parse_args()
    model, cluster = (
        mm.model("gpt3-175b"),
        mm.cluster("dgx-a100", nodes=arguments.nodes),
    )
    mm.estimate(
        model, cluster, mm.Plan(dp=cluster.world_size), global_batch=cluster.world_size
    )  # tables are read
    anything = replace(
        catalog.software("none"), name="anything"
    )  # launches every legal plan
    seconds, result = searched(model, cluster, arguments.batch, software=anything)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    scalar = scalar_seconds(model, cluster, arguments.batch, result)
    print(
        f"{result.evaluated:,} plans of {model.name} on {cluster.world_size:,} "
        f"devices, {result.feasible:,} fit"
    )
    print(
        f"{seconds:.1f} CPU s, {result.evaluated / seconds:,.0f} plans per CPU s, "
        f"peak {peak_mb:.0f} MB"
    )
    print(
        f"a scalar loop: {1 / scalar:,.0f} plans per CPU s, ratio "
        f"{scalar * result.evaluated / seconds:,.0f}"
    )
    theirs_s, launched = searched(model, cluster, arguments.batch)
    left = launched.dropped.set_index("rule")["count"]["a stack must launch it"]
    print(
        f"launched by a stack: {launched.evaluated:,} plans in {theirs_s:.1f} CPU s, "
        f"{left:,} by none left out"
    )
    print(f"{(launched.evaluated + left) / theirs_s:,.0f} plans looked at per CPU s")
    print(launched)
    for row in catalog.table("search_published").itertuples():
        plans, theirs_s = float(row.plans), float(row.seconds)
        ratio = result.evaluated / seconds / (plans / theirs_s)
        print(f"{row.tool}: {plans:,.0f} in {theirs_s:,.0f} CPU s, ratio {ratio:,.0f}")

    for name, table in plan_tables(10**6).items():
        seconds = estimate_seconds(model, table)
        print(
            f"mm.estimate of {len(table):,} plans, {name}: "
            f"{len(table) / seconds:,.0f} plans per CPU s"
        )


def searched(
    model, cluster, batch: int, **options
) -> tuple[float, mm.planner.SearchResult]:
    """CPU seconds of a search of the whole space, and what it found."""
    start = time.process_time()
    result = mm.search(
        model,
        cluster,
        batch,
        space=Space(quantised=True, tp_beyond_node=True),
        progress=False,
        **options,
    )
    return time.process_time() - start, result


def plan_tables(size: int) -> dict[str, pd.DataFrame]:
    """Tables of so many random plans on 1,024 devices: few kinds that repeat, and rows
    that all differ.
    """
    rng = np.random.default_rng(0)

    def drawn(count: int, **choices) -> pd.DataFrame:
        return pd.DataFrame(
            {name: rng.choice(values, count) for name, values in choices.items()}
        )

    common = {
        "zero": range(4),
        "micro_batch": [1, 2, 4],
        "recompute": ["none", "selective", "full"],
    }
    few = drawn(size, tp=[8], pp=[4, 8, 16], **common)
    common |= {
        "bucket_bytes": np.arange(1, 100) * 1e6,
        "attention": ["flash", "unfused"],
        "interleave": [1, 2, 3],
    }
    common |= {
        name: [False, True]
        for name in ("reduce_fp32", "sequence_parallel", "overlap_dp")
    }
    many = drawn(
        2 * size, tp=[2, 4, 8], cp=[1, 2], pp=[2, 4, 8, 16], prefetch=[0, 1], **common
    )
    tables = {
        "kinds that repeat": few,
        "all different": many.drop_duplicates(ignore_index=True)[:size],
    }
    return {
        name: table.assign(dp=1024 // (table["tp"] * table["pp"] * table.get("cp", 1)))
        for name, table in tables.items()
    }


def estimate_seconds(model, table: pd.DataFrame) -> float:
    """CPU seconds of an estimate, the least of three."""
    seconds, cluster = [], mm.cluster("dgx-a100", nodes=128)
    for _ in range(3):
        start = time.process_time()
        mm.estimate(model, cluster, table, global_batch=1536)
        seconds.append(time.process_time() - start)
    return min(seconds)


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
