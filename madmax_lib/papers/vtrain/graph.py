"""When does each piece of a vTrain step run, and how long is the step?

The operator graph of vTrain [Bang et al., MICRO 2024] as released (behaviour recorded), issued to
`simulator.schedule.engine` in the 1F1B order of `simulator.schedule.schedules`. A pipeline stage is one rank that
does one thing at a time: the layers of a micro-batch, their tensor-parallel all-reduces, then the message to the next
stage, which blocks it. When the first stage has done its last backward pass each stage reduces its gradient, and
after all of those it updates its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.papers.vtrain.comm import (
    Nccl,
    activation_bytes,
    communication_s,
    gradient_bytes,
    gradient_s,
    send_s,
    tensor_s,
)
from madmax_lib.papers.vtrain.config import Config, load_config
from madmax_lib.papers.vtrain.rules import Rules, parse_rules
from madmax_lib.simulator.schedule.engine import Program, run, to_timeline
from madmax_lib.simulator.schedule.schedules import Slot, dependency, in_order, order
from madmax_lib.simulator.schedule.streams import Stream
from madmax_lib.timeline import Meta, Timeline

__all__ = ["Operators", "iteration_s", "sweep", "timeline"]


@dataclass(frozen=True)
class Operators:
    """Seconds of vTrain's operators on one GPU, with the gaps between their kernels.

    forward_s, backward_s, update_s: of one layer; embedding_*: on the first stage, output_*: logits and loss, on the
    last. Raises ValueError for a negative time.
    """

    forward_s: float
    backward_s: float
    embedding_forward_s: float
    embedding_backward_s: float
    output_forward_s: float
    output_backward_s: float
    update_s: float
    embedding_update_s: float

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not value >= 0:
                raise ValueError(f"{name}={value} is not a time")

    @classmethod
    def of_totals(
        cls, layer_s: float, embedding_s: float, output_s: float, update_s: float, embedding_update_s: float
    ) -> Operators:
        """From times of forward and backward together: a third is forward."""
        parts = (share * total_s for total_s in (layer_s, embedding_s, output_s) for share in (1 / 3, 2 / 3))
        return cls(*parts, update_s, embedding_update_s)


def timeline(
    config: Config, operators: Operators, nccl: Nccl, rules: str | Rules = "corrected", *, device: str = ""
) -> Timeline:
    """The step as a Timeline: a rank per pipeline stage, streams 0 compute, 1 tensor, 2 data, 3 pipeline parallel."""
    rules, width = parse_rules(rules), config.tensor_parallel_size * config.data_parallel_size
    represents = {stage * width: list(range(stage * width, (stage + 1) * width)) for stage in range(config.shape.pp)}
    told = {"source": "vTrain, MICRO 2024", "model": config.model.name, "plan": str(config.plan),
            "global_batch": config.global_batch_size, "rules": asdict(rules)}  # fmt: skip
    meta = Meta("simulated", config.num_gpus, represents, device or config.gpu_name, provenance=told)
    return to_timeline(_Step(config, operators, nccl, rules).program(), meta)


def iteration_s(config: Config, operators: Operators, nccl: Nccl, rules: str | Rules = "corrected") -> float:
    """Seconds of the step."""
    return max(run(_Step(config, operators, nccl, parse_rules(rules)).program())[1])


def sweep(
    configurations: str | Path | Sequence[Config],
    operators: Mapping[tuple[int, int, int], Operators],
    nccl: Nccl,
    rules: str | Rules = "corrected",
    *,
    derive_gpus: bool = False,
    workers: int | None = None,
) -> pd.DataFrame:
    """Many configurations at once, in `workers` processes (as many as there are processors if None).

    configurations: or a folder of JSON files. operators: by (hidden size, tp, micro-batch), vTrain's key of a profile.
    Columns: name (of the file), iteration_s, communication_s, reason why there is no time: the loader's refusal, or no
    operators. Raises FileNotFoundError for a folder without JSON files.
    """
    if not isinstance(configurations, (str, Path)):
        found: list[Config | Path] = list(configurations)
    elif not (found := sorted(Path(configurations).glob("*.json"))):
        raise FileNotFoundError(f"{configurations}: no JSON files")
    one = partial(_one, operators=dict(operators), nccl=nccl, rules=parse_rules(rules), derive_gpus=derive_gpus)
    if workers == 1:
        rows = [one(item) for item in found]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            rows = list(pool.map(one, found, chunksize=4))
    return pd.DataFrame(rows, columns=["name", "iteration_s", "communication_s", "reason"])


def _one(item: Config | Path, *, operators: Mapping, nccl: Nccl, rules: Rules, derive_gpus: bool) -> tuple:
    name = item.stem if isinstance(item, Path) else f"{item.model.name} {item.plan}"
    try:
        config = load_config(item, derive_gpus=derive_gpus, rules=rules) if isinstance(item, Path) else item
        key = config.hidden_size, config.tensor_parallel_size, config.micro_batch_size
        if key not in operators:
            raise ValueError(f"no operator times for {config.trace_name}")
    except (ValueError, OSError) as error:
        return name, np.nan, np.nan, str(error)
    return name, iteration_s(config, operators[key], nccl, rules), communication_s(config, nccl, rules), ""


class _Step:
    """Issues one step; `_last` is the latest op of each stage, which the next one of the stage waits for."""

    def __init__(self, config: Config, operators: Operators, nccl: Nccl, rules: Rules):
        shape = config.shape
        self.shape, self.operators, self.layers = shape, operators, shape.layers // shape.pp
        self.width = shape.tp * shape.dp
        self.recompute = rules.recompute if config.use_checkpoint else "none"
        self.tensor_s, self.send_s = float(tensor_s(shape, nccl, rules)), float(send_s(shape, rules))
        self.gradient_s = [float(part) for part in gradient_s(shape, nccl, rules)]
        self.result = Program()
        self._last: dict[int, int] = {}

    def program(self) -> Program:
        """All passes in an order in which nothing waits for something later, then gradients and updates."""
        pp = self.shape.pp
        orders = [order("1f1b", stage, pp, self.shape.micro_batches) for stage in range(pp)]
        done: dict[tuple[int, Slot], int] = {}
        for stage, slot in in_order(orders):
            message = dependency(slot, stage, pp, 1)
            after = (done[message],) if message else ()
            self._pass(stage, slot, after)
            done[stage, slot] = self._last[stage]
        self._end()
        return self.result

    def _op(self, stage: int, stream: int, name: str, duration_s: float, after=(), *, size_bytes=float("nan")) -> None:
        own = (self._last[stage],) if stage in self._last else ()
        kind = "compute" if stream == Stream.COMPUTE else "comm"
        group = ("", "tp", "dp", "pp")[stream]
        self._last[stage] = self.result.op(stream, kind, name, duration_s, (*own, *after), rank=stage * self.width,
                                           group=group, size_bytes=size_bytes)  # fmt: skip

    def _pass(self, stage: int, slot: Slot, after: tuple[int, ...]) -> None:
        """A micro-batch forward or backward through a stage, and the message to the next one."""
        direction, _, number = slot
        if direction == "backward":
            after = self._again(stage, number, after)
        self._op(stage, Stream.COMPUTE, f"{direction} {number}", self._compute_s(stage, direction), after)
        self._reduce(stage, f"{direction} {number}")
        if stage != (self.shape.pp - 1 if direction == "forward" else 0):
            size = float(activation_bytes(self.shape))
            self._op(stage, Stream.PIPELINE, f"send {direction} {number}", self.send_s, size_bytes=size)

    def _again(self, stage: int, number: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """The forward pass repeated; returns what the backward pass still has to wait for."""
        if self.recompute == "not last" and stage < self.shape.pp - 1:
            self._op(stage, Stream.COMPUTE, f"recompute {number}", self._compute_s(stage, "forward"))
        elif self.recompute == "all":
            self._op(stage, Stream.COMPUTE, f"recompute {number}", self.layers * self.operators.forward_s, after)
            self._reduce(stage, f"recompute {number}")
            return ()
        return after

    def _reduce(self, stage: int, what: str) -> None:
        """Two all-reduces per layer over the tensor-parallel group."""
        if self.shape.tp > 1:
            size = 2.0 * self.layers * float(activation_bytes(self.shape))
            self._op(stage, Stream.TENSOR, f"all_reduce {what}", 2 * self.layers * self.tensor_s, size_bytes=size)

    def _compute_s(self, stage: int, direction: str) -> float:
        o = self.operators
        layer_s, embedding_s, output_s = (
            (o.forward_s, o.embedding_forward_s, o.output_forward_s)
            if direction == "forward"
            else (o.backward_s, o.embedding_backward_s, o.output_backward_s)
        )
        first, last = stage == 0, stage == self.shape.pp - 1
        return self.layers * layer_s + first * embedding_s + last * output_s

    def _end(self) -> None:
        """Gradients of all stages side by side once the first stage is through, then all updates."""
        pp, barrier = self.shape.pp, (self._last[0],)
        if self.shape.dp > 1:
            for stage in range(pp):
                first, last = stage == 0, stage == pp - 1
                duration_s = self.gradient_s[0 if first else 2 if last else 1]
                size = float(gradient_bytes(self.shape, first=first, last=last))
                self._op(stage, Stream.DATA, "all_reduce gradient", duration_s, barrier, size_bytes=size)
        barrier = tuple(self._last.values())
        for stage in range(pp):
            update_s = self.layers * self.operators.update_s + (stage == 0) * self.operators.embedding_update_s
            self._op(stage, Stream.COMPUTE, "update", update_s, barrier)
