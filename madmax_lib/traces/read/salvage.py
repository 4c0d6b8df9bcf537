"""Which events can be read from a piece of trace text, also where it is damaged or breaks off?

A piece that does not decode is repaired (control characters, invalid UTF-8, stray backslashes, NaN), then read event by
event without the bad ones. The position in msgspec's errors tells where the list of events ends or an event is broken.
The work grows with the length of the text alone, whatever is wrong with it.
"""

import contextlib
import functools
import gc
import itertools
import re

import msgspec

from madmax_lib.traces.read.events import EXACT, Event, RawTrace

__all__ = ["BETWEEN", "EVENT_START", "BreaksOff", "decode_final", "decode_json", "decode_piece"]

_CONTROL = bytes(32 if i < 32 else i for i in range(256))  # control characters to spaces, valid inside and outside text
_KEY = rb'"(?:ph|cat|name|pid|tid|ts|dur|args|bp|s)"\s*:'  # of an event
_BEHIND = rb'(?=\s*(?:,\s*"(?!' + _KEY[1:] + rb")|\}\s*\Z|\Z))"
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
EVENT_START = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEY + rb")")
_LIST_END = re.compile(rb"\}\s*\]" + _BEHIND)
_LIST_CLOSES = re.compile(rb"\]" + _BEHIND)
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
_ERROR_AT = re.compile(r"\(byte (\d+)\)")
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)(?:-?(?:Infinity|inf)|NaN|nan)(?=\s*[,\]}])")
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # half of it alone is no character
_STRAY_BACKSLASH = re.compile(rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|' + _PAIR + rb")|)")
_RAW = msgspec.json.Decoder(list[msgspec.Raw])
_DEEP = 100  # brackets inside of each other; Python and msgspec give up at about 1000
_LIST_ENDS = 50  # places to try as the end of the events
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BreaksOff(Exception):
    """A piece of text breaks off inside an event."""


def _decode(decoder: msgspec.json.Decoder, text: bytes) -> list:
    """The list whose brackets the text lacks; a comma after its last item does no harm."""
    if not text.endswith(b"}"):
        text = text.rstrip().removesuffix(b",")
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects and not one cycle
    try:
        return decoder.decode(b"[" + text + b"]")
    finally:
        if collecting:
            gc.enable()


def decode_piece(
    trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes, quick: msgspec.json.Decoder | None = None
) -> tuple[list[Event], bytes | None]:
    """Readable events of a text, and what follows the ] if the list ends inside it. Raises BreaksOff.

    quick: a decoder to try first, that refuses what it does not know.
    """
    if quick is not None:
        with contextlib.suppress(*_UNREADABLE):
            return _decode(quick, text), None
    events = _decode_repaired(decoder, text)
    return (events, None) if events is not None else _one_by_one(trace, decoder, text)[:2]


def decode_final(
    trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes
) -> tuple[list[Event], bytes | None, bytes]:
    """Readable events of a text that nothing follows, what stands after their ], and an event that has no end."""
    ends = [match.end() - 1 for match in _LIST_END.finditer(text, max(0, len(text) - (1 << 16)))]
    if ends:
        with contextlib.suppress(*_UNREADABLE):
            return _decode(decoder, text[: ends[-1]]), text[ends[-1] + 1 :], b""
    events = None
    with contextlib.suppress(BreaksOff):
        events = _decode_repaired(decoder, text)
    return (events, None, b"") if events is not None else _one_by_one(trace, decoder, text, final=True)


def _decode_repaired(decoder: msgspec.json.Decoder, text: bytes) -> list[Event] | None:
    """Events of a text, repaired if need be; None if it holds bad ones or more than their list. Raises BreaksOff."""
    try:
        return _decode(decoder, text)
    except _UNREADABLE as error:
        if "truncated" in str(error):
            raise BreaksOff from None
    with contextlib.suppress(*_UNREADABLE):
        return _decode(decoder, _repaired(text))
    return None


def _one_by_one(
    trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes, final: bool = False
) -> tuple[list[Event], bytes | None, bytes]:
    """Events of a damaged text without the bad ones, what follows the ] of their list, and an event without end.

    final: no text follows, so an event without end is lost. Otherwise it raises BreaksOff.
    """
    held = bytearray(b"[" + _repaired(text) + b"]")
    events: list[Event] = []
    skipped, start, rest, lost = 0, 0, None, b""
    while start is not None:
        held[start] = ord("[")  # in the place of a comma or a blank
        raws, end, at = _until_trouble(held, start)
        valid = _valid_ones(decoder, raws)
        events += valid
        skipped += len(raws) - len(valid)
        start = None
        if at is None:
            rest = bytes(held[end:-1]) if end < len(held) else None
        elif after := EVENT_START.search(held, max(at - 1, 0)):
            skipped, start = skipped + 1, after.end() - 1
        elif (behind := _behind_last(held, max(at - 1, 0))) is not None:
            skipped, rest = skipped + 1, bytes(held[behind:-1])
        elif final:
            lost = bytes(held[end:-1]).lstrip(b" \t\r\n,")
        else:
            raise BreaksOff
    trace.skipped += skipped
    return events, rest, lost


def _until_trouble(held: bytearray, start: int) -> tuple[list[msgspec.Raw], int, int | None]:
    """Events of the list that starts at a place, where the last of them or their list ends, and where one is broken."""
    view = memoryview(held)
    try:
        return _RAW.decode(view[start:]), len(held), None
    except RecursionError:
        at = _last_end(held, start, len(held), _DEEP)[1]
    except msgspec.DecodeError as error:
        at = start + _position(error)
        if "trailing characters" in str(error):
            end = held.rindex(b"]", start, at - 1) + 1  # it names the place behind the first of them
            closes = _LIST_CLOSES.match(held, end - 1, len(held) - 1)
            return _RAW.decode(view[start:end]), end, None if closes else end
        try:  # whether the ] at the end has made it worse
            _RAW.decode(view[start:-1])
        except msgspec.DecodeError as error:
            at = len(held) - 1 if "truncated" in str(error) else start + _position(error)
    if (end := _guessed_end(held, start, at)) > start:
        with contextlib.suppress(msgspec.DecodeError):
            return _RAW.decode(bytes(view[start:end]) + b"]"), end, at
    end = _last_end(held, start, at)[0]
    return _RAW.decode(bytes(view[start:end]) + b"]"), end, at


def _position(error: msgspec.DecodeError) -> int:
    return int(_ERROR_AT.search(f"{error} (byte 0)")[1])


def _guessed_end(held: bytearray, start: int, at: int) -> int:
    """Where the last event before a place ends, if it does not end inside of text or a list."""
    for match in BETWEEN.finditer(held, start, at):
        start = match.start() + 1
    return start


def _last_end(held: bytearray, start: int, at: int, deepest: float = float("inf")) -> tuple[int, int]:
    """Where the last event of sound text before a place ends, and the place of brackets that are nested too deep."""
    depth, end = 0, start + 1
    for token in _TOKEN.finditer(held, start, at):
        mark = held[token.start()]
        if mark in b"[{":
            depth += 1
            if depth > deepest:
                return end, token.start()
        elif mark in b"]}":
            depth -= 1
            if depth == 1:
                end = token.end()
    return end, at


def _behind_last(held: bytearray, at: int) -> int | None:
    """Where the ] of the events ends, if the last of them is unreadable; lists inside of its args end otherwise."""
    for end in itertools.islice(_LIST_END.finditer(held, at, len(held) - 1), _LIST_ENDS):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            tail = bytes(held[end.end() : -1]).lstrip(b" ,\r\n\t")
            msgspec.json.decode(b"{" + (tail or b"}"), type=msgspec.Raw)
            return end.end()
    return None


def _valid_ones(decoder: msgspec.json.Decoder, raws: list[msgspec.Raw]) -> list[Event]:
    """Events of those texts that are one; sound JSON of another shape is left out."""
    events: list[Event] = []
    for raw in map(bytes, raws):
        for kind in (decoder, _exact(decoder.type)):  # which takes numbers beyond 1e308
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                events += _decode(kind, raw)
                break
    return events


@functools.cache
def _exact(events: type) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(events, float_hook=EXACT)


def _repaired(text: bytes) -> bytes:
    """Text without what strict JSON forbids: control characters, invalid UTF-8, stray backslashes, NaN."""
    text = text.translate(_CONTROL).decode("utf-8", "replace").encode()
    text = _STRAY_BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _NOT_JSON_NUMBER.sub(rb"\1null", text)


def decode_json(text: bytes) -> dict:
    """JSON of a text, repaired if need be; DecodeError for what is none or nested too deep."""
    for repair in (bytes, _repaired):
        try:
            return msgspec.json.decode(repair(text))
        except RecursionError:
            raise msgspec.DecodeError("JSON is nested too deep") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if repair is _repaired or "truncated" in str(error):
                raise msgspec.DecodeError(str(error)) from None
    raise AssertionError("the second time returns or raises")
