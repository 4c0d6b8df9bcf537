"""Events of a Chrome trace from its bytes: streaming, typed, and forgiving to damaged
files.

The file is decompressed in blocks (isal) and cut between events; each piece is decoded
by msgspec into a typed struct that keeps only the fields we use, so memory stays
bounded and no dict is built per event. What a damaged piece or a truncated file still
holds is read in `salvage`. Format facts: Chrome trace event format; Kineto output 2020
to 2026.
"""

import bz2
import contextlib
import itertools
import lzma
import re
from collections.abc import Iterator

import msgspec
from isal import isal_zlib

from madmax_lib.traces.read.events import (
    EXACT,
    QUICK,
    Event,
    NotATrace,
    OtherContent,
    RawTrace,
)
from madmax_lib.traces.read.files import rank_in_name
from madmax_lib.traces.read.salvage import (
    BETWEEN,
    EVENT_START,
    BreaksOff,
    Decoded,
    decode_final,
    decode_json,
    decode_piece,
)

# bytes of JSON text per piece: small enough that the allocator uses its memory again
_BLOCK = 1 << 16
_READ = 1 << 16  # bytes of a packed file
# bytes of an event, and of the keys before or after the events; a longer one is skipped
_LONGEST = 1 << 23
_OVERLAP = 1 << 12  # bytes in which the start of an event may be cut by a block
_KEYS = 100  # positions to try as the start of the events
_MAGIC = b"\x1f\x8b"
_PACKED = {b"BZ": bz2.open, b"\xfd7": lzma.open}
_XPLANE = ".xplane.pb"
_OTHERS = {  # what a file is that begins so
    b"{": "JSON without traceEvents",
    b"[": "a list, but not of events",
    b"PK": "a zip archive: call it .zip, or unpack it",
    **dict.fromkeys(
        (b"7z\xbc\xaf", b"Rar!", b"(\xb5/\xfd"), "a packed file: unpack it first"
    ),
    b"SQLite format 3": "a database: unpack an export of Nsight Systems and "
    "name it .sqlite; from rocprof, use rocpd convert --output-format pftrace",
}
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')


def decode_pieces(
    trace: RawTrace, *, exact: bool = False, event: type[Event] | None = None
) -> Iterator[list]:
    """Events of a trace file, in lists of some hundred; `trace` is filled on the way.

    event: what to make of each, Event or a class derived from it; without it complete
    events get the attributes of Event and the others may be nothing but counted.
    exact: numbers with a decimal point become Decimal instead of float (needed where
    float64 cannot hold the ns). Raises OSError for a file that cannot be opened and
    ValueError (with file and reason) for one that is no trace.
    """
    number = EXACT if exact else None
    quick = None if event else msgspec.json.Decoder(list[QUICK], float_hook=number)
    decoder = msgspec.json.Decoder(list[event or Event], float_hook=number)
    if packets := packets_of(trace):
        # late: few files are packets
        from madmax_lib.traces.read.perfetto import chrome_lists

        yield from map(decoder.decode, chrome_lists(trace, packets))
        return
    with contextlib.closing(_file_blocks(trace)) as blocks:
        text = _find_events(trace, blocks)
        piece = Decoded([])
        wanted_bytes = 0
        # each piece costs as much as some thousand events: none is very small
        while more := _at_least(blocks, max(wanted_bytes - len(text), _BLOCK // 4, 1)):
            text += more
            try:
                piece = _next_piece(trace, decoder, text, quick)
                wanted_bytes = 0
            except BreaksOff:
                # twice as much each time, so that all attempts together stay linear
                wanted_bytes = min(2 * len(text), _LONGEST)
                if len(text) < _LONGEST:
                    continue
                piece = decode_final(trace, decoder, text)
                if piece.rest is None and piece.tail:
                    tail = _skip_event(trace, blocks, piece.tail)
                    piece = piece._replace(tail=tail)
            text = piece.tail
            trace.events += len(piece.events)
            yield piece.events
            if piece.rest is not None:
                break
        if piece.rest is None:  # the text ends, and the list with it or not
            piece = decode_final(trace, decoder, text)
            if piece.rest is None:
                trace.damage = trace.damage or "truncated JSON"
                trace.lost_bytes += len(piece.tail)
            trace.events += len(piece.events)
            yield piece.events
        _read_rest(trace, blocks, piece.rest or b"")


def packets_of(trace: RawTrace) -> bytes:
    """Bytes of a file of Perfetto's packets, uncompressed; none of another."""
    with contextlib.closing(_file_blocks(trace)) as blocks:
        first = next(blocks, b"")
        # field 1, length-delimited, of a Trace
        is_text = first.lstrip()[:1] in (b"{", b"[", b"")
        is_packets = first[:1] == b"\n" and not is_text
        if is_packets and not trace.path.name.endswith(_XPLANE):
            return b"".join((first, *blocks))
    return b""


def _at_least(blocks, length):
    """The next block, or as many as have a length together; fewer at the end, and
    nothing after it.
    """
    parts = []
    for part in blocks:
        parts.append(part)
        length -= len(part)
        if length <= 0:
            break
    return b"".join(parts)


def _next_piece(
    trace,
    decoder,
    text,
    quick,
):
    """Events of a text without the last one, which may go on in the next block.

    Raises BreaksOff where the last but one has no end that can be told: it stands
    inside a string or a nested list.
    """
    if not (cut := _last_cut(text)):
        raise BreaksOff
    until = cut.start() + 1  # the } of the last but one
    piece = decode_piece(trace, decoder, text[:until], quick)
    if piece.rest is None:
        return Decoded(piece.events, tail=text[cut.end() :])
    return Decoded(piece.events, rest=piece.rest + text[until:])


def _skip_event(trace, blocks, text):
    """Text after an event that is longer than any, with nothing of it kept on the way;
    its last bytes at the end.
    """
    length = len(text)
    while not (start := EVENT_START.search(text)):
        if not (block := next(blocks, b"")):
            trace.lost_bytes = length - len(text)
            return text
        length += len(block)
        text = text[-_OVERLAP:] + block
    trace.skipped += 1
    return text[start.end() :]


def _file_blocks(trace):
    """Uncompressed file in blocks; a broken stream ends early and says so."""
    with open(trace.path, "rb") as file:
        magic = file.read(2)
        file.seek(0)
        blocks = iter(lambda: file.read(_BLOCK), b"")
        if magic == _MAGIC:
            blocks = _inflate(trace, file)
        elif magic in _PACKED:
            blocks = _unpack(trace, _PACKED[magic](file))
        yield from blocks


def _unpack(trace, stream):
    """Text of a file of bzip2 or xz."""
    try:
        while block := stream.read(_BLOCK):
            yield block
    except (EOFError, OSError, lzma.LZMAError) as error:
        trace.damage = f"damaged file ({error})"


def _inflate(trace, file):
    """Text of a gzip file of one or more members, of at most a block each."""
    # wbits: 15 for the window, 16 for the header and checksum of gzip
    stream = isal_zlib.decompressobj(wbits=31)
    data = b""
    done = 0
    while True:
        data = data or file.read(_READ)
        if not data:
            trace.damage = "truncated gzip"
            return
        try:
            block = stream.decompress(data, _BLOCK)
        except isal_zlib.error as error:
            trace.damage = f"damaged gzip ({error})"
            yield from _up_to_damage(file, done)
            return
        yield block
        done += len(block)
        data = stream.unconsumed_tail
        if stream.eof:
            data = stream.unused_data
            data += file.read(_READ) if len(data) < len(_MAGIC) else b""
            if not data.startswith(_MAGIC):  # the end, or padding after it
                return
            stream = isal_zlib.decompressobj(wbits=31)


def _up_to_damage(file, done):
    """Text of a damaged gzip file after its first `done` bytes, unpacked again in bites
    no longer than the checksum.
    """
    stream = isal_zlib.decompressobj(wbits=31)
    file.seek(0)
    with contextlib.suppress(isal_zlib.error):
        for bite in iter(lambda: file.read(8), b""):
            if stream.eof:  # the next member begins in what the last one left
                bite = stream.unused_data + bite
                stream = isal_zlib.decompressobj(wbits=31)
            part = stream.decompress(bite)
            yield part[done:]
            done -= min(done, len(part))


def _find_events(trace, blocks):
    """Text from the first event on; the keys before it go to the envelope."""
    text = b""
    tried = 0
    searched = 0
    for block in blocks:
        text = (text + block).removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"[") and b'"ph"' in text:
            return text[1:]
        if text and text[:1] not in b"[{":
            break
        for match in itertools.islice(
            _EVENTS_KEY.finditer(text, searched), _KEYS - tried
        ):
            tried += 1
            searched = match.end()
            try:
                trace.envelope = decode_json(text[:searched] + b"]}")
                trace.envelope.pop("traceEvents")
            except msgspec.DecodeError as error:
                # the words stand inside a string or an object
                if "truncated" in str(error) or text.startswith(b"["):
                    continue
                trace.lost_keys = True
            return text[searched:]
        if len(text) > _LONGEST or tried == _KEYS:
            break
    if not text:
        raise NotATrace(
            f"{trace.path}: {trace.damage or 'empty file'}, not a profiler trace"
        )
    fitting = (_OTHERS[start] for start in _OTHERS if text.startswith(start))
    reason = next(fitting, "not JSON")
    if trace.path.name.endswith(_XPLANE):
        reason = "an XPlane of XLA's profiler; open it with xprof"
    raise _kind_of(trace, text)(
        f"{trace.path}: not a profiler trace ({trace.damage or reason})"
    )


def _kind_of(trace, text):
    """OtherContent for a sound file of another kind, NotATrace for what was to be a
    trace: it has a rank in its name or its JSON breaks off.
    """
    if trace.damage:
        return NotATrace
    if text[:1] not in b"[{":
        return OtherContent if rank_in_name(trace.path) is None else NotATrace
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        msgspec.json.decode(text, type=msgspec.Raw)
        return OtherContent
    return NotATrace


def _last_cut(text):
    """Text between the last event that has begun and the one before it, if there are
    two.
    """
    # from the end backwards, in growing steps: an event has some hundred bytes
    reach = 1 << 12
    while True:
        low = max(0, len(text) - reach)
        cuts = list(BETWEEN.finditer(text, low))
        if cuts or not low:
            return cuts[-1] if cuts else None
        reach *= 8


def _read_rest(trace, blocks, rest):
    """Keys that follow the list of events."""
    for block in blocks:
        rest += block
        if len(rest) > _LONGEST:
            trace.damage = "too much text after the events"
            trace.lost_bytes = len(rest) + sum(map(len, blocks))
            return
    rest = rest.strip().lstrip(b",")
    if not rest:
        return
    try:
        trace.envelope |= decode_json(b"{" + rest)
    except msgspec.DecodeError:
        trace.damage = trace.damage or "truncated JSON after the events"
        trace.lost_bytes = len(rest)
