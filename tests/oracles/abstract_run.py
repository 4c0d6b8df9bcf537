"""What would one rank of a large job do? Its collectives and FLOPs, without the GPUs, other ranks and arithmetic.

The code that trains (`trainer.Trainer`) runs one step as one rank of a process group that only pretends (torch's fake
backend), under a dispatch mode in which tensors of floating point have shapes and no contents: nothing is computed and
memory is reserved but never touched. Integers and single numbers are real, so that splits are. Routing is even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pandas as pd
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from madmax_lib.plan import Plan
from madmax_lib.runs.parallel import trainer
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.settings import Settings
from madmax_lib.specs import Transformer

__all__ = ["Traced", "trace"]

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "scatter", "barrier")
_SILENT = {"wait_tensor", "_wrap_tensor_autograd"}  # nothing is sent
_GROUPS = ("tp", "cp", "ep", "pp", "fsdp", "edp")  # where two are the same group, the first names it
_DIMENSIONS = {"fsdp": "dp"}  # dp x cp, as in `simulator.rates.topology`
_METADATA = {"set_", "resize_", "detach_"}  # change what a tensor is, not what is in it
_SMALL = 4096


@dataclass(frozen=True)
class Traced:
    """What one rank does in a step.

    layers: of this rank.
    collectives: a row per kind and group: collective, group (tp, cp, ep, pp, dp: dp x cp, edp, shard and replicate of
        HSDP, world), ranks, count and size_bytes of all calls (the whole buffer of an all-reduce, the gathered one of
        an all-gather, the input of the others).
    flops: of matrix products and attention, forward and backward, the latter with what is recomputed.
    """

    layers: int
    collectives: pd.DataFrame
    flops: Mapping[str, float]


def trace(model: str, plan: Plan, *, rank: int = 0, sizes: Mapping[str, object] | None = None, **settings) -> Traced:
    """One step of a plan as one of its ranks sees it; settings: fields of `Settings`, such as global_batch.

    No process group may run. In a thread of its own: DTensor remembers, per thread, process groups that will be gone
    the next time.
    """
    with ThreadPoolExecutor(1) as pool:
        total = pool.submit(_step, model, plan, Settings(**settings), dict(sizes or {}), rank).result()
    calls = sorted({key[:3] for key in total if len(key) == 4})
    rows = [(*call, total[*call, "count"], total[*call, "size_bytes"]) for call in calls]
    table = pd.DataFrame(rows, columns=["collective", "group", "ranks", "count", "size_bytes"])
    flops = {direction: float(total.get(("flops", direction), 0.0)) for direction in ("forward", "backward")}
    return Traced(total["layers"], table, flops)


def _step(model: str, plan: Plan, settings: Settings, sizes: Mapping, rank: int) -> dict:
    """Counts, bytes and FLOPs of one step by key, as `_Shapes` sums them, and layers of the rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        with _Shapes() as shapes:
            job = trainer.parallelize(model, plan, settings, sizes=sizes)
            shapes.start(job.mesh)
            job.step(_batch(job.spec, job.settings))
        return {**shapes.sums, "layers": sum(len(module.layers) for module in job.modules)}
    finally:
        dist.destroy_process_group()


def _batch(spec: Transformer, settings: Settings) -> dict[str, torch.Tensor]:
    if spec.image:
        images = torch.empty(settings.global_batch, 3, spec.image, spec.image)
        return {"images": images, "labels": torch.zeros(len(images), dtype=torch.int64)}
    tokens = torch.zeros(settings.global_batch, settings.sequence, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens}


class _Shapes(TorchDispatchMode):
    """Runs operators on integers and views, gives the others results without contents; counts once started."""

    def __init__(self):
        super().__init__()
        self.sums: Counter = Counter()
        self.groups: dict[str, tuple[str, int]] | None = None  # by group name: dimension, ranks; None: not counting yet

    def start(self, mesh: Mesh) -> None:
        """Count from here on."""
        groups = {"world": mesh.world} | {name: mesh.group(name) for name in reversed(_GROUPS)}
        if mesh.dense.ndim == 2:
            groups |= {"replicate": mesh.dense.get_group(0), "shard": mesh.dense.get_group(1)}
        named = {_DIMENSIONS.get(name, name): group for name, group in groups.items() if group is not None}
        self.groups = {group.group_name: (name, group.size()) for name, group in named.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # DTensor asks for shapes
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensors first become operations on what this rank holds
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return self._collective(func, args, kwargs)
        result = _without_contents(func, args, kwargs)
        if self.groups is not None and (formula := _FLOPS.get(func.overloadpacket)):
            direction = "forward" if torch._C._current_autograd_node() is None else "backward"
            self.sums["flops", direction] += formula(*args, **kwargs, out_val=result)
        return result

    def _collective(self, func, args: tuple, kwargs: dict):
        result, kind = func(*args, **kwargs), _name(func)
        tensors = [value for value in tree_leaves((args, result)) if isinstance(value, torch.Tensor)]
        real = not tensors[0].is_floating_point() if tensors else False
        if kind == "alltoall_base_" and real:
            args[0].copy_(args[1])  # how many rows come from each rank: as many as go there
        if kind == "recv_" and real:
            tensors[0].fill_(1)  # stages vote on how to learn shapes: the others as this one
        votes = real and kind in ("send", "recv_")
        if self.groups is not None and kind not in _SILENT and not votes:
            # the larger of input and output is the whole: gathered, before it is scattered, or both
            size = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            plain = kind.replace("_", "")
            call = next(name for name in _KINDS if plain.startswith(name.replace("_", "")))
            key = (call, *self._group(args))
            self.sums.update({(*key, "count"): 1, (*key, "size_bytes"): size})
        return result

    def _group(self, args: tuple) -> tuple[str, int]:
        """Dimension and ranks of the process group among the arguments, which is an object or a name."""
        for value in args:
            name = dist.ProcessGroup.unbox(value).group_name if isinstance(value, torch.ScriptObject) else value
            if isinstance(name, str) and name in self.groups:
                return self.groups[name]
        raise RuntimeError("a collective of a group that is no dimension of the plan")


def _without_contents(func, args: tuple, kwargs: dict):
    """What an operator returns, computed only where it is no arithmetic on floating point."""
    schema = func._schema
    returned = any("Tensor" in str(value.type) for value in schema.returns)
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    floats = any(t.is_floating_point() and t.numel() > 1 and not t.is_meta for t in given)
    creates = returned and not given and kwargs.get("device", torch.device("cpu")) == torch.device("cpu")
    if func.is_view or not (floats or creates) or not (returned or schema.is_mutable) or _name(func) in _METADATA:
        return func(*args, **kwargs)
    if schema.is_mutable:
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [named[a.name] for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
    elsewhere = {"device": torch.device("meta")} if creates or kwargs.get("device") else {}
    meta_args, meta_kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs | elsewhere))
    result = func(*meta_args, **meta_kwargs)
    if creates and (not result.is_floating_point() or result.numel() <= _SMALL):
        return func(*args, **kwargs)
    result = tree_map_only(torch.Tensor, _reserved, result)
    if func.overloadpacket is torch.ops.aten.topk:  # of a router
        values, chosen = result
        return values, torch.arange(chosen.numel()).view(chosen.shape) % args[0].shape[-1]
    return result


def _name(func) -> str:
    return func.overloadpacket.__name__


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _reserved(shape: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape: small ones and integers are zero, of large ones no page is ever touched."""
    tensor = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    return tensor.zero_() if tensor.numel() <= _SMALL or not tensor.is_floating_point() else tensor


def _attention_flops(query, key, value, *_, out_val=None, **__) -> int:
    """Scores and weighted values of fused attention on a CPU, all tokens counted, as torch counts other devices."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(gradient, query, key, value, *_, out_val=None, **__) -> int:
    """Five products instead of two: the scores once more [arXiv 2205.14135]."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
