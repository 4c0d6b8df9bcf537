"""What tests share: inputs by name that skip with the reason when absent, and small timelines."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from madmax_lib.datasets import dataset, local_data
from madmax_lib.planner.space import layouts, passes, plan_of, shards
from madmax_lib.side_tables import SIDE_TABLES, SideTables, conform
from madmax_lib.timeline import SPANS, Meta, Timeline

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


def local_or_skip(relative: str) -> Path:
    """A file of the data directories, or a skip that names it."""
    try:
        return local_data(relative)
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


def dataset_or_skip(name: str) -> Path:
    """A registered dataset on this machine, or a skip that names it; tests never download."""
    try:
        return dataset(name, download=False)
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


def make_timeline(rows: list[tuple], **meta) -> Timeline:
    """Timeline of (rank, stream, kind, name, start_ns, dur_ns) rows."""
    spans = pd.DataFrame(rows, columns=["rank", "stream", "kind", "name", "start_ns", "dur_ns"])
    spans = spans.assign(step=0, correlation=-1, op=-1, group=None, size_bytes=float("nan"))
    return Timeline(spans, Meta(**meta))


def core_flops(block) -> float:
    """Forward FLOPs of a block's attention scores."""
    return sum(op.flops for op in block.ops if op.core)


def timeline_with_tables(rows, **tables) -> Timeline:
    """Timeline of (rank, stream, kind, name, start_ns, dur_ns[, correlation]) rows, with side tables."""
    columns = ["rank", "stream", "kind", "name", "start_ns", "dur_ns", "correlation"]
    table = pd.DataFrame([(*row, -1)[:7] for row in rows], columns=columns)
    table = table.assign(step=0, op=-1, group=None, size_bytes=float("nan"))
    columns = {
        name: dict(zip(SIDE_TABLES[name], zip(*rows, strict=True), strict=True)) for name, rows in tables.items()
    }
    side_tables = {name: conform(name, table) for name, table in columns.items()}
    return Timeline(table[list(SPANS)], Meta(), side_tables=SideTables(lambda: side_tables))


def plans_of_space(space, model, cluster, batch):
    """The plans of a space one by one."""
    result = []
    for at in layouts(space, model, cluster, batch, model.sequence)[0]:
        rows, columns = passes(space, model, at, batch), shards(space, at, cluster)
        if rows and columns:
            for i, j in product(range(len(rows["micro_batch"])), range(columns["zero"].shape[1])):
                row = vars(at) | {k: v[i, 0] for k, v in rows.items()} | {k: v[0, j] for k, v in columns.items()}
                result.append(plan_of(row))
    return result
