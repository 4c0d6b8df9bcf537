"""CPU seconds of Metis' search: ours beside the original's, rows 1, 2 and 4 of the
fork's table 1, both modes.

    python benchmarks/metis.py [ROW ...]

The original is not installed here: its figures are those recorded for the unmodified
fork on a 2-core machine (`papers/metis/data/table1.csv`); for row 4 there is only its
authors' "about 30 minutes". Files are made by our own generator and read again; reading
is inside our time. Steps must equal the published ones, else this fails.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

from madmax_lib.papers.metis import (
    generate_profiles,
    search,
    studies,
    write_cluster,
    write_profiles,
)

ABOUT_S = {4: 1800.0}


def measure(row, folder):
    """One line: steps, best cost, CPU seconds of ours and of the original."""
    host, cluster, profile = (
        folder / "hostfile",
        folder / "clusterfile.json",
        folder / "profile",
    )
    write_profiles(generate_profiles(row.layers), profile)
    write_cluster(studies.nodes_of(row.gpus), host, cluster)
    began = time.process_time()
    result = search(
        profile,
        host,
        cluster,
        layers=row.layers,
        global_batch=128,
        node_order=studies.NODE_ORDERS[0],
        model_profile="A100_tp4_bs4",
        strategy=row.mode == "strategy",
        max_permute_len=128,
        max_tp=128,
        max_bs=128,
    )
    ours = time.process_time() - began
    if result.count != row.steps:
        raise SystemExit(
            f"row {row.row} {row.mode}: {result.count} steps, published are {row.steps}"
        )
    theirs = ABOUT_S.get(row.row, row.original_cpu_s)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cells = [
        row.row,
        f"{row.layers} x {row.gpus}",
        row.mode,
        result.count,
        f"{result.best_cost_ms:.4f}",
        f"{ours:.2f}",
        f"{'about ' * (row.row in ABOUT_S)}{theirs:g}",
        f"{theirs / ours:.0f}x",
        f"{peak_gb:.2f}",
    ]
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def main():
    rows = [int(text) for text in sys.argv[1:]] or [1, 2, 4]
    print(
        "| row | layers x GPUs | mode | steps | best cost (ms) | ours, CPU s | "
        "original, CPU s | ratio | peak GB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in studies.published("table1")[
        lambda table: table["row"].isin(rows)
    ].itertuples():
        with tempfile.TemporaryDirectory() as folder:
            measure(row, Path(folder))


if __name__ == "__main__":
    main()
