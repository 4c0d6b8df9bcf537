"""How long is the gradient, over all ranks, and is it finite? Norm, clipping and loss scaling by hand.

Every rank sums the squares of what it holds; a parameter that `c` ranks hold copies of counts 1/c on each. torch's
`clip_grad_norm_` refuses parameters on different meshes. With fp16 the loss is multiplied by a scale, halved when a
gradient overflows (the step is skipped on all ranks) and doubled after many good steps [arXiv 1710.03740].
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.parallel.optimizers import Optimizers, local

__all__ = ["LossScale", "finish", "multiply", "norm", "sum_tied"]


@dataclass
class LossScale:
    """What a loss is multiplied by before the backward pass.

    value: the factor (1).
    dynamic: whether it changes (False).
    good_steps: since the last overflow (0).
    growth_interval: good steps after which it doubles (2000).
    """

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    growth_interval: int = 2000

    def update(self, overflow: bool) -> None:
        """Halve after an overflow, double after `growth_interval` steps without one."""
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


def finish(parameters: Iterable[Tensor]) -> None:
    """Sum gradients that are still parts of a sum over tp ranks (norms and positions under sequence parallelism)."""
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def sum_tied(modules: Sequence[Network], mesh: Mesh) -> Tensor | None:
    """Where a tied head and its token table are on different stages, add their gradients on both.

    Returns the parameter that must not be counted again: the head, on the last stage.
    """
    stages = mesh.size("pp")
    if stages == 1 or not modules[0].spec.tied or mesh.coordinate("pp") not in (0, stages - 1):
        return None
    last = mesh.coordinate("pp") == stages - 1
    parameter = modules[-1].head.weight if last else modules[0].embedding.tokens.weight
    own, group = local(parameter.grad), mesh.group("pp")
    other, peer = torch.empty_like(own), dist.get_global_rank(group, 0 if last else stages - 1)
    exchange = [dist.P2POp(dist.isend, own.clone(), peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for request in dist.batch_isend_irecv(exchange):
        request.wait()
    own.add_(other)
    return parameter if last else None


def norm(optimizers: Optimizers, mesh: Mesh, skip: Tensor | None = None) -> float:
    """Length of the whole model's gradient; skip: a copy that another stage counts."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.root.device_type)
    holders = mesh.world.size() // mesh.size("pp")
    for parameter in optimizers.names:
        if parameter.grad is not None and parameter is not skip:
            shards = _shards(parameter)
            if parameter in optimizers.experts:
                shards *= mesh.size("ep") * mesh.size("tp")
            squares = local(parameter.grad).float().square().sum().double()
            total += (squares * shards / holders).to(total.device)
    dist.all_reduce(total, group=mesh.world)
    return math.sqrt(total.item()) if math.isfinite(total.item()) else math.inf


def _shards(parameter: Tensor) -> int:
    """Into how many parts a parameter is split."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def multiply(parameters: Iterable[Tensor], factor: float) -> None:
    """Scale all gradients in place."""
    if factor != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)
