"""Which of vTrain's habits does one want to follow?

`VTrainRules` has a switch for each known deviation of the public release of vTrain [Bang et al., MICRO 2024] from its
paper or from what one would expect (behaviour recorded).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CORRECTED", "RELEASED", "VTrainRules", "parse_rules"]


@dataclass(frozen=True)
class VTrainRules:
    """Switches where the released vTrain deviates from what one would expect; the defaults are corrected.

    recompute: what use_checkpoint repeats before a backward pass. "all": the forward pass of every stage with its
        all-reduces. "not last", as released: that of all stages but the last, without all-reduces, beside the wait for
        the gradient. "none", as in vTrain's single-node table: nothing.
    ring_factor: 2(n-1)/n also counts beyond the 1,024 MiB of the tables.
    whole_mib: sizes are rounded to MiB, less than half a MiB is free; else the tables are interpolated.
    binary_units: GB/s and Gb/s count 2**30.
    node_aware: groups and messages that leave a node use its network, shared by those that do so at once. Released:
        gradients count as inside a node whenever tp < node_size, messages between stages always as outside.
    one_micro_batch: without a pipeline, micro_batch is what a data-parallel rank gets.
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


CORRECTED = VTrainRules()
RELEASED = VTrainRules("not last", False, whole_mib=True, binary_units=True, node_aware=False, one_micro_batch=True)


def parse_rules(rules: str | VTrainRules) -> VTrainRules:
    """The rules called "corrected" or "released", or the given ones. Raises ValueError for another name."""
    if isinstance(rules, VTrainRules):
        return rules
    if rules not in ("corrected", "released"):
        raise ValueError(f"rules={rules!r} is not corrected or released")
    return CORRECTED if rules == "corrected" else RELEASED
