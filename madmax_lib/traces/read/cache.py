"""A Parquet cache of what the reader made of a trace, in the user's cache folder.

An entry is named by the content of the file, the reader's own source and the options of
the call, so it never goes stale. Entries appear whole or not at all, carry checksums,
and are made anew when they cannot be read; the folder may be deleted at any time.
MADMAX_NO_CACHE=1 turns the cache off.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from madmax_lib.catalog.datasets import cache_folder
from madmax_lib.timeline.timeline import Timeline

_PACKAGE = Path(str(files("madmax_lib")))


def content_sha256(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(sha256: str, options: str, make: Callable[[], Timeline]) -> Timeline:
    """Result of `make`, from the cache if it is there.

    sha256: of the trace file. options: text that tells apart what can be made of one
    file.
    """
    if os.environ.get("MADMAX_NO_CACHE", "0") not in ("", "0"):
        return make()
    key = f"{sha256} {_own_fingerprint()} {options}"
    name = hashlib.sha256(key.encode()).hexdigest()
    entry = cache_folder() / "timelines" / f"{name}.parquet"
    if entry.exists():
        # whatever damage does to an entry, it is made anew
        with contextlib.suppress(Exception):
            return Timeline.load(entry)
    timeline = make()
    # a full disk or a read-only home costs the cache, not the result
    with contextlib.suppress(OSError):
        timeline.save(entry)
    return timeline


def _reader_sources(package):
    """Files that decide what is read: all modules that reading imports, with their
    rooms, and our tables.
    """
    sources = [
        *(package / "data").glob("*.csv"),
        *package.glob("*.py"),
    ]
    for room in ("base", "catalog", "timeline", "traces"):
        sources += (package / room).rglob("*.py")
    return sorted(sources)


def _fingerprint(package):
    """Hash of these files and their places, so that no entry outlives a change of the
    reader.
    """
    digest = hashlib.sha256()
    for source in _reader_sources(package):
        content = hashlib.sha256(source.read_bytes()).hexdigest()
        digest.update(f"{source.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _own_fingerprint():
    return _fingerprint(_PACKAGE)
