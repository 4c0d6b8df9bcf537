"""Origins of tables: files that lie with the code, with the hashes that a figure carries
on.

A name with a slash is a paper's own: `studies/gelu` is papers/studies/data/gelu.csv.
Others are in the data folder of the library: `devices`, or `parameters.json`.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import pandas as pd

from madmax_lib import catalog, timeline


def read_table(name: str) -> pd.DataFrame:
    """Table, numbers as numbers."""
    return catalog.table(_path(name).removesuffix(".csv"), numbers=True)


def beside_published(paper: str, ours: Mapping[str, float]) -> pd.DataFrame:
    """Published numbers of a paper with ours by key: theirs, ours, error (relative)."""
    rows = read_table(f"{paper}/published").rename(columns={"value": "theirs"})
    rows["ours"] = rows["key"].map(ours)
    rows = rows.eval("error = ours / theirs - 1")
    about = ["unit", "theirs", "ours", "error", "follows", "note"]
    return rows[[*rows.columns[:3], *about]]


def provenance(*names: str, rules: str) -> dict:
    """Name and sha256 of the files, and the rules by which they were used."""
    files = [name if "." in name else f"{name}.csv" for name in names]
    return {
        "files": {file: {"name": file, "sha256": _sha256(file)} for file in files},
        "rules": rules,
    }


def with_origin(table: pd.DataFrame, *names: str, rules: str) -> pd.DataFrame:
    """Table with the `provenance` of these files."""
    return timeline.with_origin(table, provenance(*names, rules=rules))


def _path(name):
    return f"papers/{name}" if "/" in name else name


@lru_cache
def _sha256(file):
    return hashlib.sha256(catalog.data_file(_path(file)).read_bytes()).hexdigest()
