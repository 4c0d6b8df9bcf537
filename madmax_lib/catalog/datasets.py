"""Where is the input called NAME? Found on this machine, else downloaded once and
checked by its sha256.

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

__all__ = [
    "PROJECT",
    "SHIPPED",
    "cache_folder",
    "dataset",
    "datasets",
    "local_data",
    "names",
    "places",
]

PROJECT = Path(__file__).resolve().parents[2]  # the checkout
_INSIDE = (
    Path(__file__).resolve().parents[1] / "shipped"
)  # of a wheel, which setup.py fills
SHIPPED = _INSIDE if _INSIDE.is_dir() else PROJECT  # where notebooks/ and traces/ are


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
    if not len(rows):
        return SHIPPED / "traces" / name
    for root in places():
        paths = [root / path for path in rows["local_path"]]
        if all(path.exists() for path in paths):
            for path, sha256 in zip(paths, rows["content_sha256"], strict=True):
                _check_content(path, sha256)
            return paths[0] if len(paths) == 1 else paths[0].parent
    if not download:
        raise FileNotFoundError(f"dataset {name} is not on this machine")
    return _download(name, rows)


def names() -> list[str]:
    """Names that `dataset` knows: the project's own traces and the registry."""
    marks = ("*/rank0.json.gz", "*/machine.json")  # a set of traces, or a calibration
    own = {
        path.parent.name for mark in marks for path in (SHIPPED / "traces").glob(mark)
    }
    return sorted(own) + list(datasets()["dataset"].unique())


def places() -> list[Path]:
    """Folders in which inputs are looked for, in order: MADMAX_DATA_DIR, shared/data
    beside the checkout, the cache.

    All have one layout: the column local_path of the registry, such as
    traces/param-dlrm-8xV100/<file>.
    """
    given = os.environ.get("MADMAX_DATA_DIR")
    return [
        *([Path(given).expanduser()] if given else []),
        PROJECT.parent / "shared" / "data",
        cache_folder(),
    ]


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


def _download(name: str, rows: pd.DataFrame) -> Path:
    import pooch

    url, sha256, size_bytes = rows[["url", "download_sha256", "download_bytes"]].iloc[0]
    if os.environ.get("MADMAX_OFFLINE", "0") not in ("", "0"):
        raise FileNotFoundError(
            f"dataset {name} is not on this machine and MADMAX_OFFLINE is set; it is "
            f"at {url}"
        )
    try:
        (cache_folder() / "downloads").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileNotFoundError(
            f"dataset {name}: the cache folder {cache_folder()} cannot be made: {error}"
        ) from None
    try:
        packed = Path(
            pooch.retrieve(
                url,
                f"sha256:{sha256}",
                path=cache_folder() / "downloads",
                progressbar=True,
            )
        )
    except ValueError:
        raise ValueError(
            f"dataset {name}: {url} does not have the sha256 {sha256}; refused"
        ) from None
    except OSError as error:
        raise FileNotFoundError(
            f"dataset {name} ({size_bytes} bytes): no download from {url}: {error}"
        ) from None
    targets = [cache_folder() / path for path in rows["local_path"]]
    if len(rows) == 1:
        contents = {targets[0].name: packed.read_bytes()}
    else:
        members = map(Path, pooch.Untar()(str(packed), "download", None))
        contents = {
            path.name.removesuffix(".gz"): path.read_bytes() for path in members
        }
    for target, content_sha256 in zip(targets, rows["content_sha256"], strict=True):
        content = contents.get(target.name) or contents.get(
            target.name.removesuffix(".gz")
        )
        if content is None:
            raise ValueError(f"dataset {name}: {url} does not hold {target.name}")
        with replacing(target) as temporary:
            temporary.write_bytes(
                content
                if content.startswith(b"\x1f\x8b")
                else gzip.compress(content, mtime=0)
            )
            _check_content(temporary, content_sha256)
    return targets[0] if len(targets) == 1 else targets[0].parent


def _check_content(path: Path, sha256: str) -> None:
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(
            f"{path}: content has sha256 {found}, the registry says {sha256}; refused"
        )
