"""A step of stages on different ranks: schedules of torch.distributed.pipelining over
stages of one model.

gpipe [arXiv 1811.06965], 1f1b and its interleaved form [arXiv 2104.04473], zero-bubble
and zbv [arXiv 2401.10241], dualpipev [arXiv 2412.19437]. Stages are told the shapes
they exchange; left to find out, they would run once on memory that was never written.
"""

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from madmax_lib.plan.layers import stage_of_chunk
from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses
from madmax_lib.runs.model.network import Network
from madmax_lib.runs.parallel.data_parallel import DataParallel
from madmax_lib.runs.settings import Settings

_SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


class _TimedStage(PipelineStage):
    """A stage whose passes are timed, and computed under autocast."""

    phases: Phases

    def forward_one_chunk(self, *args, **kwargs):
        with self.phases("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        with self.phases("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        with self.phases("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    # torch 2.13 hands gradients between two chunks of a rank in an evaluation, too,
    # where there are none

    def get_local_bwd_output(self, mb_index):
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """Runs the stages of this rank.

    stages: each with the module to call. dtype: of what stages exchange.
    """

    def __init__(
        self,
        stages: list[tuple[Network, nn.Module]],
        data_parallel: DataParallel,
        settings: Settings,
        phases: Phases,
        dtype: torch.dtype,
    ):
        plan = data_parallel.plan
        mesh = data_parallel.mesh
        rank = mesh.coordinate("pp")
        self.first = rank == 0
        self.last = rank == plan.head_stage
        options = {"dtype": dtype, "device": phases.device}
        timed = []
        for chunk, (network, module) in enumerate(stages):
            inputs, outputs = _shapes(network, plan, settings.sequence, options)
            # torch 2.11 compares strides too
            module.register_forward_hook(lambda *call: call[-1].contiguous())
            stage = _TimedStage(
                module,
                chunk * plan.pp + stage_of_chunk(chunk, rank, plan.pp, plan.folds),
                plan.pp * plan.interleave,
                phases.device,
                input_args=inputs,
                output_args=outputs,
                group=mesh.axes["pp"].get_group(),
            )
            stage.phases = phases
            timed.append(stage)
        kind = _SCHEDULES[plan.schedule]
        if plan.interleave > 1 and plan.schedule == "1f1b":
            kind = schedules.ScheduleInterleaved1F1B
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule = kind(
            timed[0] if single else timed,
            plan.micro_batches(settings.global_batch),
            loss_fn=self._loss,
            scale_grads=False,  # losses are parts of the mean already
        )
        self._right: list[Tensor] = []
        self._scale = 1.0

    def run(
        self, part: losses.Part, scale: float, train: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Forward, and with `train` backward, of all micro-batches; (sum of losses,
        right targets) on the last stage.

        scale: what each loss is multiplied by before the backward pass.
        """
        self._scale = scale
        self._right = []
        sums = []
        args = (part.inputs.contiguous(),) if self.first else ()
        ends = {"target": part.targets, "losses": sums} if self.last else {}
        if train:
            self.schedule.step(*args, return_outputs=False, **ends)
        else:
            with torch.no_grad():
                self.schedule.eval(*args, return_outputs=False, **ends)
        if not self.last:
            return None, None
        total = torch.stack([loss.detach() for loss in sums]).sum() / scale
        return total, torch.stack(self._right).sum()

    def _loss(self, logits, targets):
        self._right.append(losses.correct(logits, targets))
        return losses.total(logits, targets) * self._scale


def _shapes(network, plan, sequence, options):
    """Empty input and output of a stage, as this rank sees them."""
    spec = network.spec
    samples = plan.micro_batch
    tokens = sequence // plan.cp
    between = tokens // plan.tp if plan.tp > 1 and plan.sequence_parallel else tokens
    options = options | {"requires_grad": True}
    inputs = outputs = torch.empty(samples, between, spec.hidden, **options)
    if network.embedding is not None and spec.image:
        side = spec.image
        inputs = torch.empty(samples, 3, side, side, device=options["device"])
    elif network.embedding is not None:
        inputs = torch.empty(
            samples, tokens, dtype=torch.int64, device=options["device"]
        )
    if network.head is not None:
        shape = (samples, spec.classes) if spec.image else (samples, tokens, spec.vocab)
        outputs = torch.empty(shape, **options)
    return inputs, outputs
