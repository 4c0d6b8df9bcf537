"""Layout of a part of a model over the ranks of its pipeline stage, in the one order in
which the dimensions combine.

Layer by layer: draw its numbers (or read them), add low-rank updates, cut experts,
split by tp, choose what to recompute, compile, shard by dp. So no rank ever holds more
than one whole layer. Then the same for embedding and head.

Matrices are split over tp ranks by columns, then by rows, with DTensors [arXiv
1909.08053]. Without sequence parallelism a layer takes two all-reduces forward and two
backward; with it the norms work on parts of the sequence, and each all-reduce becomes a
reduce-scatter and an all-gather [arXiv 2205.05198]. The token table is split by rows
(tokens), the head by columns; its logits are gathered. Experts are split by hand, their
sums are in `experts`.
"""

import torch
from torch import nn
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

from madmax_lib.catalog import Transformer
from madmax_lib.runs.measure.peak_rates import TORCH_DTYPES
from madmax_lib.runs.model.experts import Mixture
from madmax_lib.runs.model.layers import Exchange, bias_gelu
from madmax_lib.runs.model.network import Network, adapt, draw
from madmax_lib.runs.model.weights import Weights
from madmax_lib.runs.parallel.data_parallel import DataParallel
from madmax_lib.runs.settings import Settings


def build(
    part: range,
    spec: Transformer,
    data_parallel: DataParallel,
    settings: Settings,
    device: torch.device,
) -> tuple[Network, nn.Module]:
    """Layers `part` of a model, with embedding or head at its ends: the stage itself,
    and the module to call.
    """
    plan = data_parallel.plan
    mesh = data_parallel.mesh
    network = Network(spec, attention=plan.attention, part=part)
    dtype = TORCH_DTYPES[settings.dtype if settings.weights_16bit else "fp32"]
    weights = Weights(settings.weights, spec) if settings.weights else None
    for name, layer in network.units():
        draw(layer, name, spec, settings.seed, device, weights)
        if settings.lora_rank:
            adapt(layer, name, settings.lora_rank, settings.seed)
        layer.to(dtype)
        # AdamW and FSDP2 see the parameters only after every cut
        if settings.fused_gelu:
            layer.feed_forward.fused = torch.compile(bias_gelu)
        _share_layer(layer, plan, mesh)
        layer.checkpoint(plan.recompute)
        if settings.compile:
            layer.compile()
        data_parallel.wrap_unit(layer)
    for name, end in network.ends():
        draw(end, name, spec, settings.seed, device, weights)
        end.to(dtype)
    network.tie()
    if settings.lora_rank:
        network.freeze_ends()
    _share_ends(network, plan, mesh, settings)
    return network, data_parallel.wrap_root(network)


def _share_layer(layer, plan, mesh):
    """Lay a layer over cp, ep and tp."""
    layer.attention.exchange = Exchange(mesh.group("cp"))
    if isinstance(layer.feed_forward, Mixture):
        mixture = layer.feed_forward
        # this rank's part, and of how many: of the experts, and of their channels
        expert, channel = (
            (mesh.coordinate(axis), mesh.size(axis)) for axis in ("ep", "tp")
        )
        mixture.experts.keep(expert, channel)
        mixture.group = mesh.group("ep")
        mixture.experts.mesh = mesh.axes["tp"] if plan.tp > 1 else None
    if plan.tp > 1:
        _split_layer(layer, mesh.axes["tp"], plan.sequence_parallel)


def _share_ends(network, plan, mesh, settings):
    """Lay embedding and head over cp and tp."""
    if network.embedding is not None and not network.spec.image:
        # positions begin where this rank's part of the sequence does
        parts = plan.cp
        part = mesh.coordinate("cp")
        if plan.tp > 1 and plan.sequence_parallel:
            parts *= plan.tp
            part = part * plan.tp + mesh.coordinate("tp")
        network.embedding.offset = part * (settings.sequence // parts)
    if plan.tp > 1:
        _split_ends(network, mesh.axes["tp"], plan.sequence_parallel)


def _split_layer(layer, mesh, sequence_parallel):
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


def _split_ends(network, mesh, sequence_parallel):
    """Split token table and head in place, where the stage has them."""
    between = Shard(1) if sequence_parallel else Replicate()
    embedding = network.embedding
    plan = {}
    if embedding is not None and not network.spec.image:
        plan["embedding.tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if network.head is not None:
        plan["head"] = ColwiseParallel(
            input_layouts=between, output_layouts=Replicate()
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
