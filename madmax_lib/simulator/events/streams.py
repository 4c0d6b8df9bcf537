"""Which streams has a rank of a simulated step, and which threads its host? Their
numbers and their names.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache


class Stream(IntEnum):
    """Number of a device stream, or below 0 of a host thread, as in
    `Timeline.spans["stream"]`.

    label: what it does. group: of devices that communicate on it, as in
    `rates.topology.groups`; "" for several.

    >>> Stream.TENSOR.value, Stream.TENSOR.label, Stream.of("tp") is Stream.TENSOR, Stream.of("edp")
    (1, 'tensor parallel', True, <Stream.DATA: 2>)
    """

    COMPUTE = 0, "device computes"
    TENSOR = 1, "tensor parallel", "tp"
    DATA = 2, "gathers and reductions"
    PIPELINE = 3, "messages between stages", "pp"
    CONTEXT = 4, "context parallel", "cp"
    EXPERT = 5, "expert parallel", "ep"
    REPLICATE = 6, "copies of HSDP's shards", "replicate"
    DOWN = 7, "copies to the device"
    UP = 8, "copies to the host"
    RECEIVE = 9, "messages awaited"
    BACK = 10, "messages back to the stage before"
    HOST = -1, "host computes"
    DRIVES = -2, "drives"
    LAUNCH = -3, "host launches"

    def __new__(cls, number: int, label: str, group=""):
        """A number with its name and the group whose collectives run there."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.label = label
        member.group = group
        return member

    @classmethod
    @cache
    def of(cls, group: str) -> Stream:
        """The stream on which a group of devices communicates; those without one share
        that of data parallelism.
        """
        name = "tp" if group == "etp" else group.removeprefix("expert-")
        return next((stream for stream in cls if stream.group == name), cls.DATA)
