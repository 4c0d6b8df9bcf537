"""Perfetto's packets (`.pftrace`, as torch's cuspy writes them) as columns, and as the
events of a Chrome trace.

Slices of threads become host rows, render stages the device's, counter events counters.
Format: protobuf, google/perfetto protos/perfetto/trace; numbers of fields stand beside
their names here.
"""

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pandas as pd

from madmax_lib.traces.read.events import SOURCE_KEY, NotATrace, RawTrace
from madmax_lib.traces.read.values import Codes, integers
from madmax_lib.traces.read.wire import BYTES, FIXED, PADDING, Broken, Messages

_BEGIN = 1  # types of track events
_END = 2
_OWN_CLOCKS = 64  # numbers of clocks from here on belong to one sequence
_NO_STREAM = 2**31 - 1  # thread of waits for a whole device
_LINES = 4000  # events of a block of text
_PACKET = 10  # first byte of one: field 1, of bytes
_DAMAGE = "truncated packets"
# interned tables of a sequence, by field of InternedData; iid is field 1, the text 2
_TABLES = {
    1: "category",
    2: "name",
    3: "note",
    29: "text",
    24: "stage",
    1000: "kernel",
}
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
    """Slices and render stages of a file, in the order of a Chrome trace."""

    # arrays (n,): start_ns from the file's own zero, dur_ns, and codes: category and
    # name of texts, thread of threads
    columns: dict[str, np.ndarray]
    texts: Codes
    threads: list[tuple[int, int]]  # pid, tid
    notes: list[np.ndarray]  # (notes,) row, key as a code of texts, value
    samples: list[dict]  # events of counters


def read_rows(
    raw: RawTrace, data: bytes, keys: tuple[str, ...] | None = None
) -> PacketRows:
    """Rows of a file of packets, which fill `raw`; keys: notes to keep, all without.

    Raises NotATrace for bytes that are no packets, and for times of a clock that no
    snapshot explains.
    """
    data += PADDING
    bounds = _bounds(raw, data)
    while True:
        try:
            packets = Messages(data, bounds, np.arange(bounds.shape[1]))
            if not (compressed := packets.first(50, BYTES)).any():
                return _Packets(raw, packets, keys).rows()
            data = _unpacked(packets, bounds, compressed)
            bounds = _bounds(raw, data)
        except Broken as broken:  # what came before is kept
            raw.damage = raw.damage or _DAMAGE
            bounds = bounds[:, : broken.packet]


def chrome_lists(raw: RawTrace, data: bytes) -> Iterator[bytes]:
    """Lists of Chrome's events, as text, with the rows and counters of a file.

    Raises as `read_rows` does.
    """
    rows = read_rows(raw, data)
    texts = np.array(list(rows.texts), dtype=object)
    args = [{} for _ in rows.columns["name"]]
    row, key, value = rows.notes
    for number, name, each in zip(row.tolist(), texts[key], value, strict=True):
        args[number][name] = each
    threads = [rows.threads[code] for code in rows.columns["thread"].tolist()]
    columns = {
        "cat": texts[rows.columns["category"]],
        "name": texts[rows.columns["name"]],
        "pid": [pid for pid, _ in threads],
        "tid": [tid for _, tid in threads],
        "ts": map(_us, rows.columns["start_ns"].tolist()),
        "dur": map(_us, rows.columns["dur_ns"].tolist()),
        "args": args,
    }
    events = [
        {"ph": "X"} | dict(zip(columns, values, strict=True))
        for values in zip(*columns.values(), strict=True)
    ]
    events += rows.samples
    for low in range(0, len(events), _LINES):
        yield msgspec.json.encode(events[low : low + _LINES])


def _us(ns: int):
    """Microseconds with all their decimals."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))


def _bounds(raw: RawTrace, data: bytes):
    """(2, packets) first byte of each and the one after its last."""
    size = len(data) - len(PADDING)
    bounds = array("q")
    end = 0
    while end < size and data[end] == _PACKET:
        # a length as `varints` reads it; a call takes as long as all else here
        begin = end + 1
        length = shift = 0
        while (byte := data[begin]) > 127 and shift < 64:
            length |= (byte & 127) << shift
            shift += 7
            begin += 1
        begin += 1
        length |= byte << shift
        if begin + length > size:
            break
        end = begin + length
        bounds.append(begin)
        bounds.append(end)
    if end < size:
        raw.damage = raw.damage or _DAMAGE
    return np.array(bounds, dtype=np.int64).reshape(-1, 2).T


def _unpacked(packets: Messages, bounds: np.ndarray, compressed: np.ndarray):
    """Bytes of a file with compressed packets, fields by packet, in their places."""
    data = packets.data
    ends = [0, *bounds[1].tolist()]
    parts = []
    done = 0
    for number in np.flatnonzero(compressed).tolist():
        begin = packets.begin[compressed[number]]
        try:
            part = zlib.decompress(data[begin : ends[number + 1]])
        except zlib.error:
            raise Broken(number) from None
        parts += [data[done : ends[number]], part]
        done = ends[number + 1]
    return b"".join((*parts, data[done : ends[-1]], PADDING))


class _Table:
    """Values that packets give to numbers, in a scope of their own, for those after
    them.
    """

    def __init__(self, scope, number, packet, value):
        self.value = value
        rows = {"key": scope << 32 | number, "packet": packet}
        self.rows = pd.DataFrame(rows | {"row": np.arange(len(packet))})

    def latest(self, scope, number, packet, default=-1):
        """(n,) values that the last of the packets up to some give."""
        if self.rows.empty:
            return np.broadcast_to(default, len(packet))
        sought = pd.DataFrame({"key": scope << 32 | number, "packet": packet})
        found = pd.merge_asof(sought, self.rows, on="packet", by="key")["row"]
        row = found.fillna(-1).to_numpy(dtype=np.int64)
        return np.where(row < 0, default, self.value[row])


class _Packets:
    """Packets of a file: what they say about others, and the rows of the others."""

    def __init__(self, raw: RawTrace, packets: Messages, keys: tuple[str, ...] | None):
        self.raw = raw
        self.packets = packets
        self.keys = keys
        self.texts = Codes()
        self.texts.of([""])  # code 0: no text
        self.threads = Codes()
        self.sequence = packets.numbers(10)
        resets = (packets.numbers(13) & 1) | packets.numbers(41)
        # (packets,) number of a sequence since it last began its tables anew
        resets_before = pd.Series(resets).groupby(self.sequence).cumsum()
        self.era, _ = pd.factorize(self.sequence << 32 | resets_before.to_numpy())
        self.interned = packets.inside(12)
        self.tables = {}
        for number, name in _TABLES.items():
            entries = self.interned.inside(number)
            text = self._inline(entries, 2, 0)
            if name == "kernel":  # the demangled name, else the other
                text = self._inline(entries, 3, text)
            self._enter(name, entries, text)
        self.tracks = packets.inside(60)

    def _enter(self, name: str, entries: Messages, values: np.ndarray):
        packet = entries.packet
        number = entries.numbers(1)
        self.tables[name] = _Table(self.era[packet], number, packet, values)

    def _interned(self, messages: Messages, number: int, table: str, default=-1):
        """(n,) what a table of its sequence says of a field's number."""
        packet = messages.packet
        scope = self.era[packet]
        numbers = messages.numbers(number)
        return self.tables[table].latest(scope, numbers, packet, default)

    def _inline(self, messages: Messages, number: int, default):
        """Codes (n,) of the texts of a field."""
        code, texts = messages.texts(number)
        is_inline = messages.first(number, BYTES) > 0
        return np.where(is_inline, self.texts.of(texts)[code], default)

    def _named(self, messages: Messages, fields: tuple, table: str, default=0):
        """Codes (n,) of texts, inline or in a table; fields: numbers of both."""
        inline, number = fields
        codes = self._interned(messages, number, table, default)
        return self._inline(messages, inline, codes)

    def _renamed(self, codes: np.ndarray, rename: Callable[[str], str]):
        """Codes (n,) of other names for some texts."""
        return self.texts.of(list(map(rename, self.texts)))[codes]

    def _wanted(self, codes: np.ndarray):
        """(n,) whether keys are to be kept."""
        wanted = [self.keys is None or text in self.keys for text in self.texts]
        return np.array(wanted)[codes]

    def rows(self) -> PacketRows:
        """Slices in the order of `_pairs`, then render stages; see `read_rows`."""
        packets = self.packets
        about = [packets.first(number, BYTES) for number in (11, 52, 53)]
        happens = np.flatnonzero(np.any(about, axis=0))
        if not (len(happens) or len(self.tracks)):
            text = f"{self.raw.path}: not a profiler trace (no packets of Perfetto)"
            raise NotATrace(text)
        self.time_ns = np.zeros(len(packets), dtype=np.int64)
        base_ns = 0
        if len(happens):
            times_ns = self._times_ns(happens)
            base_ns = int(times_ns.min()) // 1000 * 1000
            self.time_ns[happens] = times_ns - base_ns
        slices, slice_notes = self._slices()
        stages, stage_notes = self._stages(len(slices[0]))
        names = ("start_ns", "dur_ns", "category", "name", "thread")
        columns = dict(zip(names, np.hstack([slices, stages]), strict=True))
        # an export keeps the keys beside its events as the name of a track
        names = self.tracks.strings(2)
        export_keys = next((name for name in names if SOURCE_KEY in name), "{}")
        self.raw.envelope = json.loads(export_keys) | {"baseTimeNanoseconds": base_ns}
        counters = packets.inside(52)
        samples = counters.inside(2)
        self.raw.events = len(columns["name"]) + len(samples)
        return PacketRows(
            columns,
            texts=self.texts,
            threads=list(self.threads),
            notes=[*map(np.append, slice_notes, stage_notes)],
            samples=[] if self.keys else self._samples(counters, samples),
        )

    def _times_ns(self, number: np.ndarray):
        """Time (n,) of some packets."""
        sequence = self.sequence[number]
        value = self.packets.numbers(8)[number]
        defaults = self.packets.inside(59)
        packet = defaults.packet
        clocks = _Table(self.sequence[packet], 0, packet, defaults.numbers(58, 6))
        clock = np.full(len(self.packets), 6)
        clock[number] = clocks.latest(sequence, 0, number, 6)
        clock = self.packets.numbers(58, clock)[number]
        own = np.flatnonzero(clock >= _OWN_CLOCKS)
        if not len(own):
            return value
        snapshots = self.packets.inside(6)
        clocks = snapshots.inside(1)
        clock_id = clocks.numbers(1)
        at = clocks.numbers(2)
        is_primary = clock_id == snapshots.numbers(2, 6)[clocks.outer]
        # ns of the primary clock by snapshot, -1 where it is not in it
        primary_ns = np.full(len(snapshots), -1)
        primary_ns[clocks.outer[is_primary]] = at[is_primary]
        at_ns = primary_ns[clocks.outer]
        told = np.flatnonzero(at_ns >= 0)
        packet = clocks.packet[told]
        table = _Table(self.sequence[packet], clock_id[told], packet, told)
        row = table.latest(sequence[own], clock[own], number[own])
        if (row < 0).any():
            text = (
                f"{self.raw.path}: no snapshot explains clock {clock[own][row < 0][0]}"
            )
            raise NotATrace(text)
        # each time of such a clock counts from the one before it
        steps = clocks.numbers(3)[row] > 0
        since = value[own] - np.where(steps, 0, at[row])
        since_ns = since * clocks.numbers(4, 1)[row]
        summed_ns = pd.Series(since_ns).groupby(row).cumsum()
        value[own] = at_ns[row] + np.where(steps, summed_ns, since_ns)
        return value

    def _slices(self):
        """Start, duration, category, name and thread of slices, and their notes."""
        events = self.packets.inside(11)
        packet = events.packet
        defaults = self.packets.inside(59)
        of_default = defaults.inside(11)
        track = np.zeros(len(defaults), dtype=np.int64)
        track[of_default.outer] = of_default.numbers(11)
        tracks = _Table(self.sequence[defaults.packet], 0, defaults.packet, track)
        track = events.numbers(11, tracks.latest(self.sequence[packet], 0, packet, 0))
        kind = events.numbers(9)
        marks = np.flatnonzero((kind == _BEGIN) | (kind == _END))
        time_ns = self.time_ns[packet]
        begins, ends = _pairs(kind[marks], track[marks], time_ns[marks])
        begins, ends = marks[begins], marks[ends]
        dur_ns = np.maximum(time_ns[ends] - time_ns[begins], 0)
        number, numbers = pd.factorize(track[begins])
        threads, on_gpu = self._threads(numbers)
        name = self._named(events, (23, 10), "name")[begins]
        category = self._named(events, (22, 3), "category")[begins]
        # a name tells its category on a stream of a GPU where none is written
        of_name = self._renamed(name, lambda text: _UNLABELLED.get(text, "kernel"))
        unlabelled = np.where(on_gpu[number], of_name, self.texts["cpu_op"])
        category = np.where(category > 0, category, unlabelled)
        notes = events.inside(4)
        row = np.full(len(events), -1)
        row[begins] = np.arange(len(begins))
        row = row[notes.outer]
        key = self._named(notes, (10, 1), "note")
        wanted = self._wanted(key) & (row >= 0)
        value = self._values(notes, wanted)
        slices = [time_ns[begins], dur_ns, category, name, threads[number]]
        return slices, [array[wanted] for array in (row, key, value)]

    def _threads(self, track: np.ndarray):
        """Codes (n,) of the threads of tracks, and whether they are a GPU's streams."""
        tracks = self.tracks
        number = tracks.numbers(1)
        end = np.full(len(track), len(self.packets))

        def rows_of(messages, numbers, sought, default=-1):
            table = _Table(0, numbers, messages.packet, np.arange(len(messages)))
            return table.latest(0, sought, end, default)

        parent = np.append(tracks.numbers(5), 0)[rows_of(tracks, number, track)]
        processes = tracks.inside(3)
        of_process = number[processes.outer]
        process = rows_of(processes, of_process, parent)
        process = rows_of(processes, of_process, track, process)
        threads = tracks.inside(4)
        thread = rows_of(threads, number[threads.outer], track)
        pid = np.append(threads.numbers(1), 0)[thread]
        pid = np.where(pid, pid, np.append(processes.numbers(1), 0)[process])
        tid = np.append(threads.numbers(2, -1), -1)[thread]
        tid = np.where(tid < 0, track, tid)
        tid = np.where(tid == _NO_STREAM, 1, tid)  # as in cuspy's JSON
        names = [*processes.strings(6), ""]
        on_gpu = np.array([name.startswith("GPU ") for name in names])[process]
        # numbers of tracks have no sign
        tids = [each % 2**64 for each in tid.tolist()]
        return self.threads.of(list(zip(pid.tolist(), tids, strict=True))), on_gpu

    def _stages(self, before: int):
        """Columns of render stages, which have some rows before them, and notes."""
        stages = self.packets.inside(53)
        kind = self._interned(stages, 14, "stage", self.texts["Kernel"])
        kernel = self._interned(stages, 19, "kernel", kind)
        name = self._named(stages, (17, 20), "name", kernel)
        category = self._renamed(kind, lambda text: STAGES.get(text, "kernel"))
        # a lane that names no stream is of the stream in extra data
        lane = self._interned(stages, 13, "stage", self.texts["0"])
        streams = [f"0 {text}".split()[-1] for text in self.texts]
        stream = np.array(streams, dtype=object)[lane]
        extra = stages.inside(6)
        key = self._renamed(
            self._inline(extra, 1, 0), lambda text: _NAMES.get(text, text)
        )
        of_stream = key == self.texts["stream"]
        wanted = self._wanted(key)
        value = extra.strings(2, wanted | of_stream)
        stream[extra.outer[of_stream]] = value[of_stream]
        tid = integers(stream.tolist())
        tid = np.where(tid < 0, stages.numbers(13), tid)
        threads = list(zip(stages.numbers(11).tolist(), tid.tolist(), strict=True))
        start_ns = self.time_ns[stages.packet]
        dur_ns = np.maximum(stages.numbers(2), 0)
        row = np.arange(len(stages))
        of_all = np.full(len(stages), self.texts["stream"])
        wanted &= ~of_stream
        notes = [
            np.append(row, extra.outer[wanted]) + before,
            np.append(of_all, key[wanted]),
            np.append(stream, value[wanted]),
        ]
        columns = [start_ns, dur_ns, category, name, self.threads.of(threads)]
        return columns, notes

    def _values(self, notes: Messages, wanted: np.ndarray):
        """Values (n,) of the debug annotations that are wanted."""
        values = np.zeros(len(notes), dtype=object)
        texts = np.array(list(self.texts), dtype=object)
        kinds = {
            (2, 0): notes.numbers(2) > 0,
            (3, 0): notes.numbers(3),
            (4, 0): notes.numbers(4),
            (5, FIXED): notes.doubles(5),
            (6, BYTES): notes.strings(6, wanted),
            (7, 0): notes.numbers(7),
            (17, 0): texts[self._interned(notes, 17, "text", 0)],
        }
        for field, of_kind in kinds.items():
            rows = np.flatnonzero(notes.first(*field) * wanted)
            values[rows] = of_kind[rows]
        for number in (11, 12):
            entries = notes.inside(number, wanted)
            if not len(entries):
                continue
            code = self._named(entries, (10, 1), "note")
            keys = np.array(list(self.texts), dtype=object)[code]
            inner = self._values(entries, np.ones(len(entries), dtype=bool))
            pairs = defaultdict(list)
            for outer, *pair in zip(entries.outer.tolist(), keys, inner, strict=True):
                pairs[outer].append(pair)
            for outer, each in pairs.items():
                values[outer] = dict(each) if number == 11 else [v for _, v in each]
        return values

    def _samples(self, counters: Messages, samples: Messages):
        """Events of counters."""
        described = self.interned.inside(47)
        self._enter("counter", described, np.arange(len(described)))
        # descriptors of tables count from 0 up, those of events from -1 down
        number = self._interned(counters, 4, "counter", -1 - np.arange(len(counters)))
        in_table = described.inside(2)
        in_event = counters.inside(1)
        names = {}
        for descriptors, numbers in (
            (in_table, in_table.outer),
            (in_event, -1 - in_event.outer),
        ):
            specs = descriptors.inside(1)
            keys = zip(numbers[specs.outer], specs.numbers(1), strict=True)
            names |= zip(keys, specs.strings(2), strict=True)
        value = np.where(samples.first(2), samples.numbers(2), samples.doubles(3))
        keys = zip(number[samples.outer], samples.numbers(1), strict=True)
        times_ns = self.time_ns[samples.packet].tolist()
        return [
            {"ph": "C", "name": names.get(key, ""), "ts": _us(ns), "args": {"": value}}
            for key, ns, value in zip(keys, times_ns, value.tolist(), strict=True)
        ]


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
