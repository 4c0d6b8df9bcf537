"""How do the bytes of a Chrome trace become columns? Streaming, typed, and forgiving to damaged files.

The file is decompressed in blocks (isal) and cut between events; each piece is decoded by msgspec into a typed struct
that keeps only the fields we use, so memory stays bounded and no dict is built per event. A piece that does not decode
is repaired (control characters, invalid UTF-8, stray backslashes, NaN), then read event by event without the bad ones.
A truncated file keeps every complete event. Format facts: Chrome trace event format; Kineto output 2020 to 2026.
"""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
from isal import isal_zlib

__all__ = ["Args", "Event", "NotATrace", "RawTrace", "TraceWarning", "decode_pieces"]

_BLOCK = 16 << 20  # bytes of JSON text per piece
_MAGIC = b"\x1f\x8b"
_CONTROL = bytes(32 if i < 32 else i for i in range(256))  # control characters to spaces, valid inside and outside text
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENT_START = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|bp|s)"\s*:)')
_LIST_END = re.compile(rb'\}\s*\](?=\s*(?:,\s*"|\}\s*$|$))')
_ERROR_AT = re.compile(r"\(byte (\d+)\)")
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)(?:-?(?:Infinity|inf)|NaN|nan)(?=\s*[,\]}])")
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # half of it alone is no character
_STRAY_BACKSLASH = re.compile(rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|' + _PAIR + rb")|)")


class _Short(Exception):
    """A piece of text breaks off inside an event."""


class NotATrace(ValueError):
    """A file that is something else than a profiler trace."""


class TraceWarning(UserWarning):
    """A trace was read, but something in it was missing, damaged or ambiguous."""


class Args(msgspec.Struct, frozen=True, gc=False):
    """The fields of an event's args that we use; any type, because tools write ids as numbers or text."""

    stream: Any = None
    correlation: Any = None
    external_id: Any = msgspec.field(default=None, name="External id")
    external_id_new: Any = msgspec.field(default=None, name="External Id")
    external_id_old: Any = msgspec.field(default=None, name="external id")
    size_bytes: Any = msgspec.field(default=None, name="bytes")
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_rank: Any = msgspec.field(default=None, name="Rank")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")


class Event(msgspec.Struct, gc=False):
    """One trace event; ts and dur in microseconds."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


@dataclass
class RawTrace:
    """What a file says beside its events, filled while `decode_pieces` runs."""

    path: Path
    envelope: dict = field(default_factory=dict)  # every top-level key but traceEvents
    events: int = 0
    skipped: int = 0  # events that could not be read
    lost_bytes: int = 0  # text after the last complete event of a truncated file
    damage: str = ""  # why the file ended early

    def warn(self) -> None:
        """One warning for a file that was not read whole."""
        if self.damage:
            text = (
                f"{self.path}: {self.damage}; kept {self.events} complete events, lost the last {self.lost_bytes} bytes"
            )
            warnings.warn(text, TraceWarning, stacklevel=2)
        if self.skipped:
            text = f"{self.path}: skipped {self.skipped} unreadable of {self.events + self.skipped} events"
            warnings.warn(text, TraceWarning, stacklevel=2)


_RAW = msgspec.json.Decoder(list[msgspec.Raw])


def decode_pieces(trace: RawTrace, *, exact: bool = False) -> Iterator[list[Event]]:
    """The events of a trace file, in lists of some ten thousand; `trace` is filled on the way.

    exact: numbers with a decimal point become Decimal instead of float (needed where float64 cannot hold the ns).
    Raises OSError for a file that cannot be opened and ValueError (with file and reason) for one that is no trace.
    """
    decoder = msgspec.json.Decoder(list[Event], float_hook=Decimal if exact else None)
    with contextlib.closing(_text_blocks(trace)) as blocks:
        buffer, rest = _find_events(trace, blocks), None
        for block in blocks:
            buffer += block
            if rest is not None or not (cut := _last_cut(buffer)):
                continue
            try:
                events, rest = _decode_piece(trace, decoder, buffer[: cut.start() + 1])
            except _Short:  # the cut lies inside a string or a nested list: take more text
                continue
            trace.events += len(events)
            yield events
            buffer = buffer[cut.end() :] if rest is None else rest + buffer[cut.start() + 1 :]
        if rest is None:
            events, rest = _decode_end(trace, decoder, buffer)
            trace.events += len(events)
            yield events
        else:
            rest = buffer
        _read_rest(trace, rest)


def _text_blocks(trace: RawTrace) -> Iterator[bytes]:
    """Uncompressed text in blocks, whatever the file is called; a broken stream ends early and says so."""
    with open(trace.path, "rb") as file:
        packed = file.read(2) == _MAGIC
        file.seek(0)
        yield from _inflate(trace, file) if packed else iter(lambda: file.read(_BLOCK), b"")


def _inflate(trace: RawTrace, file) -> Iterator[bytes]:
    stream, data, done = isal_zlib.decompressobj(wbits=31), b"", 0
    while True:
        data = data or file.read(1 << 20)
        if not data:
            trace.damage = "truncated gzip"
            return
        try:
            block = stream.decompress(data, _BLOCK)
        except isal_zlib.error as error:
            trace.damage = f"damaged gzip ({error})"
            yield _up_to_damage(file, done)
            return
        yield block
        done += len(block)
        data = stream.unconsumed_tail
        if stream.eof:
            data = stream.unused_data
            data += file.read(1 << 20) if len(data) < len(_MAGIC) else b""
            if not data.startswith(_MAGIC):  # the end, or padding after it
                return
            stream = isal_zlib.decompressobj(wbits=31)


def _up_to_damage(file, done: int) -> bytes:
    """Text of a damaged gzip file after its first `done` bytes, unpacked again in bites no longer than the checksum."""
    stream, parts = isal_zlib.decompressobj(wbits=31), []
    file.seek(0)
    with contextlib.suppress(isal_zlib.error):
        for bite in iter(lambda: file.read(8), b""):
            if stream.eof:
                stream, bite = isal_zlib.decompressobj(wbits=31), stream.unused_data + bite
            part = stream.decompress(bite)
            parts.append(part[done:])
            done -= min(done, len(part))
    return b"".join(parts)


def _find_events(trace: RawTrace, blocks: Iterator[bytes]) -> bytes:
    """Text from the first event on; the keys before it go to the envelope."""
    text = b""
    for block in blocks:
        text = (text + block).removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"[") and b'"ph"' in text:
            return text[1:]
        if text and text[:1] not in b"[{":
            break
        for match in _EVENTS_KEY.finditer(text):
            try:
                trace.envelope = _json(text[: match.end()] + b"]}")
            except msgspec.DecodeError:  # the words stand inside a string
                continue
            trace.envelope.pop("traceEvents")
            return text[match.end() :]
    if not text:
        raise NotATrace(f"{trace.path}: {trace.damage or 'empty file'}, not a profiler trace")
    reason = {b"{": "JSON without traceEvents", b"[": "a list, but not of events"}.get(
        text[:1], "neither a JSON object nor a list"
    )
    raise NotATrace(f"{trace.path}: not a profiler trace ({reason})")


def _last_cut(buffer: bytes) -> re.Match | None:
    """What stands between the last event that has begun and the one before it, if there are two."""
    reach = 1 << 16
    while True:
        low = max(0, len(buffer) - reach)
        cuts = list(_BETWEEN.finditer(buffer, low))
        if cuts or not low:
            return cuts[-1] if cuts else None
        reach *= 8


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


def _decode_piece(trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes) -> tuple[list[Event], bytes | None]:
    """Readable events of a text, and what follows the ] if the list ends inside it. Raises _Short if it breaks off."""
    try:
        return _decode(decoder, text), None
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidOperation) as error:
        if "truncated" in str(error):
            raise _Short from None
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
                raise _Short from None
            raws, at = [], max(int(_ERROR_AT.search(f"{error} (byte 0)")[1]) - 1, 0)
            if "trailing characters" in str(error):
                end = text.rfind(b"]", 0, at)
                trace.skipped += skipped
                return events + _decode_piece(trace, decoder, text[:end])[0], text[end + 1 :]
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
    """Events before the one that is unreadable at a position, and the text after it. Raises _Short if it has no end."""
    after = _EVENT_START.search(text, max(at - 1, 0))
    rest = text[after.end() :] if after else _behind_last(text, max(at - 1, 0))
    for match in reversed(list(_BETWEEN.finditer(text, 0, at))):
        try:
            return _decode(_RAW, text[: match.end()]), rest
        except msgspec.DecodeError:  # this boundary stands inside a string
            continue
    return [], rest


def _behind_last(text: bytes, at: int) -> bytes:
    """From the ] of the events on, if the last of them is unreadable; lists inside of its args end otherwise."""
    for end in _LIST_END.finditer(text, at):
        with contextlib.suppress(msgspec.DecodeError):
            _json(b"{" + (text[end.end() :].lstrip(b" ,\r\n\t") or b"}"))
            return text[end.end() - 1 :]
    raise _Short


def _valid_ones(decoder: msgspec.json.Decoder, raws: list[msgspec.Raw]) -> list[Event]:
    """Events of those texts that are one; sound JSON of another shape is left out."""
    events = []
    for raw in raws:
        with contextlib.suppress(msgspec.ValidationError, InvalidOperation):
            events += _decode(decoder, bytes(raw))
    return events


def _decode_end(trace: RawTrace, decoder: msgspec.json.Decoder, text: bytes) -> tuple[list[Event], bytes]:
    """Events of the end of a file: up to the ] of the list, or to the last complete event if the text breaks off."""
    ends = [match.end() - 1 for match in _LIST_END.finditer(text, max(0, len(text) - (1 << 16)))]
    if ends:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, InvalidOperation):
            return _decode(decoder, text[: ends[-1]]), text[ends[-1] + 1 :]
    cuts = [len(text), *(match.end() for match in reversed(list(_BETWEEN.finditer(text)))), 0]
    for cut in cuts:
        try:
            events, rest = _decode_piece(trace, decoder, text[:cut])
        except _Short:
            continue
        if rest is None:
            trace.damage = trace.damage or "truncated JSON"
            trace.lost_bytes = len(text[cut:].lstrip())
        return events, rest or b""
    raise AssertionError("an empty text always decodes")


def _read_rest(trace: RawTrace, rest: bytes) -> None:
    """Keys that follow the list of events."""
    rest = rest.strip().lstrip(b",")
    if not rest:
        return
    try:
        trace.envelope |= _json(b"{" + rest)
    except msgspec.DecodeError:
        trace.damage, trace.lost_bytes = trace.damage or "truncated JSON after the events", len(rest)


def _repaired(text: bytes) -> bytes:
    """Text without what strict JSON forbids: control characters, invalid UTF-8, stray backslashes, NaN."""
    text = text.translate(_CONTROL).decode("utf-8", "replace").encode()
    text = _STRAY_BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _NOT_JSON_NUMBER.sub(rb"\1null", text)


def _json(text: bytes) -> dict:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(_repaired(text))
