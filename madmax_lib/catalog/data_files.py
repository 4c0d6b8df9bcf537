"""Tables that lie beside the code, and those of a user behind them: text or numbers, and
what is wrong with them.
"""

import difflib
import json
import os
import re
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import pandas as pd

# units of one quantity, of which a user's table may have any
_INTERCHANGEABLE = (
    {"MiB", "GiB", "GB", "TB"},
    {"GB/s", "TB/s", "Gbit/s"},
    {"us", "ms"},
)
# quantities of links that none of our rows has
_UNITS_OF_LINKS = {"latency": {"us"}, "in_network_reduction": {""}}
_COUNTS = ("devices_per_node", "nodes")
DEVICE_CLASSES = ("family", "rate_class")  # text, no number
USER_FOLDER = "MADMAX_CATALOG"


def data_file(name: str) -> Traversable:
    """A file that lies beside the code: `models.csv` in data/, `papers/studies/mlp.csv`
    in papers/studies/data/.
    """
    room, _, file = name.rpartition("/")
    return files("madmax_lib") / room / "data" / file


def table(name: str, *, numbers: bool = False) -> pd.DataFrame:
    """One of our tables, ours followed by the user's.

    name: a file of `data_file` without its ending. numbers: columns of numbers as
    numbers, NaN where they are empty; otherwise everything is text.
    """
    rows = _read(data_file(f"{name}.csv"), numbers).copy()
    folder = os.environ.get(USER_FOLDER)
    if folder and not Path(folder).is_dir():
        raise FileNotFoundError(f"{USER_FOLDER}={folder}: no such folder")
    if not folder or not (user := Path(folder) / f"{name}.csv").exists():
        return rows
    theirs = _read.__wrapped__(user, numbers)  # not cached: it may change
    optional = {"nics_per_node", "source", "date"}
    if missing := [c for c in rows.columns if c not in optional.union(theirs.columns)]:
        raise ValueError(f"{user}: column(s) {', '.join(missing)} missing")
    _check_rows(user, theirs, rows)
    theirs = theirs.reindex(columns=rows.columns, fill_value="")
    return pd.concat([rows, theirs], ignore_index=True)


def _check_rows(path, rows, ours):
    """Raises ValueError with file, row and unit for numbers of a user's table that
    cannot be read.
    """
    units = {}
    if "quantity" in ours:
        units = ours.groupby("quantity")["unit"].agg(set).to_dict()
    if path.stem == "links":
        units |= _UNITS_OF_LINKS
    # the first row of the file has the names of the columns
    for number, row in enumerate(rows.to_dict("records"), 2):
        where = f"{path}, row {number} ({next(iter(row.values()))})"
        texts = {name: row[name] for name in _COUNTS if name in row}
        if quantity := row.get("quantity"):
            _check_unit(where, quantity, row["unit"], units)
            if quantity not in DEVICE_CLASSES:
                texts[quantity] = row["value"]
        for name, text in texts.items():
            is_count = name in _COUNTS
            pattern = r"\d+" if is_count else r"\d+(\.\d*)?(e[+-]?\d+)?"
            if not re.fullmatch(pattern, str(text)):
                noun = "whole number" if is_count else "number"
                raise ValueError(f"{where}: {name}={text!r} is no {noun}")


def _check_unit(where, quantity, unit, units):
    if quantity not in units:
        near = difflib.get_close_matches(str(quantity), units, n=3, cutoff=0.0)
        raise ValueError(
            f"{where}: unknown quantity={quantity!r}; nearest: {', '.join(near)}"
        )
    choices = set(units[quantity])
    for group in _INTERCHANGEABLE:
        if choices & group:
            choices |= group
    if unit not in choices:
        raise ValueError(
            f"{where}: unit={unit!r} of {quantity} is not one of "
            f"{', '.join(sorted(choices))}"
        )


@lru_cache(maxsize=64)
def _read(path, numbers):
    # without these a text such as 007 or None would not come out as it went in
    as_text = {} if numbers else {"dtype": str, "keep_default_na": False}
    with path.open(encoding="utf-8") as file:
        return pd.read_csv(file, **as_text)


def read_object(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError naming the file for other content,
    FileNotFoundError without one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also of what is not UTF-8
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
