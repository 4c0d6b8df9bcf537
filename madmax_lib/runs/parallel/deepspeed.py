"""How does the same step run on DeepSpeed? An adapter for plans of data parallelism: ZeRO-0..3, ZeRO++, CPU offload.

`config` writes DeepSpeed's configuration of a plan [deepspeed.ai/docs/config-json], `parallelize` returns a job with
the methods of `parallel.Job`. DeepSpeed is optional; `checks.check_deepspeed` tells what keeps it from starting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from madmax_lib.plan import Plan
from madmax_lib.runs import checks
from madmax_lib.runs.measure.peaks import DTYPES
from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses, models
from madmax_lib.runs.model.network import Network
from madmax_lib.runs.settings import Settings

__all__ = ["DeepSpeedJob", "config", "parallelize"]


def config(plan: Plan, settings: Settings) -> dict:
    """DeepSpeed's configuration of a plan, as in its JSON file."""
    elements = int(plan.bucket_bytes / DTYPES[settings.dtype].itemsize) if math.isfinite(plan.bucket_bytes) else 2**62
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True, "reduce_bucket_size": elements,
                               "allgather_bucket_size": elements}  # fmt: skip
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if plan.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    zero |= {"zero_quantized_weights": True} if plan.qwz else {}
    zero |= {"zero_quantized_gradients": True} if plan.qgz else {}
    zero |= {"zero_hpz_partition_size": int(os.environ.get("LOCAL_WORLD_SIZE", plan.dp))} if plan.hpz else {}
    adam = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "betas": [0.9, 0.95],
            "torch_adam": True}  # fmt: skip
    half = {settings.dtype: {"enabled": True}} if settings.dtype != "fp32" else {}
    return half | {
        "train_batch_size": settings.global_batch, "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches(settings.global_batch), "zero_optimization": zero,
        "gradient_clipping": settings.clip_norm, "optimizer": {"type": "AdamW", "params": adam},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 2**31,
    }  # fmt: skip


def parallelize(model: str, plan: Plan, settings: Settings, *, device: str = "cpu",
                sizes: Mapping[str, object] | None = None) -> DeepSpeedJob:  # fmt: skip
    """As `parallel.parallelize`, on DeepSpeed; collective over all ranks. Raises as the two checks do."""
    checks.check(plan, models.spec(model, **(sizes or {})), settings, "deepspeed")
    checks.check_deepspeed()
    network = models.build(model, seed=settings.seed, device=device, attention=plan.attention,
                           weights=settings.weights, **(sizes or {}))  # fmt: skip
    return DeepSpeedJob(network, plan, settings)


class DeepSpeedJob:
    """A model under DeepSpeed on one of its ranks."""

    def __init__(self, network: Network, plan: Plan, settings: Settings):
        import deepspeed

        self.spec, self.plan, self.settings, self.steps_done = network.spec, plan, settings, 0
        self.rank, self.device = dist.get_rank(), next(network.parameters()).device
        self.phases = Phases(self.device)
        for _, layer in network.units():
            layer.checkpoint(plan.recompute)
        self.engine, *_ = deepspeed.initialize(
            model=network,
            model_parameters=list(network.parameters()),
            config=config(plan, settings),
            dist_init_required=False,
        )

    def step(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """One training step on a global batch; the keys of `parallel.Job.step`.

        grad_norm is nan where DeepSpeed keeps none (zero=0).
        """
        with self.phases("data"):
            mine = losses.split(batch, self.spec, self.rank, self.plan.dp, self.device)
        # DeepSpeed takes means over ranks and micro-batches; losses are sums over the global number of targets
        factor = self.plan.dp * self.engine.gradient_accumulation_steps() / mine.count
        scale = float(getattr(self.engine.optimizer, "cur_scale", 1.0))
        found = self._run(mine, factor)
        self.steps_done += 1
        length, overflow = self.engine.get_global_grad_norm(), bool(getattr(self.engine.optimizer, "overflow", False))
        return losses.means(*found, mine, dist.group.WORLD) | {
            "grad_norm": math.nan if length is None else float(length), "overflow": overflow, "loss_scale": scale,
            "seconds": self.phases.seconds(),
        }  # fmt: skip

    def evaluate(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """loss, accuracy, samples and tokens of a global batch, without a gradient."""
        mine = losses.split(batch, self.spec, self.rank, self.plan.dp, self.device)
        return losses.means(*self._run(mine, None), mine, dist.group.WORLD)

    def save(self, directory: str | Path) -> None:
        """Write DeepSpeed's checkpoint."""
        self.engine.save_checkpoint(str(directory), client_state={"steps_done": self.steps_done})

    def load(self, directory: str | Path) -> None:
        """Take up DeepSpeed's checkpoint. Raises FileNotFoundError where there is none."""
        if not (Path(directory) / "latest").exists():
            raise FileNotFoundError(f"{directory}: no DeepSpeed checkpoint (latest is missing)")
        _, state = self.engine.load_checkpoint(str(directory))
        self.steps_done = state["steps_done"]

    def describe(self) -> dict[str, object]:
        """What runs, in words and numbers."""
        return {
            "model": self.spec.name, "plan": f"{self.plan}@deepspeed", "world_size": self.plan.world_size,
            "dtype": self.settings.dtype, "parameters": self.spec.parameters, "data_parallel": "deepspeed",
            "optimizer": type(self.engine.optimizer).__name__, "context": "none", "schedule": "none",
        }  # fmt: skip

    def _run(self, mine: losses.Part, factor: float | None) -> tuple[Tensor, Tensor]:
        """(sum of losses, right targets) of this rank; trains unless factor is None."""
        found, right, width = [], [], next(self.engine.module.parameters()).dtype
        inputs = mine.inputs.to(width) if self.spec.image else mine.inputs
        size = self.plan.micro_batch
        for x, y in zip(inputs.split(size), mine.targets.split(size), strict=True):
            with self.phases("forward"), torch.set_grad_enabled(factor is not None):
                logits = self.engine(x)
                loss = losses.total(logits, y)
            if factor is not None:
                with self.phases("backward"):
                    self.engine.backward(loss * factor)
                with self.phases("optimizer"):
                    self.engine.step()
            found.append(loss.detach())
            right.append(losses.correct(logits, y))
        return torch.stack(found).sum(), torch.stack(right).sum()
