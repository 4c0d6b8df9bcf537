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
NAMES = [
    "a",
    "x},{y",
    "p]}",
    "},\n  {",
    '"traceEvents": [',
    "C:\\new\\x",
    'say "hi"',
    "é 核 🚀",
    "tab\tand\nline",
]
DEVICES = [{"id": 0, "name": "GPU"}, {"id": 1, "name": "GPU"}]


def event(number: int, name: str = "", **changes) -> dict:
    args = {
        "stream": 7,
        "grid": [1, 2],
        "inputs": [{"shape": [2]}, {"shape": []}],
        "note": "]}, {",
    }
    row = {
        "ph": "X",
        "cat": "kernel",
        "name": name or f"k{number}",
        "pid": 0,
        "tid": 7,
        "ts": 10 * number,
        "dur": 4,
    }
    return {**row, "args": args, **changes}


EVENTS = [event(i, name) for i, name in enumerate(NAMES)]
FOUR = [event(i) for i in range(4)]


def read(
    path: Path, block: int = WHOLE, exact: bool = False
) -> tuple[list[Event], RawTrace]:
    trace = RawTrace(path)
    with patch.object(chrome, "_BLOCK", block):
        return [
            row for piece in decode_pieces(trace, exact=exact) for row in piece
        ], trace


def fields(rows: list) -> list[tuple]:
    return [
        (row.ph, row.cat, row.name, row.pid, row.tid, row.ts, row.dur, row.args)
        for row in rows
    ]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def warned(trace: RawTrace) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace.warn_of_loss()
    assert all(
        w.category is TraceWarning and str(w.message).startswith(str(trace.path))
        for w in caught
    )
    return "; ".join(str(w.message) for w in caught)


def in_members(text: bytes, count: int) -> bytes:
    size = -(-len(text) // count)
    return b"".join(
        gzip.compress(text[at : at + size]) for at in range(0, len(text), size)
    )


OBJECT = {
    "schemaVersion": 1,
    "note": "the traceEvents: [ follow",
    "traceEvents": EVENTS,
    "deviceProperties": DEVICES,
}
TEXT = json.dumps(OBJECT).encode()
LIST = b",\n  ".join(json.dumps(event, indent=4).encode() for event in EVENTS)
NATIVE = json.dumps({**OBJECT, "traceEvents": 0}).encode()
NATIVE = NATIVE.replace(
    b'"traceEvents": 0', b'\n  "traceEvents": [\n  ' + LIST + b"\n  ]"
)
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
    "reordered.json": json.dumps(
        {key: OBJECT[key] for key in reversed(OBJECT)}, sort_keys=True
    ).encode(),
    "events first.json": json.dumps({"traceEvents": EVENTS} | OBJECT).encode(),
    "events last.json": json.dumps(
        {k: OBJECT[k] for k in sorted(OBJECT, key="traceEvents".__eq__)}
    ).encode(),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_the_same(tmp_path, form, block):
    rows, trace = read(write(tmp_path / form, FORMS[form]), block)
    assert [(row.name, row.ts, row.args.stream) for row in rows] == [
        (e["name"], e["ts"], 7) for e in EVENTS
    ]
    assert trace.envelope == {
        key: value for key, value in OBJECT.items() if key != "traceEvents"
    }
    assert (trace.events, trace.skipped, warned(trace)) == (len(EVENTS), 0, "")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_needs_no_envelope(tmp_path, indent, block):
    rows, trace = read(
        write(tmp_path / "list.json", json.dumps(EVENTS, indent=indent)), block
    )
    assert [row.name for row in rows] == NAMES
    assert (trace.envelope, warned(trace)) == ({}, "")


HEADS = [
    r'"note": "\"traceEvents\": [ {}, {} ]"',
    '"nested": {"traceEvents": [{"name": "no"}, {"name": "no"}]}',
    '"list": ["traceEvents", {"traceEvents": []}], "traceEventsCount": [4]',
]


@pytest.mark.parametrize("head", HEADS)
def test_the_key_is_found_behind_its_own_name(tmp_path, head):
    rows, _ = read(
        write(
            tmp_path / "t.json",
            f'{{{head}, "traceEvents"\n:\n[{json.dumps(event(1))}]}}',
        )
    )
    assert [row.name for row in rows] == ["k1"]


def test_a_member_may_start_with_the_last_byte_of_a_read(tmp_path):
    def stored(length: int) -> bytes:
        return gzip.compress(b'{"pad": "' + b"x" * length + b'", ', 0)

    length = (1 << 20) - 1 - (len(stored(1 << 20)) - (1 << 20))
    path = write(
        tmp_path / "t.gz",
        stored(length) + gzip.compress(json.dumps({"traceEvents": FOUR}).encode()[1:]),
    )
    assert path.read_bytes()[(1 << 20) - 1 :].startswith(b"\x1f\x8b")
    assert len(read(path)[0]) == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
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


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    names=st.lists(TRICKY, min_size=1, max_size=8),
    extra=st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    block=st.integers(3, 400),
    indent=st.sampled_from([None, 0, 2]),
    style=st.fixed_dictionaries(
        {"ensure_ascii": st.booleans(), "sort_keys": st.booleans()}
    ),
    packed=st.booleans(),
)
def test_any_block_size_gives_the_same_events(
    tmp_path_factory, names, extra, block, indent, style, packed
):
    rows = [
        event(i, args={**extra, "stream": i}) | {"name": name}
        for i, name in enumerate(names)
    ]
    document = {
        "before": extra,
        "traceEvents": rows,
        "later": [extra, extra],
        "zlast": names,
    }
    text = json.dumps(document, indent=indent, **style).encode()
    path = write(
        tmp_path_factory.getbasetemp() / "any.json",
        gzip.compress(text) if packed else text,
    )
    found, trace = read(path, block)
    assert [(row.name, row.ts, row.args.stream) for row in found] == [
        (n, 10 * i, i) for i, n in enumerate(names)
    ]
    assert trace.envelope == {"before": extra, "later": [extra, extra], "zlast": names}
    assert fields(found) == fields(read(path)[0]) and warned(trace) == ""


@pytest.mark.parametrize("name", ["vit-ddp", "gpt-fsdp"])
def test_the_quick_decoder_sees_complete_events_as_the_general_one_does(name):
    for path in sorted(dataset(name).glob("*.json.gz")):
        quick = [
            row for piece in decode_pieces(RawTrace(path)) for row in complete(piece)
        ]
        general = [
            row
            for piece in decode_pieces(RawTrace(path), event=Event)
            for row in complete(piece)
        ]
        assert len(quick) > 100 and fields(quick) == fields(general)


@pytest.mark.parametrize("change", [{"ph": "?"}, {"ph": None}, {"args": 3}, {"ph": 7}])
def test_an_event_of_unknown_form_does_not_hide_its_neighbours(tmp_path, change):
    path = write(
        tmp_path / "t.json", json.dumps([*FOUR[:2], FOUR[2] | change, *FOUR[3:]] * 2000)
    )
    found = [
        row for row in read(path, 1000)[0] if row.dur is not None and row.ph == "X"
    ]
    assert len(found) == 6000


@pytest.mark.parametrize(("exact", "kind"), [(False, float), (True, Decimal)])
def test_decimals_are_kept_on_request(tmp_path, exact, kind):
    path = write(
        tmp_path / "t.json",
        '[{"ph": "X", "ts": 1712102341234567.891, "dur": 3, "name": "1.5"}]',
    )
    (row,), _ = read(path, exact=exact)
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
    lengths = [
        json.JSONDecoder().raw_decode(text[start:].decode())[1] for start in starts
    ]
    return starts, [
        start + length for start, length in zip(starts, lengths, strict=True)
    ]


@pytest.mark.parametrize("block", [60, WHOLE])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_cut_at_any_byte_keeps_all_complete_events(tmp_path, indent, block):
    text = json.dumps(
        {"a": 1, "traceEvents": FOUR[:3], "deviceProperties": DEVICES}, indent=indent
    ).encode()
    starts, ends = spots(text)
    list_end = text.index(b"]", ends[-1]) + 1
    for cut in range(text.index(b"[") + 1, len(text)):
        rows, trace = read(write(tmp_path / "t.json", text[:cut]), block)
        kept, begun = expected_cut(ends, starts, cut)
        tail = len(text[list_end:cut].strip().lstrip(b","))
        assert [row.name for row in rows] == [f"k{i}" for i in range(kept)], text[:cut]
        assert trace.skipped == 0
        if cut < list_end or tail:
            message = (
                f"kept {kept} complete events, lost the last {tail or begun} "
                "bytes read and all that should follow"
            )
            assert "truncated JSON" in warned(trace) and warned(trace).endswith(
                message
            ), text[:cut]


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
            assert [row.name for row in rows] == [row["name"] for row in NOISY[:kept]]
            lost = f"lost the last {begun} bytes read and all that should follow"
            assert (
                warned(trace)
                == f"{trace.path}: truncated gzip; kept {kept} complete events, {lost}"
            )


@pytest.mark.parametrize("at", [-6, -1, 0.5], ids=["checksum", "length", "middle"])
def test_a_damaged_gzip_keeps_what_stands_before_the_damage(tmp_path, at):
    text = json.dumps({"traceEvents": NOISY}).encode()
    packed = bytearray(in_members(text, 2))
    at = at if at < 0 else int(at * len(packed)) + 200
    packed[at] ^= 0x55
    rows, trace = read(write(tmp_path / "t.gz", bytes(packed)))
    readable = len(text) if at < 0 else len(text) // 2  # the first member at least
    sound = sum(end <= readable for end in spots(text)[1])
    assert [row.name for row in rows[:sound]] == [row["name"] for row in NOISY[:sound]]
    assert (
        f"damaged gzip (Error -6 Incorrect checksum found); kept {len(rows)} "
        "complete events" in warned(trace)
    )


# old text, new text, names that remain (None: all four), how many events are skipped
DAMAGE = {
    "invalid UTF-8": (b"k1", b"k\xff1", ["k0", "k\ufffd1", "k2", "k3"], 0),
    "cut UTF-8": (b"k1", "é".encode()[:1], ["k0", "\ufffd", "k2", "k3"], 0),
    "line feed": (b"k1", b"k\n1", ["k0", "k 1", "k2", "k3"], 0),
    "control characters": (b"k1", b"k\x00\x01\x1f1", ["k0", "k   1", "k2", "k3"], 0),
    "control character between": (b", {", b",\x00{", None, 0),
    "stray backslash": (
        b"k1",
        rb"C:\Users\x1\\y",
        ["k0", r"C:\Users\x1\y", "k2", "k3"],
        0,
    ),
    "stray unicode escape": (b"k1", rb"k\u12", ["k0", r"k\u12", "k2", "k3"], 0),
    "half a pair": (b"k1", rb"k\ud83d\u0041", ["k0", r"k\ud83dA", "k2", "k3"], 0),
    "whole pair": (b"k1", rb"k\ud83d\ude80", ["k0", "k🚀", "k2", "k3"], 0),
    "NaN in args": (
        b'"stream": 7',
        b'"stream": 7, "a": NaN, "b": [-Infinity, nan], "c": Infinity',
        None,
        0,
    ),
    "quote in the first name": (b'"k0"', b'"k"0"', ["k1", "k2", "k3"], 1),
    "quote in a name": (b'"k1"', b'"k"1"', ["k0", "k2", "k3"], 1),
    "quotes around a bracket": (b'"k1"', b'"k["1"], x"', ["k0", "k2", "k3"], 1),
    "quotes around a brace": (b'"k1"', b'"f({"a"}, {"b"})"', ["k0", "k2", "k3"], 1),
    "quote in the last name": (b'"k3"', b'"k"3"', ["k0", "k1", "k2"], 1),
    "quotes in all names": (b'"name": "k', b'"name": "k"', [], 4),
    "missing quote": (b'"k1"', b'"k1', ["k0", "k2", "k3"], 1),
    "backslash before the quote": (b'"k1"', b'"C:\\dir\\"', ["k0", "k2", "k3"], 1),
    "args that is a list": (
        b'"name": "k1"',
        b'"args": [1], "name": "k1"',
        ["k0", "k2", "k3"],
        1,
    ),
    "null": (
        b'{"ph": "X", "cat": "kernel", "name": "k1"',
        b'null, {"name": "k1"',
        None,
        1,
    ),
    "a number and a text": (
        b'{"ph": "X", "cat": "kernel", "name": "k1"',
        b'3, "x", {"name": "k1"',
        None,
        2,
    ),
}


@pytest.mark.parametrize("block", [60, 400, WHOLE])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_costs_no_more_than_it_touches(tmp_path, damage, block):
    old, new, names, skipped = DAMAGE[damage]
    text = json.dumps(
        {"a": 1, "traceEvents": FOUR, "deviceProperties": DEVICES, "z": 2}
    ).encode()
    rows, trace = read(
        write(tmp_path / "t.json", text.replace(old, new, max(skipped, 1))), block
    )
    assert [row.name for row in rows if row.name] == (
        ["k0", "k1", "k2", "k3"] if names is None else names
    )
    assert trace.envelope == {"a": 1, "deviceProperties": DEVICES, "z": 2}
    assert trace.damage == "" and (trace.skipped > 0) == (skipped > 0)
    if block == WHOLE:
        assert trace.skipped == skipped
        assert (
            f"skipped {skipped} unreadable of {len(rows) + skipped} events"
            in warned(trace)
        ) == (skipped > 0)
