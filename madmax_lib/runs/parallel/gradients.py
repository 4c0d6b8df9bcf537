"""Length of the gradient over all ranks, and the loss scale of fp16.

Every rank sums the squares of what it holds; a parameter that `c` ranks hold copies of
counts 1/c on each. torch's `clip_grad_norm_` refuses parameters on different meshes. No
value is read, so that the host runs ahead. With fp16 the loss is multiplied by a scale,
halved when a gradient overflows (the step is skipped on all ranks) and doubled after
many good steps [arXiv 1710.03740].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.parallel.optimizers import Optimizers, at_once, local

__all__ = ["LossScale", "finish", "norm", "sum_tied"]


@dataclass
class LossScale:
    """Factor of a loss before the backward pass."""

    value: float = 1.0
    dynamic: bool = False  # whether it changes
    good_steps: int = 0  # since the last overflow
    growth_interval: int = 2000  # good steps after which it doubles

    def update(self, overflow: bool) -> None:
        """Halve after an overflow, double after `growth_interval` steps without one."""
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.value = self.value * 2
            self.good_steps = 0


@torch.no_grad()
def finish(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Sum gradients that are still parts of a sum over tp ranks (norms and positions
    under sequence parallelism).
    """
    parts = []
    for p in parameters:
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            if (p.grad.placements, p.placements) == ((Partial(),), (Replicate(),)):
                parts.append(local(p.grad))
            else:
                p.grad = p.grad.redistribute(placements=p.placements)
    at_once(partial(dist.all_reduce, group=mesh.group("tp")), parts)


def sum_tied(modules: Sequence[Network], mesh: Mesh) -> Tensor | None:
    """Add the gradients of a tied head and its token table, on both stages, where they
    are on different ones.

    Returns the parameter that must not be counted again: the head, on the last stage.
    """
    stage = mesh.coordinate("pp")
    last = mesh.size("pp") - 1
    if not last or not modules[0].spec.tied or stage not in (0, last):
        return None
    is_head = stage == last
    ends = (modules[-1].head, modules[0].embedding)
    parameter = ends[0].weight if is_head else ends[1].tokens.weight
    if not parameter.requires_grad:  # adapters alone are trained
        return None
    gradient = local(parameter.grad)
    group = mesh.group("pp")
    # NCCL sends nothing that is offloaded
    sent = gradient.to(mesh.dense.device_type, copy=True)
    received = torch.empty_like(sent)
    peer = dist.get_global_rank(group, 0 if is_head else last)
    # in this order: Gloo says that a buffer is there on the connection on which the
    # other one is sent
    receive = dist.P2POp(dist.irecv, received, peer, group)
    send = dist.P2POp(dist.isend, sent, peer, group)
    for request in dist.batch_isend_irecv([receive, send]):
        request.wait()
    gradient.add_(received.to(gradient.device))
    return parameter if is_head else None


@torch.no_grad()
def norm(optimizers: Optimizers, mesh: Mesh, skip: Tensor | None = None) -> Tensor:
    """Length of the whole model's gradient, a number on the device; skip: a copy that
    another stage counts.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.dense.device_type)
    # |g|^2 = sum over ranks and parameters of |g_local|^2 / (ranks that hold it)
    for share, parameters in optimizers.counted.items():
        gradients = [
            local(p.grad) for p in parameters if p.grad is not None and p is not skip
        ]
        if gradients:
            lengths = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            squares = torch.stack(lengths).double().square().sum()
            total += (share * squares).to(total.device)
    dist.all_reduce(total)
    return total.sqrt()
