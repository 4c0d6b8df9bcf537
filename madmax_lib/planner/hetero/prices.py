"""Prices: what a layer costs on a GPU type.

`PriceList` holds times and memory of every layer by (GPU type, tp, recompute, batch):
from profiles in Metis' format here, from the workbench's own simulator in
`planner.hetero.model`. Times and sizes of the files are converted here: all that
follows computes in seconds and bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from madmax_lib.planner.hetero.profiles import Profiles, covered

MB_BYTES = 2.0**20  # a MB of memory tables


@dataclass(frozen=True, eq=False)
class Price:
    """One (GPU type, tp, recompute, batch); arrays have an entry per layer, memory is
    that of one GPU.
    """

    layer_s: np.ndarray  # forward and backward pass of a micro-batch
    memory_bytes: np.ndarray  # held all the time
    # held for each micro-batch between its forward and backward pass
    live_bytes: np.ndarray
    sync_s: float = 0.0  # forward and backward time outside of the layers
    generator_s: float = 0.0  # loading of a micro-batch
    base_bytes: float = 0.0  # held whatever the layers


@dataclass(frozen=True, eq=False)
class PriceList:
    """Prices of layers on every GPU type."""

    # prices by (GPU type, tp, recompute, batch)
    table: Mapping[tuple[str, int, str, int], Price]
    # (layers,) before tp splits them, as the gradient all-reduce sends them
    parameters_bytes: np.ndarray
    # gradients of a table that embedding and head share, as the ends of a pipeline
    # reduce them
    tied_bytes: float
    optimizer_s: Mapping[str, float]  # update of the whole model on one GPU, by type
    # whether a message waits for its receiver, as Gloo's do between CPUs
    meets: bool = False
    # share by which a process computes longer while all others compute on the same cores
    crowding: float = 0.0
    # the (tp, recompute) with a price on some type, in order
    ways: tuple[tuple[int, str], ...] = field(init=False)

    def __post_init__(self):
        ways = {(tp, recompute) for _, tp, recompute, _ in self.table}
        object.__setattr__(self, "ways", tuple(sorted(ways)))

    @property
    def layers(self) -> int:
        """Layers, with embedding and head."""
        return len(self.parameters_bytes)

    def get(self, device: str, tp: int, recompute: str, samples: int) -> list[Price]:
        """Prices of the pieces in which samples come, the largest first; ValueError
        naming what is missing.
        """
        pieces = self.pieces(device, tp, recompute, samples)
        if None not in pieces:
            return pieces
        more = "" if recompute == "none" else f" with recompute={recompute}"
        missing = bits(samples)[pieces.index(None)]
        raise ValueError(
            f"no profile for {device} tp {tp} batch {missing}{more}; there are "
            f"{self.covered(device)}"
        )

    def pieces(
        self, device: str, tp: int, recompute: str, samples: int
    ) -> list[Price | None]:
        """One piece where that many samples have a price, else powers of two, None for
        those without.
        """
        if price := self.table.get((device, tp, recompute, samples)):
            return [price]
        return [
            self.table.get((device, tp, recompute, piece)) for piece in bits(samples)
        ]

    def covered(self, device: str) -> str:
        """Degrees and batches of a GPU type that have a price, as text."""
        keys = [(name, tp, batch) for name, tp, _, batch in self.table]
        return covered(keys, device)


def prices_of(profiles: Profiles) -> PriceList:
    """Prices of profiles in Metis' format: memory as the table has it, nothing
    recomputed.

    The optimizer's time is stored as one of two updates and falls with tp; the smallest
    degree is scaled to one GPU.
    """
    table = {}
    optimizer_s = {}
    for (device, tp, batch), profile in sorted(profiles.table.items()):
        memory_bytes = np.array(profile.memory_mb) * MB_BYTES
        table[device, tp, "none", batch] = Price(
            layer_s=np.array(profile.layer_ms) / 1e3,
            memory_bytes=memory_bytes,
            # profiles do not tell weights from activations
            live_bytes=np.zeros_like(memory_bytes),
            sync_s=profile.sync_ms / 1e3,
            generator_s=profile.batch_generator_ms / 1e3,
        )
        # sorted: the first of a type is that of its smallest degree
        optimizer_s.setdefault(device, 2 * profile.optimizer_ms * tp / 1e3)
    parameters_bytes = np.array(profiles.named(None).parameters_bytes, float)
    return PriceList(table, parameters_bytes, 0.0, optimizer_s)


def bits(samples: int) -> list[int]:
    """Powers of two that add up to a number of samples, the largest first.

    >>> bits(11)
    [8, 2, 1]
    """
    return [1 << k for k in reversed(range(samples.bit_length())) if samples >> k & 1]
