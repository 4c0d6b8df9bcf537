"""Ranks that work together in a dimension: one DeviceMesh of a plan, and the groups
derived from it.

Ranks are laid out as (pp, dp, cp, tp), tp fastest. dp x cp ranks share parameters
(`fsdp`) and, where there are experts, split into edp x ep: ep ranks hold different
experts, edp ranks the same. No more groups are made than the plan
needs: gloo gives each a thread that wakes a hundred times a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from madmax_lib.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """Meshes by dimension.

    axes: pp, dp, cp, tp, fsdp (dp x cp), edp (copies of an expert) and ep (parts of the
    experts, None for ep=1).
    dense: ranks that dense parameters are sharded or copied over, 2-D (copies, shards) with
    HSDP.
    """

    axes: Mapping[str, DeviceMesh | None]
    dense: DeviceMesh

    @cached_property
    def _positions(self):
        """This rank's number and the ranks of each axis."""
        # read once: a DeviceMesh takes as long to tell as several kernels
        return {
            name: (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
            for name, mesh in self.axes.items()
        }

    def size(self, name: str) -> int:
        """Ranks of a dimension."""
        return self._positions[name][1]

    def coordinate(self, name: str) -> int:
        """This rank's number in a dimension."""
        return self._positions[name][0]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Process group of a dimension; None where it has one rank and needs none."""
        return self.axes[name].get_group() if self.size(name) > 1 else None


def join(device_type: str, **options) -> None:
    """Enter a process group of gloo, or of NCCL bound to the current GPU: links are
    made, and break, here.
    """
    if device_type == "cuda":
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", **options)


def build(plan: Plan, device_type: str) -> Mesh:
    """The mesh of a plan over the ranks of the running process group; collective over
    all of them.

    Starts a process group of one where there is none and the plan needs no other rank.
    Raises ValueError if the plan needs other than those.
    """
    if not dist.is_initialized() and plan.world_size == 1:
        join(device_type, store=dist.HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != plan.world_size:
        raise ValueError(
            f"{plan} needs {plan.world_size} ranks, but {world_size} were started"
        )
    names = ("pp", "dp", "cp", "tp")
    shape = tuple(getattr(plan, name) for name in names)
    root = init_device_mesh(device_type, shape, mesh_dim_names=names)
    axes = {name: root[name] for name in names} | {"ep": None}
    if plan.cp == 1 or plan.dp == 1:
        fsdp = root["dp" if plan.cp == 1 else "cp"]
    else:
        fsdp = root["dp", "cp"]._flatten("fsdp")
    axes |= {"fsdp": fsdp, "edp": fsdp}
    if plan.ep > 1:  # neighbours hold different experts
        sizes = (fsdp.size() // plan.ep, plan.ep)
        both = fsdp._unflatten(0, sizes, ("edp", "ep"))
        axes |= {"edp": both["edp"], "ep": both["ep"]}
    dense = fsdp
    if 0 < plan.shard < fsdp.size():  # HSDP: copies of shards
        sizes = (fsdp.size() // plan.shard, plan.shard)
        dense = fsdp._unflatten(0, sizes, ("copies", "shard"))
    return Mesh(axes, dense)
