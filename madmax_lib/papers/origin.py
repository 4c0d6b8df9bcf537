"""What was a table made from? Tables of the papers and of the catalog, with the hashes that a figure carries on.

A table is named by its paper, as "madmax/models" for `papers/madmax/data/models.csv`; a bare name, as "devices", is a
table of the core's data folder.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import pandas as pd

__all__ = ["provenance", "read_table", "with_origin"]


@lru_cache
def read_table(name: str) -> pd.DataFrame:
    """A table, numbers as numbers. One for all: take a copy to change it."""
    with _file(name).open() as file:
        return pd.read_csv(file)


def provenance(*names: str, rules: str) -> dict:
    """Name and sha256 of tables, and the rules by which they were used."""
    return {"files": {name: _about(name) for name in names}, "rules": rules}


def with_origin(table: pd.DataFrame, *names: str, rules: str) -> pd.DataFrame:
    """The table itself, with `provenance` among its attributes."""
    table.attrs["provenance"] = provenance(*names, rules=rules)
    return table


@lru_cache
def _about(name: str) -> dict[str, str]:
    return {"name": name, "sha256": hashlib.sha256(_file(name).read_bytes()).hexdigest()}


def _file(name: str) -> Traversable:
    paper, _, stem = name.removesuffix(".csv").rpartition("/")
    room = files("madmax_lib") / "papers" / paper if paper else files("madmax_lib")
    return room / "data" / f"{stem}.csv"
