"""The operator graph of vTrain: when each piece of a step runs, and how long it takes.

As released with [Bang et al., MICRO 2024] (behaviour recorded), issued to
`simulator.events.engine` in the 1F1B order of `simulator.costs.schedules`. A pipeline
stage is one rank that does one thing at a time: the layers of a micro-batch, their
tensor-parallel all-reduces, then the message to the next stage, which blocks it. When
the first stage has done its last backward pass each stage reduces its gradient, and
after all of those it updates its weights.
"""

from dataclasses import asdict, dataclass

from madmax_lib.papers.vtrain.config import (
    Config,
    Nccl,
    VTrainRules,
    gradient_s,
    parse_rules,
    send_s,
    tensor_s,
)
from madmax_lib.simulator.costs.schedules import turns
from madmax_lib.simulator.events.engine import Program, Stream, run, to_timeline
from madmax_lib.timeline import Meta, Timeline


@dataclass(frozen=True)
class Operators:
    """Seconds of vTrain's operators on one GPU, with the gaps between their kernels."""

    forward_s: float  # of one layer
    backward_s: float
    embedding_forward_s: float  # on the first stage
    embedding_backward_s: float
    output_forward_s: float  # logits and loss, on the last stage
    output_backward_s: float
    update_s: float  # of one layer
    embedding_update_s: float

    @classmethod
    def of_totals(
        cls,
        layer_s: float,
        embedding_s: float,
        output_s: float,
        update_s: float,
        embedding_update_s: float,
    ) -> "Operators":
        """Split times of forward and backward together: a third is forward."""
        totals_s = (layer_s, embedding_s, output_s)
        parts = [share * total for total in totals_s for share in (1 / 3, 2 / 3)]
        return cls(*parts, update_s, embedding_update_s)


def timeline(
    config: Config,
    operators: Operators,
    nccl: Nccl,
    rules: str | VTrainRules = "corrected",
) -> Timeline:
    """The step as a Timeline: a rank per pipeline stage, streams 0 compute, 1 tensor, 2
    data, 3 pipeline parallel.
    """
    rules = parse_rules(rules)
    width = config.tensor_parallel_size * config.data_parallel_size
    represents = {
        stage * width: list(range(stage * width, (stage + 1) * width))
        for stage in range(config.shape.pp)
    }
    provenance = {
        "source": "vTrain, MICRO 2024",
        "model": config.model.name,
        "plan": str(config.plan),
        "global_batch": config.global_batch_size,
        "rules": asdict(rules),
    }
    meta = Meta(
        "simulated", config.num_gpus, represents, config.gpu_name, provenance=provenance
    )
    return to_timeline(_Step(config, operators, nccl, rules).program(), meta)


def iteration_s(
    config: Config,
    operators: Operators,
    nccl: Nccl,
    rules: str | VTrainRules = "corrected",
) -> float:
    """Seconds of the step. Raises ValueError for a negative time of an operator."""
    return max(run(_Step(config, operators, nccl, parse_rules(rules)).program())[1])


class _Step:
    """Issues one step; `_last` is the latest op of each stage, which the next one of
    the stage waits for.
    """

    def __init__(self, config, operators, nccl, rules):
        shape = config.shape
        self.shape = shape
        self.operators = operators
        self.layers = shape.layers // shape.pp
        self.width = shape.tp * shape.dp
        self.recompute = rules.recompute if config.use_checkpoint else "none"
        self.tensor_s = float(tensor_s(shape, nccl, rules))
        self.send_s = float(send_s(shape, rules))
        self.gradient_s = gradient_s(shape, nccl, rules).tolist()
        self.message_bytes = float(shape.activation_bytes)
        self.result = Program()
        self._last = {}  # by stage

    def program(self):
        """All passes in an order in which nothing waits for something later, then
        gradients and updates.
        """
        pp = self.shape.pp
        m = self.shape.micro_batches
        # min(p-1-r, m) warm-up forwards on stage r, then one forward, one backward
        done = {}
        for stage, slot, message, _ in turns("1f1b", pp, m):
            after = (done[message],) if message else ()
            self._pass(stage, slot, after)
            done[stage, slot] = self._last[stage]
        self._finish()
        return self.result

    def _op(
        self,
        stage,
        stream,
        name,
        duration_s,
        after=(),
        *,
        size_bytes=float("nan"),
    ):
        # A stage does one thing at a time: each op waits for the one before it on the
        # stage, whatever its stream.
        before = (self._last[stage],) if stage in self._last else ()
        kind = "compute" if stream == Stream.COMPUTE else "comm"
        where = {"rank": stage * self.width, "group": ("", "tp", "dp", "pp")[stream]}
        inputs = (*before, *after)
        self._last[stage] = self.result.op(
            stream, kind, name, duration_s, inputs, **where, size_bytes=size_bytes
        )

    def _pass(self, stage, slot, after):
        """A micro-batch forward or backward through a stage, and the message to the
        next one.
        """
        direction, _, number = slot
        if direction == "backward":
            after = self._recompute(stage, number, after)
        what = f"{direction} {number}"
        self._op(stage, Stream.COMPUTE, what, self._compute_s(stage, direction), after)
        self._reduce(stage, what)
        last = self.shape.pp - 1 if direction == "forward" else 0
        if stage != last:
            # P, a blocking send: it delays the sender's own next op too
            self._op(
                stage,
                Stream.PIPELINE,
                f"send {what}",
                self.send_s,
                size_bytes=self.message_bytes,
            )

    def _recompute(self, stage, number, after):
        """The forward pass repeated; returns what the backward pass still has to wait
        for.
        """
        what = f"recompute {number}"
        if self.recompute == "not last" and stage < self.shape.pp - 1:
            # hangs on the stage alone, so it overlaps the wait for the gradient
            self._op(stage, Stream.COMPUTE, what, self._compute_s(stage, "forward"))
        elif self.recompute == "all":
            forward_s = self.layers * self.operators.forward_s
            self._op(stage, Stream.COMPUTE, what, forward_s, after)
            self._reduce(stage, what)
            return ()
        return after

    def _reduce(self, stage, what):
        """Two all-reduces per layer over the tensor-parallel group."""
        if self.shape.tp > 1:
            count = 2 * self.layers
            self._op(
                stage,
                Stream.TENSOR,
                f"all_reduce {what}",
                count * self.tensor_s,
                size_bytes=count * self.message_bytes,
            )

    def _compute_s(self, stage, direction):
        operators = self.operators
        parts = ("", "embedding_", "output_")
        times_s = [getattr(operators, f"{part}{direction}_s") for part in parts]
        first = stage == 0
        last = stage == self.shape.pp - 1
        # n f [+ e_f on the first stage] [+ g_f on the last], backward likewise
        return self.layers * times_s[0] + first * times_s[1] + last * times_s[2]

    def _finish(self):
        """Gradients of all stages side by side once the first stage is through, then
        all updates.
        """
        pp = self.shape.pp
        barrier = (self._last[0],)
        first_s, middle_s, last_s = self.gradient_s
        for stage in range(pp if self.shape.dp > 1 else 0):
            first = stage == 0
            last = stage == pp - 1
            duration_s = last_s if last else middle_s
            if first:  # a single stage is both and counts as the first
                duration_s = first_s
            self._op(
                stage,
                Stream.DATA,
                "all_reduce gradient",
                duration_s,
                barrier,
                size_bytes=float(self.shape.gradient_bytes(first=first, last=last)),
            )
        barrier = tuple(self._last.values())
        for stage in range(pp):
            # n w, and w0 on the first stage; the output matrix has no update
            update_s = self.layers * self.operators.update_s
            update_s += (stage == 0) * self.operators.embedding_update_s
            self._op(stage, Stream.COMPUTE, "update", update_s, barrier)
