"""Which events can be read from a piece of trace text, also where it is damaged or
breaks off?

A piece that does not decode is repaired (control characters, invalid UTF-8, stray
backslashes, NaN), then read event by event without the bad ones. The standard library's
decoder tells where an event ends or is broken. The work grows with the length of the
text alone, whatever is wrong with it.
"""

import contextlib
import functools
import gc
import itertools
import json
import re

import msgspec

from madmax_lib.traces.read.events import EXACT, Event, RawTrace

__all__ = [
    "BETWEEN",
    "EVENT_START",
    "BreaksOff",
    "decode_final",
    "decode_json",
    "decode_piece",
]

_CONTROL = bytes(
    32 if i < 32 else i for i in range(256)
)  # control characters to spaces, valid inside and outside text
_KEY = rb'"(?:ph|cat|name|pid|tid|ts|dur|args|bp|s)"\s*:'  # of an event
_BEHIND = rb'(?=\s*(?:,\s*"(?!' + _KEY[1:] + rb")|\}\s*\Z|\Z))"
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
EVENT_START = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEY + rb")")
_LIST_END = re.compile(rb"\}\s*\]" + _BEHIND)
_LIST_CLOSES = re.compile(rb"\]" + _BEHIND)
_APART = re.compile(rb"[\s,]*")  # of two items
_NOT_JSON_NUMBER = re.compile(
    rb"(?<=[:,\[])(\s*)(?:-?(?:Infinity|inf)|NaN|nan)(?=\s*[,\]}])"
)
# half of it alone is no character
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_STRAY_BACKSLASH = re.compile(
    rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|' + _PAIR + rb")|)"
)
_ITEM = json.JSONDecoder(
    strict=False, parse_int=str, parse_float=str
)  # tells where an item ends, unlike msgspec
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
    trace: RawTrace,
    decoder: msgspec.json.Decoder,
    text: bytes,
    quick: msgspec.json.Decoder | None = None,
) -> tuple[list[Event], bytes | None]:
    """Readable events of a text, and what follows the ] if the list ends inside it.
    Raises BreaksOff.

    quick: a decoder to try first, that refuses what it does not know.
    """
    if quick is not None:
        with contextlib.suppress(*_UNREADABLE):
            return _decode(quick, text), None
    events = _decode_repaired(decoder, text)
    return (
        (events, None) if events is not None else _one_by_one(trace, decoder, text)[:2]
    )


def decode_final(
    trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes
) -> tuple[list[Event], bytes | None, bytes]:
    """Readable events of a text that nothing follows, what stands after their ], and an
    event that has no end.
    """
    ends = [
        match.end() - 1
        for match in _LIST_END.finditer(text, max(0, len(text) - (1 << 16)))
    ]
    if ends:
        with contextlib.suppress(*_UNREADABLE):
            return _decode(decoder, text[: ends[-1]]), text[ends[-1] + 1 :], b""
    events = None
    with contextlib.suppress(BreaksOff):
        events = _decode_repaired(decoder, text)
    return (
        (events, None, b"")
        if events is not None
        else _one_by_one(trace, decoder, text, final=True)
    )


def _decode_repaired(decoder: msgspec.json.Decoder, text: bytes) -> list[Event] | None:
    """Events of a text, repaired if need be; None if it holds bad ones or more than
    their list. Raises BreaksOff.
    """
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
    """Events of a damaged text without the bad ones, what follows the ] of their list,
    and an event without end.

    final: no text follows, so an event without end is lost. Otherwise it raises
    BreaksOff.
    """
    text = _repaired(text)
    letters = text.decode("latin-1")  # one for each byte
    events: list[Event] = []
    skipped = 0
    at = 0
    rest = None
    lost = b""
    while (at := _APART.match(text, at).end()) < len(text):
        if _LIST_CLOSES.match(text, at):
            rest = text[at + 1 :]
            break
        end, trouble = _end_of_item(letters, at)
        if end:
            valid = _valid(decoder, text[at:end])
            events += valid
            skipped = skipped + (not valid)
            at = end
        elif after := EVENT_START.search(text, max(trouble - 1, 0)):
            skipped = skipped + 1
            at = after.end()
        elif (behind := _behind_last(text, max(trouble - 1, 0))) is not None:
            skipped = skipped + 1
            rest = text[behind:]
            break
        elif final:
            lost = text[at:]
            break
        else:
            raise BreaksOff
    trace.skipped += skipped
    return events, rest, lost


def _end_of_item(text: str, at: int) -> tuple[int, int]:
    """Where the JSON that begins at a place ends, or 0 and where it is broken: at the
    end of the text if it breaks off.

    What is nested too deep is broken where it begins.
    """
    try:
        return _ITEM.raw_decode(text, at)[1], 0
    except RecursionError:
        return 0, at + 1
    except json.JSONDecodeError as error:
        return 0, len(text) if error.msg.startswith("Unterminated") else error.pos


def _behind_last(text: bytes, at: int) -> int | None:
    """Where the ] of the events ends, if the last of them is unreadable; lists inside
    of its args end otherwise.
    """
    for end in itertools.islice(_LIST_END.finditer(text, at), _LIST_ENDS):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            tail = text[end.end() :].lstrip(b" ,\r\n\t")
            msgspec.json.decode(b"{" + (tail or b"}"), type=msgspec.Raw)
            return end.end()
    return None


def _valid(decoder: msgspec.json.Decoder, text: bytes) -> list[Event]:
    """The event of a text; none where it is sound JSON of another shape."""
    for kind in (decoder, _exact(decoder.type)):  # which takes numbers beyond 1e308
        with contextlib.suppress(*_UNREADABLE):
            return _decode(kind, text)
    return []


@functools.cache
def _exact(events: type) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(events, float_hook=EXACT)


def _repaired(text: bytes) -> bytes:
    """Text without what strict JSON forbids: control characters, invalid UTF-8, stray
    backslashes, NaN.
    """
    text = text.translate(_CONTROL).decode("utf-8", "replace").encode()
    text = _STRAY_BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _NOT_JSON_NUMBER.sub(rb"\1null", text)


def decode_json(text: bytes) -> dict:
    """JSON of a text, repaired if need be; DecodeError for what is none or nested too
    deep.
    """
    for repair in (bytes, _repaired):
        try:
            return msgspec.json.decode(repair(text))
        except RecursionError:
            raise msgspec.DecodeError("JSON is nested too deep") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if repair is _repaired or "truncated" in str(error):
                raise msgspec.DecodeError(str(error)) from None
    raise AssertionError("the second time returns or raises")
