"""Checkpoints of a run: parameters and AdamW's states, each rank its part, by torch's
distributed checkpoints.

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

from madmax_lib.runs.parallel.optimizers import Optimizers, local


def save(directory: str | Path, optimizers: Optimizers, progress: Tensor) -> None:
    """Write a checkpoint; collective over all ranks. progress: (n,) numbers that belong
    to it.
    """
    state = _state(optimizers) | {"progress": progress}
    dcp.save(state, checkpoint_id=str(directory))


def load(directory: str | Path, optimizers: Optimizers, progress: Tensor) -> None:
    """Read a checkpoint into stages, optimizers and progress, in place; collective over
    all ranks.

    Raises FileNotFoundError where there is none, and ValueError if it is one of another
    model or layout.
    """
    if not (Path(directory) / ".metadata").exists():
        raise FileNotFoundError(
            f"{directory}: no complete checkpoint (.metadata is missing)"
        )
    adam = optimizers.adam
    for _, parameter, values in optimizers.states():
        if not values:  # states that a first step would make
            part = local(parameter.detach())
            values["step"] = torch.zeros((), device=part.device)
            for name, signed in {"exp_avg": True, "exp_avg_sq": False}.items():
                values[name] = (
                    adam._new_buffer(part, signed)  # of torchao's 8 bits
                    if hasattr(adam, "_new_buffer")
                    else torch.zeros_like(part)
                )
    state = _state(optimizers) | {"progress": progress}
    stored = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    if missing := sorted(set(state) - set(stored)):
        raise ValueError(
            f"{directory}: {missing[0]} is not in the checkpoint; "
            "it is from another model or layout"
        )
    dcp.load(state, checkpoint_id=str(directory))


def _state(optimizers):
    """All tensors of this rank by name; the values share the storage of the run's own."""
    modules = optimizers.modules
    mesh = optimizers.mesh
    tied = modules[0].spec.tied
    part = "@" + ".".join(
        f"{axis}{mesh.coordinate(axis)}of{mesh.size(axis)}" for axis in ("ep", "tp")
    )
    cut = optimizers.experts if mesh.size("ep") * mesh.size("tp") > 1 else set()
    state = {}

    def add(name, parameter, values):
        # a tied head is the token table, also where a stage has only the head
        if tied and name == "head.weight":
            name = "embedding.tokens.weight"
        suffix = part if parameter in cut else ""
        for key, value in values.items():
            state[f"{name}{key}{suffix}"] = value

    for module in modules:
        for name, parameter in module.named_parameters():
            add(name, parameter, {"": parameter.detach()})
    for name, parameter, values in optimizers.states():
        moments = {f".{key}": _like(value, parameter) for key, value in values.items()}
        add(name, parameter, moments)
    return state


def _like(value, parameter):
    """A state of a parameter's part, split as the parameter is; the same storage."""
    if not value.ndim or not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
