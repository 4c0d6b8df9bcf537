"""How large a model can a cluster train by a method? GPT-2-like shapes, wider and deeper, until a step does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.simulator.offload.fits import FitsResult, fits, room_bytes, shares_that_fit
from madmax_lib.simulator.offload.placement import Policy
from madmax_lib.specs import Cluster, Transformer

__all__ = ["SIZE_METHODS", "LargestModel", "gpt_shape", "largest_model"]

# method: (fields of its Plan, whether all that may leave the device does)
SIZE_METHODS = {
    "ddp": ({"zero": 0}, False),
    "zero-1": ({"zero": 1}, False),
    "zero-2": ({"zero": 2}, False),
    "zero-3": ({"zero": 3}, False),
    "zero-offload": ({"zero": 2, "offload": "optimizer"}, False),
    "zero-3-offload": ({"zero": 3, "offload": "all"}, True),
    "zero-infinity": ({"zero": 3, "offload": "nvme"}, True),
    "chunks": ({"zero": 3, "offload": "chunks"}, False),
    "chunks-static": ({"zero": 3, "offload": "chunks"}, True),
}
_WIDTHS = (512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384, 20480, 25600)
_HEAD_DIM, _SEQUENCE, _VOCAB = 128, 1024, 50257  # GPT-2's vocabulary and sequence, as in the sources compared with
_FLATTEST, _DEEPEST = 16, 1 / 24  # layers at least, and at most per unit of width


@dataclass(frozen=True)
class LargestModel:
    """The largest model that fits, its plan, and what `fits` says about it. Every smaller one of its width fits too."""

    model: Transformer
    plan: Plan
    result: FitsResult = field(repr=False)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.model.parameters


def largest_model(cluster: Cluster, method: str) -> LargestModel:
    """The largest GPT-2-like model of a method on all devices of a cluster, by data parallelism alone.

    method: a name of `SIZE_METHODS`. Full recompute, one sample of 1,024 tokens per device, heads of 128 channels, 16
    layers or more and at most one per 24 channels.
    Raises ValueError for an unknown method, or one whose smallest model does not fit.
    """
    if method not in SIZE_METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(SIZE_METHODS)}")
    choices, static = SIZE_METHODS[method]
    plan = Plan(dp=cluster.world_size, recompute="full", **choices)
    policy = Policy(share=1.0 if static else None)
    shape = {"global_batch": plan.dp, "dtype": "fp16"}
    room = room_bytes(cluster, plan)

    def holds(width: int, layers: int) -> bool:
        model = gpt_shape(width, layers)
        if plan.offload:
            return len(shares_that_fit(model, cluster, plan, policy, room=room, **shape)) > 0
        return peak_bytes(memory(model, plan, **shape)) <= room["device"]

    best: tuple[int, int] | None = None
    for width in _WIDTHS:
        least = _FLATTEST if best is None else max(_FLATTEST, _layers_beyond(gpt_shape(*best), width))
        if layers := _deepest(holds, width, least):
            best = width, layers
    if best is None:
        raise ValueError(f"{method} on {cluster.name}: not even {_WIDTHS[0]} channels and {_FLATTEST} layers fit")
    model = gpt_shape(*best)
    return LargestModel(model, plan, fits(model, cluster, plan, policy=policy, **shape))


def gpt_shape(hidden: int, layers: int, sequence: int = _SEQUENCE, heads: int = 0) -> Transformer:
    """A GPT-2-like model of any size."""
    name = f"gpt-{hidden}x{layers}"
    return Transformer(name, layers, hidden, heads or hidden // _HEAD_DIM, 4 * hidden, sequence, _VOCAB)


def _deepest(holds: Callable[[int, int], bool], width: int, least: int) -> int:
    """Largest number of layers that fits, 0 if not even `least` do."""
    low, high = least, max(int(width * _DEEPEST), _FLATTEST)
    if low > high or not holds(width, low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(width, middle) else (low, middle - 1)
    return low


def _layers_beyond(model: Transformer, width: int) -> int:
    """Layers of this width with which a model is larger than another one."""
    one, two = (gpt_shape(width, layers).parameters for layers in (1, 2))
    return max((model.parameters - one) // (two - one) + 2, 1)
