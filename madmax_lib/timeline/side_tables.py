"""Side tables of a timeline: what only some analyses need, read when one first asks.

Measured timelines read them from their files on first use, so that a breakdown does not
pay for them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.resources import files

import numpy as np
import pandas as pd

# spans, and beside them:
# calls: collectives and point-to-point transfers whose row carries metadata, on the host
# or on the device
# memory: allocator events
# operators: cpu_op, all of them, and annotations that tell shapes (gloo's)
# counters: samples of a device's power, clocks, active SMs, traffic
# syncs: what a stream or a host thread waited for
_COLUMNS = pd.read_csv(files("madmax_lib") / "data" / "timeline_columns.csv")
SIDE_TABLES = {  # types by column by table
    name: dict(rows[["column", "type"]].to_numpy())
    for name, rows in _COLUMNS.groupby("table", sort=False)
}
SPANS = SIDE_TABLES.pop("spans")


class SideTables(Mapping):
    """Tables by name, with the columns of SIDE_TABLES; empty where a timeline has none.
    `row` is a row of the spans.

    make: returns the tables by name; called once, when the first of them is asked for.
    Default: no tables.
    """

    def __init__(self, make: Callable[[], dict[str, pd.DataFrame]] = dict):
        self._make = make
        self._tables = None

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
    ) -> "SideTables":
        """Side tables of a part of the timeline: new_row (n,) is the new number of each
        span, -1 where it is left out.

        windows_ns: of each rank that stays, first and last time whose allocator events
        belong to the part.
        """
        return SideTables(partial(_select, self, new_row, windows_ns))

    @staticmethod
    def join(parts: list[tuple["SideTables", int]]) -> "SideTables":
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
