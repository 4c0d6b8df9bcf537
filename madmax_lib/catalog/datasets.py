"""Inputs by name: found on this machine, else downloaded once and checked by their
sha256.

The registry is `data/datasets.csv`: one row per file, with a URL at a pinned commit.
Looked for in this order: the folder MADMAX_DATA_DIR, the project's own `traces/`, a
`shared/data` folder beside the checkout, the user cache, and then one download (never
with MADMAX_OFFLINE=1). Content is compared uncompressed, so a re-packed copy is as good
as the original; a file with another content is refused.
"""

import gzip
import hashlib
import os
from pathlib import Path

import pandas as pd

from madmax_lib.base.atomic import replacing

PROJECT = Path(__file__).resolve().parents[2]  # the checkout
_PACKAGED = Path(__file__).resolve().parents[1] / "shipped"  # of a wheel, by setup.py
SHIPPED = _PACKAGED if _PACKAGED.is_dir() else PROJECT  # where notebooks, traces are
_GZIP = b"\x1f\x8b"  # first bytes of such a file


def datasets() -> pd.DataFrame:
    """The registry, one row per file: dataset, local_path, url, hashes, download_bytes,
    licence, description.
    """
    from madmax_lib.catalog import tables  # reading a trace needs none of it

    return tables.table("datasets", numbers=True)


def dataset(name: str, *, download: bool = True) -> Path:
    """Folder or file of a named input: a set of `datasets()`, or one of this project's
    own in `traces/`.

    Raises ValueError for an unknown name (listing the known ones) or a file with wrong
    content, and FileNotFoundError when it is nowhere and may not or cannot be
    downloaded. See also: mm.read_trace.
    """
    if name not in names():
        raise ValueError(f"unknown dataset {name!r}; known: {', '.join(names())}")
    table = datasets()
    rows = table[table["dataset"] == name]
    if rows.empty:
        return SHIPPED / "traces" / name
    for root in places():
        paths = [root / path for path in rows["local_path"]]
        if all(path.exists() for path in paths):
            for path, sha256 in zip(paths, rows["content_sha256"], strict=True):
                _check_content(path, sha256)
            return _folder_or_file(paths)
    if not download:
        raise FileNotFoundError(f"dataset {name} is not on this machine")
    return _download(name, rows)


def _folder_or_file(paths):
    return paths[0] if len(paths) == 1 else paths[0].parent


def names() -> list[str]:
    """Names that `dataset` knows: the project's own traces and the registry."""
    marks = ("*/rank0.json.gz", "*/machine.json")  # a set of traces, or a calibration
    files = [path for mark in marks for path in (SHIPPED / "traces").glob(mark)]
    ours = sorted({path.parent.name for path in files})
    return ours + list(datasets()["dataset"].unique())


def places() -> list[Path]:
    """Folders in which inputs are looked for, in order: MADMAX_DATA_DIR, shared/data
    beside the checkout, the cache.

    All have one layout: the column local_path of the registry, such as
    traces/param-dlrm-8xV100/<file>.
    """
    folders = [PROJECT.parent / "shared" / "data", cache_folder()]
    if folder := os.environ.get("MADMAX_DATA_DIR"):
        folders.insert(0, Path(folder).expanduser())
    return folders


def local_data(relative: str) -> Path:
    """A file or folder of the data directories that is never downloaded, such as
    reference tables for tests.

    Raises FileNotFoundError naming the places that were looked at.
    """
    for root in places():
        if (root / relative).exists():
            return root / relative
    raise FileNotFoundError(
        f"{relative} is in none of {', '.join(map(str, places()))}; set MADMAX_DATA_DIR"
    )


def cache_folder() -> Path:
    """The user's cache folder of this project; it may be deleted at any time."""
    import pooch

    return Path(pooch.os_cache("madmax-workbench"))


def _download(name, rows):
    import pooch

    url, sha256, size_bytes = rows[["url", "download_sha256", "download_bytes"]].iloc[0]
    if os.environ.get("MADMAX_OFFLINE", "0") not in ("", "0"):
        raise FileNotFoundError(
            f"dataset {name} is not on this machine and MADMAX_OFFLINE is set; it is "
            f"at {url}"
        )
    folder = cache_folder() / "downloads"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        packed = pooch.retrieve(url, f"sha256:{sha256}", path=folder, progressbar=True)
    except ValueError:
        raise ValueError(
            f"dataset {name}: {url} does not have the sha256 {sha256}; refused"
        ) from None
    except OSError as error:
        raise FileNotFoundError(
            f"dataset {name} ({size_bytes} bytes): no download from {url} to {folder}: "
            f"{error}"
        ) from None
    # one file, or an archive of several; with or without .gz either way
    targets = [cache_folder() / path for path in rows["local_path"]]
    members = {targets[0].name: packed}
    if len(targets) > 1:
        members = {
            Path(path).name: path for path in pooch.Untar()(packed, "download", None)
        }
    members = {member.removesuffix(".gz"): path for member, path in members.items()}
    for target, content_sha256 in zip(targets, rows["content_sha256"], strict=True):
        member = members.get(target.name.removesuffix(".gz"))
        if member is None:
            raise ValueError(f"dataset {name}: {url} does not hold {target.name}")
        content = Path(member).read_bytes()
        if not content.startswith(_GZIP):
            content = gzip.compress(content, mtime=0)
        with replacing(target) as temporary:
            temporary.write_bytes(content)
            _check_content(temporary, content_sha256)
    return _folder_or_file(targets)


def _check_content(path, sha256):
    content = path.read_bytes()
    if content.startswith(_GZIP):
        content = gzip.decompress(content)
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path}: content has sha256 {digest}, the registry says {sha256}; refused"
        )
