"""Layout of a part of a model over the ranks of its pipeline stage, in the one order in
which the dimensions combine.

Layer by layer: draw its numbers (or read them), add low-rank updates, cut experts,
split by tp, choose what to recompute, compile, shard by dp. So no rank ever holds more
than one whole layer. Then the same for embedding and head.
"""

import torch
from torch import nn

from madmax_lib.catalog.models import Transformer
from madmax_lib.runs.measure.peak_rates import TORCH_DTYPES
from madmax_lib.runs.model import lora
from madmax_lib.runs.model.context import Exchange
from madmax_lib.runs.model.experts import Mixture
from madmax_lib.runs.model.kernels import way
from madmax_lib.runs.model.network import Network, draw
from madmax_lib.runs.model.weights import Weights
from madmax_lib.runs.parallel import tensor
from madmax_lib.runs.parallel.data_parallel import DataParallel
from madmax_lib.runs.settings import Settings

__all__ = ["build"]


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
            lora.adapt(layer, name, settings.lora_rank, settings.seed)
        layer.to(dtype)
        # AdamW and FSDP2 see the parameters only after every cut
        layer.feed_forward.fused = way(settings.fused_gelu, device.type) == "triton"
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
        lora.freeze_ends(network)
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
        tensor.split_layer(layer, mesh.axes["tp"], plan.sequence_parallel)


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
        tp_mesh = mesh.axes["tp"]
        split_logits = settings.loss_parallel
        tensor.split_ends(network, tp_mesh, plan.sequence_parallel, split_logits)
