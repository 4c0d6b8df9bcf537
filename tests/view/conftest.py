"""A browser for the tests that need one."""

import shutil

import pytest

QUIET = (
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-sync",
)


@pytest.fixture(scope="module")
def chromium():
    """A browser with nothing in it; skips where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra browser)"
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
