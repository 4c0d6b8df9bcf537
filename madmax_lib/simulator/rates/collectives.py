"""Seconds of collectives: latency and bandwidth of ring and all-to-all algorithms.

All functions broadcast over NumPy arrays. size_bytes is the message of one rank: the
whole buffer for all-reduce, the gathered buffer for all-gather, the input for
reduce-scatter and all-to-all. A group of one rank takes no time. Ring formulas:
Patarasuk & Yuan 2009; Thakur, Rabenseifner & Gropp 2005.
"""

import numpy as np

__all__ = ["exchange", "ring", "ring_steps"]

_TREE_STEPS = 32  # per doubling of the nodes: what a ring of 256 nodes takes


def ring(ranks, in_node, near, far):
    """Seconds per byte of a ring's all-gather, or reduce-scatter, its reverse: (p-1)/p
    of the bytes at the slower pace.

    near, far: seconds per byte between ranks of a node, and of one of its in_node ports
    to other nodes.

    >>> groups = ((1, 1), (2, 2), (8, 8), (16, 8), (2, 1))
    >>> [round(float(1e9 * ring(p, n, 1e-11, 9.6e-11)), 5) for p, n in groups]
    [0.0, 0.005, 0.00875, 0.01125, 0.048]
    """
    # one rank of each node sends on, over the ports of all of its ranks there
    far_s = (ranks > in_node) * far / in_node
    near_s = (in_node > 1) * near
    return (ranks - 1) / ranks * np.maximum(far_s, near_s)


def exchange(ranks, in_node, near, far):
    """Seconds per byte of an all-to-all: each rank sends 1/p to every other one, over
    both levels at once.

    Of 16 ranks on two nodes half of the bytes take the slow level:

    >>> [round(float(1e9 * exchange(p, 8, 1 / 350e9, 1 / 25e9)), 4) for p in (8, 16)]
    [0.0025, 0.02]
    """
    return np.maximum((in_node - 1) * near, (ranks - in_node) * far) / ranks


def ring_steps(nodes):
    """Steps between nodes of an all-gather or reduce-scatter: a ring, and above some
    250 nodes a tree's growth.

    A ring takes nodes - 1 steps; parallel aggregated trees (PAT, NCCL 2.23) grow with
    the logarithm.

    >>> ring_steps([1, 2, 4096]).tolist()
    [0.0, 1.0, 384.0]
    """
    nodes = np.maximum(nodes, 1.0)
    return np.minimum(nodes - 1, _TREE_STEPS * np.log2(nodes))
