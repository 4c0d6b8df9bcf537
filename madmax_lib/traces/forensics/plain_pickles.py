"""Pickles of others, read without executing anything: plain containers and values only.

Python's own unpickler builds the objects, and each opcode is checked before a byte of
it gets there: only those that make dictionaries, lists, tuples, texts and numbers pass
(protocols 2 to 5), with sizes and numbers that the file bears out, so that no few bytes
ask for much memory. A global is refused by its name.
"""

import contextlib
import gc
import io
import lzma
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isal import igzip

_BLOCK = 1 << 20  # bytes read at once
_LARGEST = 1 << 24  # bytes of a text or a frame: Python's own frames have 64 KiB
# tuples of other than two numbers: so many inside one another can still be hashed
# without a crash
_TUPLES = 1 << 16
# GLOBAL, INST, STACK_GLOBAL: the unpickler asks for the global of a name, and is refused
_NAMES = b"ci\x93"
_STOP = 0x2E
# opcodes with an argument that is checked, and their bytes with it
_SIZED = {
    0x8C: 2,  # SHORT_BINUNICODE: length of a text in a byte
    0x58: 5,  # BINUNICODE: length of a text in four bytes
    0x95: 9,  # FRAME: length in eight bytes
    0x72: 5,  # LONG_BINPUT: index in the memo
    0x80: 2,  # PROTO: version
}
# largest argument; 0: no larger than the bytes before it, as each entry of the memo took
# at least one
_MOST = {0x72: 0, 0x80: 5}
# opcodes of `_PLAIN` with an argument, and bytes of the longest
_SHORT = b"hjKJMGq\x8a"
_LONGEST = 18
_LONGS = b"|".join(b"\x8a%c.{%d}" % (size, size) for size in range(_LONGEST - 1))
# opcodes that ask for nothing, with their arguments; possessive, as what matched once
# needs no other try
_PLAIN = re.compile(
    rb"(?:(?:h.)++|(?:j....)++|[\x94(}\])uaesN\x88\x89]++|(?:K.){2}\x86|K.|J....|M..|G.{8}|q.|"
    + _LONGS
    + rb")++",
    re.DOTALL,
)


class _Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise ValueError(
            f"it names {module}.{name}, which a record of plain values does not"
        )

    def persistent_load(self, key):
        raise ValueError("it refers to objects outside of the file")


class _Checked(io.RawIOBase):
    """Bytes of a pickle, handed on as far as their opcodes have been checked; `between`
    is called before each block.
    """

    def __init__(self, file, between):
        self._file = file
        self._between = between
        self._ready = memoryview(b"")
        self._rest = b""
        self._ended = False
        self._offset = 0  # in the file, of the first byte not handed on
        self._skip = 0  # bytes at its beginning that belong to a checked opcode
        self._tuples = 0

    def readable(self):
        return True

    def readinto(self, target):
        while not len(self._ready) and not self._ended:
            self._between()
            if block := self._file.read(_BLOCK):
                self._check(self._rest + block)
            else:  # a part of an opcode, which the unpickler finds cut
                self._ready = memoryview(self._rest)
                self._ended = True
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _check(self, data):
        """Find out how far these bytes may be handed on; an opcode without its whole
        argument waits for more.
        """
        at = self._skip
        while at < len(data) and not self._ended:
            # millions of opcodes: one match of the pattern takes a long run of them
            if plain := _PLAIN.match(data, at):
                at = plain.end()
                continue
            opcode = data[at]
            size = _SIZED.get(opcode, 1)
            if len(data) - at < (_LONGEST if opcode in _SHORT else size):
                break
            if opcode in _NAMES:
                self._ended = True
                at = len(data)
            else:
                self._ended = opcode == _STOP
                argument = data[at + 1 : at + size]
                at += self._size(opcode, argument, self._offset + at)
        # a long text may reach beyond these bytes: its rest is skipped in the next
        end = min(at, len(data))
        self._ready = memoryview(data)[:end]
        self._rest = data[end:]
        self._skip = at - end
        self._offset += end

    def _size(self, opcode, argument, offset):
        """Bytes of an opcode that is not in `_PLAIN`. ValueError where it does not
        belong in plain values, or asks for too much.
        """
        if opcode in b"\x85\x86\x87t":
            self._tuples += 1
        elif opcode != _STOP and opcode not in _SIZED:
            import pickletools

            known_opcode = pickletools.code2op.get(chr(opcode))
            name = known_opcode.name if known_opcode else opcode
            raise ValueError(
                f"byte {offset} is {name}, which a record of plain values does not have"
            )
        number = int.from_bytes(argument, "little")
        most = _MOST.get(opcode, _LARGEST) or offset
        if self._tuples > _TUPLES or number > most:
            raise ValueError(
                f"byte {offset} asks for more than a record of plain values does"
            )
        return 1 + len(argument) + (number if opcode in (0x8C, 0x58) else 0)


@contextlib.contextmanager
def _without_collection():
    """No search for cycles while millions of objects are made, none of which is
    garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_plain(
    path: Path, between: Callable[[pickle.Unpickler], None] | None = None
) -> Any:
    """Load a pickle of dictionaries, lists, texts and numbers, of protocols 2 to
    5, also packed by gzip or xz.

    between: called with the unpickler before each MiB, so that what has been read can
    be emptied. Raises ValueError with file and reason for anything else: globals,
    objects by reference, other bytes, a cut file.
    """
    try:
        with open(path, "rb") as file:
            magic = file.peek(6)[:6]
            packed = {b"\x1f\x8b": igzip.open, b"\xfd7": lzma.open}.get(magic[:2])
            source = packed(file) if packed else file
            checked = _Checked(source, lambda: between and between(unpickler))
            unpickler = _Plain(io.BufferedReader(checked, _BLOCK))
            with _without_collection():
                try:
                    return unpickler.load()
                finally:
                    # it holds all objects in its memo, and `checked` holds it: a cycle,
                    # which no collection would free before long
                    unpickler = None
    except Exception as reason:  # damaged bytes end in nearly any error
        if isinstance(reason, OSError) and reason.errno is not None:
            raise
        raise ValueError(
            f"{path}: not a record of plain values ({reason or type(reason).__name__})"
        ) from None
