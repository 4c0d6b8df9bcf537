"""Protobuf's wire format: the fields of one message as a dict, of all messages of a
kind at once as arrays.

A field is a key (its number, and how its value ends) and a value. Messages are walked
side by side: the first field of each, then the second, as long as any has more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from copy import copy

import numpy as np

FIXED = 1  # wire type of eight bytes
BYTES = 2  # of texts and messages
PADDING = bytes(32)  # behind a file, for what reaches beyond its end
# bytes of a value by wire type, -1 for an unknown type; numbers and lengths say where
# they end
_SIZES = np.array([0, 8, 0, -1, -1, 4, -1, -1])
_ABREAST = 1 << 14  # messages whose arrays stay in the processor's cache

Message = dict[int, list]


class Broken(ValueError):
    """A message that is cut, in a packet by its number."""

    def __init__(self, packet: int):
        super().__init__("a cut message")
        self.packet = packet


class Messages:
    """Messages of one kind in the packets of a file, with the fields of some numbers.

    bounds: (2, n), first byte and the one after the last. packet: (n,), whose part they
    are. outer: (n,), number of the message that each is inside of.
    """

    def __init__(
        self,
        data: bytes,
        bounds: np.ndarray,
        packet: np.ndarray,
        numbers: Iterable[int],
        outer: np.ndarray | None = None,
    ):
        self.data = data
        self.bounds = bounds
        self.packet = packet
        self.outer = outer
        # (keys,) which are kept; all beyond the last are not
        is_wanted = np.zeros(8 * max(numbers) + 9, dtype=bool)
        for number in numbers:
            is_wanted[8 * number : 8 * number + 8] = True
        parts = []
        for low in range(0, len(packet), _ABREAST):
            owner = np.arange(low, min(low + _ABREAST, len(packet)))
            parts.append(self._walk(owner, *bounds[:, owner], is_wanted))
        # the last one stands for a field that is not there, as number -1
        parts.append(np.array([[-1], [-1], [0], [0]]))
        # (fields,) message, key, number or length, first byte
        self.owner, self.key, self.value, self.begin = np.hstack(parts)

    def _walk(self, owner, at, end, is_wanted):
        data = np.frombuffer(self.data, dtype=np.uint8)
        parts = [np.zeros((4, 0), dtype=np.int64)]
        while len(going := np.flatnonzero(at < end)):
            owner, end = owner[going], end[going]
            at = at[going]
            key, at = varints(data, at)
            value, after = varints(data, at)
            wire = key & 7
            size = np.where(wire == BYTES, value, _SIZES[wire])
            # types 1 and 5 have no length
            at = np.where(wire & 3 == 1, at, after)
            # a length may be any number, so that a sum could overflow
            cut = (size < 0) | (size > end - at)
            if cut.any():
                raise Broken(int(self.packet[owner[cut]].min()))
            mine = np.flatnonzero(is_wanted.take(key, mode="clip"))
            parts.append(np.stack([owner[mine], key[mine], value[mine], at[mine]]))
            at += size
        return np.hstack(parts)

    def __len__(self):
        return len(self.packet)

    def all(self, number: int, wire: int = BYTES) -> np.ndarray:
        """Fields of a number, by message."""
        fields = np.flatnonzero(self.key == number << 3 | wire)
        return fields[np.argsort(self.owner[fields], kind="stable")]

    def first(self, number: int, wire: int = 0) -> np.ndarray:
        """(n,) first field of a number in each message, -1 for none."""
        # later fields of a message stand behind earlier ones
        fields = np.flatnonzero(self.key == number << 3 | wire)[::-1]
        first = np.full(len(self), -1)
        first[self.owner[fields]] = fields  # of several the last one stays
        return first

    def numbers(self, number: int, default: int | np.ndarray = 0) -> np.ndarray:
        """(n,) values of a field."""
        first = self.first(number)
        return np.where(first < 0, default, self.value[first])

    def texts(self, fields: np.ndarray) -> list[bytes]:
        """Bytes of some fields, b"" for -1."""
        begin = self.begin[fields]
        end = begin + self.value[fields]
        data = self.data
        return [
            data[low:high]
            for low, high in zip(begin.tolist(), end.tolist(), strict=True)
        ]

    def bytes_of(self, message: int) -> bytes:
        """The bytes of a message."""
        low, high = self.bounds[:, message].tolist()
        return self.data[low:high]

    def take(self, messages: np.ndarray) -> Messages:
        """Some of the messages, in that order."""
        subset = copy(self)
        subset.bounds = self.bounds[:, messages]
        subset.packet = self.packet[messages]
        subset.outer = None if self.outer is None else self.outer[messages]
        # (n + 1,) new number of a message, -1 for what is not taken or none
        number = np.full(len(self) + 1, -1)
        number[messages] = np.arange(len(messages))
        owner = number[self.owner]
        stays = owner >= 0
        stays[-1] = True  # the field that is not there
        fields = (owner, self.key, self.value, self.begin)
        subset.owner, subset.key, subset.value, subset.begin = (
            f[stays] for f in fields
        )
        return subset

    def inside(self, number: int, numbers: Iterable[int]) -> Messages:
        """Messages that a field holds."""
        fields = self.all(number)
        bounds = np.stack([self.begin[fields], self.begin[fields] + self.value[fields]])
        outer = self.owner[fields]
        return Messages(self.data, bounds, self.packet[outer], numbers, outer)


def varints(data: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (n,) that begin at some bytes, and the bytes (n,) after them."""
    value = data[at].astype(np.int64)
    at = at + 1
    long = np.flatnonzero(value > 127)
    value[long] &= 127
    # ten bytes at most; each has seven bits, the lowest first, and whether one follows
    for shift in range(7, 70, 7):
        if not len(long):
            break
        byte = data[at[long]].astype(np.int64)
        value[long] |= (byte & 127) << shift
        at[long] += 1
        long = long[byte > 127]
    return value, at


def fields(data: bytes) -> Message:
    """Values of a message's fields, in their order, up to one that is cut."""
    values: Message = {}
    at = 0
    with contextlib.suppress(IndexError):
        while at < len(data):
            key, at = varint(data, at)
            wire = key & 7
            value = int(_SIZES[wire])
            if not value:
                value, at = varint(data, at)
            if wire:
                begin = at
                at += value
                if value < 0 or at > len(data):
                    break
                value = data[begin:at]
            values.setdefault(key >> 3, []).append(value)
    return values


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number that begins at a byte, and the byte after it."""
    value = 0
    shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def signed(value: int) -> int:
    """A number of 64 bits as its two's complement."""
    return (value + 2**63) % 2**64 - 2**63


def first(message: Message, number: int, default):
    """First value of a field, if it is of the default's type."""
    value = message.get(number, (default,))[0]
    return value if isinstance(value, type(default)) else default


def inner(message: Message, number: int) -> list[Message]:
    """Messages that a field holds."""
    values = message.get(number, [])
    return [fields(value) for value in values if isinstance(value, bytes)]
