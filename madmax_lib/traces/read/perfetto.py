"""Perfetto's packets (`.pftrace`, as torch's cuspy writes them) as columns, and as the
text of a Chrome trace.

Slices of threads become host rows, render stages the device's, counter events counters.
What packets say about those after them is read packet by packet, rows all at once.
Format: protobuf, google/perfetto protos/perfetto/trace; numbers of fields stand beside
their names here.
"""

import json
import struct
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pandas as pd

from madmax_lib.traces.read.events import SOURCE_KEY, NotATrace, RawTrace
from madmax_lib.traces.read.values import Codes
from madmax_lib.traces.read.wire import (
    BYTES,
    FIXED,
    PADDING,
    Broken,
    Message,
    Messages,
    fields,
    first,
    inner,
    signed,
    varints,
)

_BEGIN = 1  # types of track events
_END = 2
_OWN_CLOCKS = 64  # numbers of clocks from here on belong to one sequence
_NO_STREAM = 2**31 - 1  # thread of waits for a whole device
_LINES = 4000  # events of a block of text
_PACKET = 10  # first byte of one: field 1, of bytes
_STATE = (6, 12, 41, 59, 60)  # fields of packets that say something about others
_NOTE = (1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 17)  # fields of debug annotations
# of values that are no integer and no text: number and wire type
_ODD = ((2, 0), (5, FIXED), (11, BYTES), (12, BYTES))
_EVENTS = (8, 10, 11, 13, 50, 52, 53, 58)  # the others that are read
# interned tables of a sequence, by field of InternedData; iid is field 1, the text 2
_TABLES = {1: "category", 2: "name", 3: "note", 29: "text", 24: "stage"}
STAGES = {  # category of Kineto, by name of a render stage
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Annotation": "gpu_user_annotation",
    "EventRecord": "graph_event_node",
    "HostNode": "graph_host_node",
}
_UNLABELLED = {  # slices of a GPU's streams; others are kernels
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Event Sync": "cuda_sync",
    "Stream Wait Event": "cuda_sync",
    "Stream Sync": "cuda_sync",
    "Context Sync": "cuda_sync",
}
_NAMES = {"device id": "device", "context id": "context", "stream id": "stream"}


def is_perfetto(text: bytes) -> bool:
    """Whether a file begins with a packet: field 1, length-delimited, of a Trace."""
    return text[:1] == b"\n" and text.lstrip()[:1] not in (b"{", b"[", b"")


@dataclass
class PacketRows:
    """Slices and render stages of a file as arrays (n,), in the order of a Chrome
    trace.
    """

    start_ns: np.ndarray  # int64, from the file's own zero
    dur_ns: np.ndarray  # int64
    category: np.ndarray  # code, index of texts, as is the name
    name: np.ndarray
    thread: np.ndarray  # code, index of threads
    texts: "Texts"
    threads: list[tuple[int, int]]  # pid, tid
    notes: list[tuple[str, np.ndarray, list]]  # key, rows that have it, their values
    samples: list[tuple]  # ns, name and value of counters


def read_rows(
    raw: RawTrace, data: bytes, keys: tuple[str, ...] | None = None
) -> PacketRows:
    """Rows of a file of packets, which fill `raw`; keys: notes to keep, or all of them
    and the counters.

    Raises NotATrace for bytes that are no packets, and for times of a clock that no
    snapshot explains.
    """
    data, bounds = _bounds(raw, data)
    while True:
        try:
            packet = np.arange(bounds.shape[1])
            packets = Messages(data, bounds, packet, (*_STATE, *_EVENTS))
            if not len(packets.all(50)):
                return _Packets(raw, packets).rows(keys)
            data, bounds = _bounds(raw, _unpacked(raw, packets))
        except Broken as broken:  # what came before is kept
            raw.damage = raw.damage or "truncated packets"
            bounds = bounds[:, : broken.packet]


def chrome_text(raw: RawTrace, data: bytes) -> Iterator[bytes]:
    """Text of a Chrome trace with the rows and counters of a file, in blocks.

    Raises as `read_rows` does.
    """
    rows = read_rows(raw, data)
    yield msgspec.json.encode(raw.envelope | {"traceEvents": []})[:-2]
    args = [{} for _ in range(len(rows.start_ns))]
    for key, rows_with, values in rows.notes:
        for row, value in zip(rows_with.tolist(), values, strict=True):
            args[row][key] = value
    columns = (rows.category, rows.name, rows.thread, rows.start_ns, rows.dur_ns)
    lines = [
        {
            "cat": rows.texts.of_code[category],
            "name": rows.texts.of_code[name],
            "args": args[row],
        }
        | dict(zip(("pid", "tid"), rows.threads[thread], strict=True))
        | {"ph": "X", "ts": _us(ts_ns), "dur": _us(dur_ns)}
        for row, (category, name, thread, ts_ns, dur_ns) in enumerate(
            zip(*map(np.ndarray.tolist, columns), strict=True)
        )
    ]
    lines += [
        {"ph": "C", "name": name, "ts": _us(ts_ns), "args": {"": value}}
        for ts_ns, name, value in rows.samples
    ]
    separator = b""
    for low in range(0, len(lines), _LINES):
        yield separator + msgspec.json.encode(lines[low : low + _LINES])[1:-1]
        separator = b","
    yield b"]}"


def _us(ns: int):
    """Microseconds with all their decimals."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))


def _bounds(raw: RawTrace, data: bytes):
    """Bytes of a file, those of compressed packets as they were, and (2, packets) the
    first byte of each and the one after its last.
    """
    size = len(data)
    data += PADDING
    ends = array("q")
    at = 0
    while at < size and data[at] == _PACKET:
        # a length as `varint` reads it; a call takes as long as all else here
        at += 1
        byte = data[at]
        length = byte & 127
        shift = 7
        while byte > 127:
            at += 1
            byte = data[at]
            length |= (byte & 127) << shift
            shift += 7
        at += length + 1
        if at > size:
            break
        ends.append(at)
    if at != size:
        raw.damage = raw.damage or "truncated packets"
    ends = np.array(ends, dtype=np.int64)
    bytes_ = np.frombuffer(data, dtype=np.uint8)
    _, begins = varints(bytes_, np.append(0, ends[:-1]) + 1)
    return data, np.stack([begins[: len(ends)], ends])


def _unpacked(raw: RawTrace, packets: Messages):
    """Bytes of a file with compressed packets in their places."""
    parts = []
    done = 0
    ends = packets.bounds[1]
    for field in packets.all(50):
        number = packets.owner[field]
        parts.append(packets.data[done : ends[number - 1] if number else 0])
        try:
            parts.append(zlib.decompress(*packets.texts([field])))
        except zlib.error:
            raw.damage = raw.damage or "truncated packets"
            return b"".join(parts)
        done = ends[number]
    return b"".join((*parts, packets.data[done : ends[-1]]))


class Texts(Codes):
    """Numbers the bytes of texts; `of_code` has them decoded."""

    def __init__(self):
        super().__init__()
        self.of_code = []
        self.of([b""])  # code 0: no text

    def __missing__(self, key):
        self.of_code.append(key.decode(errors="replace"))
        return super().__missing__(key)

    def map(self, codes: np.ndarray, function):
        """Values (n,) that a function makes of the text of each code."""
        if not len(codes):
            return codes
        used = np.flatnonzero(np.bincount(codes, minlength=len(self)))
        values = np.array([function(self.of_code[code]) for code in used])
        return values[np.searchsorted(used, codes)]


class _Told:
    """Numbers that packets tell, of a sequence and a number of its own, to those after
    them.
    """

    def __init__(self):
        self.rows: list[tuple[int, int, int]] = []

    def add(self, sequence: int, number: int, packet: int, value: int):
        self.rows.append((sequence << 32 | number, packet, value))

    def find(self, sequence, number, packet, since=0):
        """(n,) what the last packets up to some say, since others; -1 where none does."""
        if not self.rows:
            return np.full(len(packet), -1)
        key, since_packet, value = np.array(self.rows).T
        keys, key_code = np.unique(key, return_inverse=True)
        # packets by key and number in one array that is sorted
        order = np.lexsort((since_packet, key_code))
        sought = sequence << 32 | number
        after = np.searchsorted(keys, sought) << 32 | packet
        row = (
            np.searchsorted((key_code << 32 | since_packet)[order], after, "right") - 1
        )
        row = order[row]
        good = (
            (key[row] == sought)
            & (since_packet[row] <= packet)
            & (since_packet[row] >= since)
        )
        return np.where(good, value[row], -1)


class _Packets:
    """Packets of a file: what they say about others, and the rows of the others."""

    def __init__(self, raw: RawTrace, packets: Messages):
        self.raw = raw
        self.packets = packets
        self.texts = Texts()
        self.threads = Codes()
        self.notes = []
        self.time_ns = np.zeros(len(packets), dtype=np.int64)
        self.told: dict[str, _Told] = defaultdict(_Told)
        self.clocks: list[list[int]] = []
        self.specs: list[dict[int, bytes]] = []  # names of counters by number
        self.tracks: dict[int, Message] = {}
        self.sequence = packets.numbers(10)
        says = packets.owner[np.isin(packets.key >> 3, _STATE)]
        resets = np.flatnonzero(packets.numbers(13) & 1)
        for number in np.union1d(says, resets).tolist():
            self._state(number, fields(packets.bytes_of(number)))

    def _state(self, number: int, packet: Message):
        """Take what a packet says about others."""
        sequence = first(packet, 10, 0)
        if first(packet, 13, 0) & 1 or first(packet, 41, 0):
            self.told["reset"].add(sequence, 0, number, number)
        for default in inner(packet, 59)[:1]:
            clock = first(default, 58, 6)
            self.told["default clock"].add(sequence, 0, number, clock)
            track = first(fields(first(default, 11, b"")), 11, 0)
            self.told["default track"].add(sequence, 0, number, signed(track))
        for snapshot in inner(packet, 6):
            self._snapshot(snapshot, sequence, number)
        for table in inner(packet, 12):
            self._intern(table, sequence, number)
        for track in inner(packet, 60):
            self.tracks[signed(first(track, 1, 0))] = track

    def _snapshot(self, snapshot: Message, sequence: int, number: int):
        clocks = inner(snapshot, 1)
        primary = first(snapshot, 2, 6)
        at = {first(clock, 1, 0): first(clock, 2, 0) for clock in clocks}
        for clock in clocks:
            clock_id = first(clock, 1, 0)
            if clock_id >= _OWN_CLOCKS and primary in at:
                self.told["clock"].add(sequence, clock_id, number, len(self.clocks))
                unit_ns, steps = first(clock, 4, 1), first(clock, 3, 0)
                # [value that the clock had, ns at it, ns of a unit, is_incremental]
                zero = 0 if steps else at[clock_id]
                self.clocks.append([zero, at[primary], unit_ns, steps])

    def _intern(self, table: Message, sequence: int, number: int):
        def tell(name, entry, value):
            self.told[name].add(sequence, first(entry, 1, 0), number, value)

        for field, name in _TABLES.items():
            for entry in inner(table, field):
                tell(name, entry, self.texts[first(entry, 2, b"")])
        for entry in inner(table, 1000):
            # the demangled name, else the other
            name = first(entry, 3, first(entry, 2, b""))
            tell("kernel", entry, self.texts[name])
        for entry in inner(table, 47):
            tell("counter", entry, len(self.specs))
            self.specs.append(_specs(first(entry, 2, b"")))

    def rows(self, keys: tuple[str, ...] | None) -> PacketRows:
        """Slices in the order of `_pairs`, then render stages; see `read_rows`."""
        packets = self.packets
        fields_of = [packets.first(number, BYTES) for number in (11, 52, 53)]
        happens = np.flatnonzero(np.max(fields_of, axis=0) >= 0)
        if not (len(happens) or self.tracks):
            text = f"{self.raw.path}: not a profiler trace (no packets of Perfetto)"
            raise NotATrace(text)
        self.time_ns[happens] = self._times_ns(happens)
        base_ns = 0
        if len(happens):
            base_ns = int(self.time_ns[happens].min()) // 1000 * 1000
        slices = self._slices(keys)
        stages = self._stages(keys, slices.shape[1])
        columns = np.hstack([slices, stages])
        columns[0] -= base_ns
        counters = packets.inside(52, (1, 2, 4))
        # an export keeps the keys beside its events as the name of a track
        names = (first(track, 2, b"") for track in self.tracks.values())
        export_keys = next(
            (name for name in names if SOURCE_KEY.encode() in name), b"{}"
        )
        self.raw.envelope = json.loads(export_keys) | {"baseTimeNanoseconds": base_ns}
        self.raw.events = columns.shape[1] + len(counters.all(2))
        return PacketRows(
            *columns,
            texts=self.texts,
            threads=list(self.threads),
            notes=self.notes,
            samples=[] if keys else list(self._samples(counters, base_ns)),
        )

    def _times_ns(self, number: np.ndarray):
        """Time (n,) of some packets."""
        sequence = self.sequence[number]
        value = self.packets.numbers(8)[number]
        default = self.told["default clock"].find(sequence, 0, number)
        default = np.where(default < 0, 6, default)
        clock = np.full(len(self.packets), -1)
        clock[number] = default
        clock = self.packets.numbers(58, clock)[number]
        by_snapshot = clock >= _OWN_CLOCKS
        if not by_snapshot.any():
            return value
        row = self.told["clock"].find(
            sequence[by_snapshot], clock[by_snapshot], number[by_snapshot]
        )
        if (row < 0).any():
            unknown = clock[by_snapshot][row < 0][0]
            text = f"{self.raw.path}: no snapshot explains clock {unknown}"
            raise NotATrace(text)
        zero, at_ns, unit_ns, steps = np.array(self.clocks)[row].T
        since_ns = (value[by_snapshot] - zero) * unit_ns
        # each time counts from the one before it
        summed_ns = pd.Series(since_ns).groupby(row).cumsum()
        value[by_snapshot] = at_ns + np.where(steps, summed_ns, since_ns)
        return value

    def _slices(self, keys: tuple[str, ...] | None):
        """(5, n) start, duration, category, name and thread of slices."""
        events = self.packets.inside(11, (3, 4, 9, 10, 11, 22, 23))
        sequence = self.sequence[events.packet]
        default = self.told["default track"].find(sequence, 0, events.packet)
        track = events.numbers(11, np.where(default == -1, 0, default))
        kind = events.numbers(9)
        marks = np.flatnonzero((kind == _BEGIN) | (kind == _END))
        time_ns = self.time_ns[events.packet]
        begins, ends = _pairs(kind[marks], track[marks], time_ns[marks])
        begins, ends = marks[begins], marks[ends]
        start_ns = time_ns[begins]
        dur_ns = np.maximum(time_ns[ends] - start_ns, 0)
        slices = events.take(begins)
        number, tracks = pd.factorize(track[begins])
        of_track = [self._thread(each) for each in tracks.tolist()]
        thread = self.threads.of([thread for thread, _ in of_track])[number]
        on_gpu = np.array([gpu for _, gpu in of_track], dtype=bool)[number]
        name = np.maximum(self._named(slices, 23, 10, "name"), 0)
        category = self._named(slices, 22, 3, "category")
        # a name tells its category on a stream of a GPU where none is written
        of_name = self.texts.map(
            name, lambda text: self.texts[_UNLABELLED.get(text, "kernel").encode()]
        )
        unlabelled = np.where(on_gpu, of_name, self.texts[b"cpu_op"])
        category = np.where(category > 0, category, unlabelled)
        notes = slices.inside(4, _NOTE)
        for key, some in self._by_key(self._named(notes, 10, 1, "note"), keys):
            values = self._values(notes.take(some))
            self.notes.append((key, notes.outer[some], values))
        return np.stack([start_ns, dur_ns, category, name, thread])

    def _stages(self, keys: tuple[str, ...] | None, before: int):
        """(5, n) columns of render stages, which have some rows before them."""
        stages = self.packets.inside(53, (2, 6, 11, 13, 14, 17, 19, 20))
        kind = self._interned(stages, 14, "stage")
        kind = np.where(kind < 0, self.texts[b"Kernel"], kind)
        kernel = self._interned(stages, 19, "kernel")
        name = self._named(stages, 17, 20, "name")
        name = np.where(name < 0, np.where(kernel < 0, kind, kernel), name)
        category = self.texts.map(
            kind, lambda text: self.texts[STAGES.get(text, "kernel").encode()]
        )
        # a lane that names no stream is of the stream in extra data
        lane = self._interned(stages, 13, "stage")
        lane = np.where(lane < 0, self.texts[b"0"], lane)
        stream = self.texts.map(lane, lambda text: f"0 {text}".split()[-1]).tolist()
        extra = stages.inside(6, (1, 2))
        key = self.texts.of(extra.texts(extra.first(1, BYTES)))
        for name_of, some in self._by_key(key, keys and (*keys, *_NAMES)):
            rows = extra.outer[some]
            of_key = extra.take(some)
            texts = [
                text.decode(errors="replace")
                for text in of_key.texts(of_key.first(2, BYTES))
            ]
            if name_of == "stream id":
                for row, text in zip(rows.tolist(), texts, strict=True):
                    stream[row] = text
            elif name_of != "stream":
                self.notes.append((_NAMES.get(name_of, name_of), rows + before, texts))
        self.notes.append(("stream", np.arange(len(stages)) + before, stream))
        numbers = {text: int(text) for text in set(stream) if text.isdecimal()}
        queue = stages.numbers(13).tolist()
        tid = [
            numbers.get(text, other) for text, other in zip(stream, queue, strict=True)
        ]
        gpu = stages.numbers(11).tolist()
        thread = self.threads.of(list(zip(gpu, tid, strict=True)))
        start_ns = self.time_ns[stages.packet]
        dur_ns = np.maximum(stages.numbers(2), 0)
        return np.stack([start_ns, dur_ns, category, name, thread])

    def _interned(self, messages: Messages, number: int, table: str):
        """Codes (n,) that a field has in a table of its sequence, -1 for none."""
        packet = messages.packet
        sequence = self.sequence[packet]
        since = self.told["reset"].find(sequence, 0, packet)
        return self.told[table].find(sequence, messages.numbers(number), packet, since)

    def _named(self, messages: Messages, inline: int, number: int, table: str):
        """Codes (n,) of texts, inline or in a table; -1 for none."""
        codes = self._interned(messages, number, table)
        field = messages.first(inline, BYTES)
        is_inline = field >= 0
        codes[is_inline] = self.texts.of(messages.texts(field[is_inline]))
        return codes

    def _by_key(self, codes: np.ndarray, keys: tuple[str, ...] | None):
        """Texts that keys allow, and where their codes are."""
        # (codes + 1,) number of each, the first is none
        for code in np.flatnonzero(np.bincount(codes + 1)) - 1:
            key = self.texts.of_code[max(code, 0)]
            if keys is None or key in keys:
                yield key, np.flatnonzero(codes == code)

    def _values(self, notes: Messages):
        """Values of debug annotations."""
        values = notes.numbers(4, notes.numbers(3, notes.numbers(7))).tolist()
        codes = self._named(notes, 6, 17, "text")
        for row in np.flatnonzero((codes >= 0) | (notes.first(17) >= 0)).tolist():
            # code 0 where no table has the text
            values[row] = self.texts.of_code[max(codes[row], 0)]
        # what holds others or no integer, one by one
        odd = [notes.first(field, wire) >= 0 for field, wire in _ODD]
        for row in np.flatnonzero(np.any(odd, axis=0)).tolist():
            names = partial(self._name_at, int(notes.packet[row]))
            values[row] = _value(fields(notes.bytes_of(row)), names)
        return values

    def _name_at(self, packet: int, table: str, number: int):
        """A text of a table, "" for none."""
        at = np.array([packet])
        sequence = self.sequence[at]
        since = self.told["reset"].find(sequence, 0, at)
        (code,) = self.told[table].find(sequence, number, at, since)
        return self.texts.of_code[max(code, 0)]

    def _samples(self, counters: Messages, base_ns: int):
        """Time, name and value of each counter."""
        described = self._interned(counters, 4, "counter").tolist()
        samples = counters.inside(2, (1, 2, 3))
        inline = counters.texts(counters.first(1, BYTES))
        time_ns = (self.time_ns[samples.packet] - base_ns).tolist()
        for row, outer in enumerate(samples.outer.tolist()):
            number = described[outer]
            specs = _specs(inline[outer]) if number < 0 else self.specs[number]
            sample = fields(samples.bytes_of(row))
            value = first(sample, 2, 0) if 2 in sample else _double(sample, 3)
            name = specs.get(first(sample, 1, 0), b"").decode(errors="replace")
            yield time_ns[row], name, value

    def _thread(self, number: int):
        """(pid, tid) of a track, and whether it is a stream of a GPU."""
        track = self.tracks.get(number, {})
        parent = self.tracks.get(signed(first(track, 5, 0)), {})
        thread = fields(first(track, 4, b""))
        process = fields(first(track, 3, first(parent, 3, b"")))
        pid = first(thread, 1, first(process, 1, 0))
        tid = first(thread, 2, number % 2**64)
        tid = 1 if tid == _NO_STREAM else tid  # as in cuspy's JSON
        return (pid, tid), first(process, 6, b"").startswith(b"GPU ")


def _pairs(kind: np.ndarray, track: np.ndarray, time_ns: np.ndarray):
    """Beginnings of slices and their ends.

    A block of beginnings and an equally long one of ends on the same tracks belong
    together in order, as cuspy writes them; else the last that began on a track ends.
    """
    # (blocks,) marks of one kind that follow each other
    block_begin = np.flatnonzero(np.diff(kind, prepend=0))
    length = np.diff(block_begin, append=len(kind))
    block = np.repeat(np.arange(len(length)), length)
    # (marks,) the one as many further on as the block is long
    partner = np.minimum(np.arange(len(kind)) + length[block], len(kind) - 1)
    differ = np.bincount(block, track != track[partner], minlength=len(length))
    paired = (kind[block_begin] == _BEGIN) & (differ == 0)
    paired &= length == np.append(length[1:], 0)
    begins = np.flatnonzero(paired[block])
    ends = partner[begins]
    is_loose = np.ones(len(kind), dtype=bool)
    is_loose[begins] = is_loose[ends] = False
    loose = np.flatnonzero(is_loose)
    order = loose[np.lexsort((kind[loose] == _BEGIN, time_ns[loose]))]
    pairs = []
    open_rows = defaultdict(list)
    for mark, of_track, begin in zip(
        order.tolist(), track[order].tolist(), kind[order] == _BEGIN, strict=True
    ):
        if begin:
            open_rows[of_track].append(mark)
        elif open_rows[of_track]:
            pairs.append((open_rows[of_track].pop(), mark))
    # (pairs, 2), also where there are none
    more = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return np.append(begins, more[:, 0]), np.append(ends, more[:, 1])


def _specs(descriptor: bytes):
    """Names of counters by number."""
    specs = inner(fields(descriptor), 1)
    return {first(spec, 1, 0): first(spec, 2, b"") for spec in specs}


def _value(note: Message, name_of):
    """Value of a debug annotation; name_of: text of a table and number."""
    if 12 in note:
        return [_value(each, name_of) for each in inner(note, 12)]
    if 11 in note:
        entries = inner(note, 11)
        return {_key(entry, name_of): _value(entry, name_of) for entry in entries}
    if 6 in note or 17 in note:
        text = name_of("text", first(note, 17, 0))
        return first(note, 6, b"").decode(errors="replace") if 6 in note else text
    if 5 in note:
        return _double(note, 5)
    if 4 in note:
        return signed(first(note, 4, 0))
    if 2 in note:
        return bool(first(note, 2, 0))
    return first(note, 3, first(note, 7, 0))


def _key(entry: Message, name_of):
    if 10 in entry:
        return first(entry, 10, b"").decode(errors="replace")
    return name_of("note", first(entry, 1, 0))


def _double(message: Message, number: int):
    data = first(message, number, b"")
    return struct.unpack("<d", data)[0] if len(data) == 8 else 0.0
