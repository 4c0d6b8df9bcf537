"""What does one pass of a chunk issue? Its ops, numbered from 0, so that every
micro-batch can issue them again.

A message of Gloo, on CPU devices, is sent once the receiver has said that its buffer is
there, on the connection on which that sends itself. In 1F1B a stage posts what it sends
and what it awaits together, so that the two messages of an exchange travel one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from madmax_lib.plan import Plan
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.schedules import Slot
from madmax_lib.simulator.events.engine import Program, Stream
from madmax_lib.simulator.layers.ops import Block, Comms

# What an op waits for outside of its pass: the message of another stage, the last
# compute of the pass before
MESSAGE = -1
BEFORE = -2
Ops = list[int]  # of a pass, by number


@dataclass(frozen=True)
class MicroBatch:
    """The work of a micro-batch of one size."""

    chunks: list[list[list[Block]]]  # [stage][chunk]
    prices: Prices  # of their ops and collectives
    sent_bytes: float = 0.0  # by a device to the next pipeline stage


class Pass:
    """The ops of one pass of a chunk, numbered from 0.

    comm_s: seconds of a collective (kind, size in bytes, group, calls); 0 for a group
    of one. slowdown: of compute beside the traffic of weights, by unit. program: the
    ops. waits: (op, what it waits for outside: MESSAGE or BEFORE). last: its last op on
    the compute stream, -1 before there is one; computed: its last that computes.
    sends: op that sends the result on, -1 if none does; message: what is sent once its
    receiver is there. ends: ops that the optimizer waits for. launches: what the host
    issued. gathers, restores: what each gather of parameters, and each return of a
    checkpoint, waited for so far. with_weights: a backward pass computes gradients of
    weights, too.
    """

    def __init__(
        self,
        comm_s: Callable[[str, float, str, float], float],
        slowdown: Callable[[str], float] = lambda unit: 1.0,
    ):
        self.comm_s = comm_s
        self.slowdown = slowdown
        self.program = Program()
        self.waits: list[tuple[int, int]] = []
        self.last = -1
        self.computed = -1
        self.sends = -1
        self.message: Message | None = None
        self.ends: Ops = []
        self.gathers: list[Ops] = []
        self.restores: list[Ops] = []
        self.launches: Ops = []
        self.with_weights = False

    def op(
        self,
        stream: Stream,
        kind: str,
        name: str,
        duration_s: float,
        after: Iterable[int],
        **more,
    ) -> int:
        """Issue an op; numbers below 0 in `after` are outside of the pass."""
        after = sorted(set(after))
        op = self.program.op(
            stream,
            kind,
            name,
            duration_s,
            [other for other in after if other >= 0],
            **more,
        )
        self.waits += [(op, outside) for outside in after if outside < 0]
        return op

    def compute(
        self, name: str, duration_s: float, after: Iterable[int], unit: str = ""
    ) -> int:
        """Issue on the compute stream."""
        self.last = self.computed = self.op(
            Stream.COMPUTE, "compute", name, duration_s * self.slowdown(unit), after
        )
        return self.last

    def after_compute(self) -> Ops:
        """The last compute op, that of the pass before where there is none yet."""
        return [self.last if self.last >= 0 else BEFORE]

    def comm(
        self,
        kind: str,
        group: str,
        what: str,
        size_bytes: float,
        after: Ops,
        calls: float = 1.0,
    ) -> Ops:
        """Issue a collective; what the next op waits for. Nothing is issued where
        nothing moves.
        """
        duration_s = self.comm_s(kind, size_bytes, group, calls)
        if not duration_s:
            return after
        return [
            self.op(
                Stream.of(group),
                "comm",
                f"{kind} {what}",
                duration_s,
                after,
                group=group,
                size_bytes=size_bytes,
            )
        ]

    def comms(self, comms: Comms, what: str, after: Ops) -> Ops:
        """Collectives one after another."""
        for comm in comms:
            after = self.comm(comm.kind, comm.group, what, comm.size_bytes, after)
        return after


@dataclass(frozen=True)
class Message:
    """Message of a pass to another stage: activation or gradient, after these ops of the
    sender.
    """

    what: str
    duration_s: float
    size_bytes: float
    after: tuple[int, ...]
    sender: int = -1

    def of(self, sender: int, base: int) -> Message:
        """Message of a pass whose ops begin at base."""
        return replace(self, sender=sender, after=tuple(base + op for op in self.after))

    def received(self, program: Program, asked: int | None, crossing: bool) -> int:
        """Issue it, as late as the receiver's op before it has ended; crossing: behind
        another one, the other way.
        """
        stream = Stream.PIPELINE if self.what == "activation" else Stream.BACK
        after = self.after if asked is None else (*self.after, asked)
        return program.op(
            stream,
            "comm",
            f"send_recv {self.what}",
            (1 + crossing) * self.duration_s,
            after,
            rank=self.sender,
            group="pp",
            size_bytes=self.size_bytes,
        )


def crosses(slot: Slot, stage: int, plan: Plan, micro_batches: int) -> bool:
    """Whether the message that a pass awaits meets one that its stage sends back: in
    the steady state of 1F1B.
    """
    direction, _, number = slot
    if plan.schedule != "1f1b":
        return False
    return (
        number >= plan.pp - stage
        if direction == "forward"
        else number <= micro_batches - plan.pp + stage
    )
