"""How are AdamW's states held? One optimizer per kind of parameter, sharded by rank under ZeRO-1.

Parameters on different meshes cannot be stepped in one fused call, so they are sorted by mesh. ZeRO-1 is
`ZeroRedundancyOptimizer` [arXiv 1910.02054]: each rank updates some parameters whole and sends them to the others. It
takes no DTensors; those get plain twins that share their storage.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from madmax_lib.plan import Plan
from madmax_lib.runs.parallel.data_parallel import experts_of
from madmax_lib.runs.parallel.mesh import Mesh

__all__ = ["Optimizers", "local"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Optimizers:
    """AdamW over all trained parameters of a rank's stages. names: full name of every trained parameter."""

    def __init__(self, modules: list[nn.Module], plan: Plan, mesh: Mesh, learning_rate: float, weight_decay: float):
        self.names = {p: name for module in modules for name, p in module.named_parameters() if p.requires_grad}
        self.experts = {p for module in modules for experts in experts_of(module) for p in experts.parameters()}
        self.twins: dict[Tensor, nn.Parameter] = {}
        options = {"lr": learning_rate, "weight_decay": weight_decay, "betas": (0.9, 0.95)}
        if plan.zero == 1 and mesh.fsdp.size() > 1:
            self.parts = [self._redundant(parameters, group, options) for parameters, group in self._by_copies(mesh)]
        else:
            self.parts = [torch.optim.AdamW(parameters, **options) for parameters in self._by_mesh()]

    @property
    def kind(self) -> str:
        """Name of the optimizer."""
        return type(self.parts[0]).__name__ if self.parts else "none"

    def _by_mesh(self) -> list[list[Tensor]]:
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
        for parameter in self.names:
            by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
        return list(by_mesh.values())

    def _by_copies(self, mesh: Mesh) -> Iterator[tuple[list[Tensor], torch.distributed.ProcessGroup | None]]:
        """Parameters and the ranks that hold copies of them, None where there is one copy."""
        dense = [p for p in self.names if p not in self.experts]
        experts = [p for p in self.names if p in self.experts]
        yield dense, mesh.group("fsdp")
        if experts:
            yield experts, mesh.group("edp")

    def _redundant(self, parameters: list[Tensor], group, options: dict) -> torch.optim.Optimizer:
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                self.twins[parameter] = nn.Parameter(parameter.detach().to_local())
        plain = [self.twins.get(p, p) for p in parameters]
        if group is None:
            return torch.optim.AdamW(plain, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecations when imported

        return ZeroRedundancyOptimizer(plain, torch.optim.AdamW, process_group=group, **options)

    def step(self) -> None:
        """Update the parameters and forget their gradients."""
        for parameter, twin in self.twins.items():
            twin.grad = local(parameter.grad)
        for optimizer in self.parts:
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.names, *self.twins.values()):
            parameter.grad = None

    def states(self) -> Iterator[tuple[str, Tensor, dict]]:
        """(name, parameter, AdamW's state of it) of those that this rank updates."""
        names = self.names | {twin: self.names[p] for p, twin in self.twins.items()}
        for optimizer in self.parts:
            inner = getattr(optimizer, "optim", optimizer)  # a ZeroRedundancyOptimizer's own part
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield names[parameter], parameter, inner.state[parameter]
