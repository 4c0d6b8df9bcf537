"""AdamW and its states: of all parameters on every rank, or under ZeRO-1 each rank's for
the parameters that it updates; the length of the gradient, and the loss scale of fp16.

ZeRO-1 [arXiv 1910.02054]: a rank updates some of the parameters that it shares with
others, and sends them in one broadcast. AdamW sees plain tensors, so that one fused
call takes all of them: DTensors get twins that share their storage.

For the length of the gradient every rank sums the squares of what it holds; a parameter
that `c` ranks hold copies of counts 1/c on each. torch's `clip_grad_norm_` refuses
parameters on different meshes. No value is read, so that the host runs ahead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from madmax_lib.plan import Plan
from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.data_parallel import experts_of
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.settings import Settings


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def at_once(exchange: Callable[[Tensor], object], tensors: list[Tensor]) -> None:
    """Exchange many tensors in place, in one message."""
    if tensors:
        bucket = torch.cat([tensor.flatten() for tensor in tensors])
        exchange(bucket)
        pieces = bucket.split([tensor.numel() for tensor in tensors])
        shaped = map(Tensor.view_as, pieces, tensors)
        torch._foreach_copy_(tensors, list(shaped))  # one kernel for all of them


class Optimizers:
    """AdamW over all trained parameters of a rank's stages.

    adam: the optimizer itself.
    names: full name of every trained parameter.
    experts: parameters of experts.
    counted: parameters by the part of their squares that this rank adds to the model's:
    one over the ranks with copies.
    modules: the stages. mesh: of the ranks.
    """

    def __init__(
        self, modules: list[Network], plan: Plan, mesh: Mesh, settings: Settings
    ):
        self.modules = modules
        self.mesh = mesh
        self.names: dict[Tensor, str] = {}
        self.experts: set[Tensor] = set()
        for module in modules:
            for name, p in module.named_parameters():
                if p.requires_grad:
                    self.names[p] = name
            for experts in experts_of(module):
                self.experts.update(experts.parameters())
        # Every rank of a stage adds the squares of what it has: a parameter in s shards
        # is counted (ranks of the stage) / s times. Experts are cut by hand, over ep
        # and tp, so that no DTensor knows of it.
        self.counted: dict[float, list[Tensor]] = defaultdict(list)
        cut_by_hand = mesh.size("ep") * mesh.size("tp")
        stage_ranks = plan.world_size // plan.pp
        for p in self.names:
            shards = _shards(p) * (cut_by_hand if p in self.experts else 1)
            self.counted[shards / stage_ranks].append(p)
        self._twins = {
            p: nn.Parameter(p.detach().to_local()) if isinstance(p, DTensor) else p
            for p in self.names
        }
        self._shared: list[tuple[dist.ProcessGroup, list[list[Tensor]]]] = []
        updated = []
        for axis in ("fsdp", "edp"):
            twins = [
                twin
                for p, twin in self._twins.items()
                if (p in self.experts) == (axis == "edp")
            ]
            group = mesh.group(axis) if plan.zero == 1 else None
            if not group:
                updated += twins
                continue
            parts = _balanced(twins, group.size())
            updated += parts[group.rank()]
            if twins:
                self._shared.append((group, parts))
        self.adam = _adam(updated, settings)

    @torch.no_grad()
    def step(self, factor: Tensor) -> None:
        """Update the parameters by `factor` times their gradients, where it is finite,
        and forget the gradients.

        The host does not wait for the factor, unless the optimizer is none of torch's.
        """
        for parameter, twin in self._twins.items():
            # FSDP2 moves shards when it pads or pins them, at the first pass
            if twin is not parameter:
                twin.data = local(parameter)
                twin.grad = local(parameter.grad)
        gradients = [p.grad for p in self._updated() if p.grad is not None]
        device = gradients[0].device if gradients else factor.device
        factor = factor.to(device, torch.float32)
        # fused AdamW unscales, and skips, as it goes
        if hasattr(self.adam, "_step_supports_amp_scaling"):
            self.adam.grad_scale = 1 / factor
            self.adam.found_inf = (~factor.isfinite()).float()
            self.adam.step()
        elif factor.isfinite():
            torch._foreach_mul_(gradients, factor)
            self.adam.step()
        for group, parts in self._shared:
            for rank, part in enumerate(parts):
                at_once(partial(dist.broadcast, group=group, group_src=rank), part)
        self.clear()

    @torch.no_grad()
    def finish(self) -> Tensor | None:
        """Sum gradients that are still parts of a sum: over tp ranks (norms and
        positions under sequence parallelism), and of a tied token table over stages.

        Returns the parameter that must not be counted again: the head, on the last
        stage.
        """
        parts = []
        for p in self.names:
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                if (p.grad.placements, p.placements) == ((Partial(),), (Replicate(),)):
                    parts.append(local(p.grad))
                else:
                    p.grad = p.grad.redistribute(placements=p.placements)
        at_once(partial(dist.all_reduce, group=self.mesh.group("tp")), parts)
        return self._sum_tied()

    def _sum_tied(self):
        """Add the gradients of a tied head and its token table, on both stages, where
        they are on different ones; the head, where it is here.
        """
        mesh = self.mesh
        stage = mesh.coordinate("pp")
        last = mesh.size("pp") - 1
        if not last or not self.modules[0].spec.tied or stage not in (0, last):
            return None
        is_head = stage == last
        end = self.modules[-1].head if is_head else self.modules[0].embedding.tokens
        if not end.weight.requires_grad:  # adapters alone are trained
            return None
        gradient = local(end.weight.grad)
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
        return end.weight if is_head else None

    @torch.no_grad()
    def norm(self, skip: Tensor | None = None) -> Tensor:
        """Length of the whole model's gradient, a number on the device; skip: a copy
        that another stage counts.
        """
        device = self.mesh.dense.device_type
        total = torch.zeros((), dtype=torch.float64, device=device)
        # |g|^2 = sum over ranks and parameters of |g_local|^2 / (ranks that hold it)
        for share, parameters in self.counted.items():
            counted = (p for p in parameters if p.grad is not None and p is not skip)
            gradients = [local(p.grad) for p in counted]
            if gradients:
                lengths = torch._foreach_norm(gradients, 2, dtype=torch.float32)
                squares = torch.stack(lengths).double().square().sum()
                total += (share * squares).to(total.device)
        dist.all_reduce(total)
        return total.sqrt()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter, twin in self._twins.items():
            parameter.grad = twin.grad = None

    def states(self) -> Iterator[tuple[str, Tensor, dict]]:
        """(name, parameter, AdamW's state of this rank's part of it) of those that this
        rank updates.
        """
        updated = set(self._updated())
        for parameter, twin in self._twins.items():
            if twin in updated:
                yield self.names[parameter], parameter, self.adam.state[twin]

    def _updated(self):
        """Tensors that this rank updates."""
        return [p for group in self.adam.param_groups for p in group["params"]]


def _adam(parameters, settings):
    options = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": (0.9, 0.95),  # of GPT-3 and LLaMA
    }
    # a group, as a bare list may not be empty
    groups = [{"params": parameters}]
    if settings.adam_8bit:
        from torchao.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _shards(parameter):
    """Into how many parts a parameter is split."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def _balanced(tensors, ranks):
    """Tensors by the rank that updates them."""
    parts = [[] for _ in range(ranks)]
    elements = [0] * ranks
    # the next largest goes to the rank with the fewest elements
    for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
        rank = elements.index(min(elements))
        parts[rank].append(tensor)
        elements[rank] += tensor.numel()
    return parts


@dataclass
class LossScale:
    """Factor of a loss before the backward pass: halved when a gradient overflows (the
    step is skipped on all ranks), doubled after many good steps [arXiv 1710.03740].
    """

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
