"""When does a message between stages travel whose sender waits for its receiver?
Messages of Gloo, on CPU devices.

Gloo sends once the receiver has said that its buffer is there, on the connection on
which it sends itself. In 1F1B a stage posts what it sends and what it awaits together,
so that the two messages of an exchange travel one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.events.engine import Program
from madmax_lib.simulator.events.schedules import Slot
from madmax_lib.simulator.events.streams import Stream

__all__ = ["Message", "crosses"]


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
        about = {"rank": self.sender, "group": "pp", "size_bytes": self.size_bytes}
        return program.op(
            stream,
            "comm",
            f"send_recv {self.what}",
            (1 + crossing) * self.duration_s,
            after,
            **about,
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
