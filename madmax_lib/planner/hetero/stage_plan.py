"""What is a heterogeneous plan, and by which rules is it charged? The fields that Metis gives a plan, checked.

A stage is a group of consecutive GPUs with its own degrees and layers. Plans are read from Metis' own output too,
whose balancer loses layers and leaves stages empty: `repaired` gives such a plan all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate

__all__ = ["DEFECTS", "HeteroPlan", "Rules"]

DEFECTS = {
    "E1": "a later node order counts only the first stage of two-stage plans",
    "E2": "layers that the balancer lost are not computed",
    "E3": "stages without layers are accepted",
    "E4": "a replica of mixed types runs at the speed of its first GPU",
    "E5": "links between nodes are as fast as inside, sends count elements for bytes",
    "E6": "memory: five times the table of the first type, against the sum over a stage's GPUs",
    "E7": "optimizer and batch generator come from whichever profile is listed first",
}


@dataclass(frozen=True)
class HeteroPlan:
    """Stages over device groups: the fields of a plan in Metis, all ints but the names.

    node_sequence: order of the GPU types. device_groups: GPUs of each stage. strategies: (dp, tp) of each. batches:
    micro-batches. layer_partition: first layer of each stage, and the number of layers. recompute: of each stage.
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
        for name, length in (("strategies", stages), ("layer_partition", stages + 1), ("recompute", stages)):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {stages} device groups")
        for number, (gpus, (dp, tp)) in enumerate(zip(self.device_groups, self.strategies, strict=True)):
            if dp < 1 or tp < 1 or dp * tp != gpus:
                raise ValueError(f"stage {number}: dp x tp = {dp} x {tp} is not the {gpus} GPUs of its group")

    @classmethod
    def read(cls, plan: HeteroPlan | Mapping) -> HeteroPlan:
        """A plan as it is, or from a mapping or table row with these fields, such as Metis' own. Raises ValueError."""
        if isinstance(plan, cls):
            return plan
        values = {}
        for name in cls.__dataclass_fields__:
            if name in plan:
                values[name] = plan[name]
            elif name != "recompute":
                raise ValueError(f"the plan has no {name}")
        try:
            return cls(
                node_sequence=tuple(map(str, values["node_sequence"])),
                device_groups=tuple(map(int, values["device_groups"])),
                strategies=tuple((int(dp), int(tp)) for dp, tp in values["strategies"]),
                batches=int(values["batches"]),
                layer_partition=tuple(map(int, values["layer_partition"])),
                recompute=tuple(map(str, values.get("recompute", ()))),
            )
        except TypeError as error:
            raise ValueError(f"not a plan: {error}") from None

    def repaired(self, layers: int) -> HeteroPlan:
        """With all layers: lost ones go to the last stage, an empty stage takes the nearest of its neighbour.

        Raises ValueError for more stages than layers.
        """
        stages = len(self.device_groups)
        if layers < stages:
            raise ValueError(f"{layers} layers are fewer than the {stages} stages of the plan")
        inner = [max(cut, low) for cut, low in zip(self.layer_partition[1:-1], range(1, stages), strict=True)]
        inner = list(accumulate(inner, lambda before, cut: max(before + 1, cut)))
        inner = [min(cut, layers - stages + 1 + number) for number, cut in enumerate(inner)]
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return HeteroPlan(**values | {"layer_partition": (0, *inner, layers)})

    def as_dict(self) -> dict:
        """Plain values, as `read` takes them."""
        return asdict(self)


@dataclass(frozen=True)
class Rules:
    """What a plan is charged for.

    bytes_per_element: of an activation sent between stages. memory_factor: bytes needed per byte of the table; 0 is no
    limit. tp_in_node: a replica's GPUs must lie in one node. defect: one of DEFECTS, or "". model_profile: (optimizer
    ms, batch generator ms) of the profile that is listed first (E5, E7). counted_stages: those E1 counts.
    """

    global_batch: int
    hidden: int = 4096
    sequence: int = 1024
    bytes_per_element: float = 2.0
    memory_factor: float = 1.0
    tp_in_node: bool = False
    defect: str = ""
    model_profile: tuple[float, float] = (0.0, 0.0)
    counted_stages: int = 1

    def __post_init__(self):
        if self.defect and self.defect not in DEFECTS:
            raise ValueError(f"defect={self.defect!r} is not one of {', '.join(DEFECTS)}")
        for name in ("global_batch", "hidden", "sequence", "bytes_per_element"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.memory_factor >= 0:
            raise ValueError(f"memory_factor={self.memory_factor} must not be negative")

    @property
    def element_bytes(self) -> float:
        """Bytes of an activation, or one where elements are taken for bytes (E5)."""
        return 1.0 if self.defect == "E5" else self.bytes_per_element
