"""Real traces, damaged in every way: a Timeline comes out, with a warning where some is
lost, or one line of error.

The committed examples are few and always the same; each fault that a longer search has
found stands below by name.
"""

import copy
import functools
import gzip
import json
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from madmax_lib.catalog.datasets import dataset, local_data
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces import exposed_by_collective
from madmax_lib.traces.read import chrome
from madmax_lib.traces.read.kineto import TraceWarning, read_trace

pytestmark = pytest.mark.slow

SHIPPED = ("gpt-ddp/rank0.json.gz", "vit-fsdp/rank1.json.gz")
LOCAL = (
    "hta-samples/cuda_event_sync_multi_stream.json.gz",
    "hta-samples/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta-samples/gpu_user_annotation_gp100.json.gz",
    "hta-samples/nccl_data.json.gz",
    "cpu-gloo-torch2.13/ddp-rank0.json.gz",
    "param-dlrm-8xV100/worker0_step_12.1694128201545.pt.trace.json.gz",
)
OF_A_KIND = 3  # events of each phase and category that stay of a real trace
RAW = {  # what json.dumps does not write
    "@1e999": "1e999",
    "@-1e999": "-1e999",
    "@1e-999": "1e-999",
    "@digits": "9" * 5000,
    "@fraction": "0." + "3" * 5000,
    "@exponent": "1e99999999999999999999",
    "@lists": "[" * 3000 + "]" * 3000,
    "@objects": '{"a":' * 3000 + "1" + "}" * 3000,
    "@nearly": "[" * 940 + "]" * 940,
    "@open": "[" * 3000,
    "@twice": '1, "ts": 2, "ph": "i", "dur": 3',
    "@surrogate": '"\\ud800"',
}
ODD = [None, True, False, 0, -1, -5, 7, 1.5, -0.0, 2**31, -(2**31) - 1, 2**52, 2**53 + 1, 2**62, 2**63, 2**64, 10**30,
       -(10**30), 10**400, 1e15, 1e300, -1e308, float("nan"), float("inf"), float("-inf"), "", "7", "-1", "1_0",
       " 1.5 ", "1e999999", "9" * 5000, "NaN", "-Infinity", "x", "é 核 🚀", "x" * 5000, "nccl" * 1200, "[0, 1, ..., 7]",
       "[memory]", "ProfilerStep#3", "ProfilerStep#99999999999999999999", "iteration 5000000000", "kernel madmax(%)",
       "}, {", "]}", '"', "\\", "\0\n\x1f", '"traceEvents": [', "X", "kernel", "cuda_sync", "cpu_op", "i", [], [1],
       [[]], [1, [2, 3]], ["a", None], [None] * 3, {}, {"a": 1}, {"rank": 0}, [{"name": 5}], *RAW]  # fmt: skip
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id")
ARGS = ("stream", "correlation", "External id", "External Id", "external id", "bytes", "Collective name",
        "In msg nelems", "Out msg nelems", "dtype", "Process Group Name", "Process Group Ranks", "Rank", "Group size",
        "Seq", "Src Rank", "Dst Rank", "Addr", "Bytes", "Total Allocated", "Total Reserved", "Device Type", "Device Id",
        "Input Dims", "Input type", "Concrete Inputs", "Sequence number", "Fwd thread id", "graph id", "graph node id",
        "cuda_sync_kind", "wait_on_stream", "wait_on_cuda_event_record_corr_id")  # fmt: skip
ENVELOPE = (
    "distributedInfo",
    "deviceProperties",
    "baseTimeNanoseconds",
    "schemaVersion",
    "traceName",
    "a",
    "args",
)
TOKENS = [b'"', b'""', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"},{", b'}, {"name": "', b"}]", b"]}", b"\0",
          b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"NaN", b"-", b"e", b"null", b"0",
          b'"traceEvents": [', b"\\ud800", b"[" * 2000, b'{"a":' * 2000, b'"' * 500, b"x" * 3000, b" " * 3000,
          b"},\n{" * 500]  # fmt: skip


@functools.cache
def real_traces() -> list[dict]:
    """Some events of every kind of real traces, with all that stands beside the events."""
    paths = [dataset(name.split("/")[0]) / name.split("/")[1] for name in SHIPPED]
    for name in LOCAL:
        try:
            paths.append(local_data(f"traces/{name}"))
        except FileNotFoundError:  # the shipped ones must do
            continue
    return [_excerpt(json.loads(gzip.decompress(path.read_bytes()))) for path in paths]


def _excerpt(document: dict) -> dict:
    seen: dict[tuple, int] = {}
    events = []
    for event in document["traceEvents"]:
        name = (
            event["name"]
            if event["name"] in ("[memory]", "record_param_comms")
            else event["name"].partition(":")[0]
        )
        kind = (
            event["ph"],
            event.get("cat"),
            name if name in ("gloo", "[memory]", "record_param_comms") else "",
        )
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= OF_A_KIND:
            events.append(event)
    return document | {"traceEvents": events}


def _pick(items, number: int):
    return items[number % len(items)]


def _event(document: dict, where: int) -> dict:
    events = document["traceEvents"]
    event = _pick(events, where) if events else None
    return event if isinstance(event, dict) else {}


def _args(document: dict, where: int) -> dict:
    args = _event(document, where).get("args")
    return args if isinstance(args, dict) else {}


def _drop(row, what: int) -> None:
    if isinstance(row, dict) and row:
        del row[_pick(list(row), what)]


def _set(row: dict, keys: tuple[str, ...], what: int) -> None:
    keys = (*keys, *row)
    row[_pick(keys, what)] = copy.deepcopy(_pick(ODD, what // len(keys)))


def _copied(document: dict, where: int, what: int) -> None:
    """What tells events apart is the same in two of them."""
    key, other = (
        _pick(("correlation", "External id", "ts", "tid", "name", "Seq", "Addr"), what),
        where + what // 7,
    )
    for rows in (_event, _args):
        if key in rows(document, other):
            rows(document, where)[key] = rows(document, other)[key]


def _all_times(document: dict, where: int, what: int) -> None:
    for event in document["traceEvents"]:
        if isinstance(event, dict) and isinstance(event.get("ts"), (int, float)):
            factor, shift = (
                _pick((1, -1, 1e3, 1e6, 0), where),
                _pick((0, 0.001, -1e12, 2**50, 1.7e15), what),
            )
            event["ts"] = event["ts"] * factor + shift


def _set_beside(document: dict, where: int, what: int) -> None:
    inside = [value for value in document.values() if isinstance(value, dict)]
    lists = [
        value
        for key, value in document.items()
        if key != "traceEvents" and isinstance(value, list)
    ]
    inside += [value[0] for value in lists if value and isinstance(value[0], dict)]
    _set(
        _pick([document, *inside], where),
        ENVELOPE if where % 2 else ("rank", "world_size"),
        what,
    )


def _insert(document: dict, where: int, event) -> None:
    document["traceEvents"].insert(where % (len(document["traceEvents"]) + 1), event)


CHANGES: dict[str, Callable[[dict, int, int], None]] = {
    "field": lambda d, where, what: _set(_event(d, where), FIELDS, what),
    "arg": lambda d, where, what: _set(_args(d, where), ARGS, what),
    "no field": lambda d, where, what: _drop(_event(d, where), what),
    "no arg": lambda d, where, what: _drop(_args(d, where), what),
    "copied": _copied,
    "twice": lambda d, where, what: _insert(
        d, where + what, copy.deepcopy(_event(d, where))
    ),
    "not an event": lambda d, where, what: _insert(
        d, where, copy.deepcopy(_pick(ODD, what))
    ),
    "phase": lambda d, where, what: _event(d, where).update(
        ph=_pick("XBEiMsfCbnetO?", what)
    ),
    "all times": _all_times,
    "beside": _set_beside,
    "not beside": lambda d, where, what: _drop(
        d if where % 3 else d.get("distributedInfo"), what
    ),
}


def changed(source: int, changes: list[tuple[str, int, int]], style: int) -> bytes:
    """Text of a real trace after some changes to its events and keys."""
    document = copy.deepcopy(_pick(real_traces(), source))
    events = document["traceEvents"]
    for change, where, what in changes:
        CHANGES[change](document, where, what)
        document["traceEvents"] = events  # whatever has become of the key
    indent, as_list, last = (
        _pick((None, 0, 2), style),
        style // 3 % 5 == 4,
        style // 15 % 2,
    )
    document = {k: v for k, v in document.items() if not last or k != "traceEvents"} | {
        "traceEvents": events
    }
    text = json.dumps(
        events if as_list else document,
        indent=indent,
        ensure_ascii=bool(style // 30 % 2),
    )
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode("utf-8", "surrogatepass")


def _flip(text: bytes, where: int, what: int) -> bytes:
    at = where % max(len(text), 1)
    return (
        text[:at]
        + bytes(byte ^ (1 + what % 255) for byte in text[at : at + 1])
        + text[at + 1 :]
    )


def _put(text: bytes, where: int, new: bytes, instead_of: int = 0) -> bytes:
    at = where % (len(text) + 1)
    return text[:at] + new + text[at + instead_of :]


DAMAGES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "cut": lambda text, where, what: text[: where % (len(text) + 1)],
    "flip": _flip,
    "insert": lambda text, where, what: _put(text, where, _pick(TOKENS, what)),
    "replace": lambda text, where, what: _put(
        text, where, _pick(TOKENS, what), what // len(TOKENS) % 50
    ),
    "leave out": lambda text, where, what: _put(text, where, b"", what % 400),
    "repeat": lambda text, where, what: _put(
        text, where, text[where % (len(text) + 1) :][: what % 4000]
    ),
    "all of it": lambda text, where, what: text.replace(
        _pick(TOKENS, where), _pick(TOKENS, what), where % 100
    ),
    "append": lambda text, where, what: text + _pick(TOKENS, what),
    "in front": lambda text, where, what: _pick(TOKENS, what) + text,
    "UTF-16": lambda text, where, what: text.decode("utf-8", "replace").encode(
        _pick(("utf-16", "utf-16-be"), what)
    ),
    "UTF-8-sig": lambda text, where, what: b"\xef\xbb\xbf" + text,
}


def damaged(text: bytes, damages: list[tuple[str, int, int]]) -> bytes:
    for damage, where, what in damages:
        text = DAMAGES[damage](text, where, what)
    return text


def packed(text: bytes, how: int) -> bytes:
    """As it is, gzip, in members, twice."""
    if how % 4 == 2:
        size = max(len(text) // (2 + how // 4 % 40), 1)
        return b"".join(
            gzip.compress(text[at : at + size], 1) for at in range(0, len(text), size)
        )
    for _ in range((0, 1, 1, 2)[how % 4]):
        text = gzip.compress(text, how // 4 % 10)
    return text


def check(path: Path) -> Timeline | None:
    """Reads a file by both rules and looks at what comes out: None is an error in one
    line that names the file.
    """
    timeline = None
    for hta_compatible in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                timeline = read_trace(path, hta_compatible=hta_compatible)
                _check_timeline(timeline, hta_compatible)
            except (ValueError, OSError) as error:
                assert str(path) in str(error) and "\n" not in str(error), repr(error)
                timeline = None
        assert all(
            w.category is TraceWarning and "\n" not in str(w.message) for w in caught
        ), [str(w) for w in caught]
    return timeline


def _check_timeline(timeline: Timeline, hta_compatible: bool) -> None:
    spans, table, exposed = (
        timeline.spans,
        breakdown(timeline),
        exposed_by_collective(timeline),
    )
    seconds = table.drop(columns=["rank", "overlap"]).to_numpy()
    assert np.isfinite(seconds).all() and np.isfinite(
        exposed[["comm_s", "exposed_s"]].astype(float)
    ).all(axis=None)
    for side_table in timeline.side_tables.values():
        if "row" in side_table:
            rows = side_table["row"].to_numpy()
            assert (
                (np.diff(rows) > 0).all()
                and len(spans) > rows.max(initial=-1)
                and rows.min(initial=0) >= 0
            )
    if hta_compatible:  # whose rounding turns short spans around
        return
    assert spans["dur_ns"].min() >= 0 or not len(spans)
    assert (seconds >= 0).all()
    busy = table["compute_s"] + table["non_compute_s"]
    assert (busy <= table["total_s"] * (1 + 1e-12)).all() and (
        table["exposed_comm_s"] <= table["comm_s"]
    ).all()
    assert (exposed["exposed_s"] <= exposed["comm_s"]).all()


NUMBERS = st.integers(0, 1 << 16)
STEPS = functools.partial(st.lists, max_size=5)


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(
    source=st.integers(0, 7),
    changes=STEPS(st.tuples(st.sampled_from(list(CHANGES)), NUMBERS, NUMBERS)),
    style=st.integers(0, 60),
    damages=st.just([])
    | STEPS(st.tuples(st.sampled_from(list(DAMAGES)), NUMBERS, NUMBERS)),
    how=st.integers(0, 200),
    later=st.just([])
    | STEPS(
        st.tuples(
            st.sampled_from(["cut", "flip", "append", "leave out"]), NUMBERS, NUMBERS
        )
    ),
)
def test_a_damaged_trace_is_read_or_refused_in_one_line(
    tmp_path_factory, source, changes, style, damages, how, later
):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(
        damaged(packed(damaged(changed(source, changes, style), damages), how), later)
    )
    check(path)


EVENT = {
    "ph": "X",
    "cat": "kernel",
    "name": "k",
    "pid": 0,
    "tid": 7,
    "ts": 10,
    "dur": 4,
    "args": {"stream": 7},
}
MEMORY = {
    "ph": "i",
    "name": "[memory]",
    "pid": 0,
    "tid": 7,
    "ts": 10,
    "args": {"Bytes": 512, "Addr": 1},
}
DEEP = "[" * 5000 + "]" * 5000
RANK = {"distributedInfo": {"rank": 0, "world_size": 1}}


def text_of(*events: dict | str, beside: dict | None = None) -> str:
    """A trace of events, some of them as text."""
    rows = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return (
        json.dumps({**RANK, **(beside or {}), "traceEvents": 0})[:-2]
        + f"[{', '.join(rows)}]}}"
    )


def with_arg(key: str, value) -> dict:
    return EVENT | {"args": EVENT["args"] | {key: value}}


def read(path: Path, text: str | bytes) -> tuple[Timeline, str]:
    """What `check` lets through, and its warnings by the exact rules."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert check(path) is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        timeline = read_trace(path)
    return timeline, "; ".join(str(w.message).removeprefix(f"{path}: ") for w in caught)


DEEP_EVENT = json.dumps(with_arg("a", 0)).replace("0}}", DEEP + "}}")
NEARLY_DEEP_EVENT = json.dumps(with_arg("Input Dims", 0)).replace(
    "0}}", "[" * 900 + "]" * 900 + "}}"
)


def events_around(inside: str) -> str:
    """A text between two sound events."""
    return text_of(EVENT, inside, EVENT)


FAULTS = {  # text, names of the spans that remain, words of the warnings
    "nested too deep": (events_around(DEEP_EVENT), 2, "skipped 1 unreadable"),
    "nested too deep, in every second event": (text_of(*[EVENT, DEEP_EVENT] * 5, EVENT), 6, "skipped 5 unreadable"),
    "nested nearly too deep": (events_around(NEARLY_DEEP_EVENT), 3, ""),
    "keys nested too deep":
        (text_of(EVENT).replace('{"rank"', '{"a": ' + DEEP + ', "rank"'), 1, "keys before the events"),
    "keys in front that are no JSON":
        (text_of(EVENT).replace('{"rank"', '{"a" 1, "rank"'), 1, "keys before the events"),
    "] between events": (events_around("]").replace(", ], ", "], "), 1, "skipped 1 unreadable"),
    "half a character at the end":
        (text_of(EVENT, with_arg("a", "?"))[:-2].replace("?", "\\ud800"), 2, "truncated JSON"),
    "event starts inside of a string that breaks":
        (events_around('{"name": "' + '},{\\"ph\\":' * 3000 + '" x}'), 2, "skipped 1 unreadable"),
    "thousands of quotes": (events_around('{"name": "' + '"' * 100_000 + '"}'), 2, "skipped 1 unreadable"),
    "thousands of broken events": (events_around(", ".join(['{"ph": "X" 1}'] * 5000)), 2, "skipped 5000 unreadable"),
    "thousands of open events": (text_of(EVENT, EVENT)[:-2] + ', {"ph": ' * 20_000, 2, "truncated JSON"),
    "thousands of ends": (text_of(EVENT, EVENT)[:-2] + ', {"a" 1' + '}], "a": 1' * 20_000, 2, "truncated JSON"),
    "thousands of keys": (text_of(EVENT, beside={"a": '"traceEvents": [' * 50}), 1, ""),
    "number out of range": (events_around(json.dumps(with_arg("Seq", "?")).replace('"?"', "1e999")), 3, ""),
    "rank out of range":
        (text_of(EVENT, beside={"distributedInfo": {"rank": 2**31, "world_size": 10**30}}), 1, "no rank"),
    "step out of range": (text_of(EVENT | {"cat": "user_annotation", "name": "ProfilerStep#" + "9" * 5000}), 1, ""),
    "size out of range": (text_of(with_arg("bytes", 10**400), with_arg("bytes", "inf")), 2, ""),
    "lists for threads": (text_of(EVENT | {"tid": [1]}, MEMORY | {"tid": {"a": [1]}}, MEMORY), 1, ""),
    "false for a duration":
        (text_of(EVENT | {"dur": False}, EVENT | {"dur": "1"}, with_arg("Collective name", "send")), 2, "skipped 1"),
    "exponents":
        (text_of(EVENT | {"ts": "1e999999"}, EVENT | {"dur": "1e99999999999"}, EVENT), 1, "skipped 2 unreadable"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("block", [1000, None])
def test_fault(tmp_path, monkeypatch, fault, block):
    text, spans, words = FAULTS[fault]
    if block:
        monkeypatch.setattr(chrome, "_BLOCK", block)
    timeline, warned = read(tmp_path / "t.json", text)
    assert len(timeline) == spans and words in warned and bool(words) == bool(warned), (
        warned
    )


@pytest.mark.parametrize(
    ("far_us", "known"), [(2_900_000_000_000_000, True), (4_000_000_000_000_000, False)]
)
def test_no_sum_of_times_leaves_int64(tmp_path, far_us, known):
    events = [EVENT | {"ts": sign * far_us, "dur": far_us} for sign in (1, -1)]
    text = text_of(EVENT, *events, beside={"baseTimeNanoseconds": far_us * 1000})
    timeline, warned = read(tmp_path / "t.json", text)
    starts_us = [far_us + 10, 2 * far_us, 0] if known else [10]
    assert (timeline.spans["start_ns"] // 1000).tolist() == starts_us
    assert breakdown(timeline)["total_s"].tolist() == pytest.approx(
        [3 * far_us / 1e6 if known else 4e-6]
    )
    assert ("skipped 2" in warned) != known


@pytest.mark.parametrize("number", ["1e999", "1e99999999", "1e99999999999999999999999"])
def test_numbers_beyond_all_bounds_cost_nothing_where_times_are_decimals(
    tmp_path, number
):
    odd = with_arg("correlation", "?") | {
        "args": dict.fromkeys(("correlation", "stream", "bytes", "Seq"), "?")
    }
    memory = MEMORY | {"ts": 1e15, "args": {"Bytes": "?", "Addr": "?"}}
    text = text_of(
        odd,
        with_arg("Collective name", "send"),
        EVENT | {"tid": "?", "cat": "?", "name": "?"},
        memory,
    )
    for more in (text, text.replace('"ts": 10,', '"ts": 1700000000000000.25,', 1)):
        timeline, warned = read(tmp_path / "t.json", more.replace('"?"', number))
        assert (len(timeline), warned) == (3, "")
        assert timeline.side_tables["calls"]["row"].tolist() == [1]
        assert timeline.side_tables["memory"]["size_bytes"].tolist() == [0]


@pytest.mark.parametrize(
    ("name", "rank"), [("rank99999999999.json", 0), ("rank2147483647.json", 2**31 - 1)]
)
def test_a_rank_in_the_file_name_may_be_no_rank(tmp_path, name, rank):
    text = text_of(
        EVENT, with_arg("Rank", "9" * 5000), beside={"distributedInfo": {"rank": -1}}
    )
    assert read(tmp_path / name, text)[0].ranks == [rank]


def test_the_last_keys_may_be_missing_and_members_tiny(tmp_path):
    text = text_of(*[EVENT] * 20).encode()
    members = b"".join(
        gzip.compress(text[at : at + 1], 1) + gzip.compress(b"", 1) * 5
        for at in range(len(text))
    )
    timeline, warned = read(tmp_path / "t.gz", members)
    assert (len(timeline), warned) == (20, "")


PADDING = 20  # MB
PADDED = {  # before and after the padding, which letter, spans that remain
    "space in front": ("", text_of(EVENT), " ", 1),
    "space behind": (text_of(EVENT), "", " ", 1),
    "space between events": (
        text_of(EVENT)[:-2] + ",",
        text_of(*[EVENT] * 2).partition("[")[2],
        " ",
        3,
    ),
    "space inside of an event": (
        text_of(EVENT)[:-2] + ', {"ph":',
        f'"X"}}, {json.dumps(EVENT)}]}}',
        " ",
        2,
    ),
    "name of an event": (
        text_of(EVENT)[:-2] + ', {"name":"',
        f'"}}, {json.dumps(EVENT)}]}}',
        "x",
        2,
    ),
    "name of the last event": (text_of(EVENT)[:-2] + ', {"name":"', '"}]}', "x", 1),
    "name without end": (text_of(EVENT)[:-2] + ', {"name":"', "", "x", 1),
    "lists without end": (text_of(EVENT)[:-2] + ', {"args":', "", "[", 1),
    "keys behind": (text_of(EVENT)[:-1] + ', "a": "', '"}', "x", 1),
    "keys in front": ('{"a": "', '", ' + text_of(EVENT)[1:], "x", None),
}


def spans_within(path: Path, most_mb: int) -> int | None:
    """Spans of a file that is read in so much memory; None if it is refused."""
    tracemalloc.start()
    try:
        timeline = check(path)
        assert tracemalloc.get_traced_memory()[1] < most_mb << 20
    finally:
        tracemalloc.stop()
    return None if timeline is None else len(timeline)


@pytest.mark.parametrize("where", PADDED)
def test_a_small_file_does_not_fill_the_memory(tmp_path, where):
    before, after, letter, spans = PADDED[where]
    with gzip.open(tmp_path / "t.gz", "wb", 1) as file:
        for part in (before, *[letter * (1 << 20)] * PADDING, after):
            file.write(part.encode())
    assert spans_within(tmp_path / "t.gz", 48) == spans


def test_a_long_text_among_numbers_is_stored_once(tmp_path):
    events = [EVENT] * 500 + [
        EVENT | {"ts": "1." + "0" * 100_000},
        EVENT | {"dur": "x" * 100_000},
    ]
    (tmp_path / "t.json").write_text(text_of(*events))
    assert spans_within(tmp_path / "t.json", 20) == 501
