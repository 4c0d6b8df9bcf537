"""Which group sizes, positions and layer slices does a search go over? The grid that all its spaces share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from madmax_lib.planner.hetero.prices import Prices

__all__ = ["Grid"]


class Grid:
    """What all orders and batches share: group sizes, positions on their common grid, layer slices.

    sizes: (n,) GPUs of groups, ascending.
    unit: GPUs between two positions; steps: (n,) sizes in units; places: units of the whole cluster.
    alike: whether all layers but the first and last cost the same everywhere.
    first, middle, last, whole: (2, rows) first layer and end of slices by where a stage stands. The middle slice from
    layer x to y is row `row(x) + y - x - 1`; where middle layers are alike, row(x) is 0.
    sums: of prices by (type, tp, recompute, samples), filled by the stage tables, which share them.
    """

    def __init__(self, gpus: int, sizes: Sequence[int], prices: Prices):
        self.sizes = np.array(sorted(set(sizes)))
        self.unit = int(np.gcd.reduce([gpus, *self.sizes]))
        self.steps, self.places = self.sizes // self.unit, gpus // self.unit
        self.layers = layers = prices.layers
        self.alike = _alike(prices)
        from_layers = range(1, min(2, layers - 1) if self.alike else layers - 1)
        middle = [(x, y) for x in from_layers for y in range(x + 1, layers)]
        self.middle = np.array(middle, int).reshape(-1, 2).T
        self.first = np.array([(0, y) for y in range(1, layers)], int).reshape(-1, 2).T
        self.last = np.array([(x, layers) for x in range(1, layers)], int).reshape(-1, 2).T
        self.whole = np.array([[0], [layers]])
        self.sums: dict[tuple, tuple] = {}

    def row(self, x: int) -> int:
        """First middle row of slices that begin at layer x."""
        return 0 if self.alike else (x - 1) * (self.layers - 1) - x * (x - 1) // 2


def _alike(prices: Prices) -> bool:
    columns = [prices.parameters_bytes]
    for price in prices.table.values():
        columns += [price.layer_s, price.memory_bytes, price.live_bytes]
    return all((column[1:-1] == column[1:2]).all() for column in columns)
