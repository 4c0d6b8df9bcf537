"""Events of a piece of trace text, also where it is damaged or breaks off.

A piece that does not decode is repaired (control characters, invalid UTF-8, stray
backslashes, NaN), then read event by event without the bad ones. The standard library's
decoder tells where an event ends or is broken. The work grows with the length of the
text alone, whatever is wrong with it.
"""

import contextlib
import functools
import itertools
import json
import re
from typing import NamedTuple

import msgspec

from madmax_lib.base.doors import uncollected
from madmax_lib.traces.read.events import EXACT, Event, RawTrace

# control characters to spaces, which are valid inside and outside of text
_CONTROL = bytes(32 if i < 32 else i for i in range(256))
_KEY = rb'"(?:ph|cat|name|pid|tid|ts|dur|args|bp|s)"\s*:'  # of an event
# what follows the list of events: another key of the file, the end of the object or of
# the text; a list inside of an event is followed by keys of events
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
# tells where an item ends, unlike msgspec; numbers are not needed, and take long
_ITEM = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_LIST_ENDS = 50  # places to try as the end of the events
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BreaksOff(Exception):
    """A piece of text breaks off inside an event."""


class Decoded(NamedTuple):
    """Events of a piece of text and what is left of it."""

    events: list[Event]
    rest: bytes | None = None  # after the ] of their list; None: the list goes on
    tail: bytes = b""  # an event that has begun and not ended


def _decode(decoder, text):
    """The list whose brackets the text lacks."""
    if not text.endswith(b"}"):
        text = text.rstrip().removesuffix(b",")  # a comma after the last item
    with uncollected():
        return decoder.decode(b"[" + text + b"]")


def decode_piece(
    trace: RawTrace,
    decoder: msgspec.json.Decoder,
    text: bytes,
    quick: msgspec.json.Decoder | None = None,
) -> Decoded:
    """Readable events of a text, inside of which the list may end. Raises BreaksOff.

    quick: a decoder to try first, that refuses what it does not know.
    """
    if quick is not None:
        with contextlib.suppress(*_UNREADABLE):
            return Decoded(_decode(quick, text))
    events = _decode_repaired(decoder, text)
    if events is not None:
        return Decoded(events)
    return _one_by_one(trace, decoder, text)


def decode_final(
    trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes
) -> Decoded:
    """Readable events of a text that nothing follows."""
    # a sound file: the last ] that may be the list's, near the end
    near_end = max(0, len(text) - (1 << 16))
    ends = [match.end() - 1 for match in _LIST_END.finditer(text, near_end)]
    if ends:
        with contextlib.suppress(*_UNREADABLE):
            return Decoded(_decode(decoder, text[: ends[-1]]), text[ends[-1] + 1 :])
    events = None
    with contextlib.suppress(BreaksOff):
        events = _decode_repaired(decoder, text)
    if events is not None:
        return Decoded(events)
    return _one_by_one(trace, decoder, text, final=True)


def _decode_repaired(decoder, text):
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


def _one_by_one(trace, decoder, text, final=False):
    """Events of a damaged text without the bad ones.

    final: no text follows, so an event without end is lost. Otherwise it raises
    BreaksOff.
    """
    text = _repaired(text)
    letters = text.decode(
        "latin-1"
    )  # one for each byte, so that positions are the same
    events = []
    skipped = 0
    at = 0
    rest = None
    tail = b""
    while (at := _APART.match(text, at).end()) < len(text):
        if _LIST_CLOSES.match(text, at):
            rest = text[at + 1 :]
            break
        end, broken = _end_of_item(letters, at)
        if end:
            # sound JSON, which may still be no event
            valid = _valid(decoder, text[at:end])
            events += valid
            skipped += not valid
            at = end
        elif next_event := EVENT_START.search(text, max(broken - 1, 0)):
            skipped += 1
            at = next_event.end()
        elif (list_end := _end_after_last(text, max(broken - 1, 0))) is not None:
            skipped += 1
            rest = text[list_end:]
            break
        elif final:
            tail = text[at:]
            break
        else:
            raise BreaksOff
    trace.skipped += skipped
    return Decoded(events, rest, tail)


def _end_of_item(text, at):
    """End of the JSON that begins at a position, or 0 and the position where it is
    broken: the end of the text if it breaks off.

    An item that is nested too deep is broken where it begins.
    """
    try:
        return _ITEM.raw_decode(text, at)[1], 0
    except RecursionError:
        return 0, at + 1
    except json.JSONDecodeError as error:
        return 0, len(text) if error.msg.startswith("Unterminated") else error.pos


def _end_after_last(text, at):
    """Position after the ] of the events, if the last of them is unreadable; lists
    inside of its args end otherwise.
    """
    for match in itertools.islice(_LIST_END.finditer(text, at), _LIST_ENDS):
        # what follows must be keys and the } of the file; Raw checks without decoding
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            keys = text[match.end() :].lstrip(b" ,\r\n\t")
            msgspec.json.decode(b"{" + (keys or b"}"), type=msgspec.Raw)
            return match.end()
    return None


def _valid(decoder, text):
    """The event of a text; none where it is sound JSON of another shape."""
    try:
        return _decode(decoder, text)
    except _UNREADABLE:
        pass
    # numbers beyond 1e308 are no floats, but decimals
    with contextlib.suppress(*_UNREADABLE):
        return _decode(_exact_decoder(decoder.type), text)
    return []


@functools.cache
def _exact_decoder(events):
    return msgspec.json.Decoder(events, float_hook=EXACT)


def _repaired(text):
    """Text without what strict JSON forbids: control characters, invalid UTF-8, stray
    backslashes, NaN.
    """
    text = text.translate(_CONTROL).decode("utf-8", "replace").encode()
    # group 1 is a sound escape; any other backslash is meant as one
    text = _STRAY_BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _NOT_JSON_NUMBER.sub(rb"\1null", text)


def decode_json(text: bytes) -> dict:
    """Object of a JSON text, repaired if need be; DecodeError for what is none or
    nested too deep.
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
