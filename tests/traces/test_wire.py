"""Protobuf's wire format, against bytes written by hand, and packets in other parts."""

import gzip
import json
import random
import zlib

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.traces.export_packets import packets
from madmax_lib.traces.read import wire
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.wire import BYTES, PADDING, Broken, Messages, varints


def messages(*parts):
    """Messages of some bytes, each in a packet of its own."""
    ends = np.cumsum([0, *map(len, parts)])
    bounds = np.stack([ends[:-1], ends[1:]])
    return Messages(b"".join(parts) + PADDING, bounds, np.arange(len(parts)))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("00", 0),
        ("7f", 127),
        ("8001", 128),
        ("ac02", 300),
        ("8080808010", 2**32),
        ("ffffffffffffffff7f", 2**63 - 1),
        ("ffffffffffffffffff01", -1),
        ("80808080808080808001", -(2**63)),
    ],
)
def test_numbers(text, number):
    data = np.frombuffer(b"\x05" + bytes.fromhex(text) + PADDING, dtype=np.uint8)
    values, after = varints(data, np.array([0, 1]))
    assert values.tolist() == [5, number]
    assert after.tolist() == [1, 1 + len(text) // 2]


@pytest.mark.parametrize(
    ("text", "number", "default"),
    [
        ("0805", 5, 7),  # field 1
        ("08050806", 5, 7),  # of two the first
        ("1005", 7, 7),  # field 2 only
        ("0a030102030805", 5, 7),  # packed numbers of field 1 before it
        ("0901000000000000000805", 5, 7),  # eight bytes before it
        ("0d010000000805", 5, 7),  # four bytes before it
        ("f8ffffff0f010805", 5, 7),  # a field of the largest number before it
        ("08ffffffffffffffffff01", -1, 7),
        ("", 7, 7),
    ],
)
def test_a_field(text, number, default):
    read = messages(b"\x08\x02", bytes.fromhex(text), b"")
    assert read.numbers(1, default).tolist() == [2, number, default]


def test_texts_doubles_and_messages_inside():
    first = b"\x0a\x02ab" + b"\x12\x04\x08\x01\x08\x02" + b"\x12\x02\x08\x03"
    read = messages(first, b"", b"\x0a\x02ab" + b"\x19" + np.float64(-1.5).tobytes())
    assert read.strings(1).tolist() == ["ab", "", "ab"]
    assert read.doubles(3).tolist() == [0.0, 0.0, -1.5]
    assert (read.first(1, BYTES) > 0).tolist() == [True, False, True]
    inside = read.inside(2)
    assert inside.numbers(1).tolist() == [1, 3] and inside.outer.tolist() == [0, 0]
    assert inside.only(np.array([False, True])).numbers(1).tolist() == [3]
    assert read.one(2).numbers(1).tolist() == [1, 0, 0]


@pytest.mark.parametrize("text", ["08", "0a05ab", "0b", "0901", "0aff", "08ffff"])
def test_a_message_that_is_cut_is_told_by_its_packet(text):
    with pytest.raises(Broken) as broken:
        messages(b"\x08\x02", bytes.fromhex(text))
    assert broken.value.packet == 1


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Packets of a recording, and its rows when they are read in one piece."""
    folder = tmp_path_factory.mktemp("parts")
    path, *_ = mm.export_trace(mm.read_trace(mm.dataset("gpt-ddp")), folder / "json")
    text = path.read_bytes()
    text = gzip.decompress(text) if path.suffix == ".gz" else text
    parts = list(packets(json.loads(text)))
    whole = folder / "rank0.pftrace"
    whole.write_bytes(b"".join(parts))
    return parts, mm.read_trace(whole).spans


@pytest.mark.parametrize("seed", range(3))
def test_packets_in_other_parts_are_the_same(parts, seed, tmp_path, monkeypatch):
    """Compressed in runs of any length, walked any number abreast."""
    parts, spans = parts
    dice = random.Random(seed)
    monkeypatch.setattr(wire, "_ABREAST", dice.randint(50, 5000))
    cuts = sorted(dice.sample(range(len(parts)), 20))
    data = b""
    for low, high in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        run = b"".join(parts[low:high])
        if dice.random() < 0.5:
            packed = zlib.compress(run)
            run = b"\x92\x03" + length(packed) + packed  # field 50
            run = b"\n" + length(run) + run
        data += run
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(data)
    pd.testing.assert_frame_equal(mm.read_trace(path).spans, spans)


def length(data):
    """A varint of five bytes, the first four of which say that more follow."""
    return bytes([len(data) >> 7 * i & 127 | 128 * (i < 4) for i in range(5)])


@pytest.mark.parametrize(
    "damage", [b"\n\x02\x0b\x00", b"\n\x04\x92\x03\x01x", b"\n\x70"]
)
def test_what_stands_before_damage_is_kept(parts, damage, tmp_path):
    parts, spans = parts
    half = len(parts) // 2
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(b"".join(parts[:half]) + damage + b"".join(parts[half:]))
    with pytest.warns(TraceWarning, match="truncated packets"):
        kept = mm.read_trace(path).spans
    assert 0.3 * len(spans) < len(kept) < 0.8 * len(spans)
    columns = ["name", "start_ns", "dur_ns"]
    before = spans[columns].merge(kept[columns].drop_duplicates(), on=columns)
    assert len(before) >= len(kept)
