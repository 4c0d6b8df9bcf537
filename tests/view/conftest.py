"""A step of two ranks, and a browser for the tests that need one."""

import shutil

import pytest
from support import make_timeline

ALL_REDUCE = "ncclDevKernel_AllReduce"
QUIET = (
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-sync",
)


@pytest.fixture
def step():
    """Two ranks; the second begins 2 ms later, and the first waits for it."""
    rows = []
    for rank, late in ((0, 0), (1, 2_000_000)):
        rows += [
            (rank, 7, "compute", "gemm", late, 10_000_000),
            (rank, -1, "cpu", "aten::mm", 0, 1_000_000),
            (rank, 20, "comm", ALL_REDUCE, 8_000_000 + late, 6_000_000 - late),
            (rank, 7, "compute", "adam <&>", 15_000_000 + late, 1_000),
        ]
    files = {"0": {"name": "a", "sha256": "b"}}
    return make_timeline(rows, provenance={"files": files, "rules": "exact"})


@pytest.fixture(scope="module")
def chromium():
    """A browser with nothing in it; skips where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra test)"
    )
    path = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
        ),
        None,
    )
    if path is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    arguments = [f"--{option}" for option in (*QUIET, "disable-component-update")]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
