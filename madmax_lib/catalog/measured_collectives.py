"""Measured collectives: points of size and time by kind and group, and times between."""

import numpy as np
import pandas as pd

from madmax_lib.base.collectives import TIMED
from madmax_lib.base.fields import require_type

_KEYS = ["collective", "ranks", "nodes"]
_VALUES = ["size_bytes", "seconds"]


class MeasuredCollectives:
    """Seconds of collectives that were measured, by nccl-tests (`read_link_log`), by a
    bench or in one's own traces.

        measured = mm.calibration.read_link_log("nccl-tests.log")
        mm.simulate("gpt2", "dgx-h100", "dp8", global_batch=64, collectives=measured)

    table: at least two sizes for every group, and several rows of a size count by their
    median. Its columns:
      collective: all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, or
      broadcast and gather, which no step has.
      ranks, nodes: of the group.
      size_bytes: message of a rank, as in `simulator.costs.link_prices`.
      seconds: of one call.
    curves: points (size in bytes, seconds) by "collective ranks nodes", as `Parameters`
    take them. Raises ValueError naming what is missing or wrong.
    """

    def __init__(self, table: pd.DataFrame):
        require_type("collectives", table, pd.DataFrame)
        for name in (*_KEYS, *_VALUES):
            if name not in table.columns:
                _refuse(f"column {name!r} is missing")
        numbers = table[[*_KEYS[1:], *_VALUES]].apply(pd.to_numeric, errors="coerce")
        table = table.assign(**numbers)
        for name in numbers:
            # a text that is no number is NaN now
            if not (np.isfinite(numbers[name]) & (numbers[name] > 0)).all():
                _refuse(f"{name} must be a positive number in every row")
        if unknown := sorted(set(table["collective"]) - set(TIMED)):
            _refuse(f"{unknown[0]!r} is not one of {', '.join(TIMED)}")
        if "network" in table:
            networks = sorted(set(table["network"].dropna().astype(str)))
            if len(networks) > 1:
                _refuse(
                    f"rows of several networks, {' and '.join(networks)}; choose one"
                )
        self.curves = {}
        for (kind, ranks, nodes), part in table.groupby(_KEYS):
            points = part.groupby("size_bytes")["seconds"].median()
            if len(points) < 2:
                _refuse(f"{kind} of {ranks} ranks needs at least two sizes")
            pairs = zip(points.index.tolist(), points.tolist(), strict=True)
            self.curves[f"{kind} {ranks:g} {nodes:g}"] = tuple(pairs)

    def seconds(
        self, collective: str, ranks: int, nodes: int, size_bytes: float
    ) -> float | None:
        """Seconds of one call, by `measured_s`; None for a group that was not measured."""
        points = self.curves.get(f"{collective} {ranks} {nodes}")
        return None if points is None else float(measured_s(points, size_bytes))


def _refuse(rule):
    raise ValueError(f"measured collectives: {rule}")


def measured_s(points, size_bytes):
    """Seconds: between measured sizes a latency and a rate, below the smallest its
    time, above the largest its rate.

        t = t_0 + (t_1 - t_0) (s - s_0) / (s_1 - s_0)        [Hockney 1994]

    >>> [round(float(measured_s([(1e3, 1e-3), (1e6, 1e-2)], size)), 6) for size in (10.0, 1e6, 2e6)]
    [0.001, 0.01, 0.02]
    """
    sizes, times = np.array(points).T
    # at the largest size's rate the time grows as the size
    beyond = np.maximum(size_bytes / sizes[-1], 1.0)
    return np.interp(size_bytes, sizes, times) * beyond
