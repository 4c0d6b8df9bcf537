"""An exported trace as Perfetto's packets (`.pftrace`): host rows as slices of their
threads, device rows as render stages, each with its args.

Format and numbers of fields: google/perfetto protos/perfetto/trace, as `read.perfetto`
reads them.
"""

import json
import struct
from collections.abc import Iterator

from madmax_lib.traces.read.perfetto import STAGES

_SEQUENCE = (10, 1)  # all packets are of one sequence


def packets(content: dict) -> Iterator[bytes]:
    """Packets of the content of a Chrome trace, its envelope as the name of a track.

    Raises ValueError for times before 0, which packets do not have.
    """
    events = content.pop("traceEvents")
    base_ns = content["baseTimeNanoseconds"]
    if base_ns < 0:
        raise ValueError("spans start before 0 ns; packets cannot hold them")
    yield _packet((60, message((1, 1), (2, json.dumps(content)))))
    stages = {category: number for number, category in enumerate(STAGES.values(), 1)}
    names = [(24, message((1, n), (2, name))) for n, name in enumerate(STAGES, 1)]
    yield _packet(_SEQUENCE, (13, 1), (12, message(*names)))
    tracks = {}
    for event in events:
        if event["ph"] != "X":
            continue
        # in a file times are us
        begin_ns = base_ns + round(event["ts"] * 1000)
        dur_ns = round(event["dur"] * 1000)
        args = event["args"]
        if number := stages.get(event["cat"]):
            extra = {"stream id": event["tid"], **args}
            stage = message(
                (2, dur_ns),
                (14, number),
                (17, event["name"]),
                *((6, message((1, k), (2, str(v)))) for k, v in extra.items()),
            )
            yield _packet(_SEQUENCE, (8, begin_ns), (53, stage))
            continue
        thread = (event["pid"], event["tid"])
        if thread not in tracks:
            tracks[thread] = len(tracks) + 2
            about = message((1, thread[0]), (2, thread[1]))
            yield _packet((60, message((1, tracks[thread]), (4, about))))
        track = (11, tracks[thread])
        begin = message(
            (9, 1),
            track,
            (22, event["cat"]),
            (23, event["name"]),
            *((4, _note(value, (10, key))) for key, value in args.items()),
        )
        end = message((9, 2), track)
        yield _packet(_SEQUENCE, (8, begin_ns), (11, begin))
        yield _packet(_SEQUENCE, (8, begin_ns + dur_ns), (11, end))


def _packet(*fields):
    return message((1, message(*fields)))


def _note(value, *name):
    """A debug annotation."""
    if isinstance(value, list):
        return message(*name, *((12, _note(each)) for each in value))
    number = {str: 6, float: 5, int: 4, bool: 2}[type(value)]
    return message(*name, (number, value))


def message(*fields: tuple) -> bytes:
    """Bytes of a message's numbered values."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value % 2**64))
        elif isinstance(value, float):
            parts.append(varint(number << 3 | 1) + struct.pack("<d", value))
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(varint(number << 3 | 2) + varint(len(data)) + data)
    return b"".join(parts)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have the eighth set."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
