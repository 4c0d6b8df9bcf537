import functools
import gzip
import hashlib
import http.server
import tarfile
import threading

import pandas as pd
import pytest

from madmax_lib.catalog import datasets

CONTENT = {
    "worker0.json": b'{"traceEvents": []}',
    "worker1.json": b'{"traceEvents": [1]}',
}


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
    (folder / "one.json.gz").write_bytes(
        gzip.compress(CONTENT["worker0.json"], mtime=0)
    )
    monkeypatch.setattr(
        http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}", folder
        web.shutdown()


@pytest.fixture
def registry(server, tmp_path, monkeypatch):
    url, folder = server
    archive, one = (
        sha((folder / name).read_bytes()) for name in ("set.tar.gz", "one.json.gz")
    )
    rows = [
        ("set", f"set/{n}.gz", f"{url}/set.tar.gz", archive, 9, sha(c), "MIT", "")
        for n, c in CONTENT.items()
    ]
    rows += [
        (
            "one",
            "one/one.json.gz",
            f"{url}/one.json.gz",
            one,
            9,
            sha(CONTENT["worker0.json"]),
            "MIT",
            "",
        )
    ]
    rows += [
        (
            "bad",
            "bad/one.json.gz",
            f"{url}/one.json.gz",
            "0" * 64,
            9,
            "0" * 64,
            "MIT",
            "",
        )
    ]
    rows += [
        ("gone", "gone/x.json", f"{url}/nothing.json", "0" * 64, 9, "0" * 64, "MIT", "")
    ]
    columns = [
        "dataset",
        "local_path",
        "url",
        "download_sha256",
        "download_bytes",
        "content_sha256",
        "licence",
    ]
    monkeypatch.setattr(
        datasets,
        "datasets",
        lambda: pd.DataFrame(rows, columns=[*columns, "description"]),
    )
    monkeypatch.setattr(datasets, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("MADMAX_OFFLINE", raising=False)
    monkeypatch.setenv("MADMAX_DATA_DIR", str(tmp_path / "mine"))
    return tmp_path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_download_then_the_cache(registry, monkeypatch):
    path = datasets.dataset("set")
    assert {
        p.stem: gzip.decompress(p.read_bytes())
        for p in path.iterdir()
        if p.suffix == ".gz"
    } == CONTENT
    assert (
        gzip.decompress(datasets.dataset("one").read_bytes()) == CONTENT["worker0.json"]
    )
    monkeypatch.setenv("MADMAX_OFFLINE", "1")
    assert datasets.dataset("set") == path


def test_wrong_hash_is_refused_and_nothing_kept(registry):
    with pytest.raises(
        ValueError, match=r"dataset bad: .* does not have the sha256 0000.*refused"
    ):
        datasets.dataset("bad")
    assert not (registry / "cache" / "bad").exists()


def test_what_cannot_be_had_says_why(registry, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r"dataset gone \(9 bytes\): no download from"
    ):
        datasets.dataset("gone")
    with pytest.raises(FileNotFoundError, match=r"one is not on this machine$"):
        datasets.dataset("one", download=False)
    monkeypatch.setenv("MADMAX_OFFLINE", "1")
    with pytest.raises(
        FileNotFoundError, match="one is not on this machine and MADMAX_OFFLINE is set"
    ):
        datasets.dataset("one")


def test_own_folder_comes_first_and_is_checked(registry):
    mine = registry / "mine" / "one"
    mine.mkdir(parents=True)
    (mine / "one.json.gz").write_bytes(
        CONTENT["worker0.json"]
    )  # plain text under a .gz name: the content counts
    assert datasets.dataset("one") == mine / "one.json.gz"
    (mine / "one.json.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"one.json.gz: content has sha256 .* refused"):
        datasets.dataset("one")


def test_unknown_name_lists_the_known():
    with pytest.raises(
        ValueError, match=r"unknown dataset 'vit'; known: .*vit-ddp.*dlrm-8xv100"
    ):
        datasets.dataset("vit")


def test_local_data_names_the_places(monkeypatch, tmp_path):
    monkeypatch.setenv("MADMAX_DATA_DIR", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=f"nothing/here is in none of {tmp_path}"
    ):
        datasets.local_data("nothing/here")


def test_registry_is_pinned_and_licensed():
    table = datasets.datasets()
    assert table["url"].str.contains(r"/[0-9a-f]{40}/").all()
    assert table[["download_sha256", "content_sha256"]].map(len).eq(64).all(axis=None)
    assert table["licence"].notna().all()
