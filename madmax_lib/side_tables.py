"""What else is known about a timeline, that only some analyses need and that is read when the first of them asks?

Measured timelines read these tables from their files on first use, so that a breakdown does not pay for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd

__all__ = ["DETAILS", "Details", "conform", "joined"]

DETAILS = {
    # collectives and point-to-point transfers whose row carries metadata, on the host or on the device
    "calls": {
        "row": "int64",  # row number of the span
        "collective": "category",  # canonical name, as in kinds.COLLECTIVES; send, recv and wait as they are
        "dtype": "category",  # lower case, as recorded: float, bfloat16, ...
        "in_elements": "int64",  # -1 where unknown, as for all numbers below
        "out_elements": "int64",
        "group_size": "int64",
        "ranks": "category",  # members of the group as text, "0,1,2", as far as the file lists them
        "sequence": "int64",  # number of the call in its group
        "source_rank": "int64",  # point-to-point: global ranks
        "target_rank": "int64",
    },
    # allocator events
    "memory": {
        "rank": "int32",
        "stream": "int32",  # host thread that asked, as in the spans; 0 if it has no span
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
        "shapes": "category",  # JSON text of the inputs' dimensions, "" where not recorded
        "types": "category",  # JSON text of the inputs' types
        "inputs": "category",  # JSON text of the inputs that are numbers or lists of numbers, as text
        "sequence": "int64",  # autograd sequence number, joins forward and backward
        "forward_thread": "int64",  # of a backward operator
    },
    # kernels and copies inside of a CUDA or HIP graph
    "graphs": {"row": "int64", "graph": "int64"},
    # what a stream or a host thread waited for
    "syncs": {"row": "int64", "name": "category", "stream": "int64", "correlation": "int64"},
}


class Details(Mapping):
    """Tables by name, one of DETAILS each; empty where a timeline has none. `row` counts the timeline's spans.

    make: gives a dict of tables, called once, when the first table is asked for.
    """

    def __init__(self, make: Callable[[], dict[str, pd.DataFrame]] = dict):
        self._make = make
        self._tables: dict[str, pd.DataFrame] | None = None

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in DETAILS:
            raise KeyError(f"{name!r} is not one of {', '.join(DETAILS)}")
        if self._tables is None:
            self._tables = self._make()
        if name not in self._tables:
            return pd.DataFrame({column: pd.Series([], dtype=d) for column, d in DETAILS[name].items()})
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(DETAILS)

    def __len__(self) -> int:
        return len(DETAILS)

    def select(self, new_row: np.ndarray, windows_ns: dict[int, tuple[float, float]]) -> Details:
        """Details of a part: new_row (n,) is the new number of each span, -1 where it is left out.

        windows_ns: of each rank that stays, first and last time whose allocator events belong to the part.
        """
        return Details(partial(_select, self, new_row, windows_ns))

    @staticmethod
    def join(parts: list[tuple[Details, int]]) -> Details:
        """Details of timelines put together; each comes with the number of spans before it."""
        return Details(partial(_join, parts))


def conform(name: str, columns: dict) -> pd.DataFrame:
    """A table of DETAILS from its columns."""
    return pd.DataFrame({column: pd.Series(columns[column]).astype(d) for column, d in DETAILS[name].items()})


def _select(details: Details, new_row: np.ndarray, windows_ns: dict[int, tuple[float, float]]) -> dict:
    tables = {}
    for name, table in details.items():
        if "row" in table:
            table = table.assign(row=new_row[table["row"]])
            table = table[table["row"] >= 0]
        else:
            low, high = (
                table["rank"].map({rank: window[end] for rank, window in windows_ns.items()}) for end in (0, 1)
            )
            table = table[(table["time_ns"] >= low) & (table["time_ns"] <= high)]
        tables[name] = table.reset_index(drop=True)
    return tables


def _join(parts: list[tuple[Details, int]]) -> dict[str, pd.DataFrame]:
    tables = {}
    for name, schema in DETAILS.items():
        own = [d[name].assign(row=d[name]["row"] + o) if "row" in schema else d[name] for d, o in parts]
        tables[name] = pd.DataFrame({column: joined([table[column] for table in own]) for column in schema})
    return tables


def joined(columns: list[pd.Series]):
    """One column of several, with the categories of all."""
    if isinstance(columns[0].dtype, pd.CategoricalDtype):
        return pd.api.types.union_categoricals([column.array for column in columns])
    return np.concatenate([column.to_numpy() for column in columns])
