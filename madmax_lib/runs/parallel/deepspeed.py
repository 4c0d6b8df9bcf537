"""Adapter to DeepSpeed for plans of data parallelism: ZeRO-0..3, ZeRO++, CPU offload.

`config` writes DeepSpeed's configuration of a plan [deepspeed.ai/docs/config-json],
`parallelize` returns a trainer with the methods of `trainer.Trainer`. DeepSpeed is
optional; `checks.check_deepspeed` tells why it cannot start.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from madmax_lib.plan import Plan
from madmax_lib.runs import checks
from madmax_lib.runs.data.text import MASKED
from madmax_lib.runs.measure.peak_rates import TORCH_DTYPES
from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses, models
from madmax_lib.runs.parallel import mesh
from madmax_lib.runs.settings import Settings


def config(plan: Plan, settings: Settings) -> dict:
    """DeepSpeed's configuration of a plan, as in its JSON file."""
    adam = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": [0.9, 0.95],
    }
    content = {
        "train_batch_size": settings.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches(settings.global_batch),
        "gradient_clipping": settings.clip_norm,
        "optimizer": {"type": "AdamW", "params": adam | {"torch_adam": True}},
        "zero_optimization": _zero(plan, TORCH_DTYPES[settings.dtype].itemsize),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if settings.dtype != "fp32":
        content[settings.dtype] = {"enabled": True}
    return content


def _zero(plan, element_bytes):
    elements = 2**62  # DeepSpeed takes no infinity
    if math.isfinite(plan.bucket_bytes):
        elements = int(plan.bucket_bytes / element_bytes)
    zero = {
        "stage": plan.zero,
        "overlap_comm": True,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if plan.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    if plan.qwz:
        zero["zero_quantized_weights"] = True
    if plan.qgz:
        zero["zero_quantized_gradients"] = True
    if plan.hpz:
        # the second shard is spread over the ranks of a node
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", plan.dp))
        zero["zero_hpz_partition_size"] = on_node
    return zero


def parallelize(
    model: str,
    plan: Plan,
    settings: Settings,
    *,
    device: str = "cpu",
    sizes: Mapping[str, object] | None = None,
) -> "_DeepSpeedTrainer":
    """A trainer of DeepSpeed, as `trainer.parallelize` makes one of torch; collective
    over all ranks. Raises as the two checks do.
    """
    sizes = dict(sizes or {})
    checks.check(plan, models.spec(model, **sizes), settings, "deepspeed")
    checks.check_deepspeed()
    ranks = mesh.build(plan, device)
    network = models.build(
        model,
        device=device,
        attention=plan.attention,
        seed=settings.seed,
        weights=settings.weights,
        **sizes,
    )
    return _DeepSpeedTrainer(network, plan, settings, (ranks.coordinate("dp"), plan.dp))


class _DeepSpeedTrainer:
    """A model under DeepSpeed on one of its ranks."""

    def __init__(self, network, plan, settings, share):
        import deepspeed

        self.spec = network.spec
        self.plan = plan
        self.settings = settings
        self.steps_done = 0
        self.share = share
        self.device = next(network.parameters()).device
        self.phases = Phases(self.device)
        for _, layer in network.units():
            layer.checkpoint(plan.recompute)
        self.config = config(plan, settings)
        self.engine, *_ = deepspeed.initialize(
            model=network,
            model_parameters=list(network.parameters()),
            config=self.config,
            dist_init_required=False,
        )

    def step(self, batch):
        """One training step on this rank's share of a global batch; the keys of
        `Trainer.step`.

        grad_norm is nan where DeepSpeed keeps none (zero=0).
        """
        with self.phases("data"):
            part = losses.split(batch, self.spec, self.device, self.plan.dp)
            count = (part.targets != MASKED).sum()
            # DeepSpeed clips within its step, so the count must be known before
            dist.all_reduce(count)
        # DeepSpeed takes means over ranks and micro-batches; losses are sums over the
        # global number of targets
        means_of = self.plan.dp * self.engine.gradient_accumulation_steps()
        factor = means_of / max(int(count), 1)
        optimizer = self.engine.optimizer
        scale = float(getattr(optimizer, "cur_scale", 1.0))
        loss, right = self._run(part, factor)
        self.steps_done += 1
        norm = self.engine.get_global_grad_norm()
        return losses.means(losses.sums(loss, right, part), part) | {
            "grad_norm": math.nan if norm is None else float(norm),
            "overflow": bool(getattr(optimizer, "overflow", False)),
            "loss_scale": scale,
            "seconds": self.phases.seconds(),
        }

    def evaluate(self, batch):
        """loss, accuracy, samples and tokens of a global batch by this rank's share,
        without a gradient.
        """
        part = losses.split(batch, self.spec, self.device, self.plan.dp)
        loss, right = self._run(part, None)
        return losses.means(losses.sums(loss, right, part), part)

    def save(self, directory):
        """Write DeepSpeed's checkpoint."""
        self.engine.save_checkpoint(
            str(directory), client_state={"steps_done": self.steps_done}
        )

    def load(self, directory):
        """Take up DeepSpeed's checkpoint. Raises FileNotFoundError where there is none."""
        if not (Path(directory) / "latest").exists():
            raise FileNotFoundError(
                f"{directory}: no DeepSpeed checkpoint (latest is missing)"
            )
        _, state = self.engine.load_checkpoint(str(directory))
        self.steps_done = state["steps_done"]

    def describe(self):
        """Numbers and names of what runs."""
        return {
            "parameters": self.spec.parameters,
            "data_parallel": "deepspeed",
            "optimizer": type(self.engine.optimizer).__name__,
        }

    def _run(self, part, factor):
        """(sum of losses, right targets) of this rank; trains unless factor is None."""
        dtype = next(self.engine.module.parameters()).dtype
        if self.spec.image:
            part = replace(part, inputs=part.inputs.to(dtype))

        def backward(loss):
            with self.phases("backward"):
                self.engine.backward(loss * factor)
            with self.phases("optimizer"):
                self.engine.step()

        samples = self.plan.micro_batch
        act = None if factor is None else backward
        return losses.accumulate(
            part, samples, self.phases, lambda x, _: self.engine(x), act
        )
