"""Pickles of others, read without executing anything: plain containers and values only.

Dictionaries, lists, tuples, texts and numbers need no global, so every global is
refused by its name: without one a pickle cannot call anything. A hostile file can still
ask for more memory than there is.
"""

import io
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isal import igzip

from madmax_lib.base.doors import uncollected

_BLOCK = 1 << 20  # bytes read at once


class _Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise ValueError(
            f"it names {module}.{name}, which a record of plain values does not"
        )

    def persistent_load(self, key):
        raise ValueError("it refers to objects outside of the file")


class _Blocks(io.RawIOBase):
    """Bytes of a file; `between` is called before each block."""

    def __init__(self, file, between):
        self._file = file
        self._between = between

    def readable(self):
        return True

    def readinto(self, target):
        self._between()
        block = self._file.read(len(target))
        target[: len(block)] = block
        return len(block)


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
            blocks = _Blocks(source, lambda: between and between(unpickler))
            unpickler = _Plain(io.BufferedReader(blocks, _BLOCK))
            with uncollected():
                try:
                    return unpickler.load()
                finally:
                    # it holds all objects in its memo, and `blocks` holds it: a cycle,
                    # which no collection would free before long
                    unpickler = None
    except Exception as reason:  # damaged bytes end in nearly any error
        if isinstance(reason, OSError) and reason.errno is not None:
            raise
        raise ValueError(
            f"{path}: not a record of plain values ({reason or type(reason).__name__})"
        ) from None
