"""What was a table made from? Files of the data folder, with the hashes that a figure carries on."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files

import pandas as pd

__all__ = ["provenance", "read_table", "with_origin"]


@lru_cache
def read_table(name: str) -> pd.DataFrame:
    """A table of the data folder, numbers as numbers. One for all: take a copy to change it."""
    with (files("madmax_lib") / "data" / name).open() as file:
        return pd.read_csv(file)


def provenance(*names: str, rules: str) -> dict:
    """Name and sha256 of files of the data folder, and the rules by which they were used."""
    return {"files": {name: _about(name) for name in names}, "rules": rules}


def with_origin(table: pd.DataFrame, *names: str, rules: str) -> pd.DataFrame:
    """The table itself, with `provenance` among its attributes."""
    table.attrs["provenance"] = provenance(*names, rules=rules)
    return table


@lru_cache
def _about(name: str) -> dict[str, str]:
    content = (files("madmax_lib") / "data" / name).read_bytes()
    return {"name": name, "sha256": hashlib.sha256(content).hexdigest()}
