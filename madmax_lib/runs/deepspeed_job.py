"""A training job whose data parallelism is DeepSpeed's, with the methods of `parallel.Job`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from madmax_lib.plan import Plan
from madmax_lib.runs import losses
from madmax_lib.runs.network import Network
from madmax_lib.runs.phases import Phases
from madmax_lib.runs.weights import Weights
from madmax_lib.specs import Transformer

__all__ = ["DeepSpeedJob"]


class DeepSpeedJob:
    """A model under DeepSpeed on one of its ranks. settings: DeepSpeed's configuration."""

    def __init__(self, spec: Transformer, plan: Plan, device: str, dtype: str, settings: dict, seed: int = 0,
                 weights: str | Path | None = None):  # fmt: skip
        self.spec, self.plan, self.dtype, self.steps_done = spec, plan, dtype, 0
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        network = Network(spec, attention=plan.attention)
        network.materialise(seed, self.device, Weights(weights, spec) if weights else None)
        for _, layer in network.units():
            layer.checkpoint(plan.recompute)
        self.modules, self.phases, self.rank = [network], Phases(self.device), dist.get_rank()
        self.is_logger, self.coordinates = self.rank == 0, {"pp": 0, "dp": self.rank, "cp": 0, "tp": 0, "ep": 0}
        self.engine, *_ = deepspeed.initialize(
            model=network, model_parameters=list(network.parameters()), config=settings, dist_init_required=False
        )

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.engine.get_lr()[0]

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = value

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
            "learning_rate": self.learning_rate, "seconds": self.phases.seconds(),
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
            "dtype": self.dtype, "parameters": self.spec.parameters, "data_parallel": "deepspeed",
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
