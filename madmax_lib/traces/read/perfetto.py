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
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pandas as pd

from madmax_lib.traces.read.events import SOURCE_KEY, NotATrace, RawTrace
from madmax_lib.traces.read.values import Codes, integers, recorded_codes
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
    47: "counter",
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
_NAMES = {"device id": "device", "context id": "context", "stream id": "stream"}


def read_packets(
    raw: RawTrace, data: bytes, keys: tuple[str, ...] | None = None
) -> "Packets":
    """Packets of a file, which fill `raw`; keys: notes to keep, all without.

    Raises NotATrace for bytes that are no packets, and for times of a clock that no
    snapshot explains.
    """
    data += PADDING
    bounds = _bounds(raw, data)
    while True:
        try:
            packets = Messages(data, bounds, np.arange(bounds.shape[1]))
            if not (compressed := packets.first(50, BYTES)).any():
                return Packets(raw, packets, keys)
            data = _unpacked(packets, bounds, compressed)
            bounds = _bounds(raw, data)
        except Broken as broken:  # what came before is kept
            raw.damage = raw.damage or _DAMAGE
            bounds = bounds[:, : broken.packet]


def chrome_lists(raw: RawTrace, data: bytes) -> Iterator[bytes]:
    """Lists of Chrome's events, as text, with the rows and counters of a file.

    Raises as `read_packets` does.
    """
    packets = read_packets(raw, data)
    texts = list(packets.texts)
    threads = list(packets.threads)
    args = [{} for _ in packets.columns["name"]]
    for row, key, value in zip(*map(np.ndarray.tolist, packets.notes), strict=True):
        args[row][texts[key]] = value
    columns = map(np.ndarray.tolist, packets.columns.values())
    events = [
        {
            "ph": "X",
            "ts": _us(start_ns),
            "dur": _us(dur_ns),
            "cat": texts[category],
            "name": texts[name],
            "pid": threads[thread][0],
            "tid": threads[thread][1],
            "args": args[row],
        }
        for row, (start_ns, dur_ns, category, name, thread) in enumerate(
            zip(*columns, strict=True)
        )
    ]
    events += packets.samples
    for low in range(0, len(events), _LINES):
        yield msgspec.json.encode(events[low : low + _LINES])


def _us(ns):
    """Microseconds with all their decimals."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))


def _bounds(raw, data):
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
    # (2 packets,) begins and ends by turns
    return np.array(bounds, dtype="int64").reshape(-1, 2).T


def _unpacked(packets, bounds, compressed):
    """Bytes of a file with compressed packets, fields by packet, in their places."""
    data = packets.data
    ends = [0, *bounds[1].tolist()]
    parts = [data[low:high] for low, high in pairwise(ends)]
    for number in np.flatnonzero(compressed).tolist():
        begin = packets.begin[compressed[number]]
        try:
            parts[number] = zlib.decompress(data[begin : ends[number + 1]])
        except zlib.error:
            raise Broken(number) from None
    return b"".join((*parts, PADDING))


class _Table:
    """Codes that packets give to numbers, in a scope of their own, for those after
    them.
    """

    def __init__(self, scope, number, packet, value):
        self.rows = self._frame(scope, number, packet).assign(value=value)

    def _frame(self, scope, number, packet):
        return pd.DataFrame({"key": scope << 32 | number, "packet": packet})

    def latest(self, scope, number, packet, default):
        """(n,) codes that the last of the packets up to some give."""
        if self.rows.empty:
            return np.broadcast_to(default, len(packet))
        sought = self._frame(scope, number, packet)
        rows = pd.merge_asof(sought, self.rows, on="packet", by="key")
        value = rows["value"].to_numpy()
        return np.where(np.isnan(value), default, value).astype("int64")


class Packets:
    """Slices and render stages of a file, in the order of a Chrome trace.

    columns: arrays (n,), start_ns from the file's own zero, dur_ns, and codes: category
    and name of texts, thread of threads (pid, tid). notes: (notes,) row, key as a code
    of texts, value. samples: events of counters, where all keys are kept.
    """

    def __init__(self, raw: RawTrace, packets: Messages, keys: tuple[str, ...] | None):
        self.packets = packets
        self.keys = keys
        self.texts = Codes()
        self.texts.of([""])  # code 0: no text
        self.threads = Codes()
        self.tracks = packets.inside(60)
        happens = np.any([packets.first(n, BYTES) for n in (11, 52, 53)], axis=0)
        if not (happens.any() or len(self.tracks)):
            text = f"{raw.path}: not a profiler trace (no packets of Perfetto)"
            raise NotATrace(text)
        self._defaults()
        self._interns()
        time_ns = self._times_ns(raw, happens)
        base_ns = 0
        if happens.any():
            base_ns = int(time_ns[happens].min()) // 1000 * 1000
        self.time_ns = time_ns - base_ns
        parts = []  # of notes: packet, key, value
        rows = np.hstack([self._slices(parts), self._stages(parts)])
        packet, dur_ns, category, name, thread = rows
        self.columns = {
            "start_ns": self.time_ns[packet],
            "dur_ns": dur_ns,
            "category": category,
            "name": name,
            "thread": thread,
        }
        # a packet is one row at most
        row = np.full(len(packets), -1)
        row[packet] = np.arange(len(packet))
        packet, key, value = map(np.concatenate, zip(*parts, strict=True))
        has_row = row[packet] >= 0
        self.notes = [row[packet][has_row], key[has_row], value[has_row]]
        # an export keeps the keys beside its events as the name of a track
        names = self.tracks.strings(2)
        export_keys = next((name for name in names if SOURCE_KEY in name), "{}")
        raw.envelope = json.loads(export_keys) | {"baseTimeNanoseconds": base_ns}
        counters = packets.inside(52)
        samples = counters.inside(2)
        raw.events = len(self.columns["name"]) + len(samples)
        self.samples = [] if keys else self._samples(counters, samples)

    def _defaults(self):
        """Clock and track of the packets that name none."""
        packets = self.packets
        defaults = packets.inside(59)
        self.sequence = packets.numbers(10)
        number = np.arange(len(defaults))
        table = _Table(self.sequence[defaults.packet], 0, defaults.packet, number)
        last = table.latest(self.sequence, 0, packets.packet, -1)
        self.clock = np.append(defaults.numbers(58, 6), 6)[last]
        self.track = np.append(defaults.one(11).numbers(11), 0)[last]

    def _interns(self):
        """Tables of texts that packets say by number."""
        packets = self.packets
        resets = (packets.numbers(13) & 1) | packets.numbers(41)
        # (packets,) number of a sequence since it last began its tables anew
        resets_before = pd.Series(resets).groupby(self.sequence).cumsum()
        self.era, _ = pd.factorize(self.sequence << 32 | resets_before.to_numpy())
        self.interned = packets.inside(12)
        self.tables = {}
        for number, name in _TABLES.items():
            entries = self.interned.inside(number)
            value = self._inline(entries, 2, 0)
            if name == "kernel":  # the demangled name, else the other
                value = self._inline(entries, 3, value)
            if name == "counter":
                value = np.arange(len(entries))
            packet = entries.packet
            table = _Table(self.era[packet], entries.numbers(1), packet, value)
            self.tables[name] = table

    def _in_table(self, messages, number, table, default):
        """(n,) what a table of its sequence says of a field's number."""
        packet = messages.packet
        numbers = messages.numbers(number)
        return self.tables[table].latest(self.era[packet], numbers, packet, default)

    def _inline(self, messages, number, default):
        """Codes (n,) of the texts of a field."""
        code, texts = messages.texts(number)
        is_inline = messages.first(number, BYTES) > 0
        return np.where(is_inline, self.texts.of(texts)[code], default)

    def _named(self, messages, inline, number, table, default=0):
        """Codes (n,) of texts, in one field, or in a table by another."""
        codes = self._in_table(messages, number, table, default)
        return self._inline(messages, inline, codes)

    def _renamed(self, codes, rename):
        """Codes (n,) of other names for some texts."""
        return self.texts.of(list(map(rename, self.texts)))[codes]

    def _wanted(self, codes):
        """(n,) whether keys are to be kept."""
        wanted = [self.keys is None or text in self.keys for text in self.texts]
        return np.array(wanted)[codes]

    def _strings(self):
        return np.array(list(self.texts), dtype=object)

    def _times_ns(self, raw, happens):
        """Time (packets,) of each; happens: where it is asked for."""
        value = self.packets.numbers(8)
        clock = self.packets.numbers(58, self.clock)
        rows = np.flatnonzero((clock >= _OWN_CLOCKS) & happens)
        if not len(rows):
            return value
        snapshots = self.packets.inside(6)
        clocks = snapshots.inside(1)
        number = clocks.numbers(1)
        at = clocks.numbers(2)
        is_primary = number == snapshots.numbers(2, 6)[clocks.outer]
        # ns of the primary clock by snapshot, -1 where it is not in it
        primary_ns = np.full(len(snapshots), -1)
        primary_ns[clocks.outer[is_primary]] = at[is_primary]
        at_ns = np.append(primary_ns[clocks.outer], -1)
        sequence = self.sequence[clocks.packet]
        table = _Table(sequence, number, clocks.packet, np.arange(len(clocks)))
        row = table.latest(self.sequence[rows], clock[rows], rows, -1)
        if len(unknown := clock[rows][at_ns[row] < 0]):
            raise NotATrace(f"{raw.path}: no snapshot explains clock {unknown[0]}")
        # each time of such a clock counts from the one before it
        steps = clocks.numbers(3)[row] > 0
        since_ns = (value[rows] - np.where(steps, 0, at[row])) * clocks.numbers(4, 1)[
            row
        ]
        summed_ns = pd.Series(since_ns).groupby(row).cumsum()
        value[rows] = at_ns[row] + np.where(steps, summed_ns, since_ns)
        return value

    def _slices(self, notes):
        """(5, n) packet, duration, category, name and thread of slices."""
        events = self.packets.one(11)
        track = events.numbers(11, self.track)
        kind = events.numbers(9)
        marks = np.flatnonzero((kind == _BEGIN) | (kind == _END))
        begins, ends = _pairs(kind[marks], track[marks], self.time_ns[marks])
        begins, ends = marks[begins], marks[ends]
        dur_ns = np.maximum(self.time_ns[ends] - self.time_ns[begins], 0)
        code, tracks = pd.factorize(track[begins])
        threads, on_gpu = self._threads(tracks)
        name = self._named(events, 23, 10, "name")[begins]
        category = self._named(events, 22, 3, "category")[begins]
        # a name tells its category on a stream of a GPU where none is written
        categories = STAGES | dict.fromkeys(
            recorded_codes("wait").values(), "cuda_sync"
        )
        of_name = self._renamed(name, lambda text: categories.get(text, "kernel"))
        unlabelled = np.where(on_gpu[code], of_name, self.texts["cpu_op"])
        category = np.where(category > 0, category, unlabelled)
        annotations = events.inside(4)
        key = self._named(annotations, 10, 1, "note")
        wanted = self._wanted(key)
        annotations = annotations.only(wanted)
        notes.append([annotations.packet, key[wanted], self._values(annotations)])
        return np.stack([begins, dur_ns, category, name, threads[code]])

    def _threads(self, numbers):
        """Codes (n,) of the threads of tracks, and whether they are a GPU's streams."""
        tracks = self.tracks
        number = tracks.numbers(1)
        row_of = {each: row for row, each in enumerate(number.tolist())}
        process = tracks.one(3)
        thread = tracks.one(4)
        # a track is of its own process, else of its parent's
        holder = np.where(tracks.first(3, BYTES), number, tracks.numbers(5)).tolist()
        holder = [row_of.get(each, row) for row, each in enumerate(holder)]
        pid = thread.numbers(1, process.numbers(1)[holder])
        tid = thread.numbers(2, number)
        tid = np.where(tid == _NO_STREAM, 1, tid)  # as in cuspy's JSON
        on_gpu = [name.startswith("GPU ") for name in process.strings(6)[holder]]
        about = zip(pid.tolist(), tid.tolist(), on_gpu, strict=True)
        about = dict(zip(number.tolist(), about, strict=True))
        rows = [about.get(each, (0, each, False)) for each in numbers.tolist()]
        # numbers of tracks have no sign
        threads = self.threads.of([(pid, tid % 2**64) for pid, tid, _ in rows])
        return threads, np.array([on_gpu for _, _, on_gpu in rows], dtype=bool)

    def _stages(self, notes):
        """(5, n) packet, duration, category, name and thread of render stages."""
        stages = self.packets.inside(53)
        kind = self._in_table(stages, 14, "stage", self.texts["Kernel"])
        kernel = self._in_table(stages, 19, "kernel", kind)
        name = self._named(stages, 17, 20, "name", kernel)
        category = self._renamed(kind, lambda text: STAGES.get(text, "kernel"))
        # a lane that names no stream is of the stream in extra data
        lane = self._in_table(stages, 13, "stage", self.texts["0"])
        stream_of_lane = self._renamed(lane, lambda text: f"0 {text}".split()[-1])
        stream = self._strings()[stream_of_lane]
        of_stage = np.full(len(stages), self.texts["stream"])
        notes.append([stages.packet, of_stage, stream])
        extra = stages.inside(6)
        key = self._inline(extra, 1, 0)
        key = self._renamed(key, lambda text: _NAMES.get(text, text))
        wanted = self._wanted(key)
        extra = extra.only(wanted)
        key = key[wanted]
        value = extra.strings(2)
        notes.append([extra.packet, key, value])
        is_stream = key == self.texts["stream"]
        stream[extra.outer[is_stream]] = value[is_stream]
        tid = integers(stream.tolist())
        tid = np.where(tid < 0, stages.numbers(13), tid)
        threads = list(zip(stages.numbers(11).tolist(), tid.tolist(), strict=True))
        dur_ns = np.maximum(stages.numbers(2), 0)
        thread = self.threads.of(threads)
        return np.stack([stages.packet, dur_ns, category, name, thread])

    def _values(self, notes):
        """Values (n,) of debug annotations."""
        values = np.zeros(len(notes), dtype=object)
        kinds = {
            (2, 0): notes.numbers(2) > 0,
            (3, 0): notes.numbers(3),
            (4, 0): notes.numbers(4),
            (5, FIXED): notes.doubles(5),
            (6, BYTES): notes.strings(6),
            (7, 0): notes.numbers(7),
            (17, 0): self._strings()[self._in_table(notes, 17, "text", 0)],
        }
        for field, of_kind in kinds.items():
            rows = np.flatnonzero(notes.first(*field))
            values[rows] = of_kind[rows]
        for number in (11, 12):
            entries = notes.inside(number)
            if not len(entries):
                continue
            code = self._named(entries, 10, 1, "note")
            inner = self._values(entries)
            pairs = defaultdict(list)
            outer = entries.outer.tolist()
            for note, *pair in zip(outer, self._strings()[code], inner, strict=True):
                pairs[note].append(pair)
            for note, each in pairs.items():
                values[note] = dict(each) if number == 11 else [v for _, v in each]
        return values

    def _samples(self, counters, samples):
        # descriptors of tables count from 0 up, those of events from -1 down
        inline = -1 - np.arange(len(counters))
        number = self._in_table(counters, 4, "counter", inline)
        in_table = self.interned.inside(47).one(2).inside(1)
        in_event = counters.one(1).inside(1)
        names = {}
        for specs, of in (
            (in_table, in_table.outer),
            (in_event, -1 - in_event.outer),
        ):
            keys = zip(of, specs.numbers(1), strict=True)
            names |= zip(keys, specs.strings(2), strict=True)
        value = np.where(samples.first(2), samples.numbers(2), samples.doubles(3))
        keys = zip(number[samples.outer], samples.numbers(1), strict=True)
        times_ns = self.time_ns[samples.packet].tolist()
        return [
            {"ph": "C", "name": names.get(key, ""), "ts": _us(ns), "args": {"": value}}
            for key, ns, value in zip(keys, times_ns, value.tolist(), strict=True)
        ]


def _pairs(kind, track, time_ns):
    """Beginnings of slices and their ends.

    A block of beginnings and an equally long one of ends on the same tracks belong
    together in order, as cuspy writes them; else the last that began on a track ends.
    """
    # (marks,) blocks of one kind that follow each other
    block = np.cumsum(np.diff(kind, prepend=0) != 0)
    length = np.bincount(block)[block]
    # the one as many further on as the block is long
    partner = np.minimum(np.arange(len(kind)) + length, len(kind) - 1)
    is_paired = (kind == _BEGIN) & (kind[partner] == _END)
    is_paired &= (track == track[partner]) & (length == length[partner])
    begins = np.flatnonzero(pd.Series(is_paired).groupby(block).transform("all"))
    ends = partner[begins]
    loose = np.delete(np.arange(len(kind)), np.append(begins, ends))
    order = loose[np.lexsort((kind[loose] == _BEGIN, time_ns[loose]))]
    pairs = []
    open_marks = defaultdict(list)
    for mark, of_track, begin in zip(
        order.tolist(), track[order].tolist(), kind[order] == _BEGIN, strict=True
    ):
        if begin:
            open_marks[of_track].append(mark)
        elif open_marks[of_track]:
            pairs.append((open_marks[of_track].pop(), mark))
    # (pairs, 2), also where there are none
    more = np.array(pairs, dtype="int64").reshape(-1, 2)
    return np.append(begins, more[:, 0]), np.append(ends, more[:, 1])
