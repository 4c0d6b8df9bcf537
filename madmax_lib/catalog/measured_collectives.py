"""How long did collectives take that were measured? Points of size and time by kind and
group, and times between.
"""

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type

__all__ = ["KINDS", "MeasuredCollectives", "measured_s"]

_KEYS = ["collective", "ranks", "nodes"]
_VALUES = ["size_bytes", "seconds"]
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "broadcast",
)


class MeasuredCollectives:
    """Seconds of collectives that were measured, by nccl-tests (`read_link_log`), by a
    bench or in one's own traces.

    table: at least two sizes for every group, and several rows of a size count by their
    median. Its columns:
      collective: all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, or
      broadcast, which no step has.
      ranks, nodes: of the group.
      size_bytes: message of a rank, as in `simulator.rates.collectives`.
      seconds: of one call.
    curves: points (size in bytes, seconds) by "collective ranks nodes", as `Parameters`
    take them. Raises ValueError naming what is missing or wrong.
    """

    def __init__(self, table: pd.DataFrame):
        require_type("collectives", table, pd.DataFrame)
        if missing := [
            name for name in (*_KEYS, *_VALUES) if name not in table.columns
        ]:
            raise ValueError(f"measured collectives: column {missing[0]!r} is missing")
        numbers = table[[*_KEYS[1:], *_VALUES]].apply(pd.to_numeric, errors="coerce")
        table = table.assign(**numbers)
        if wrong := [
            name
            for name in numbers
            if not (np.isfinite(numbers[name]) & (numbers[name] > 0)).all()
        ]:
            raise ValueError(
                f"measured collectives: {wrong[0]} must be a positive number in "
                "every row"
            )
        if unknown := sorted(set(table["collective"]) - set(KINDS)):
            raise ValueError(
                f"measured collectives: {unknown[0]!r} is not one of {', '.join(KINDS)}"
            )
        networks = (
            sorted(set(table["network"].dropna().astype(str)))
            if "network" in table
            else []
        )
        if len(networks) > 1:
            raise ValueError(
                "measured collectives: rows of several networks, "
                f"{' and '.join(networks)}; choose one"
            )
        self.curves = {}
        for (kind, ranks, nodes), part in table.groupby(_KEYS):
            points = part.groupby("size_bytes")["seconds"].median()
            if len(points) < 2:
                raise ValueError(
                    f"measured collectives: {kind} of {ranks} ranks needs at least "
                    "two sizes"
                )
            self.curves[f"{kind} {ranks:g} {nodes:g}"] = tuple(
                zip(points.index.tolist(), points.tolist(), strict=True)
            )

    def seconds(
        self, collective: str, ranks: int, nodes: int, size_bytes: float
    ) -> float | None:
        """As `measured_s`; None for a group that was not measured."""
        points = self.curves.get(f"{collective} {ranks} {nodes}")
        return None if points is None else float(measured_s(points, size_bytes))


def measured_s(points, size_bytes):
    """Between measured sizes on a log-log line, below the smallest its time, above the
    largest its rate.

    >>> [round(float(measured_s([(1e3, 1e-3), (1e6, 1e-2)], size)), 6) for size in (10.0, 1e6, 2e6)]
    [0.001, 0.01, 0.02]
    """
    sizes, times = np.log(np.array(points)).T
    at = np.log(np.maximum(size_bytes, 1e-9))
    return np.exp(np.interp(at, sizes, times) + np.maximum(at - sizes[-1], 0.0))
