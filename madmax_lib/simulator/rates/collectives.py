"""How long does a collective take? Latency and bandwidth of ring and all-to-all algorithms, or what was measured.

All functions broadcast over NumPy arrays. size_bytes is the message of one rank: the whole buffer for all-reduce, the
gathered buffer for all-gather, the input for reduce-scatter and all-to-all. A group of one rank takes no time.
Ring formulas: Patarasuk & Yuan 2009; Thakur, Rabenseifner & Gropp 2005.
"""

import numpy as np
import pandas as pd

__all__ = ["MeasuredCollectives", "exchange", "ring", "ring_steps"]

_TREE_STEPS = 32  # per doubling of the nodes: what a ring of 256 nodes takes
_KEYS, _VALUES = ["collective", "ranks", "nodes"], ["size_bytes", "seconds"]
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")


def ring(ranks, in_node, near, far):
    """Seconds per byte of a ring's all-gather, or reduce-scatter, its reverse: (p-1)/p of the bytes at the slower pace.

    near, far: seconds per byte between ranks of a node, and of one of its in_node ports to other nodes.

    >>> [round(float(1e9 * ring(p, n, 1e-11, 9.6e-11)), 5) for p, n in ((1, 1), (2, 2), (8, 8), (16, 8), (2, 1))]
    [0.0, 0.005, 0.00875, 0.01125, 0.048]
    """
    return (ranks - 1) / ranks * np.maximum((ranks > in_node) * far / in_node, (in_node > 1) * near)


def exchange(ranks, in_node, near, far):
    """Seconds per byte of an all-to-all: each rank sends 1/p to every other one, over both levels at once.

    >>> [round(float(1e9 * exchange(p, 8, 1 / 350e9, 1 / 25e9)), 4) for p in (8, 16)]  # half take the slow level
    [0.0025, 0.02]
    """
    return np.maximum((in_node - 1) * near, (ranks - in_node) * far) / ranks


def ring_steps(nodes):
    """Steps between nodes of an all-gather or reduce-scatter: a ring, and above some 250 nodes a tree's growth.

    A ring takes nodes - 1 steps; parallel aggregated trees (PAT, NCCL 2.23) grow with the logarithm.

    >>> ring_steps([1, 2, 4096]).tolist()
    [0.0, 1.0, 384.0]
    """
    nodes = np.maximum(nodes, 1.0)
    return np.minimum(nodes - 1, _TREE_STEPS * np.log2(nodes))


class MeasuredCollectives:
    """Seconds of collectives that were measured, by nccl-tests (`read_link_log`), by a bench or in one's own traces.

    table: at least two sizes for every group, and several rows of a size count by their median. Its columns:
      collective: all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, or broadcast, which no step has.
      ranks, nodes: of the group.
      size_bytes: as in this module.
      seconds: of one call.
    Raises ValueError naming what is missing or wrong.
    """

    def __init__(self, table: pd.DataFrame):
        if missing := [name for name in (*_KEYS, *_VALUES) if name not in table.columns]:
            raise ValueError(f"measured collectives: column {missing[0]!r} is missing")
        numbers = table[[*_KEYS[1:], *_VALUES]].apply(pd.to_numeric, errors="coerce")
        table = table.assign(**numbers)
        if wrong := [name for name in numbers if not (np.isfinite(numbers[name]) & (numbers[name] > 0)).all()]:
            raise ValueError(f"measured collectives: {wrong[0]} must be a positive number in every row")
        if unknown := sorted(set(table["collective"]) - set(_KINDS)):
            raise ValueError(f"measured collectives: {unknown[0]!r} is not one of {', '.join(_KINDS)}")
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
