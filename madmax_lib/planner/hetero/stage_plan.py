"""A heterogeneous plan: the fields that Metis gives a plan, checked.

A stage is a group of consecutive GPUs with its own degrees and layers. Plans are read
from Metis' own output too, whose balancer loses layers and leaves stages empty:
`repaired` gives such a plan all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from madmax_lib.base import require_int


@dataclass(frozen=True)
class HeteroPlan:
    """Stages over device groups: the fields of a plan in Metis.

    node_sequence: order of the GPU types.
    device_groups: GPUs of each stage.
    strategies: (dp, tp) of each stage.
    batches: micro-batches of a step.
    layer_partition: first layer of each stage, and the number of layers.
    recompute: of each stage, "none" by default.
    """

    node_sequence: tuple[str, ...]
    device_groups: tuple[int, ...]
    strategies: tuple[tuple[int, int], ...]
    batches: int
    layer_partition: tuple[int, ...]
    recompute: tuple[str, ...] = ()

    def __post_init__(self):
        stages = len(self.device_groups)
        if not self.recompute:
            object.__setattr__(self, "recompute", ("none",) * stages)
        for name, length in (
            ("strategies", stages),
            ("layer_partition", stages + 1),
            ("recompute", stages),
        ):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {stages} "
                    "device groups"
                )
        for number, (gpus, (dp, tp)) in enumerate(
            zip(self.device_groups, self.strategies, strict=True)
        ):
            if dp < 1 or tp < 1 or dp * tp != gpus:
                raise ValueError(
                    f"stage {number}: dp x tp = {dp} x {tp} is not the {gpus} GPUs "
                    "of its group"
                )

    @classmethod
    def read(cls, plan: HeteroPlan | Mapping) -> HeteroPlan:
        """A plan as it is, or from a mapping or table row with these fields, such as
        Metis' own. Raises ValueError.
        """
        if isinstance(plan, cls):
            return plan
        for name in cls.__dataclass_fields__:
            if name not in plan and name != "recompute":
                raise ValueError(f"the plan has no {name}")

        def counts(name, values, least=1):
            return tuple(require_int(name, value, least) for value in values)

        try:
            return cls(
                node_sequence=tuple(map(str, plan["node_sequence"])),
                device_groups=counts("device_groups", plan["device_groups"]),
                strategies=tuple(counts("dp, tp", pair) for pair in plan["strategies"]),
                batches=require_int("batches", plan["batches"], 1),
                layer_partition=counts("layer_partition", plan["layer_partition"], 0),
                recompute=tuple(map(str, plan.get("recompute", ()))),
            )
        except TypeError as error:
            raise ValueError(f"not a plan: {error}") from None

    def repaired(self, layers: int) -> HeteroPlan:
        """Plan with all layers: lost ones go to the last stage, an empty stage takes the
        nearest of its neighbour.

        Raises ValueError for more stages than layers.
        """
        stages = len(self.device_groups)
        if layers < stages:
            raise ValueError(
                f"{layers} layers are fewer than the {stages} stages of the plan"
            )
        cuts = self.layer_partition
        if cuts[-1] > layers or any(end < start for start, end in pairwise(cuts)):
            raise ValueError(
                f"layer_partition {list(cuts)} does not go up to the {layers} layers"
            )
        # every cut at least a layer behind the one before it ...
        inner = [max(cut, number) for number, cut in enumerate(cuts[1:-1], 1)]
        inner = list(accumulate(inner, lambda before, cut: max(before + 1, cut)))
        # ... and a layer left for each stage after it
        most = layers - stages + 1
        inner = [min(cut, most + number) for number, cut in enumerate(inner)]
        return replace(self, layer_partition=(0, *inner, layers))
