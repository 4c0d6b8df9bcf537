"""What does one pass of a chunk issue? Its ops, numbered from 0, so that every micro-batch can issue them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from madmax_lib.simulator.layers.ops import Block, Comm
from madmax_lib.simulator.rates.topology import Group
from madmax_lib.simulator.schedule.engine import Program
from madmax_lib.simulator.schedule.streams import Stream

__all__ = ["BEFORE", "MESSAGE", "Pass"]

# What an op waits for outside of its pass: the message of another stage, the last compute of the pass before
MESSAGE, BEFORE = -1, -2


class Pass:
    """The ops of one pass of a chunk, numbered from 0.

    groups: of devices, by name.
    comm_s: seconds of a collective; block_s: of a block by phase.
    traffic_scale: slow-down of data-parallel traffic beside the pass.
    program: the ops.
    waits: (op, what it waits for outside: MESSAGE or BEFORE).
    last: its last compute op, -1 before there is one.
    sends: op that sends the result on, -1 if none does.
    ends: ops that the optimizer waits for.
    gathers, restores: what each gather of parameters, and each return of a checkpoint, waited for so far.
    """

    def __init__(
        self,
        groups: dict[str, Group],
        comm_s: Callable[[str, float, Group], float],
        block_s: Callable[[Block], dict[str, float]] | None = None,
        traffic_scale: float = 1.0,
    ):
        self.groups, self.comm_s, self.block_s, self.traffic_scale = groups, comm_s, block_s, traffic_scale
        self.program = Program()
        self.waits: list[tuple[int, int]] = []
        self.last, self.sends = -1, -1
        self.ends: list[int] = []
        self.gathers: list[list[int]] = []
        self.restores: list[list[int]] = []

    def op(self, stream: Stream, kind: str, name: str, duration_s: float, after: Iterable[int], **more) -> int:
        """Issue an op; numbers below 0 in `after` are outside of the pass."""
        after = sorted(set(after))
        op = self.program.op(stream, kind, name, duration_s, [other for other in after if other >= 0], **more)
        self.waits += [(op, outside) for outside in after if outside < 0]
        return op

    def compute(self, name: str, duration_s: float, after: Iterable[int]) -> int:
        """Issue on the compute stream."""
        self.last = self.op(Stream.COMPUTE, "compute", name, duration_s, after)
        return self.last

    def after_compute(self) -> list[int]:
        """The last compute op, that of the pass before where there is none yet."""
        return [self.last if self.last >= 0 else BEFORE]

    def comm(self, kind: str, group: str, what: str, size_bytes: float, after: list[int]) -> list[int]:
        """Issue a collective; what the next op waits for. Nothing is issued for a group of one."""
        members = self.groups[group]
        if kind == "copy" or members.ranks == 1 or not size_bytes:
            return after
        stream = Stream.of(group)
        duration_s = self.comm_s(kind, size_bytes, members) * (self.traffic_scale if stream == Stream.DATA else 1.0)
        return [self.op(stream, "comm", f"{kind} {what}", duration_s, after, group=group, size_bytes=size_bytes)]

    def comms(self, comms: tuple[Comm, ...], what: str, after: list[int]) -> list[int]:
        """Collectives one after another."""
        for comm in comms:
            after = self.comm(comm.kind, comm.group, what, comm.size_bytes, after)
        return after
