"""How is a run stopped and taken up again? Parameters and AdamW's states, each rank its
part, by torch's checkpoints.

Every tensor is stored under its parameter's full name. DTensors know which part they
are, so a run may be taken up with other degrees of dp, cp, tp, pp or another ZeRO
stage; parts cut by hand (experts) carry their place in the name and need the same ep
and tp. The directory is complete once `.metadata` is there.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.parallel.optimizers import Optimizers, local

__all__ = ["load", "save"]


def save(
    directory: str | Path,
    modules: list[Network],
    optimizers: Optimizers,
    mesh: Mesh,
    progress: Tensor,
) -> None:
    """Write a checkpoint; collective over all ranks. progress: (n,) numbers that belong
    to it.
    """
    state = _state(modules, optimizers, mesh) | {"progress": progress}
    dcp.save(state, checkpoint_id=str(directory))


def load(
    directory: str | Path,
    modules: list[Network],
    optimizers: Optimizers,
    mesh: Mesh,
    progress: Tensor,
) -> None:
    """Read a checkpoint into modules, optimizers and progress, in place; collective
    over all ranks.

    Raises FileNotFoundError where there is none, and ValueError if it is one of another
    model or layout.
    """
    if not (Path(directory) / ".metadata").exists():
        raise FileNotFoundError(
            f"{directory}: no complete checkpoint (.metadata is missing)"
        )
    for _, parameter, values in optimizers.states():
        if not values:
            part = local(parameter.detach())
            values["step"] = torch.zeros((), device=part.device)
            empty = getattr(
                optimizers.adam,
                "_new_buffer",
                lambda part, signed: torch.zeros_like(part),
            )  # of 8 bits
            values["exp_avg"] = empty(part, True)
            values["exp_avg_sq"] = empty(part, False)
    state = _state(modules, optimizers, mesh) | {"progress": progress}
    stored = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    if missing := sorted(set(state) - set(stored)):
        raise ValueError(
            f"{directory}: {missing[0]} is not in the checkpoint; it is one of "
            "another model or layout"
        )
    dcp.load(state, checkpoint_id=str(directory))


def _stored_name(name: str, network: Network) -> str:
    """The name of a parameter in a checkpoint: a tied head is the token table, also
    where a stage has only the head.
    """
    return (
        "embedding.tokens.weight"
        if network.spec.tied and name == "head.weight"
        else name
    )


def _state(
    modules: list[Network], optimizers: Optimizers, mesh: Mesh
) -> dict[str, Tensor]:
    """All tensors of this rank by name; the values share the storage of the run's own."""
    names = {
        p: _stored_name(name, module)
        for module in modules
        for name, p in module.named_parameters()
    }
    part = f"@ep{mesh.coordinate('ep')}of{mesh.size('ep')}.tp{mesh.coordinate('tp')}of{mesh.size('tp')}"
    cut = (
        {names[p] for p in optimizers.experts}
        if mesh.size("ep") * mesh.size("tp") > 1
        else set()
    )
    state = {
        name + (part if name in cut else ""): p.detach() for p, name in names.items()
    }
    for name, parameter, values in optimizers.states():
        name = _stored_name(name, modules[0])
        suffix = part if name in cut else ""
        state |= {
            f"{name}.{key}{suffix}": _like(value, parameter)
            for key, value in values.items()
        }
    return state


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A state of a parameter's part, split as the parameter is; the same storage."""
    if not value.ndim or not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        value, mesh, parameter.placements, run_check=False, **whole
    )
