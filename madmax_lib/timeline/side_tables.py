"""Side tables of a timeline: what only some analyses need, read when one first asks.

Measured timelines read them from their files on first use, so that a breakdown does not
pay for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd

SIDE_TABLES = {
    # collectives and point-to-point transfers whose row carries metadata, on the host
    # or on the device
    "calls": {
        "row": "int64",  # row number of the span
        # canonical name, as in kinds.COLLECTIVES; send, recv and wait as they are
        "collective": "category",
        "dtype": "category",  # lower case, as recorded: float, bfloat16, ...
        "in_elements": "int64",  # -1 where unknown, as for all numbers below
        "out_elements": "int64",
        "group_size": "int64",
        # members of the group as text, "0,1,2", as far as the file lists them
        "ranks": "category",
        "sequence": "int64",  # number of the call in its group
        "source_rank": "int64",  # point-to-point: global ranks
        "target_rank": "int64",
        # of an uneven all-to-all: rows to each member as text, "4,12"; "" where they
        # are even
        "in_splits": "category",
        "out_splits": "category",  # rows from each member
    },
    # allocator events
    "memory": {
        "rank": "int32",
        # host thread that asked, as in the spans; 0 if it has no span
        "stream": "int32",
        "time_ns": "int64",
        "size_bytes": "int64",  # > 0 allocated, < 0 freed
        "address": "int64",
        "allocated_bytes": "int64",  # on the device after the event, -1 where unknown
        "reserved_bytes": "int64",
        "device": "category",  # cpu, cuda:0, ...
    },
    # operators (cpu_op), all of them, and annotations that tell shapes (gloo's)
    "operators": {
        "row": "int64",
        # JSON text of the inputs' dimensions, "" where not recorded
        "shapes": "category",
        "types": "category",  # JSON text of the inputs' types
        # JSON text of the inputs that are numbers or lists of numbers, as text
        "inputs": "category",
        "sequence": "int64",  # autograd sequence number, joins forward and backward
        "forward_thread": "int64",  # of a backward operator
        "strides": "category",  # JSON text of the inputs' strides
    },
    # samples of a device's counters: power, clocks, active SMs, traffic
    "counters": {
        "rank": "int32",
        "time_ns": "int64",
        "name": "category",  # with its unit, as recorded: Power (W), SM Active (%)
        "value": "float64",
    },
    # what a stream or a host thread waited for
    "syncs": {
        "row": "int64",
        "name": "category",
        "stream": "int64",
        "correlation": "int64",
    },
}


class SideTables(Mapping):
    """Tables by name, with the columns of SIDE_TABLES; empty where a timeline has none.
    `row` is a row of the spans.

    make: returns the tables by name; called once, when the first of them is asked for.
    Default: no tables.
    """

    def __init__(self, make: Callable[[], dict[str, pd.DataFrame]] = dict):
        self._make = make
        self._tables: dict[str, pd.DataFrame] | None = None

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in SIDE_TABLES:
            raise KeyError(f"{name!r} is not one of {', '.join(SIDE_TABLES)}")
        if name in self.present():
            return self.present()[name]
        return conform(name, {column: [] for column in SIDE_TABLES[name]})

    def present(self) -> dict[str, pd.DataFrame]:
        """The tables that the timeline has."""
        if self._tables is None:
            self._tables = self._make()
        return self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(SIDE_TABLES)

    def __len__(self):
        return len(SIDE_TABLES)

    def select(
        self, new_row: np.ndarray, windows_ns: dict[int, tuple[float, float]]
    ) -> SideTables:
        """Side tables of a part of the timeline: new_row (n,) is the new number of each
        span, -1 where it is left out.

        windows_ns: of each rank that stays, first and last time whose allocator events
        belong to the part.
        """
        return SideTables(partial(_select, self, new_row, windows_ns))

    @staticmethod
    def join(parts: list[tuple[SideTables, int]]) -> SideTables:
        """Side tables of timelines put together; each comes with the number of spans
        before it.
        """
        return SideTables(partial(_join, parts))


def conform(name: str, columns: dict) -> pd.DataFrame:
    """A side table with the columns and types of its schema."""
    return pd.DataFrame(
        {
            column: pd.Series(columns[column]).astype(d)
            for column, d in SIDE_TABLES[name].items()
        }
    )


def _select(
    side_tables,
    new_row,
    windows_ns,
):
    tables = {}
    for name, table in side_tables.present().items():
        if "row" in table:
            table = table.assign(row=new_row[table["row"]])
            table = table[table["row"] >= 0]
        else:
            # allocator events belong to no span, but to a time; a rank that is left out
            # has no window, and nothing is between NaN and NaN
            first_ns = {rank: window[0] for rank, window in windows_ns.items()}
            last_ns = {rank: window[1] for rank, window in windows_ns.items()}
            rank = table["rank"]
            inside = table["time_ns"].between(rank.map(first_ns), rank.map(last_ns))
            table = table[inside]
        tables[name] = table.reset_index(drop=True)
    return tables


def _join(parts):
    tables = {}
    for name, schema in SIDE_TABLES.items():
        pieces = []
        for side_tables, spans_before in parts:
            table = side_tables.present().get(name)
            if table is not None and "row" in schema:
                table = table.assign(row=table["row"] + spans_before)
            pieces += [] if table is None else [table]
        if pieces:
            columns = {c: joined([table[c] for table in pieces]) for c in schema}
            tables[name] = pd.DataFrame(columns)
    return tables


def joined(columns: list[pd.Series]):
    """One column of several, with the categories of all."""
    if isinstance(columns[0].dtype, pd.CategoricalDtype):
        return pd.api.types.union_categoricals([column.array for column in columns])
    return np.concatenate([column.to_numpy() for column in columns])
