"""Which ranks work together in which dimension? One DeviceMesh of a plan, and the groups derived from it.

Ranks are laid out as (pp, dp, cp, tp), tp fastest. dp x cp ranks share parameters (`fsdp`) and, where there are
experts, split into edp x ep: ep ranks hold different experts, edp ranks the same. No more groups are made than the plan
needs: gloo gives each a thread that wakes a hundred times a second.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from madmax_lib.plan import Plan

__all__ = ["Mesh", "build"]


@dataclass(frozen=True)
class Mesh:
    """Meshes by dimension.

    root: all ranks as (pp, dp, cp, tp).
    fsdp: dp x cp.
    dense: what dense parameters are sharded or copied over, 2-D (copies, shards) with HSDP.
    edp: copies of an expert.
    ep: parts of the experts, None for ep=1.
    world: all ranks.
    """

    root: DeviceMesh
    fsdp: DeviceMesh
    dense: DeviceMesh
    edp: DeviceMesh
    ep: DeviceMesh | None
    world: dist.ProcessGroup

    def __getitem__(self, name: str) -> DeviceMesh:
        """One of pp, dp, cp, tp, ep, edp, fsdp."""
        return getattr(self, name) if name in ("ep", "edp", "fsdp") else self.root[name]

    def size(self, name: str) -> int:
        """Ranks of a dimension."""
        return 1 if self[name] is None else self[name].size()

    def coordinate(self, name: str) -> int:
        """This rank's number in a dimension."""
        return 0 if self[name] is None else self[name].get_local_rank()

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Process group of a dimension; None where it has one rank and needs none."""
        return self[name].get_group() if self.size(name) > 1 else None


def build(plan: Plan, device_type: str) -> Mesh:
    """The mesh of a plan over the ranks of the running process group; collective over all of them.

    Starts a process group of one where there is none and the plan needs no other rank. Raises ValueError if the plan
    needs other than those.
    """
    if not dist.is_initialized() and plan.world_size == 1:
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != plan.world_size:
        raise ValueError(f"{plan} needs {plan.world_size} ranks, but {world_size} were started")
    shape = (plan.pp, plan.dp, plan.cp, plan.tp)
    root = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    if plan.cp == 1 or plan.dp == 1:
        fsdp = root["dp"] if plan.cp == 1 else root["cp"]
    else:
        fsdp = root["dp", "cp"]._flatten("fsdp")
    dense = edp = fsdp
    ep = None
    if plan.ep > 1:
        both = fsdp._unflatten(0, (fsdp.size() // plan.ep, plan.ep), ("edp", "ep"))
        edp, ep = both["edp"], both["ep"]
    if 0 < plan.shard < fsdp.size():
        dense = fsdp._unflatten(0, (fsdp.size() // plan.shard, plan.shard), ("copies", "shard"))
    return Mesh(root, fsdp, dense, edp, ep, dist.group.WORLD)
