"""Bytes in, events out: every form of file reads the same, and damage costs no more
than what it touches.
"""

import gzip
import json
import random
import re
import warnings
import zlib
from decimal import Decimal
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from madmax_lib.catalog.datasets import dataset
from madmax_lib.traces.read import chrome
from madmax_lib.traces.read.chrome import decode_pieces
from madmax_lib.traces.read.event_columns import complete
from madmax_lib.traces.read.events import Event, RawTrace, TraceWarning

WHOLE = chrome._BLOCK
BLOCKS = (3, 60, 200, 1000, WHOLE)
NAMES = ["a", "x},{y", "p]}", "},\n  {", '"traceEvents": [', "C:\\new\\x", 'say "hi"', "é 核 🚀", "tab\tand\nline"]  # fmt: skip
DEVICES = [{"id": 0, "name": "GPU"}, {"id": 1, "name": "GPU"}]


USUAL = {"ph": "X", "cat": "kernel", "name": "", "pid": 0, "tid": 7, "ts": 0, "dur": 4}
ARGS = {"stream": 7, "grid": [1, 2], "inputs": [{"shape": [2]}, {"shape": []}]}
ARGS |= {"note": "]}, {"}


def event(number: int, name: str = "", **changes) -> dict:
    row = {"name": name or f"k{number}", "ts": 10 * number, "args": ARGS}
    return USUAL | row | changes


EVENTS = [event(i, name) for i, name in enumerate(NAMES)]
FOUR = [event(i) for i in range(4)]


def read(path: Path, block: int = WHOLE, exact=False) -> tuple[list[Event], RawTrace]:
    trace = RawTrace(path)
    with patch.object(chrome, "_BLOCK", block):
        pieces = decode_pieces(trace, exact=exact)
        return [row for piece in pieces for row in piece], trace


FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")


def fields(rows: list) -> list[tuple]:
    return [tuple(getattr(row, field) for field in FIELDS) for row in rows]


def told(rows: list) -> list[tuple]:
    return [(row.name, row.ts, row.args.stream) for row in rows]


def names_of(rows: list) -> list[str]:
    return [row.name for row in rows]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def warned(trace: RawTrace) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace.warn_of_loss()
    said = [str(warning.message) for warning in caught]
    assert {warning.category for warning in caught} <= {TraceWarning}
    assert all(text.startswith(str(trace.path)) for text in said)
    return "; ".join(said)


def in_members(text: bytes, count: int) -> bytes:
    size = -(-len(text) // count)
    parts = (text[at : at + size] for at in range(0, len(text), size))
    return b"".join(map(gzip.compress, parts))


ENVELOPE = {"schemaVersion": 1, "note": "the traceEvents: [ follow"}
OBJECT = ENVELOPE | {"traceEvents": EVENTS, "deviceProperties": DEVICES}
ENVELOPE |= {"deviceProperties": DEVICES}
TEXT = json.dumps(OBJECT).encode()
LIST = b",\n  ".join(json.dumps(event, indent=4).encode() for event in EVENTS)
NATIVE = json.dumps({**OBJECT, "traceEvents": 0}).encode()
WITHIN = b'\n  "traceEvents": [\n  ' + LIST + b"\n  ]"
NATIVE = NATIVE.replace(b'"traceEvents": 0', WITHIN)
REVERSED = {key: OBJECT[key] for key in reversed(OBJECT)}
FORMS = {
    "plain.json": TEXT,
    "gzip.json": gzip.compress(TEXT),
    "plain.json.gz": TEXT,
    "gzip.json.gz": gzip.compress(TEXT),
    "two members.gz": in_members(TEXT, 2),
    "many members.gz": in_members(TEXT, 50),
    "padded.gz": gzip.compress(TEXT) + bytes(512),
    "byte order mark.json": b"\xef\xbb\xbf" + TEXT,
    "byte order mark.gz": gzip.compress(b"\xef\xbb\xbf" + TEXT),
    "white space.json": b"\r\n " + TEXT + b"\n\n",
    "pretty.json": json.dumps(OBJECT, indent=2, ensure_ascii=False).encode(),
    "minified.json": json.dumps(OBJECT, separators=(",", ":")).encode(),
    "kineto.json": NATIVE,
    "reordered.json": json.dumps(REVERSED, sort_keys=True).encode(),
    "events first.json": json.dumps({"traceEvents": EVENTS} | OBJECT).encode(),
    "events last.json": json.dumps(ENVELOPE | {"traceEvents": EVENTS}).encode(),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_the_same(tmp_path, form, block):
    rows, trace = read(write(tmp_path / form, FORMS[form]), block)
    assert told(rows) == [(e["name"], e["ts"], 7) for e in EVENTS]
    assert trace.envelope == ENVELOPE
    assert (trace.events, trace.skipped, warned(trace)) == (len(EVENTS), 0, "")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_needs_no_envelope(tmp_path, indent, block):
    path = write(tmp_path / "list.json", json.dumps(EVENTS, indent=indent))
    rows, trace = read(path, block)
    assert names_of(rows) == NAMES
    assert (trace.envelope, warned(trace)) == ({}, "")


HEADS = [
    r'"note": "\"traceEvents\": [ {}, {} ]"',
    '"nested": {"traceEvents": [{"name": "no"}, {"name": "no"}]}',
    '"list": ["traceEvents", {"traceEvents": []}], "traceEventsCount": [4]',
]


@pytest.mark.parametrize("head", HEADS)
def test_the_key_is_found_behind_its_own_name(tmp_path, head):
    text = f'{{{head}, "traceEvents"\n:\n[{json.dumps(event(1))}]}}'
    rows, _ = read(write(tmp_path / "t.json", text))
    assert names_of(rows) == ["k1"]


def test_a_member_may_start_with_the_last_byte_of_a_read(tmp_path):
    def stored(length: int) -> bytes:
        return gzip.compress(b'{"pad": "' + b"x" * length + b'", ', 0)

    length = (1 << 20) - 1 - (len(stored(1 << 20)) - (1 << 20))
    rest = gzip.compress(json.dumps({"traceEvents": FOUR}).encode()[1:])
    path = write(tmp_path / "t.gz", stored(length) + rest)
    assert path.read_bytes()[(1 << 20) - 1 :].startswith(b"\x1f\x8b")
    assert len(read(path)[0]) == 4


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
TRICKY = (
    st.text(max_size=12)
    | st.text('{}[]",:\\ \n', max_size=12)
    | st.sampled_from([*NAMES, "}", "{", '"}]', "\\"])
)


STYLES = {"ensure_ascii": st.booleans(), "sort_keys": st.booleans()}


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    names=st.lists(TRICKY, min_size=1, max_size=8),
    extra=st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    block=st.integers(3, 400),
    style=st.fixed_dictionaries(STYLES | {"indent": st.sampled_from([None, 0, 2])}),
    packed=st.booleans(),
)
def test_any_block_size_gives_the_same_events(
    tmp_path_factory, names, extra, block, style, packed
):
    numbered = list(enumerate(names))
    rows = [event(i, args={**extra, "stream": i}) | {"name": n} for i, n in numbered]
    beside = {"before": extra, "later": [extra, extra], "zlast": names}
    document = {"before": extra, "traceEvents": rows} | beside
    text = json.dumps(document, **style).encode()
    text = gzip.compress(text) if packed else text
    path = write(tmp_path_factory.getbasetemp() / "any.json", text)
    found, trace = read(path, block)
    assert told(found) == [(name, 10 * i, i) for i, name in numbered]
    assert trace.envelope == beside
    assert fields(found) == fields(read(path)[0]) and warned(trace) == ""


@pytest.mark.parametrize("name", ["vit-ddp", "gpt-fsdp"])
def test_the_quick_decoder_sees_complete_events_as_the_general_one_does(name):
    for path in sorted(dataset(name).glob("*.json.gz")):
        quick, general = (
            [row for piece in pieces for row in complete(piece)]
            for pieces in (
                decode_pieces(RawTrace(path)),
                decode_pieces(RawTrace(path), event=Event),
            )
        )
        assert len(quick) > 100 and fields(quick) == fields(general)


@pytest.mark.parametrize("change", [{"ph": "?"}, {"ph": None}, {"args": 3}, {"ph": 7}])
def test_an_event_of_unknown_form_does_not_hide_its_neighbours(tmp_path, change):
    events = [*FOUR[:2], FOUR[2] | change, *FOUR[3:]] * 2000
    rows, _ = read(write(tmp_path / "t.json", json.dumps(events)), 1000)
    assert sum(row.dur is not None and row.ph == "X" for row in rows) == 6000


@pytest.mark.parametrize(("exact", "kind"), [(False, float), (True, Decimal)])
def test_decimals_are_kept_on_request(tmp_path, exact, kind):
    text = '[{"ph": "X", "ts": 1712102341234567.891, "dur": 3, "name": "1.5"}]'
    (row,), _ = read(write(tmp_path / "t.json", text), exact=exact)
    assert type(row.ts) is kind and type(row.dur) is int and row.name == "1.5"
    assert row.ts == kind("1712102341234567.891")


def expected_cut(ends: list[int], starts: list[int], cut: int) -> tuple[int, int]:
    """How many events are complete before a cut, and how many bytes of the next one
    have begun.
    """
    kept = sum(end <= cut for end in ends)
    return kept, max(0, cut - starts[kept]) if kept < len(starts) else 0


def spots(text: bytes) -> tuple[list[int], list[int]]:
    starts = [match.start() for match in re.finditer(rb'\{\s*"ph"', text)]
    decode = json.JSONDecoder().raw_decode
    return starts, [start + decode(text[start:].decode())[1] for start in starts]


LOST = "kept {} complete events, lost the last {} bytes read and all that should follow"


@pytest.mark.parametrize("block", [60, WHOLE])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_cut_at_any_byte_keeps_all_complete_events(tmp_path, indent, block):
    document = {"a": 1, "traceEvents": FOUR[:3], "deviceProperties": DEVICES}
    text = json.dumps(document, indent=indent).encode()
    starts, ends = spots(text)
    list_end = text.index(b"]", ends[-1]) + 1
    for cut in range(text.index(b"[") + 1, len(text)):
        rows, trace = read(write(tmp_path / "t.json", text[:cut]), block)
        kept, begun = expected_cut(ends, starts, cut)
        tail = len(text[list_end:cut].strip().lstrip(b","))
        assert names_of(rows) == [f"k{i}" for i in range(kept)], text[:cut]
        assert trace.skipped == 0
        if cut < list_end or tail:
            said = warned(trace)
            assert "truncated JSON" in said, text[:cut]
            assert said.endswith(LOST.format(kept, tail or begun)), text[:cut]


NOISE = random.Random(0)
NOISY = [event(i, "".join(NOISE.choices("abcdefghij{}[]", k=30))) for i in range(20)]


def test_a_gzip_cut_at_any_byte_keeps_all_complete_events(tmp_path):
    text = json.dumps({"traceEvents": NOISY}).encode()
    packed, (starts, ends) = gzip.compress(text), spots(text)
    for cut in range(len(packed)):
        readable = len(zlib.decompressobj(wbits=31).decompress(packed[:cut]))
        if readable > text.index(b"["):
            rows, trace = read(write(tmp_path / "t.gz", packed[:cut]))
            kept, begun = expected_cut(ends, starts, readable)
            assert names_of(rows) == [row["name"] for row in NOISY[:kept]]
            lost = LOST.format(kept, begun)
            assert warned(trace) == f"{trace.path}: truncated gzip; {lost}"


@pytest.mark.parametrize("at", [-6, -1, 0.5], ids=["checksum", "length", "middle"])
def test_a_damaged_gzip_keeps_what_stands_before_the_damage(tmp_path, at):
    text = json.dumps({"traceEvents": NOISY}).encode()
    packed = bytearray(in_members(text, 2))
    at = at if at < 0 else int(at * len(packed)) + 200
    packed[at] ^= 0x55
    rows, trace = read(write(tmp_path / "t.gz", bytes(packed)))
    readable = len(text) if at < 0 else len(text) // 2  # the first member at least
    sound = sum(end <= readable for end in spots(text)[1])
    assert names_of(rows[:sound]) == [row["name"] for row in NOISY[:sound]]
    damage = "damaged gzip (Error -6 Incorrect checksum found)"
    assert f"{damage}; kept {len(rows)} complete events" in warned(trace)


# old text, new text, names that remain (None: all four), how many events are skipped
KERNEL = '{"ph": "X", "cat": "kernel", "name": "k1"'
# old text, new text, names that remain, how many events are skipped
DAMAGE = {
    "invalid UTF-8": ("k1", b"k\xff1", "k0 k\ufffd1 k2 k3", 0),
    "cut UTF-8": ("k1", "é".encode()[:1], "k0 \ufffd k2 k3", 0),
    "line feed": ("k1", b"k\n1", "k0 k_1 k2 k3", 0),
    "control characters": ("k1", b"k\x00\x01\x1f1", "k0 k___1 k2 k3", 0),
    "control character between": (", {", b",\x00{", "k0 k1 k2 k3", 0),
    "stray backslash": ("k1", rb"C:\Users\x1\\y", r"k0 C:\Users\x1\y k2 k3", 0),
    "stray unicode escape": ("k1", rb"k\u12", r"k0 k\u12 k2 k3", 0),
    "half a pair": ("k1", rb"k\ud83d\u0041", r"k0 k\ud83dA k2 k3", 0),
    "whole pair": ("k1", rb"k\ud83d\ude80", "k0 k🚀 k2 k3", 0),
    "NaN in args": (
        '"stream": 7', b'"stream": 7, "a": NaN, "b": [-Infinity, nan], "c": Infinity', "k0 k1 k2 k3", 0),
    "quote in the first name": ('"k0"', b'"k"0"', "k1 k2 k3", 1),
    "quote in a name": ('"k1"', b'"k"1"', "k0 k2 k3", 1),
    "quotes around a bracket": ('"k1"', b'"k["1"], x"', "k0 k2 k3", 1),
    "quotes around a brace": ('"k1"', b'"f({"a"}, {"b"})"', "k0 k2 k3", 1),
    "quote in the last name": ('"k3"', b'"k"3"', "k0 k1 k2", 1),
    "quotes in all names": ('"name": "k', b'"name": "k"', "", 4),
    "missing quote": ('"k1"', b'"k1', "k0 k2 k3", 1),
    "backslash before the quote": ('"k1"', b'"C:\\dir\\"', "k0 k2 k3", 1),
    "args that is a list": ('"name": "k1"', b'"args": [1], "name": "k1"', "k0 k2 k3", 1),
    "null": (KERNEL, b'null, {"name": "k1"', "k0 k1 k2 k3", 1),
    "a number and a text": (KERNEL, b'3, "x", {"name": "k1"', "k0 k1 k2 k3", 2),
}  # fmt: skip


@pytest.mark.parametrize("block", [60, 400, WHOLE])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_costs_no_more_than_it_touches(tmp_path, damage, block):
    old, new, names, skipped = DAMAGE[damage]
    beside = {"a": 1, "deviceProperties": DEVICES, "z": 2}
    document = {"a": 1, "traceEvents": FOUR} | beside
    text = json.dumps(document).encode().replace(old.encode(), new, max(skipped, 1))
    rows, trace = read(write(tmp_path / "t.json", text), block)
    remain = [row.name for row in rows if row.name]
    assert remain == [name.replace("_", " ") for name in names.split()]
    assert trace.envelope == beside and trace.damage == ""
    assert (trace.skipped > 0) == (skipped > 0)
    if block == WHOLE:
        assert trace.skipped == skipped
        said = f"skipped {skipped} unreadable of {len(rows) + skipped} events"
        assert (said in warned(trace)) == (skipped > 0)
