"""Data parallelism: copies of everything (DDP), or shards of states, gradients,
parameters (ZeRO, FSDP2).

zero=0 and 1 copy the parameters: DistributedDataParallel, or FSDP2's `replicate` where
DDP cannot go (DTensors of tensor parallelism; experts, which fewer ranks share; the
split backward pass of a zero-bubble pipeline, which bypasses DDP's hooks). zero=2 and 3
are `fully_shard`, gathered once per step or once per pass [arXiv 1910.02054,
2304.11277]; over a 2-D mesh it is HSDP. All reductions sum: losses are divided by the
global number of targets, so nothing else needs a factor.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from madmax_lib.plan import Plan
from madmax_lib.runs.model.experts import Experts
from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.mesh import Mesh

# logits that leave a DTensor are views; nothing here writes into what a module returns
warnings.filterwarnings(
    "ignore", r"FSDP2-wrapped module \(\w+\) returned a view tensor", UserWarning
)


def experts_of(module: nn.Module) -> list[Experts]:
    """All expert blocks in a module."""
    return [child for child in module.modules() if isinstance(child, Experts)]


class DataParallel:
    """Copies or shards of parameters across dp x cp; `kind` is none, ddp, replicate,
    fsdp2 or hsdp.
    """

    def __init__(self, plan: Plan, mesh: Mesh, compute: torch.dtype):
        self.plan = plan
        self.mesh = mesh
        self.policy = MixedPrecisionPolicy()
        if compute != torch.float32:
            reduce_dtype = torch.float32 if plan.reduce_fp32 else None
            self.policy = MixedPrecisionPolicy(compute, reduce_dtype)
        self.kind = self._kind()

    def _kind(self):
        plan = self.plan
        ranks = self.mesh.size("fsdp")
        if plan.zero >= 2 and (ranks > 1 or plan.offload):
            return "hsdp" if self.mesh.dense.ndim == 2 else "fsdp2"
        if ranks == 1:
            return "none"
        beyond_ddp = plan.tp * plan.ep > 1 or plan.defers_weights
        return "replicate" if beyond_ddp else "ddp"

    @property
    def casts(self) -> bool:
        """Whether parameters are cast where they are gathered, so that no autocast is
        needed.
        """
        return self.kind in ("fsdp2", "hsdp")

    def wrap_unit(self, module: nn.Module) -> None:
        """Shard a layer in place, as soon as it exists: no rank ever holds more than
        one whole layer.
        """
        for experts in experts_of(module):
            self._wrap(experts, self.mesh.axes["edp"])
        self._wrap(module, self.mesh.dense)

    def wrap_root(self, network: Network) -> nn.Module:
        """Shard what is left of a stage; the module to call."""
        if self.kind == "ddp":
            return self._ddp(network)
        # None: the root is gathered for the forward pass and stays for the backward
        # pass, which begins with it
        self._wrap(network, self.mesh.dense, reshard=None)
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # gloo knows no scaled sum
                module.set_force_sum_reduction_for_comms(True)
        return network

    def _wrap(self, module, mesh, reshard=True):
        if self.kind == "replicate":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            axis = "edp" if isinstance(module, Experts) else "fsdp"
            replicate(module, mesh=self.mesh.axes[axis])
        elif self.casts:
            on_gpu = self.mesh.dense.device_type == "cuda"
            offload = OffloadPolicy()
            if self.plan.offload:
                offload = CPUOffloadPolicy(pin_memory=on_gpu)
            fully_shard(
                module,
                mesh=mesh,
                # zero=2 gathers once a step and leaves the parameters whole until then
                reshard_after_forward=reshard if self.plan.zero == 3 else False,
                mp_policy=self.policy,
                offload_policy=offload,
            )

    def _ddp(self, network):
        group = self.mesh.group("fsdp")
        bucket_bytes = min(self.plan.bucket_bytes, 2**40)  # DDP takes no infinity
        wrapped = DistributedDataParallel(
            network,
            process_group=group,
            bucket_cap_mb=bucket_bytes / 2**20,
            init_sync=False,  # seeds have made them equal
            gradient_as_bucket_view=True,
        )

        def sum_bucket(group, bucket):
            # DDP's default divides by the ranks; losses here are parts of the mean
            buffer = bucket.buffer()
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda _: buffer)

        wrapped.register_comm_hook(group, sum_bucket)
        return wrapped

    def before_micro_batch(self, module: nn.Module, last: bool) -> None:
        """Say whether gradients are reduced in the backward pass that follows.

        Copies reduce with the last micro-batch; shards with every one, so that they
        stay shards, and HSDP's copies of shards with the last. What zero=2 has gathered
        stays until then.
        """
        if self.kind == "ddp":
            module.require_backward_grad_sync = last
        elif self.kind == "replicate":
            module.set_requires_gradient_sync(last)
        elif self.casts:
            module.set_requires_all_reduce(last)
            module.set_reshard_after_backward(last or self.plan.zero == 3)
