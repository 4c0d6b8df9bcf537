"""Which events can be read from a piece of trace text, also where it is damaged or breaks off?

A piece that does not decode is repaired (control characters, invalid UTF-8, stray backslashes, NaN), then read event by
event without the bad ones. The position in msgspec's errors tells where the list of events ends or an event is broken.
"""

from __future__ import annotations

import contextlib
import gc
import re
from decimal import InvalidOperation

import msgspec

from madmax_lib.traces.events import Event, RawTrace

__all__ = ["BETWEEN", "BreaksOff", "decode_end", "decode_json", "decode_piece"]

_CONTROL = bytes(32 if i < 32 else i for i in range(256))  # control characters to spaces, valid inside and outside text
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENT_START = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|bp|s)"\s*:)')
_LIST_END = re.compile(rb'\}\s*\](?=\s*(?:,\s*"|\}\s*$|$))')
_ERROR_AT = re.compile(r"\(byte (\d+)\)")
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)(?:-?(?:Infinity|inf)|NaN|nan)(?=\s*[,\]}])")
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # half of it alone is no character
_STRAY_BACKSLASH = re.compile(rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|' + _PAIR + rb")|)")
_RAW = msgspec.json.Decoder(list[msgspec.Raw])


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
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, InvalidOperation):
            return _decode(quick, text), None
    try:
        return _decode(decoder, text), None
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidOperation) as error:
        if "truncated" in str(error):
            raise BreaksOff from None
        if "trailing characters" not in str(error):
            text = _repaired(text)
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, InvalidOperation):
                return _decode(decoder, text), None
    events: list[Event] = []
    skipped = 0
    while text.strip(b" ,\r\n\t"):
        try:
            raws, at = _decode(_RAW, text), len(text)
        except msgspec.DecodeError as error:
            if _breaks_off(text):
                raise BreaksOff from None
            raws, at = [], max(int(_ERROR_AT.search(f"{error} (byte 0)")[1]) - 1, 0)
            if "trailing characters" in str(error):
                end = text.rfind(b"]", 0, at)
                trace.skipped += skipped
                return events + decode_piece(trace, decoder, text[:end])[0], text[end + 1 :]
            raws, text = _around(text, at)
            skipped += 1
        else:
            text = b""
        valid = _valid_ones(decoder, raws)
        skipped += len(raws) - len(valid)
        events += valid
    trace.skipped += skipped
    return events, None


def _breaks_off(text: bytes) -> bool:
    """Whether a text is sound as far as it goes."""
    try:
        _RAW.decode(b"[" + text)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    return False


def _around(text: bytes, at: int) -> tuple[list[msgspec.Raw], bytes]:
    """Events before the unreadable one at a position, and the text after it. Raises BreaksOff if it has no end."""
    after = _EVENT_START.search(text, max(at - 1, 0))
    rest = text[after.end() :] if after else _behind_last(text, max(at - 1, 0))
    for match in reversed(list(BETWEEN.finditer(text, 0, at))):
        try:
            return _decode(_RAW, text[: match.end()]), rest
        except msgspec.DecodeError:  # this boundary stands inside a string
            continue
    return [], rest


def _behind_last(text: bytes, at: int) -> bytes:
    """From the ] of the events on, if the last of them is unreadable; lists inside of its args end otherwise."""
    for end in _LIST_END.finditer(text, at):
        with contextlib.suppress(msgspec.DecodeError):
            decode_json(b"{" + (text[end.end() :].lstrip(b" ,\r\n\t") or b"}"))
            return text[end.end() - 1 :]
    raise BreaksOff


def _valid_ones(decoder: msgspec.json.Decoder, raws: list[msgspec.Raw]) -> list[Event]:
    """Events of those texts that are one; sound JSON of another shape is left out."""
    events = []
    for raw in raws:
        with contextlib.suppress(msgspec.ValidationError, InvalidOperation):
            events += _decode(decoder, bytes(raw))
    return events


def decode_end(trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes) -> tuple[list[Event], bytes]:
    """Events of the end of a file: up to the ] of the list, or to the last complete event if the text breaks off."""
    ends = [match.end() - 1 for match in _LIST_END.finditer(text, max(0, len(text) - (1 << 16)))]
    if ends:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, InvalidOperation):
            return _decode(decoder, text[: ends[-1]]), text[ends[-1] + 1 :]
    cuts = [len(text), *(match.end() for match in reversed(list(BETWEEN.finditer(text)))), 0]
    for cut in cuts:
        try:
            events, rest = decode_piece(trace, decoder, text[:cut])
        except BreaksOff:
            continue
        if rest is None:
            trace.damage = trace.damage or "truncated JSON"
            trace.lost_bytes = len(text[cut:].lstrip())
        return events, rest or b""
    raise AssertionError("an empty text always decodes")


def _repaired(text: bytes) -> bytes:
    """Text without what strict JSON forbids: control characters, invalid UTF-8, stray backslashes, NaN."""
    text = text.translate(_CONTROL).decode("utf-8", "replace").encode()
    text = _STRAY_BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _NOT_JSON_NUMBER.sub(rb"\1null", text)


def decode_json(text: bytes) -> dict:
    """JSON of a text, repaired if need be."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(_repaired(text))
