"""Tables of measured kernels and collectives in one layout, that of
`kernels.fit`.
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from madmax_lib import catalog
from madmax_lib.catalog.hardware import dtype_named


def read_kernels(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Rows of files, CSV or Parquet, and of folders of them.

    Columns: as `kernels.fit` says. Raises ValueError naming the file for one
    that is of none of the layouts that are read.
    """
    files = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.parquet")) + sorted(path.glob("*.csv"))
        files += inside if path.is_dir() else [path]
    parts = []
    for file in files:
        is_parquet = file.suffix == ".parquet"
        table = pd.read_parquet(file) if is_parquet else pd.read_csv(file)
        parts.append(_in_layout(table, file))
    table = pd.concat(parts, ignore_index=True)
    return table.assign(device=table["device"].map(_device_name))


def _device_name(name):
    """The catalog's name of a device, where it has it."""
    device = catalog.device_named(name)
    return device.name if device else name


def _in_layout(table, file):
    """A table in our layout."""
    columns = set(table.columns)
    if {"kernel", "moved_bytes"} <= columns:
        return _bench_kernels(table)
    if {"collective", "machine"} <= columns:
        table = table[table["nodes"] == 1]
        return table.rename(columns={"collective": "operation", "machine": "device"})
    if missing := {"operation", "device", "dtype", "seconds"} - columns:
        raise ValueError(f"{file}: column(s) {', '.join(sorted(missing))} missing")
    return table


def _bench_kernels(table):
    """Products of `madmax bench`: forward, by PyTorch's own kernels; shape: tokens,
    hidden and ffn.
    """
    linear = table["kernel"].str.fullmatch("linear.* forward")
    table = table[linear & (table["how"] == "eager")]
    block = table["shape"].str.split("x", expand=True).astype(float)
    hidden, ffn = block[1], block[2]
    is_up = table["kernel"].str.contains(" up ")
    is_down = table["kernel"].str.contains(" down ")
    return table.assign(
        operation="gemm",
        device=table["machine"],
        dtype=table["dtype"].map(dtype_named),
        seconds=table["median_s"],
        m=block[0],
        n=ffn.where(is_up, hidden),
        k=ffn.where(is_down, hidden),
    )
