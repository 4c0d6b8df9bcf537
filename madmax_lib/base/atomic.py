"""Files that appear whole or not at all: written under a temporary name beside the
target, then renamed.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` if the block succeeds and
    vanishes if it raises.

    Raises IsADirectoryError if `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, give a file name")
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, because a rename is atomic only within one file system
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp lets only the owner read; the mode of a plain open() is 0o666 less the
        # umask, which can be read only by setting it
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text in UTF-8; the file appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
