"""How do stages on different ranks share a step? Schedules of
torch.distributed.pipelining over stages of one model.

gpipe [arXiv 1811.06965], 1f1b and its interleaved form [arXiv 2104.04473], zero-bubble
[arXiv 2401.10241]. Stages are told the shapes they exchange; left to find out, they
would run once on memory that was never written.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from madmax_lib.plan.plan import Plan
from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses
from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.mesh import Mesh
from madmax_lib.runs.settings import Settings

__all__ = ["Pipeline"]

_SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


class _TimedStage(PipelineStage):
    """A stage whose passes are timed, and computed under autocast."""

    phases: Phases
    autocast: AbstractContextManager

    def forward_one_chunk(self, *args, **kwargs):
        with self.phases("forward"), self.autocast:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        with self.phases("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        with self.phases("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """Runs the stages of this rank.

    modules: what to call, networks: what is in them. dtype: of what stages exchange.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        networks: list[Network],
        plan: Plan,
        mesh: Mesh,
        settings: Settings,
        dtype: torch.dtype,
        device: torch.device,
        phases: Phases,
        autocast: AbstractContextManager,
    ):
        rank = mesh.coordinate("pp")
        group = mesh.axes["pp"].get_group()
        self.first = rank == 0
        self.last = rank == plan.pp - 1
        stages = []
        for chunk, (module, network) in enumerate(zip(modules, networks, strict=True)):
            inputs, outputs = _shapes(network, plan, settings.sequence, dtype, device)
            module.register_forward_hook(
                lambda *call: call[-1].contiguous()
            )  # torch 2.11 compares strides too
            number = chunk * plan.pp + rank
            count = plan.pp * plan.interleave
            stage = _TimedStage(
                module,
                number,
                count,
                device,
                input_args=inputs,
                output_args=outputs,
                group=group,
            )
            stage.phases = phases
            stage.autocast = autocast
            stages.append(stage)
        kind = (
            schedules.ScheduleInterleaved1F1B
            if plan.interleave > 1
            else _SCHEDULES[plan.schedule]
        )
        given = (
            stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
        )
        micro_batches = plan.micro_batches(settings.global_batch)
        self.schedule = kind(
            given, micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self._right: list[Tensor] = []
        self._scale = 1.0

    def run(
        self, inputs: Tensor, targets: Tensor, scale: float, train: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Forward, and with `train` backward, of all micro-batches; (sum of losses,
        right targets) on the last stage.

        scale: what each loss is multiplied by before the backward pass.
        """
        self._scale = scale
        self._right = []
        sums: list[Tensor] = []
        args = (inputs.contiguous(),) if self.first else ()
        ends = {"target": targets, "losses": sums} if self.last else {}
        if train:
            self.schedule.step(*args, return_outputs=False, **ends)
        else:
            with torch.no_grad():
                self.schedule.eval(*args, return_outputs=False, **ends)
        if not self.last:
            return None, None
        return torch.stack([loss.detach() for loss in sums]).sum() / scale, torch.stack(
            self._right
        ).sum()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        self._right.append(losses.correct(logits, targets))
        return losses.total(logits, targets) * self._scale


def _shapes(
    network: Network,
    plan: Plan,
    sequence: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Empty input and output of a stage, as this rank sees them."""
    spec = network.spec
    samples = plan.micro_batch
    tokens = sequence // plan.cp
    between = tokens // plan.tp if plan.tp > 1 and plan.sequence_parallel else tokens
    inputs = outputs = torch.empty(
        samples, between, spec.hidden, dtype=dtype, device=device, requires_grad=True
    )
    if network.embedding is not None:
        shape = (
            (samples, 3, spec.image, spec.image) if spec.image else (samples, tokens)
        )
        inputs = torch.empty(
            shape, dtype=torch.float32 if spec.image else torch.int64, device=device
        )
    if network.head is not None:
        shape = (samples, spec.classes) if spec.image else (samples, tokens, spec.vocab)
        outputs = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    return inputs, outputs
