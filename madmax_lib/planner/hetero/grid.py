"""Which group sizes, positions and layer slices does a search go over? The grid that all its spaces share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from madmax_lib.planner.hetero.prices import Prices

__all__ = ["Layout"]


class Layout:
    """What all orders and batches share: group sizes, positions on their common grid, layer slices.

    sizes: (n,) GPUs of groups, ascending. steps: (n,) the same in grid units, places: their number to the end. A middle
    slice from layer x to y is row `row(x) + y - x - 1`; where all middle layers are alike, row(x) is 0. A layout goes
    with one Prices.
    """

    def __init__(self, gpus: int, sizes: Sequence[int], prices: Prices):
        self.sizes = np.array(sorted(set(sizes)))
        self.grid = int(np.gcd.reduce([gpus, *self.sizes]))
        self.steps, self.places = self.sizes // self.grid, gpus // self.grid
        self.layers = layers = prices.layers
        self.alike = _alike(prices)
        from_layers = range(1, min(2, layers - 1) if self.alike else layers - 1)
        pairs = [(x, y) for x in from_layers for y in range(x + 1, layers)]
        self.middle = np.array(pairs, int).reshape(-1, 2).T
        self.first = np.array([(0, y) for y in range(1, layers)], int).reshape(-1, 2).T
        self.last = np.array([(x, layers) for x in range(1, layers)], int).reshape(-1, 2).T
        self.whole = np.array([[0], [layers]])
        self.sums: dict[tuple, tuple] = {}  # of prices by (type, tp, recompute, samples), which spaces share

    def row(self, x: int) -> int:
        """First middle row of slices that begin at layer x."""
        return 0 if self.alike else (x - 1) * (self.layers - 1) - x * (x - 1) // 2


def _alike(prices: Prices) -> bool:
    """Whether all layers but the first and last cost the same everywhere."""
    vectors = [v for p in prices.table.values() for v in (p.layer_ms, p.memory_mb, p.live_mb)]
    return all((v[1:-1] == v[1:2]).all() for v in [prices.parameters_bytes, *vectors])
