"""How is a model trained under a plan? `parallelize` lays it over the ranks, the `Job` it returns takes steps.

World = dp x tp x pp x cp with ep over dp x cp, every product of them on one mesh: stages are built (`stages`), then the
optimizer, then the schedule. Losses and gradients are those of one process whatever the plan, see
tests/test_runs_parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from madmax_lib.plan import Plan
from madmax_lib.runs import checkpoints, checks, gradients, losses, mesh, models, stages
from madmax_lib.runs.accumulation import Accumulation
from madmax_lib.runs.mesh import Mesh
from madmax_lib.runs.optimizers import Optimizers, local
from madmax_lib.runs.phases import Phases
from madmax_lib.runs.pipeline import Pipeline
from madmax_lib.runs.sharding import Sharding
from madmax_lib.runs.stages import DTYPES, Settings
from madmax_lib.specs import Transformer

__all__ = ["Job", "parallelize"]

_FIRST_SCALE = 2.0**16  # of fp16 losses


def parallelize(model: str, plan: Plan, *, global_batch: int, sequence: int | None = None, device: str = "cpu",
                sizes: Mapping[str, object] | None = None, **settings) -> Job:  # fmt: skip
    """Lay a model over the ranks of the running process group; collective over all of them.

    global_batch: samples per step over all ranks. sequence: tokens per sample, the model's own if not given. device:
    cpu or cuda. sizes: changed sizes of the model. settings: fields of `Settings`: dtype of matrix products, fp32, bf16
    or fp16 with a loss scale (weights and states stay fp32); seed; learning_rate; weight_decay; clip_norm, the longest
    gradient, 0 for any; compile; loss_parallel, to leave logits split over tp; lora_rank, to train only low-rank
    updates and the head; weights, a directory of published ones to start from.
    Raises ValueError, in one line, for what does not fit together.
    """
    spec = models.spec(model, **(sizes or {}))
    options = Settings(global_batch, sequence or spec.sequence, **settings)
    checks.check(plan, spec, global_batch=global_batch, world_size=plan.world_size, sequence=options.sequence,
                 dtype=options.dtype, compile=options.compile, loss_parallel=options.loss_parallel,
                 lora_rank=options.lora_rank)  # fmt: skip
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return Job(spec, plan, mesh.build(plan, device), place, options)


class Job:
    """A model under a plan, on one of its ranks. Every method is collective over the ranks of the plan."""

    def __init__(self, spec: Transformer, plan: Plan, mesh: Mesh, device: torch.device, settings: Settings):
        self.spec, self.plan, self.mesh, self.device, self.settings = spec, plan, mesh, device, settings
        self.steps_done, self._learning_rate = 0, settings.learning_rate
        self.phases, compute = Phases(device), DTYPES[settings.dtype]
        scaled = settings.dtype == "fp16"
        self.scale = gradients.LossScale(_FIRST_SCALE, dynamic=True) if scaled else gradients.LossScale()
        self.sharding = Sharding(plan, mesh, compute)
        parts = checks.chunk_layers(spec.layers, plan)[mesh.coordinate("pp")]
        built = [stages.build(part, spec, plan, mesh, self.sharding, settings, device) for part in parts]
        self.modules, called = [network for network, _ in built], [module for _, module in built]
        self.optimizers = Optimizers(self.modules, plan, mesh, settings.learning_rate, settings.weight_decay)
        mixed = compute != torch.float32 and not self.sharding.casts
        autocast = torch.autocast(device.type, compute) if mixed else nullcontext()
        if plan.pp > 1:
            self._engine: Pipeline | Accumulation = Pipeline(
                called, self.modules, plan, mesh, micro_batches=plan.micro_batches(settings.global_batch),
                sequence=settings.sequence, dtype=compute if self.sharding.casts else torch.float32, device=device,
                phases=self.phases, autocast=autocast,
            )  # fmt: skip
        else:
            self._engine = Accumulation(called[0], self.sharding, samples=plan.micro_batch, phases=self.phases,
                                        autocast=autocast, split_logits=settings.loss_parallel)  # fmt: skip

    @property
    def rank(self) -> int:
        """Place in the job, 0 to world size - 1."""
        return self.mesh.job.rank()

    @property
    def is_logger(self) -> bool:
        """Whether this is the one rank that should write results."""
        return self.rank == 0

    @property
    def coordinates(self) -> dict[str, int]:
        """Place in each dimension."""
        return {name: self.mesh.coordinate(name) for name in ("pp", "dp", "cp", "tp", "ep")}

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = value
        self.optimizers.set_learning_rate(value)

    def step(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """One training step on a global batch, the same on every rank: tokens and targets, or images and labels.

        Returns loss (mean over the global batch's targets), accuracy (0..1), grad_norm (before clipping), samples,
        tokens, overflow (the gradient was not finite and the step was skipped), learning_rate, loss_scale and seconds
        by phase on this rank. Raises ValueError if dp does not divide the batch.
        """
        with self.phases("data"):
            mine = self._mine(batch)
        used = self.scale.value
        found = self._engine.run(mine.inputs, mine.targets, used / mine.count, train=True)
        with self.phases("optimizer"):
            length = self._update(used)
        overflow = not math.isfinite(length)
        self.scale.update(overflow)
        self.steps_done += 1
        return self._means(*found, mine) | {
            "grad_norm": length, "overflow": overflow, "learning_rate": self._learning_rate, "loss_scale": used,
            "seconds": self.phases.seconds(),
        }  # fmt: skip

    def evaluate(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """loss, accuracy, samples and tokens of a global batch, without a gradient."""
        mine = self._mine(batch)
        found = self._engine.run(mine.inputs, mine.targets, 1.0, train=False)
        for network in self.modules:
            for module in network.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what was gathered here would be stale after the next update
        self.phases.seconds()
        return self._means(*found, mine)

    def save(self, directory: str | Path) -> None:
        """Write a sharded checkpoint of parameters, optimizer and progress."""
        checkpoints.save(directory, self.modules, self.optimizers, self.mesh, self._progress())

    def load(self, directory: str | Path) -> None:
        """Take up a checkpoint. Raises FileNotFoundError or ValueError."""
        progress = self._progress()
        checkpoints.load(directory, self.modules, self.optimizers, self.mesh, progress)
        self.steps_done, self.scale.good_steps = int(progress[0]), int(progress[2])
        self.scale.value = float(progress[1])

    def describe(self) -> dict[str, object]:
        """What runs, in words and numbers."""
        own = [p for network in self.modules for p in network.parameters()]
        return {
            "model": self.spec.name, "plan": str(self.plan), "world_size": self.plan.world_size,
            "dtype": self.settings.dtype, "parameters": self.spec.parameters,
            "local_parameters": sum(local(p).numel() for p in own),
            "trained_local_parameters": sum(local(p).numel() for p in own if p.requires_grad),
            "data_parallel": self.sharding.kind, "optimizer": self.optimizers.kind,
            "context": "ulysses" if self.plan.cp > 1 else "none",
            "schedule": type(self._engine.schedule).__name__ if isinstance(self._engine, Pipeline) else "none",
        }  # fmt: skip

    def _mine(self, batch: Mapping[str, Tensor]) -> losses.Part:
        at, plan = self.mesh.coordinate, self.plan
        return losses.split(batch, self.spec, at("dp"), plan.dp, self.device, at("cp"), plan.cp)

    def _means(self, loss: Tensor | None, right: Tensor | None, mine: losses.Part) -> dict[str, object]:
        return losses.means(loss, right, mine, self.mesh.job, copies=self.plan.tp)

    def _update(self, scale: float) -> float:
        """Finish the gradients, clip and step; the length of the gradient before clipping."""
        optimizers, clip_norm = self.optimizers, self.settings.clip_norm
        gradients.finish(optimizers.names)
        self.sharding.reduce_experts(self.modules)
        copy = gradients.sum_tied(self.modules, self.mesh)
        length = gradients.norm(optimizers, self.mesh, skip=copy) / scale
        if math.isfinite(length):
            clip = clip_norm / length if 0 < clip_norm < length else 1.0
            gradients.multiply(optimizers.names, clip / scale)
            optimizers.step()
        else:
            optimizers.clear()
        return length

    def _progress(self) -> Tensor:
        return torch.tensor([self.steps_done, self.scale.value, self.scale.good_steps], dtype=torch.float64)
