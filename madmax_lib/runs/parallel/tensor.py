"""How are the matrices of a layer split over tp ranks? By columns, then by rows, with
DTensors [arXiv 1909.08053].

Without sequence parallelism a layer takes two all-reduces forward and two backward;
with it the norms work on parts of the sequence, and each all-reduce becomes a
reduce-scatter and an all-gather [arXiv 2205.05198]. The token table is split by rows
(tokens), the head by columns; its logits are gathered, or stay split under a parallel
loss. Experts are split by hand, their sums are in `experts`.
"""

from torch import Tensor, nn
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
    plan: dict[str, object] = {
        "attention": enter,
        "attention.projection": RowwiseParallel(output_layouts=between),
    }
    plan |= {
        f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")
    }
    if not isinstance(layer.feed_forward, Mixture):
        plan |= {
            "feed_forward": enter,
            "feed_forward.down": RowwiseParallel(output_layouts=between),
        }
        columns = ("up", "gate") if layer.feed_forward.gate is not None else ("up",)
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in columns}
    if sequence_parallel:
        plan |= {
            "attention_norm": SequenceParallel(),
            "feed_forward_norm": SequenceParallel(),
        }
    parallelize_module(layer, mesh, plan)
    if sequence_parallel and isinstance(layer.feed_forward, Mixture):
        _whole_inside(layer.feed_forward, mesh)


def _whole_inside(mixture: Mixture, mesh: DeviceMesh) -> None:
    """A mixture sees the whole sequence and hands on this rank's part of it."""
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
    plan: dict[str, object] = {}
    if network.embedding is not None and not network.spec.image:
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
    if (
        sequence_parallel
        and network.embedding is not None
        and network.embedding.positions is not None
    ):
        _share_positions(network.embedding, mesh)
    network.tie()


def _share_positions(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank looks up its own rows of the position table, so that its gradient is a
    part of a sum.
    """
    whole = distribute_tensor(
        embedding.positions.detach(), mesh, [Replicate()], src_data_rank=None
    )
    embedding.positions = nn.Parameter(whole)
    embedding.table = _local_rows


def _local_rows(positions: Tensor) -> Tensor:
    return (
        positions.to_local(grad_placements=[Partial()])
        if isinstance(positions, DTensor)
        else positions
    )
