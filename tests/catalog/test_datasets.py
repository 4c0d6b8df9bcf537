import functools
import gzip
import hashlib
import http.server
import tarfile
import threading

import pandas as pd
import pytest
from support import cells, refused

from madmax_lib.catalog import datasets

NONE = b'{"traceEvents": []}'
CONTENT = {"worker0.json": NONE, "worker1.json": b'{"traceEvents": [1]}'}


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server on this machine that serves an archive and a file."""
    folder = tmp_path / "web"
    (folder / "inner").mkdir(parents=True)
    for name, content in CONTENT.items():
        (folder / "inner" / name).write_bytes(content)
    with tarfile.open(folder / "set.tar.gz", "w:gz") as archive:
        archive.add(folder / "inner", "inner")
    (folder / "one.json.gz").write_bytes(gzip.compress(NONE, mtime=0))
    handler = http.server.SimpleHTTPRequestHandler
    monkeypatch.setattr(handler, "log_message", lambda *_: None)
    handler = functools.partial(handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}", folder
        web.shutdown()


COLUMNS = (
    "dataset local_path url download_sha256 download_bytes content_sha256 licence "
    "description"
)


@pytest.fixture
def registry(server, tmp_path, monkeypatch):
    url, folder = server

    def row(path, file, content, right=True):
        served = folder / file
        hashes = sha(served.read_bytes()) if right else "0" * 64
        content = sha(content) if right else "0" * 64
        name = path.partition("/")[0]
        return name, path, f"{url}/{file}", hashes, 9, content, "MIT", ""

    rows = [row(f"set/{n}.gz", "set.tar.gz", c) for n, c in CONTENT.items()]
    rows += [
        row("one/one.json.gz", "one.json.gz", NONE),
        row("bad/one.json.gz", "one.json.gz", NONE, right=False),
        row("gone/x.json", "nothing.json", NONE, right=False),
    ]
    table = pd.DataFrame(rows, columns=COLUMNS.split())
    monkeypatch.setattr(datasets, "datasets", lambda: table)
    monkeypatch.setattr(datasets, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("MADMAX_OFFLINE", raising=False)
    monkeypatch.setenv("MADMAX_DATA_DIR", str(tmp_path / "mine"))
    return tmp_path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_download_then_the_cache(registry, monkeypatch):
    path = datasets.dataset("set")
    read = {p.stem: gzip.decompress(p.read_bytes()) for p in path.glob("*.gz")}
    assert read == CONTENT
    assert gzip.decompress(datasets.dataset("one").read_bytes()) == NONE
    monkeypatch.setenv("MADMAX_OFFLINE", "1")
    assert datasets.dataset("set") == path


@pytest.mark.parametrize(
    ("name", "download", "offline", "error", "words"),
    cells("""
    bad | True | 0 | ValueError | dataset bad: & sha256 0000 & refused
    gone | True | 0 | FileNotFoundError | dataset gone (9 bytes): no download from
    one | False | 0 | FileNotFoundError | one is not on this machine
    one | True | 1 | FileNotFoundError | one is not & machine & MADMAX_OFFLINE is set
    """),
)
def test_what_cannot_be_had_says_why_and_is_not_kept(
    registry, monkeypatch, name, download, offline, error, words
):
    if offline:
        monkeypatch.setenv("MADMAX_OFFLINE", "1")
    with refused(words, error={"ValueError": ValueError}.get(error, FileNotFoundError)):
        datasets.dataset(name, download=download)
    assert not (registry / "cache" / name).exists()


def test_own_folder_comes_first_and_is_checked(registry):
    mine = registry / "mine" / "one" / "one.json.gz"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(NONE)  # plain text under a .gz name: the content counts
    assert datasets.dataset("one") == mine
    mine.write_bytes(b"something else")
    with refused("one.json.gz & content has sha256 & refused"):
        datasets.dataset("one")


def test_unknown_name_lists_the_known():
    with refused(
        "unknown dataset 'vit'; known: & dlrm-8xv100 & vit-ddp & resnet-ddp-a100"
    ):
        datasets.dataset("vit")


def test_local_data_names_the_places(monkeypatch, tmp_path):
    monkeypatch.setenv("MADMAX_DATA_DIR", str(tmp_path))
    with refused(f"nothing/here is in none of {tmp_path}", error=FileNotFoundError):
        datasets.local_data("nothing/here")


def test_registry_is_pinned_and_licensed():
    table = datasets.datasets()
    assert table["url"].str.contains(r"/[0-9a-f]{40}/").all()
    assert table[["download_sha256", "content_sha256"]].map(len).eq(64).all(axis=None)
    assert table["licence"].notna().all()
