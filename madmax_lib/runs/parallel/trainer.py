"""Training under a plan: `parallelize` lays a model over the ranks, the `Trainer` it
returns takes steps.

World = dp x tp x pp x cp with ep over dp x cp, every product of them on one mesh:
stages are built (`stages`), then the optimizer, then the schedule. Losses and gradients
are those of one process whatever the plan, see tests/runs/test_parallel.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from madmax_lib.catalog import Transformer
from madmax_lib.plan import Plan
from madmax_lib.plan.layers import chunk_layers
from madmax_lib.runs import checks
from madmax_lib.runs.measure.peak_rates import TORCH_DTYPES, native_dtype
from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses, models
from madmax_lib.runs.parallel import checkpoints, mesh, stages
from madmax_lib.runs.parallel.data_parallel import DataParallel
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.parallel.optimizers import LossScale, Optimizers, local
from madmax_lib.runs.settings import Settings

_FIRST_SCALE = 2.0**16  # of fp16 losses


class Trainer:
    """A model under a plan, on one of its ranks. Every method is collective over the
    ranks of the plan.

        trainer = mm.runs.parallelize("gpt-tiny", mm.Plan.parse("dp2"), mm.RunSpec())
        trainer.step({"tokens": tokens, "targets": targets})["loss"]
    """

    def __init__(
        self,
        spec: Transformer,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        settings: Settings,
    ):
        self.spec = spec
        self.plan = plan
        self.mesh = mesh
        self.device = device
        self.settings = settings
        self.steps_done = 0
        self.scale = LossScale()
        if settings.dtype == "fp16":
            self.scale = LossScale(_FIRST_SCALE, True)
        compute = TORCH_DTYPES[settings.dtype]
        self.data_parallel = DataParallel(plan, mesh, compute)
        # FSDP2 casts the parameters that it gathers; elsewhere autocast does
        casts = self.data_parallel.casts
        mixed = compute != torch.float32 and not casts
        self.phases = Phases(
            device, torch.autocast(device.type, compute) if mixed else None
        )
        parts = chunk_layers(spec.layers, plan)[mesh.coordinate("pp")]
        built = [
            stages.build(part, spec, self.data_parallel, settings, device)
            for part in parts
        ]
        self.modules = [network for network, _ in built]
        self.optimizers = Optimizers(self.modules, plan, mesh, settings)
        self.schedule = "none"
        if plan.pp == 1:
            self._module = built[0][1]
            self._run = self._accumulate
            return
        # torch's pipelining takes half a second to import
        from madmax_lib.runs.parallel.pipeline import Pipeline

        narrow = casts or settings.weights_16bit
        exchanged = compute if narrow else torch.float32
        data_parallel = self.data_parallel
        pipeline = Pipeline(built, data_parallel, settings, self.phases, exchanged)
        self._run = pipeline.run
        self.schedule = type(pipeline.schedule).__name__

    def step(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """One training step on this rank's `share` of a global batch: tokens and
        targets, or images and labels.

        Returns loss (mean over the global batch's targets), accuracy (0..1), grad_norm
        (before clipping), samples, tokens (targets that count), overflow (the gradient
        was not finite and the step was skipped), loss_scale and seconds by phase on
        this rank.
        """
        with self.phases("data"):
            part = self._part(batch)
        scale = self.scale.value
        # Each loss is divided by all positions, as the targets that count are known
        # only after the sum over ranks; the update makes up for the masked ones.
        loss, right = self._run(part, scale / part.positions, train=True)
        sums = losses.sums(loss, right, part, self.plan.tp)
        counted = sums[2].clamp(min=1)
        with self.phases("optimizer"):
            norm = self._update(scale * counted / part.positions)
        means = losses.means(sums, part)  # the first that waits for the device
        overflow = not norm.isfinite().item()
        self.scale.update(overflow)
        self.steps_done += 1
        return means | {
            "grad_norm": math.inf if overflow else norm.item(),
            "overflow": overflow,
            "loss_scale": scale,
            "seconds": self.phases.seconds(),
        }

    def evaluate(self, batch: Mapping[str, Tensor]) -> dict[str, object]:
        """loss, accuracy, samples and tokens of a global batch by this rank's share,
        without a gradient.
        """
        part = self._part(batch)
        loss, right = self._run(part, 1.0, train=False)
        for network in self.modules:
            for module in network.modules():
                if isinstance(module, FSDPModule):
                    # what was gathered here would be stale after the next update
                    module.reshard()
        self.phases.seconds()
        return losses.means(losses.sums(loss, right, part, self.plan.tp), part)

    def save(self, directory: str | Path) -> None:
        """Write a sharded checkpoint of parameters, optimizer and progress."""
        checkpoints.save(directory, self.optimizers, self._progress())

    def load(self, directory: str | Path) -> None:
        """Take up a checkpoint. Raises FileNotFoundError or ValueError."""
        progress = self._progress()
        checkpoints.load(directory, self.optimizers, progress)
        steps_done, scale, good_steps = progress.tolist()
        self.steps_done = int(steps_done)
        self.scale.value = scale
        self.scale.good_steps = int(good_steps)

    def describe(self) -> dict[str, object]:
        """Numbers and names of what runs."""
        parameters = [p for network in self.modules for p in network.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        return {
            "parameters": self.spec.parameters,
            "local_parameters": sum(local(p).numel() for p in parameters),
            "trained_local_parameters": sum(local(p).numel() for p in trained),
            "data_parallel": self.data_parallel.kind,
            "optimizer": type(self.optimizers.adam).__name__,
            "gelu": "compiled" if self.settings.fused_gelu else "eager",
            "context": "ulysses" if self.plan.cp > 1 else "none",
            "schedule": self.schedule,
        }

    @property
    def share(self) -> tuple[int, int]:
        """Number of the part of a global batch that this rank trains on, and of how many."""
        return self.mesh.coordinate("dp"), self.plan.dp

    def _accumulate(self, part, scale, train):
        """A step without a pipeline: gradients of micro-batches add up."""

        def forward(x, last):
            if train:
                self.data_parallel.before_micro_batch(self._module, last)
            return self._module(x)

        def backward(loss):
            with self.phases("backward"):
                (loss * scale).backward()

        samples = self.plan.micro_batch
        act = backward if train else None
        return losses.accumulate(part, samples, self.phases, forward, act)

    def _part(self, batch):
        cp = self.mesh.coordinate("cp"), self.plan.cp
        return losses.split(batch, self.spec, self.device, self.plan.dp, cp)

    def _update(self, scale):
        """Finish the gradients, clip and step; the norm of the gradient before
        clipping.

        scale: what the gradients at hand are larger by than those of the mean loss.
        """
        optimizers = self.optimizers
        clip_norm = self.settings.clip_norm
        copy = optimizers.finish()
        norm = optimizers.norm(skip=copy) / scale
        clip = (clip_norm / norm).clamp(max=1.0) if clip_norm else torch.ones_like(norm)
        # NaN skips the step on all ranks, and no host has to look at the norm
        optimizers.step(torch.where(norm.isfinite(), clip, math.nan) / scale)
        return norm

    def _progress(self):
        numbers = [self.steps_done, self.scale.value, self.scale.good_steps]
        return torch.tensor(numbers, dtype=torch.float64)


def parallelize(
    model: str,
    plan: Plan,
    settings: Settings,
    *,
    device: str = "cpu",
    sizes: Mapping[str, object] | None = None,
) -> Trainer:
    """Lay a model over the ranks of the running process group; collective over all of
    them.

    device: cpu or cuda. sizes: changed sizes of the model. Raises ValueError, in one
    line, for what does not fit together.
    """
    spec = models.spec(model, **(sizes or {}))
    checks.check(plan, spec, settings)
    sequence = spec.sequence if spec.image else settings.sequence or spec.sequence
    dtype = native_dtype(settings.dtype, device)
    settings = replace(settings, sequence=sequence, dtype=dtype)
    here = torch.device(device)
    if device == "cuda":
        here = torch.device(device, torch.cuda.current_device())
    return Trainer(spec, plan, mesh.build(plan, device), here, settings)
