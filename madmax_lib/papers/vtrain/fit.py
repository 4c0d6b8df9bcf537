"""Operator times that reproduce vTrain's own predictions: five constants per group, found
by linear least squares.

vTrain's table `ground_truth_single` is output of the simulator, so it can be taken
apart exactly. For a step of m micro-batches, L layers on p stages (n = L/p each),
without recomputation [derived from the graph of Bang et al., MICRO 2024; A:
tensor-parallel all-reduce, P: send, D: slowest gradient all-reduce]:

  T = (m+p-1) n (l + 4A) + e' + m g + (m+2p-3) P [p > 1] + n w + w0 + D,  e' = e, or m e
  without a pipeline

l: a layer forward and backward, e: embedding, g: output and loss, w: update of a layer,
w0: of the embedding, in seconds; they depend on hidden size, heads, sequence, tensor
parallelism and micro-batch. T is linear in them, so what a group's rows determine is a
matter of rank: a row outside their span is not predicted.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from madmax_lib.papers.vtrain.config import (
    TABLE,
    Nccl,
    Sizes,
    VTrainRules,
    gradient_s,
    parse_rules,
    send_s,
    shape_of,
    tensor_s,
)

_CONSTANTS = (
    "layer_s",
    "embedding_s",
    "output_s",
    "layer_update_s",
    "embedding_update_s",
)
_GROUP = ("hidden", "heads", "sequence", "tp", "micro_batch")
_TIME = "iteration time (ms)"
_SPAN = 1e-9  # singular values and residues below this share count as zero


@dataclass(frozen=True)
class OperatorFit:
    """Operators of one group, as far as its rows determine them."""

    rows: int  # number of rows
    # of _CONSTANTS in seconds (5,), meaningful only in the combinations inside `span`
    values: np.ndarray
    scale: np.ndarray  # by which the columns were divided (5,)
    span: np.ndarray  # orthonormal basis of what is determined (rank, 5)
    worst_s: float  # largest residual of a row, in seconds

    @property
    def determined(self) -> bool:
        """Do the rows determine every constant?"""
        return len(self.span) == len(_CONSTANTS)

    def covers(self, terms: np.ndarray) -> np.ndarray:
        """Does each row (n, 5) follow from what is determined?"""
        # it does if nothing is left of it beside its projection on the span
        scaled = terms / self.scale
        rest = scaled - scaled @ self.span.T @ self.span
        return np.linalg.norm(rest, axis=1) <= _SPAN * np.linalg.norm(scaled, axis=1)


@dataclass(frozen=True)
class Profile:
    """A fit by group (hidden, heads, sequence, tp, micro_batch), with the tables and
    rules it was made by.
    """

    groups: dict[tuple[int, ...], OperatorFit]
    nccl: Nccl
    rules: VTrainRules

    @property
    def table(self) -> pd.DataFrame:
        """One row per group: rows, rank, determined (rank 5), _CONSTANTS (NaN unless
        determined), worst residual.
        """
        rows = []
        for key, group in self.groups.items():
            # single constants mean nothing below rank 5
            values = group.values if group.determined else np.full(5, np.nan)
            counts = (group.rows, len(group.span), group.determined)
            rows.append((*key, *counts, *values, group.worst_s))
        columns = [*_GROUP, "rows", "rank", "determined", *_CONSTANTS, "worst_s"]
        return pd.DataFrame(rows, columns=columns)


def fit(
    table: pd.DataFrame, nccl: Nccl, rules: str | VTrainRules = "released"
) -> Profile:
    """The constants of each group that the rows determine.

    table: in the columns of vTrain's ground truth, with "iteration time (ms)". rules:
    of the all-reduces and sends; recomputation has no part in this table. Raises
    ValueError for a missing column or a time that is not positive.
    """
    rules = parse_rules(rules)
    shape = shape_of(table)
    if _TIME not in table.columns:
        raise ValueError(f"the table lacks the column {_TIME}")
    time_s = pd.to_numeric(table[_TIME], errors="coerce").to_numpy(float) / 1e3
    if not (time_s > 0).all():
        row = table.index[int(np.argmin(time_s > 0))]
        raise ValueError(f"{_TIME} of row {row} is not a positive number")
    rest_s = time_s - network_s(shape, nccl, rules)
    columns = terms(shape)
    groups = {
        key: _solve(columns[rows], rest_s[rows]) for key, rows in _groups(table).items()
    }
    return Profile(groups, nccl, rules)


def predict(profile: Profile, table: pd.DataFrame) -> np.ndarray:
    """Seconds of each row (n,), NaN where the fitted rows do not determine it.

    table: in the columns of vTrain's ground truth; a time column is not looked at.
    """
    shape = shape_of(table)
    rest_s = network_s(shape, profile.nccl, profile.rules)
    columns = terms(shape)
    result = np.full(len(table), np.nan)
    for key, rows in _groups(table).items():
        if group := profile.groups.get(key):
            covered = rows[group.covers(columns[rows])]
            result[covered] = rest_s[covered] + columns[covered] @ group.values
    return result


def network_s(shape: Sizes, nccl: Nccl, rules: VTrainRules) -> np.ndarray:
    """Seconds of a step (n,) that need no constant: all-reduces and sends on its
    longest path.
    """
    # (m+p-1) n 4A + D + (m+2p-3) P [p > 1]; fmax skips the NaN of stages that are not
    m = shape.micro_batches
    pp = np.asarray(shape.pp)
    reductions = 4 * (m + pp - 1) * (shape.layers // pp) * tensor_s(shape, nccl, rules)
    gradients = np.fmax.reduce(gradient_s(shape, nccl, rules))
    sends = np.where(pp > 1, (m + 2 * pp - 3) * send_s(shape, rules), 0.0)
    return reductions + gradients + sends


def terms(shape: Sizes) -> np.ndarray:
    """Count of each of _CONSTANTS on the longest path of a step (n, 5)."""
    # l: (m+p-1) n, e: 1, or m without a pipeline, g: m, w: n, w0: 1
    m = shape.micro_batches
    pp = np.asarray(shape.pp)
    layers = shape.layers // pp
    columns = np.broadcast_arrays(
        (m + pp - 1) * layers, np.where(pp == 1, m, 1), m, layers, 1
    )
    return np.stack(columns, axis=-1).astype(float)


def _groups(table):
    """Positions of the rows of each group."""
    return table.groupby([TABLE[name] for name in _GROUP]).indices


def _solve(columns, rest_s):
    """Least squares with columns scaled to length 1; the smallest solution where the
    rank is not full.
    """
    # pseudo-inverse by singular values: y = U S V' c, c = V S^-1 U' y over the rank
    scale = np.linalg.norm(columns, axis=0)
    left, size, span = np.linalg.svd(columns / scale, full_matrices=False)
    nonzero = size > _SPAN * size[0]
    span = span[nonzero]
    values = (left[:, nonzero].T @ rest_s / size[nonzero]) @ span / scale
    worst_s = float(np.abs(columns @ values - rest_s).max())
    return OperatorFit(len(rest_s), values, scale, span, worst_s)
