"""Split of a layer's matrices over tp ranks: by columns, then by rows, with DTensors
[arXiv 1909.08053].

Without sequence parallelism a layer takes two all-reduces forward and two backward;
with it the norms work on parts of the sequence, and each all-reduce becomes a
reduce-scatter and an all-gather [arXiv 2205.05198]. The token table is split by rows
(tokens), the head by columns; its logits are gathered, or stay split under a parallel
loss. Experts are split by hand, their sums are in `experts`.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from madmax_lib.runs.model.experts import Mixture
from madmax_lib.runs.model.layers import TransformerLayer
from madmax_lib.runs.model.network import Network

__all__ = ["split_ends", "split_layer"]


def split_layer(
    layer: TransformerLayer, mesh: DeviceMesh, sequence_parallel: bool
) -> None:
    """Split a layer in place; between layers each rank has (B, S/tp, hidden) with
    sequence_parallel.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    enter = PrepareModuleInput(
        input_layouts=(between,), desired_input_layouts=(Replicate(),)
    )
    leave = RowwiseParallel(output_layouts=between)  # sums over the tp ranks
    plan = {"attention": enter, "attention.projection": leave}
    for name in ("query", "key", "value"):
        plan[f"attention.{name}"] = ColwiseParallel()
    is_mixture = isinstance(layer.feed_forward, Mixture)
    if not is_mixture:
        plan |= {"feed_forward": enter, "feed_forward.down": leave}
        plan["feed_forward.up"] = ColwiseParallel()
        if layer.feed_forward.gate is not None:
            plan["feed_forward.gate"] = ColwiseParallel()
    if sequence_parallel:
        for name in ("attention_norm", "feed_forward_norm"):
            plan[name] = SequenceParallel()
    parallelize_module(layer, mesh, plan)
    if sequence_parallel and is_mixture:
        _gather_inside(layer.feed_forward, mesh)


def _gather_inside(mixture, mesh):
    """A mixture sees all of the sequence and hands on this rank's part of it."""
    # routing needs plain tensors, of all tokens: experts are split by hand
    enter = PrepareModuleInput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_output=True,
    )
    leave = PrepareModuleOutput(
        output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),)
    )
    parallelize_module(mixture, mesh, enter)
    parallelize_module(mixture, mesh, leave)


def split_ends(
    network: Network, mesh: DeviceMesh, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Split token table and head in place, where the stage has them."""
    between = Shard(1) if sequence_parallel else Replicate()
    embedding = network.embedding
    plan = {}
    if embedding is not None and not network.spec.image:
        plan["embedding.tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if network.head is not None:
        logits = Shard(-1) if loss_parallel else Replicate()
        plan["head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=logits,
            use_local_output=not loss_parallel,
        )
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
    parallelize_module(network, mesh, plan)
    if sequence_parallel and embedding is not None and embedding.positions is not None:
        _share_positions(embedding, mesh)
    # parallelize_module makes new parameters, which are tied anew
    network.tie()


def _share_positions(embedding, mesh):
    """Each rank looks up its own rows of the position table, so that its gradient is a
    part of a sum.
    """
    # every rank has drawn the same table: no rank sends it
    table = embedding.positions.detach()
    shared = distribute_tensor(table, mesh, [Replicate()], src_data_rank=None)
    embedding.positions = nn.Parameter(shared)

    def local_rows(positions):
        if isinstance(positions, DTensor):
            return positions.to_local(grad_placements=[Partial()])
        return positions  # gathered by FSDP2

    embedding.table = local_rows
