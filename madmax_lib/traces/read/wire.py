"""Protobuf's wire format: the fields of all messages of a kind at once, as arrays.

A field is a key (its number, and how its value ends) and a value. Messages are walked
side by side: the first field of each, then the second, as long as any has more.
"""

import numpy as np
import pyarrow as pa

FIXED = 1  # wire type of eight bytes
BYTES = 2  # of texts and messages
PADDING = bytes(32)  # behind a file, for what reaches beyond its end
# bytes of a value by wire type, -1 for an unknown type; numbers and lengths say where
# they end
_SIZES = np.array([0, 8, 0, -1, -1, 4, -1, -1])
_ABREAST = 1 << 14  # messages whose arrays stay in the processor's cache


class Broken(ValueError):
    """A message that is cut, in a packet by its number."""

    def __init__(self, packet: int):
        super().__init__("a cut message")
        self.packet = packet


class Messages:
    """Messages of one kind in the packets of a file, and all their fields.

    data: bytes of the file, with PADDING. bounds: (2, n), first byte and the one after
    the last. packet: (n,), whose part they are. outer: (n,), number of the message that
    each is inside of.
    """

    def __init__(
        self,
        data: bytes,
        bounds: np.ndarray,
        packet: np.ndarray,
        outer: np.ndarray | None = None,
    ):
        self.data = data
        self.bounds = bounds
        self.packet = packet
        self.outer = outer
        # field 0 stands for one that is not there
        parts = [np.array([[-1], [-1], [0], [0]])]
        for low in range(0, len(packet), _ABREAST):
            owner = np.arange(low, min(low + _ABREAST, len(packet)))
            parts += self._walk(owner, *bounds[:, owner])
        columns = np.hstack(parts)
        # (fields,) message, key, number or length, first byte of text or message
        self.owner, self.key, self.value, self.begin = columns

    def _walk(self, owner, at, end):
        data = np.frombuffer(self.data, dtype="uint8")
        while len(going := np.flatnonzero(at < end)):
            owner = owner[going]
            end = end[going]
            key, at = varints(data, at[going])
            value, after = varints(data, at)
            wire = key & 7
            size = np.where(wire == BYTES, value, _SIZES[wire])
            # types 1 and 5 have no length
            at = np.where(wire & 3 == 1, at, after)
            # a length may be any number, so that a sum could overflow
            cut = (size < 0) | (size > end - at)
            if cut.any():
                raise Broken(int(self.packet[owner[cut]].min()))
            yield np.stack([owner, key, value, at])
            at = at + size

    def __len__(self):
        return len(self.packet)

    def first(self, number: int, wire: int = 0) -> np.ndarray:
        """(n,) first field of a number in each message, 0 for none."""
        # later fields of a message stand behind earlier ones
        fields = np.flatnonzero(self.key == number << 3 | wire)[::-1]
        first = np.zeros(len(self), dtype="int64")
        first[self.owner[fields]] = fields  # of several the last one stays
        return first

    def numbers(self, number: int, default: int | np.ndarray = 0) -> np.ndarray:
        """(n,) values of a field."""
        field = self.first(number)
        return np.where(field, self.value[field], default)

    def doubles(self, number: int) -> np.ndarray:
        """(n,) values of a field, 0 for none."""
        field = self.first(number, FIXED)
        # (bytes - 7,) the eight bytes from each on, without a copy
        at = np.ndarray(len(self.data) - 7, "<f8", self.data, strides=(1,))
        return np.where(field, at[self.begin[field]], 0.0)

    def texts(self, number: int) -> tuple[np.ndarray, list[str]]:
        """Number (n,) of the text of each message in a field, "" for none, and texts."""
        field = self.first(number, BYTES)
        begin = self.begin[field]
        spans = np.stack([begin, begin + self.value[field]], 1)
        # (2 n + 1,) ends of texts that take turns with what is between them
        ends = np.append(spans, len(self.data))
        parts = pa.Array.from_buffers(
            pa.large_binary(),
            spans.size,
            [None, pa.py_buffer(ends), pa.py_buffer(self.data)],
        )
        is_text = pa.array(np.arange(0, spans.size, 2))
        coded = parts.take(is_text).dictionary_encode()
        code = coded.indices.to_numpy()
        texts = coded.dictionary.to_numpy(zero_copy_only=False)
        return code, [text.decode(errors="replace") for text in texts]

    def strings(self, number: int) -> np.ndarray:
        """(n,) texts of a field, as `texts` has them."""
        code, texts = self.texts(number)
        return np.array(texts, dtype=object)[code]

    def inside(self, number: int) -> "Messages":
        """Messages that a field holds, of several in a message all."""
        fields = np.flatnonzero(self.key == number << 3 | BYTES)
        fields = fields[np.argsort(self.owner[fields], kind="stable")]
        return self._messages(fields, self.owner[fields])

    def one(self, number: int) -> "Messages":
        """(n,) first message that a field holds, an empty one for none."""
        return self._messages(self.first(number, BYTES), np.arange(len(self)))

    def only(self, wanted: np.ndarray) -> "Messages":
        """Some of the messages."""
        bounds = self.bounds[:, wanted]
        packet = self.packet[wanted]
        return Messages(self.data, bounds, packet, self.outer[wanted])

    def _messages(self, fields, outer):
        begin = self.begin[fields]
        bounds = np.stack([begin, begin + self.value[fields]])
        return Messages(self.data, bounds, self.packet[outer], outer)


def varints(data: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (n,) that begin at some bytes, and the bytes (n,) after them."""
    value = data[at].astype("int64")
    at = at + 1
    long = np.flatnonzero(value > 127)
    value[long] &= 127
    # ten bytes at most; each has seven bits, the lowest first, and whether one follows
    for shift in range(7, 70, 7):
        if not len(long):
            break
        byte = data[at[long]].astype("int64")
        value[long] |= (byte & 127) << shift
        at[long] += 1
        long = long[byte > 127]
    return value, at
