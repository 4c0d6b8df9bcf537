"""How do the bytes of a Chrome trace become columns? Streaming, typed, and forgiving to damaged files.

The file is decompressed in blocks (isal) and cut between events; each piece is decoded by msgspec into a typed struct
that keeps only the fields we use, so memory stays bounded and no dict is built per event. What a damaged piece or a
truncated file still holds is read in `salvage`. Format facts: Chrome trace event format; Kineto output 2020 to 2026.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from decimal import Decimal

import msgspec
from isal import isal_zlib

from madmax_lib.traces.events import QUICK, Event, NotATrace, OtherContent, RawTrace
from madmax_lib.traces.files import rank_in_name
from madmax_lib.traces.salvage import BETWEEN, BreaksOff, decode_end, decode_json, decode_piece

__all__ = ["decode_pieces"]

_BLOCK = 1 << 18  # bytes of JSON text per piece: it and its events stay in the processor's cache
_MAGIC = b"\x1f\x8b"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')


def decode_pieces(trace: RawTrace, *, exact: bool = False, event: type[Event] | None = None) -> Iterator[list]:
    """The events of a trace file, in lists of some ten thousand; `trace` is filled on the way.

    event: what to make of each, Event or a class derived from it; without it complete events get the attributes of
    Event and the others may be nothing but counted.
    exact: numbers with a decimal point become Decimal instead of float (needed where float64 cannot hold the ns).
    Raises OSError for a file that cannot be opened and ValueError (with file and reason) for one that is no trace.
    """
    number = Decimal if exact else None
    quick = None if event else msgspec.json.Decoder(list[QUICK], float_hook=number)
    decoder = msgspec.json.Decoder(list[event or Event], float_hook=number)
    with contextlib.closing(_text_blocks(trace)) as blocks:
        buffer, rest = _find_events(trace, blocks), None
        for block in blocks:
            buffer += block
            if rest is not None or not (cut := _last_cut(buffer)):
                continue
            try:
                events, rest = decode_piece(trace, decoder, buffer[: cut.start() + 1], quick)
            except BreaksOff:  # the cut lies inside a string or a nested list: take more text
                continue
            trace.events += len(events)
            yield events
            buffer = buffer[cut.end() :] if rest is None else rest + buffer[cut.start() + 1 :]
        if rest is None:
            events, rest = decode_end(trace, decoder, buffer)
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
        data = data or file.read(1 << 16)
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
                trace.envelope = decode_json(text[: match.end()] + b"]}")
            except msgspec.DecodeError:  # the words stand inside a string
                continue
            trace.envelope.pop("traceEvents")
            return text[match.end() :]
    if not text:
        raise NotATrace(f"{trace.path}: {trace.damage or 'empty file'}, not a profiler trace")
    reason = {b"{": "JSON without traceEvents", b"[": "a list, but not of events"}.get(text[:1], "not JSON")
    raise _kind_of(trace, text)(f"{trace.path}: not a profiler trace ({trace.damage or reason})")


def _kind_of(trace: RawTrace, text: bytes) -> type[NotATrace]:
    """Whether a file holds something else, or what was to be a trace: it has a rank or its JSON breaks off."""
    if trace.damage:
        return NotATrace
    if text[:1] not in b"[{":
        return OtherContent if rank_in_name(trace.path) is None else NotATrace
    with contextlib.suppress(msgspec.DecodeError):
        msgspec.json.decode(text, type=msgspec.Raw)
        return OtherContent
    return NotATrace


def _last_cut(buffer: bytes) -> re.Match | None:
    """What stands between the last event that has begun and the one before it, if there are two."""
    reach = 1 << 12
    while True:
        low = max(0, len(buffer) - reach)
        cuts = list(BETWEEN.finditer(buffer, low))
        if cuts or not low:
            return cuts[-1] if cuts else None
        reach *= 8


def _read_rest(trace: RawTrace, rest: bytes) -> None:
    """Keys that follow the list of events."""
    rest = rest.strip().lstrip(b",")
    if not rest:
        return
    try:
        trace.envelope |= decode_json(b"{" + rest)
    except msgspec.DecodeError:
        trace.damage, trace.lost_bytes = trace.damage or "truncated JSON after the events", len(rest)
