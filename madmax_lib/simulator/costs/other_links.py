"""What would collectives cost on the links that they were measured on? Prices there, by
the formulas of any link.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

__all__ = ["on_links"]

_SAME = 1e-3  # relative difference of rates that are only written differently


def on_links(prices, links: tuple[float, ...]):
    """`Prices` on links of these rates, as in `Parameters`; itself where its machine
    has them, or none are stated.
    """
    machine = prices.machine
    here = zip((machine.link, machine.nic), links, strict=False)
    if all(np.allclose(*pair, rtol=_SAME, atol=0) for pair in here):
        return prices
    what = (
        f"collectives were measured on links of {links[0]:.3g} and {links[1]:.3g} "
        "bytes/s, inside a node and"
    )
    what += (
        " of a device's share of the network; here they are scaled to other "
        "links as the formulas are"
    )
    warnings.warn(what, stacklevel=2)
    there = replace(prices.steps, machine=replace(machine, link=links[0], nic=links[1]))
    return type(prices)(there, prices.parameters)
