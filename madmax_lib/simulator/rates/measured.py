"""What did a collective take when it was measured? Tables of sizes and seconds, read between their points.

Such tables come from nccl-tests, from a vendor or from one's own traces; where a plan has a group that was measured,
its seconds replace the formula of `simulator.rates.collectives`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

__all__ = ["MeasuredCollectives"]

_KEYS, _VALUES = ["collective", "ranks", "nodes"], ["size_bytes", "seconds"]
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


class MeasuredCollectives:
    """Seconds by collective, ranks, nodes and size_bytes (as in `simulator.rates.collectives`).

    table: these columns and seconds, at least two sizes per group. Raises ValueError naming what is missing or wrong.
    """

    def __init__(self, table: pd.DataFrame):
        if missing := [name for name in (*_KEYS, *_VALUES) if name not in table.columns]:
            raise ValueError(f"measured collectives: column {missing[0]!r} is missing")
        if unknown := sorted(set(table["collective"]) - set(_KINDS)):
            raise ValueError(f"measured collectives: {unknown[0]!r} is not one of {', '.join(_KINDS)}")
        if not (table[_VALUES].to_numpy(float) > 0).all():
            raise ValueError("measured collectives: size_bytes and seconds must be positive")
        self.curves = {}
        for key, part in table.groupby(_KEYS):
            points = part.groupby("size_bytes")["seconds"].median()
            if len(points) < 2:
                raise ValueError(f"measured collectives: {key[0]} of {key[1]} ranks needs at least two sizes")
            self.curves[key] = np.log(points.index.to_numpy(float)), np.log(points.to_numpy(float))

    def seconds(self, collective: str, ranks: int, nodes: int, size_bytes: float) -> float | None:
        """Between measured sizes on a log-log line, below the smallest its time, above the largest its rate.

        None for a group that was not measured.
        """
        if (curve := self.curves.get((collective, ranks, nodes))) is None:
            return None
        sizes, times = curve
        at = np.log(size_bytes)
        return float(np.exp(np.interp(at, sizes, times) + max(at - sizes[-1], 0.0)))
