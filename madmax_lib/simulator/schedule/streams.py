"""Which streams has a rank of a simulated step, and which threads its host? Their numbers and names, told once."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Stream"]


class Stream(IntEnum):
    """Number of a device stream, or below 0 of a host thread, as in `Timeline.spans["stream"]`; `label` names it.

    >>> Stream.DOWN.value, Stream.DOWN.label
    (7, 'copies to the device')
    """

    COMPUTE = 0, "device computes"
    TENSOR = 1, "tensor parallel"
    DATA = 2, "gathers and reductions"
    PIPELINE = 3, "messages between stages"
    CONTEXT = 4, "context parallel"
    EXPERT = 5, "expert parallel"
    REPLICATE = 6, "copies of HSDP's shards"
    DOWN = 7, "copies to the device"
    UP = 8, "copies to the host"
    HOST = -1, "host computes"
    DRIVES = -2, "drives"

    def __new__(cls, number: int, label: str):
        """A member with its label beside it."""
        member = int.__new__(cls, number)
        member._value_, member.label = number, label
        return member

    @classmethod
    def of(cls, group: str) -> Stream:
        """The stream on which a group of devices (`rates.topology.groups`) communicates."""
        return _OF_GROUP.get(group, cls.DATA)


_OF_GROUP = {
    "tp": Stream.TENSOR,
    "cp": Stream.CONTEXT,
    "ep": Stream.EXPERT,
    "pp": Stream.PIPELINE,
    "replicate": Stream.REPLICATE,
}  # all others share the stream of data parallelism
