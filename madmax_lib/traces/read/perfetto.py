"""Perfetto's packets (`.pftrace`, as torch's cuspy writes them) as the text of a Chrome
trace, so that one reader knows what rows mean.

Slices of threads become host rows, render stages the device's, counter events counters.
Format: protobuf, google/perfetto protos/perfetto/trace; numbers of fields stand beside
their names here.
"""

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from madmax_lib.traces.read.events import SOURCE_KEY, NotATrace, RawTrace

_BEGIN = 1  # types of track events
_END = 2
_OWN_CLOCKS = 64  # numbers of clocks from here on belong to one sequence
_NO_STREAM = 2**31 - 1  # thread of waits for a whole device
_LINES = 4000  # events of a block of text
_MOST_NOTES = 1 << 15  # whose text is kept
_PACKET = 10  # first byte of one: field 1, of bytes
_BYTES = 2  # wire type of texts and messages
_EVENTS = {8, 10, 11, 13, 52, 53, 58}  # fields of packets that say nothing about others
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

Message = dict[int, list]


def is_perfetto(text: bytes) -> bool:
    """Whether a file begins with a packet: field 1, length-delimited, of a Trace."""
    return text[:1] == b"\n" and text.lstrip()[:1] not in (b"{", b"[", b"")


def chrome_text(raw: RawTrace, data: bytes) -> Iterator[bytes]:
    """Text of a Chrome trace with the events of a file's packets, in blocks.

    Raises NotATrace for bytes that are no packets, and for times of a clock that no
    snapshot explains.
    """
    trace = _Packets(str(raw.path))
    try:
        trace.read(data)
    except (IndexError, UnicodeDecodeError, zlib.error):
        raw.damage = raw.damage or "truncated packets"  # what came before is kept
    if not (trace.times or trace.tracks):
        raise NotATrace(f"{raw.path}: not a profiler trace (no packets of Perfetto)")
    base_ns = min(trace.times, default=0) // 1000 * 1000
    # an export keeps the keys beside its events as the name of a track
    names = (_text(track, 2, "") for track in trace.tracks.values())
    envelope = json.loads(next((name for name in names if SOURCE_KEY in name), "{}"))
    keys = {**envelope, "baseTimeNanoseconds": base_ns, "traceEvents": []}
    yield json.dumps(keys)[:-2].encode()
    separator = ""
    lines = []
    for line in trace.lines(base_ns):
        lines.append(line)
        if len(lines) == _LINES:
            yield (separator + ",\n".join(lines)).encode()
            separator, lines = ",\n", []
    yield ((separator if lines else "") + ",\n".join(lines) + "]}").encode()


class _Packets:
    """State of a file while its packets are read in order."""

    def __init__(self, path):
        self.path = path
        self.times: list[int] = []
        self.interned = defaultdict(lambda: defaultdict(dict))  # by sequence
        self.defaults: dict[int, Message] = {}  # of packets, by sequence
        self.clocks: dict[tuple[int, int], list[int]] = {}
        self.tracks: dict[int, Message] = {}
        # type, track, time, name, category and args of slices: plain tuples of plain
        # values are no garbage to look for, as are texts
        self.marks: list[tuple] = []
        # start, duration and text of device rows and counters
        self.rows: list[tuple[int, int | None, str]] = []

    def read(self, data):
        """Take the packets of a Trace, or of a compressed part of one."""
        at = 0
        while at < len(data):
            if data[at] != _PACKET:
                raise IndexError("a field that is not a packet")
            length, at = _varint(data, at + 1)
            packet = data[at : at + length]
            if len(packet) < length:
                raise IndexError("a cut packet")
            self._packet(_once(packet))
            at += length

    def _packet(self, packet):
        sequence = _first(packet, 10, 0)
        if not packet.keys() <= _EVENTS or _first(packet, 13, 0) & 1:
            self._state(packet, sequence)
        if not packet.keys() & {11, 52, 53}:
            return
        names = self.interned[sequence]
        ts_ns = self._time_ns(packet, sequence)
        self.times.append(ts_ns)
        for event in packet.get(11, []):
            self._track_event(_message(event), ts_ns, sequence)
        for event in packet.get(53, []):
            stage = _once(event)
            self.rows.append((ts_ns, _first(stage, 2, 0), _stage_line(stage, names)))
        for event in packet.get(52, []):
            self.rows += [(ts_ns, None, line) for line in _counters(event, names)]

    def _state(self, packet, sequence):
        """Take what a packet says about others."""
        if _first(packet, 13, 0) & 1 or _first(packet, 41, 0):
            self.interned.pop(sequence, None)
        if defaults := packet.get(59):
            self.defaults[sequence] = _message(defaults[0])
        for snapshot in packet.get(6, []):
            self._snapshot(_message(snapshot), sequence)
        for table in packet.get(12, []):
            _intern(_message(table), self.interned[sequence])
        for descriptor in packet.get(60, []):
            track = _message(descriptor)
            self.tracks[_first(track, 1, 0)] = track
        for part in packet.get(50, []):
            self.read(zlib.decompress(part))

    def _snapshot(self, snapshot, sequence):
        clocks = [_message(clock) for clock in snapshot.get(1, [])]
        primary = _first(snapshot, 2, 6)
        at = {_first(clock, 1, 0): _first(clock, 2, 0) for clock in clocks}
        for clock in clocks:
            number = _first(clock, 1, 0)
            if number >= _OWN_CLOCKS and primary in at:
                unit_ns, steps = _first(clock, 4, 1), _first(clock, 3, 0)
                # [value that the clock had, ns at it, ns of a unit, is_incremental]
                self.clocks[sequence, number] = [
                    0 if steps else at[number],
                    at[primary],
                    unit_ns,
                    steps,
                ]

    def _time_ns(self, packet, sequence):
        value = _first(packet, 8, 0)
        default = _first(self.defaults.get(sequence, {}), 58, 6)
        number = _first(packet, 58, default)
        if number < _OWN_CLOCKS:
            return value
        clock = self.clocks.get((sequence, number))
        if clock is None:
            raise NotATrace(f"{self.path}: no snapshot explains clock {number}")
        ts_ns = clock[1] + (value - clock[0]) * clock[2]
        if clock[3]:  # each time counts from the one before it
            clock[1] = ts_ns
        return ts_ns

    def _track_event(self, event, ts_ns, sequence):
        names = self.interned[sequence]
        if 11 not in event:  # the track of its sequence
            default = _message(_first(self.defaults.get(sequence, {}), 11, b""))
            event = default | event
        track = _first(event, 11, 0)
        kind = _first(event, 9, 0)
        if kind == _END:  # which names nothing
            self.marks.append((kind, track, ts_ns, "", "", ""))
        if kind != _BEGIN:
            return
        name = _text(event, 23, names["name"].get(_first(event, 10, 0), ""))
        category = names["category"].get(_first(event, 3, 0), "")
        category = _text(event, 22, category)
        notes = names["noted"]
        if len(notes) > _MOST_NOTES:
            notes.clear()
        texts = []
        for note in event.get(4, []):
            if note not in notes:
                notes[note] = ": ".join(_note(note, names))
            texts.append(notes[note])
        self.marks.append((kind, track, ts_ns, name, category, ", ".join(texts)))

    def lines(self, base_ns):
        """The events as lines of JSON."""
        thread_of = lru_cache(self._thread)  # few threads have many slices
        for (_, track, ts_ns, name, category, args), end_ns in _pairs(self.marks):
            thread, on_gpu = thread_of(track)
            # a name tells its category on a stream of a GPU where none is written
            unlabelled = _UNLABELLED.get(name, "kernel") if on_gpu else "cpu_op"
            text = _line(category or unlabelled, name, thread, args)
            yield _timed(text, ts_ns - base_ns, end_ns - ts_ns)
        for ts_ns, dur_ns, text in self.rows:
            yield _timed(text, ts_ns - base_ns, dur_ns)

    def _thread(self, number):
        """(pid, tid) of a track, and whether it is a stream of a GPU."""
        track = self.tracks.get(number, {})
        parent = self.tracks.get(_first(track, 5, 0), {})
        thread = _message(_first(track, 4, b""))
        process = _message(_first(track, 3, _first(parent, 3, b"")))
        pid = _first(thread, 1, _first(process, 1, 0))
        tid = _first(thread, 2, number)
        tid = 1 if tid == _NO_STREAM else tid  # as in cuspy's JSON
        return (pid, tid), _text(process, 6, "").startswith("GPU ")


def _pairs(marks):
    """Slices and their ends, in the order of their beginnings.

    A block of beginnings and an equally long one of ends on the same tracks belong
    together in order, as cuspy writes them; else the last that began on a track ends.
    """
    blocks = [
        (kind, list(rows)) for kind, rows in groupby(marks, key=lambda mark: mark[0])
    ]
    loose = []
    number = 0
    while number < len(blocks):
        kind, rows = blocks[number]
        ends = blocks[number + 1][1] if number + 1 < len(blocks) else []
        together = [track for _, track, *_ in rows] == [track for _, track, *_ in ends]
        if kind == _BEGIN and together:
            yield from zip(rows, [ts_ns for _, _, ts_ns, *_ in ends], strict=True)
            number += 2
            continue
        loose += [(row[2], kind == _BEGIN, row) for row in rows]
        number += 1
    open_rows = defaultdict(list)
    for ts_ns, begins, row in sorted(loose, key=lambda mark: mark[:2]):
        track = row[1]
        if begins:
            open_rows[track].append(row)
        elif open_rows[track]:
            yield open_rows[track].pop(), ts_ns


def _stage_line(stage, names):
    """A row of the device."""
    kind = names["stage"].get(_first(stage, 14, 0), "Kernel")
    name = names["kernel"].get(_first(stage, 19, 0), kind)
    name = _text(stage, 17, names["name"].get(_first(stage, 20, 0), name))
    pairs = (_message(extra) for extra in stage.get(6, []))
    extra = {_text(pair, 1, ""): _text(pair, 2, "") for pair in pairs}
    # a lane that names no stream is of the stream in extra_data
    lane = names["stage"].get(_first(stage, 13, 0), "0").split()[-1]
    stream = extra.get("stream id", lane)
    values = {_NAMES.get(key, key): value for key, value in extra.items()}
    args = json.dumps(values | {"stream": stream})[1:-1]
    tid = int(stream) if stream.isdigit() else _first(stage, 13, 0)
    return _line(STAGES.get(kind, "kernel"), name, (_first(stage, 11, 0), tid), args)


def _counters(data, names):
    """Texts of the counters of an event."""
    event = _once(data)
    inline = {"specs": _specs(_message(_first(event, 1, b""))), "gpu": 0}
    described = names["counter"].get(_first(event, 4, 0), inline)
    gpu = _first(event, 3, described["gpu"])
    for counter in map(_message, event.get(2, [])):
        name = described["specs"].get(_first(counter, 1, 0), "")
        value = _first(counter, 2, None)
        value = _double(_first(counter, 3, b"")) if value is None else value
        text = f'"ph": "C", "name": {_json(name)}, "pid": "GPU {gpu} Counters"'
        yield f'{text}, "args": {{"": {value}}}'


def _line(category, name, thread, args):
    """A line of the Chrome trace without its times; args: members of a JSON object."""
    text = f'"ph": "X", "cat": {_json(category)}, "name": {_json(name)}'
    return f'{text}, "pid": {thread[0]}, "tid": {thread[1]}, "args": {{{args}}}'


def _timed(text, ts_ns, dur_ns):
    """A line with its times; a counter has no duration."""
    dur = "" if dur_ns is None else f', "dur": {_us(max(dur_ns, 0))}'
    return f'{{{text}, "ts": {_us(ts_ns)}{dur}}}'


def _us(ns):
    return f"{ns // 1000}.{ns % 1000:03d}"


def _intern(data, names):
    """Enter the tables of a packet into those of its sequence."""
    names["noted"].clear()  # texts of notes by their bytes
    for field, table in _TABLES.items():
        for entry in map(_message, data.get(field, [])):
            names[table][_first(entry, 1, 0)] = _text(entry, 2, "")
    for entry in map(_message, data.get(1000, [])):
        # the demangled name, else the other
        names["kernel"][_first(entry, 1, 0)] = _text(entry, 3, _text(entry, 2, ""))
    for entry in map(_message, data.get(47, [])):
        specs = _specs(_message(_first(entry, 2, b"")))
        gpu = _first(entry, 3, 0)
        names["counter"][_first(entry, 1, 0)] = {"specs": specs, "gpu": gpu}


def _specs(descriptor):
    """Names of counters by number."""
    specs = map(_message, descriptor.get(1, []))
    return {_first(spec, 1, 0): _text(spec, 2, "") for spec in specs}


def _note(data, names):
    """Key and value of a debug annotation, as JSON."""
    note = _message(data)
    key = _text(note, 10, names["note"].get(_first(note, 1, 0), ""))
    return _json(key), _value(note, names)


def _value(note, names):
    if 12 in note:
        values = (_value(_message(each), names) for each in note[12])
        return f"[{', '.join(values)}]"
    if 11 in note:
        pairs = (_note(each, names) for each in note[11])
        return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"
    if 6 in note or 17 in note:
        return _json(_text(note, 6, names["text"].get(_first(note, 17, 0), "")))
    if 5 in note:
        return json.dumps(_double(note[5][0]))
    if 4 in note:  # int64: two's complement
        value = note[4][0]
        return str(value - 2**64 if value >= 2**63 else value)
    if 2 in note:
        return "true" if note[2][0] else "false"
    return str(_first(note, 3, _first(note, 7, 0)))


def _first(message, field, default):
    return message[field][0] if field in message else default


def _text(message, field, default):
    return message[field][0].decode() if field in message else default


def _double(data):
    return struct.unpack("<d", data)[0] if data else 0.0


def _once(data):
    """Values of a message's fields, in order."""
    values: Message = {}
    at = 0
    end = len(data)
    # most numbers are short and need no call
    while at < end:
        key = data[at]
        at += 1
        if key > 127:
            key, at = _varint(data, at - 1)
        wire = key & 7
        if wire in (0, _BYTES):
            value = data[at]
            at += 1
            if value > 127:
                value, at = _varint(data, at - 1)
        else:
            value = {1: 8, 5: 4}.get(wire, end)
        if wire:
            begin = at
            at += value
            if at > end:
                raise IndexError("a cut or unknown field")
            value = data[begin:at]
        field = key >> 3
        if field in values:
            values[field].append(value)
        else:
            values[field] = [value]
    return values


# annotations and ends of slices repeat, packets do not
_message = lru_cache(maxsize=1 << 12)(_once)
_json = lru_cache(maxsize=1 << 15)(json.dumps)  # of texts


def _varint(data, at):
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
