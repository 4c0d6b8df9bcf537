"""Kinds of kernels and collectives by name: one table, `data/kernel_kinds.csv`, whose
first matching row wins.

`rules="exact"` patterns are searched anywhere in the name, ignoring case, and so are
those of rules "device", which hold for what runs on a device and not for annotations;
`rules="hta"` are HTA 0.5.0's own, matched with case from the start of the name. An
empty pattern matches everything. A user's table is put in front of ours.
"""

import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.base.collectives import COLLECTIVES, POINT_TO_POINT
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline

__all__ = [
    "COLLECTIVES",
    "POINT_TO_POINT",
    "collective_names",
    "collectives_of",
    "kernel_kinds",
    "load_kinds",
    "own_collectives",
]

_COLUMNS = ["rules", "kind", "collective", "pattern", "source"]
# a rule of callers, and the rules of the table's rows that it follows
_RULES = {"exact": ("exact", "device"), "annotation": ("exact",), "hta": ("hta",)}
# Letters of a name that patterns see. Templated kernels have names of 100 kB, and the
# time of a search with backtracking grows faster than their length.
_LONGEST = 4096


def load_kinds(user_table: str | Path | None = None) -> pd.DataFrame:
    """The table of kernel kinds; rows of `user_table` (CSV with columns kind and
    pattern, others optional) come first.

    Switching peer copies to communication, for example, is a user table with the row
    `comm,^Memcpy PtoP`. Raises ValueError for a missing column, an unknown kind or a
    pattern that is not a regular expression.
    """
    shipped = _shipped_kinds()
    if user_table is None:
        return shipped
    return pd.concat([_read_csv(Path(user_table)), shipped], ignore_index=True)


@lru_cache(maxsize=1)
def _shipped_kinds():
    return _read_csv(files("madmax_lib") / "data" / "kernel_kinds.csv")


def kernel_kinds(
    names: list[str], *, rules: str = "exact", table: pd.DataFrame | None = None
) -> np.ndarray:
    """Kind of each name, (n,) of str: compute, comm, memcpy or other.

    >>> kernel_kinds(["ncclDevKernel_AllGather_RING_LL(...)", "Memset (Device)", "sgemm"]).tolist()
    ['comm', 'memcpy', 'compute']
    """
    return _first_match(names, rules, table)["kind"].to_numpy()


def collective_names(
    names: list[str], *, table: pd.DataFrame | None = None
) -> np.ndarray:
    """Collective of each communication name, (n,) of str, empty where the name is not
    communication.

    >>> names = ["gloo:all_reduce", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(...)"]
    >>> collective_names(names).tolist()
    ['all_reduce', 'send_recv']
    """
    return _first_match(names, "exact", table)["collective"].to_numpy()


def own_collectives(names: list[str], table: pd.DataFrame) -> dict[str, str]:
    """Collectives by name of a user's table, as a timeline's provenance keeps them: the
    table is not there later.
    """
    pairs = zip(names, collective_names(names, table=table), strict=True)
    return {name: collective for name, collective in pairs if collective}


def collectives_of(timeline: Timeline, names: list[str]) -> np.ndarray:
    """Collective of each communication name, (n,) of str: by its timeline's own table
    of kinds, by ours, or generic.
    """
    user_names = timeline.meta.provenance.get("collectives", {})
    collectives = [
        user_names.get(name) or collective or "generic"
        for name, collective in zip(names, collective_names(names), strict=True)
    ]
    return np.array(collectives, dtype=object)


def _first_match(names, rules, table):
    table = load_kinds() if table is None else table
    if rules not in _RULES:
        raise ValueError(f"rules={rules!r} is not one of {', '.join(_RULES)}")
    table = table[table["rules"].isin(_RULES[rules])]
    first_row = _matcher(tuple(table["pattern"]), rules == "hta")
    return table.iloc[[first_row(name) for name in names]]


@lru_cache(maxsize=8)
def _matcher(patterns, hta):
    """Function from a name to the row of the first pattern that matches it."""
    if hta:
        matches = [re.compile(pattern).match for pattern in patterns]
    else:
        matches = [re.compile(pattern, re.IGNORECASE).search for pattern in patterns]

    # all ranks run the same kernels: 32,768 names are remembered across files
    @lru_cache(1 << 15)
    def first_row(name):
        # the last pattern of each rule is empty and matches everything
        return next(i for i, match in enumerate(matches) if match(name[:_LONGEST]))

    return first_row


def _read_csv(path):
    with path.open(encoding="utf-8") as file:
        try:
            table = pd.read_csv(file, dtype=str, keep_default_na=False)
        except ValueError as error:
            raise ValueError(f"{path}: not a table of kernel kinds ({error})") from None
    if not {"kind", "pattern"} <= set(table.columns):
        raise ValueError(
            f"{path}: a table of kernel kinds needs the columns kind and pattern, "
            f"got {list(table)}"
        )
    table = table.reindex(columns=_COLUMNS, fill_value="")
    table["rules"] = table["rules"].replace("", "exact")
    allowed = {"kind": BUSY_KINDS, "rules": ("exact", "device", "hta")}
    for row in table.itertuples():
        for name, words in allowed.items():
            word = getattr(row, name)
            if word not in words:
                raise ValueError(
                    f"{path}: {name} {word!r} is not one of {', '.join(words)}"
                )
        try:
            # as `_matcher` does, which finds it in the cache of `re`
            re.compile(row.pattern, re.IGNORECASE)
        except re.error as error:
            raise ValueError(
                f"{path}: pattern {row.pattern!r} is not a regular expression: {error}"
            ) from None
    return table
