"""How is a model trained under a plan? `parallelize` lays it over the ranks, the `Job` it returns takes steps.

World = dp x tp x pp x cp with ep over dp x cp, every product of them on one mesh: stages are built (`stages`), then the
optimizer, then the schedule. Losses and gradients are those of one process whatever the plan, see
tests/runs/test_runs_parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from madmax_lib.plan import Plan
from madmax_lib.plan_layers import chunk_layers
from madmax_lib.runs import checks
from madmax_lib.runs.measure.peaks import DTYPES
from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses, models
from madmax_lib.runs.parallel import checkpoints, gradients, mesh, stages
from madmax_lib.runs.parallel.accumulation import Accumulation
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.parallel.optimizers import Optimizers, local
from madmax_lib.runs.parallel.sharding import Sharding
from madmax_lib.runs.settings import Settings
from madmax_lib.specs import Transformer

__all__ = ["Job", "parallelize"]

_FIRST_SCALE = 2.0**16  # of fp16 losses


def parallelize(model: str, plan: Plan, settings: Settings, *, device: str = "cpu",
                sizes: Mapping[str, object] | None = None) -> Job:  # fmt: skip
    """Lay a model over the ranks of the running process group; collective over all of them.

    device: cpu or cuda. sizes: changed sizes of the model. Raises ValueError, in one line, for what does not fit
    together.
    """
    spec = models.spec(model, **(sizes or {}))
    checks.check(plan, spec, settings)
    settings = replace(settings, sequence=spec.sequence if spec.image else settings.sequence or spec.sequence)
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return Job(spec, plan, mesh.build(plan, device), place, settings)


class Job:
    """A model under a plan, on one of its ranks. Every method is collective over the ranks of the plan."""

    def __init__(self, spec: Transformer, plan: Plan, mesh: Mesh, device: torch.device, settings: Settings):
        self.spec, self.plan, self.mesh, self.device, self.settings = spec, plan, mesh, device, settings
        self.steps_done, self.phases, compute = 0, Phases(device), DTYPES[settings.dtype]
        scaled = settings.dtype == "fp16"
        self.scale = gradients.LossScale(_FIRST_SCALE, dynamic=True) if scaled else gradients.LossScale()
        self.sharding = Sharding(plan, mesh, compute)
        parts = chunk_layers(spec.layers, plan)[mesh.coordinate("pp")]
        built = [stages.build(part, spec, plan, mesh, self.sharding, settings, device) for part in parts]
        self.modules, called = [network for network, _ in built], [module for _, module in built]
        self.optimizers = Optimizers(self.modules, plan, mesh, settings.learning_rate, settings.weight_decay)
        mixed = compute != torch.float32 and not self.sharding.casts
        passes = {"phases": self.phases, "autocast": torch.autocast(device.type, compute) if mixed else nullcontext()}
        if plan.pp > 1:
            from madmax_lib.runs.parallel.pipeline import Pipeline  # torch's pipelining takes half a second to import

            exchanged = compute if self.sharding.casts else torch.float32
            self._engine = Pipeline(called, self.modules, plan, mesh, settings, exchanged, device, **passes)
        else:
            self._engine = Accumulation(called[0], self.sharding, plan.micro_batch, settings.loss_parallel, **passes)

    def step(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """One training step on a global batch, the same on every rank: tokens and targets, or images and labels.

        Returns loss (mean over the global batch's targets), accuracy (0..1), grad_norm (before clipping), samples,
        tokens, overflow (the gradient was not finite and the step was skipped), loss_scale and seconds by phase on this
        rank. Raises ValueError if dp does not divide the batch.
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
            "grad_norm": length, "overflow": overflow, "loss_scale": used, "seconds": self.phases.seconds()
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
            "schedule": type(self._engine.schedule).__name__ if self.plan.pp > 1 else "none",
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
