"""Which of vTrain's habits does one want to follow?

`Rules` has a switch for each known deviation of the public release of vTrain [Bang et al., MICRO 2024] from its paper
or from what one would expect (behaviour recorded).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["CORRECTED", "RELEASED", "Rules", "parse_rules"]


@dataclass(frozen=True)
class Rules:
    """Switches where the released vTrain deviates from what one would expect; the defaults are corrected.

    recompute: with use_checkpoint, "all" stages repeat the forward pass of their layers with its all-reduces before
    the backward pass; "not last" as released: all stages but the last, without all-reduces, beside the wait for the
    gradient; "none" as in vTrain's single-node table, whatever use_checkpoint says.
    ring_factor: 2(n-1)/n also beyond the 1,024 MiB of the tables. whole_mib: sizes are rounded to MiB, less than half a
    MiB is free; else the tables are interpolated. binary_units: GB/s and Gb/s count 2**30.
    node_aware: groups and messages that leave a node use its network, shared by those that do so at once. Released:
    gradients count as inside a node whenever tp < node_size, messages between stages always as outside.
    one_micro_batch: without pipeline, micro_batch is what a data-parallel rank gets.
    """

    recompute: str = "all"
    ring_factor: bool = True
    whole_mib: bool = False
    binary_units: bool = False
    node_aware: bool = True
    one_micro_batch: bool = False

    def __post_init__(self):
        if self.recompute not in ("all", "not last", "none"):
            raise ValueError(f"recompute={self.recompute!r} is not all, not last or none")

    @property
    def giga(self) -> float:
        """What G stands for in GB/s and Gb/s."""
        return 2.0**30 if self.binary_units else 1e9


CORRECTED = Rules()
RELEASED = Rules("not last", ring_factor=False, whole_mib=True, binary_units=True, node_aware=False,
                 one_micro_batch=True)  # fmt: skip


def parse_rules(choice: str | Rules = "corrected", **switches) -> Rules:
    """The rules "corrected" or "released", with some switches set otherwise.

    Raises ValueError for another name or an unknown switch.

    >>> parse_rules("released", recompute="none").ring_factor
    False
    """
    named = {"corrected": CORRECTED, "released": RELEASED}
    found = choice if isinstance(choice, Rules) else named.get(choice)
    if found is None:
        raise ValueError(f"rules={choice!r} is not {' or '.join(named)}")
    if unknown := set(switches) - {f.name for f in fields(Rules)}:
        raise ValueError(f"{sorted(unknown)[0]!r} is not a switch of the rules")
    return replace(found, **switches)
