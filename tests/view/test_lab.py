"""The workbench in a real JupyterLab and a real browser with a fresh profile, as a
newcomer meets it.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

from madmax_lib.catalog.datasets import PROJECT

pytestmark = pytest.mark.slow

SETTINGS = {  # all cells in the page at once, and no question to the network
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
SHOTS = PROJECT / "build" / "screenshots"


@pytest.fixture(scope="module")
def lab(chromium, tmp_path_factory):
    """Address of a JupyterLab on copies of three notebooks; its own settings, kernels
    of this environment.
    """
    home = tmp_path_factory.mktemp("lab")
    for name in ("00_tour", "01_explore", "20_overlap"):
        shutil.copy(PROJECT / "notebooks" / f"{name}.ipynb", home)
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    folders = [
        "JUPYTERLAB_SETTINGS",
        "JUPYTERLAB_WORKSPACES",
        "JUPYTER_CONFIG",
        "JUPYTER_RUNTIME",
    ]
    folders = {f"{name}_DIR": name.split("_")[1].lower() for name in folders}
    folders |= {"IPYTHONDIR": "ipython", "MADMAX_FIGURES": "figures"}
    env = {
        name: value for name, value in os.environ.items() if name != "MADMAX_FIGURE_LOG"
    }
    env |= {name: str(home / folder) for name, folder in folders.items()} | {
        "MADMAX_OFFLINE": "1"
    }
    env["PYTHONPATH"] = str(PROJECT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--ip=127.0.0.1",
    ]
    command += [
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={home}",
        "--ServerApp.port_retries=0",
    ]
    with open(home / "log.txt", "w") as log:
        server = subprocess.Popen(command, env=env, cwd=home, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}", server, home / "log.txt"
    finally:
        server.terminate()
        server.wait(20)


@contextmanager
def opened(chromium, lab, notebook):
    """A page with the notebook, in a profile that has seen nothing before; its picture
    is kept.
    """
    address, server, log = lab
    answers(address, server, log)
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(60_000)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type == "error" else None
        ),
    )
    try:
        page.goto(f"{address}/lab/workspaces/{notebook}/tree/{notebook}.ipynb")
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        page.get_by_text(re.compile(r"\| Idle$")).first.wait_for()
        yield page
        errors = [
            text for text in errors if "net::ERR" not in text
        ]  # badges are on the network
        assert not errors, errors
    finally:
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"{notebook}.png")
        context.close()


def answers(address, server, log):
    """Wait until the server answers; a server that has died is an error with its log."""
    request = urllib.request.Request(f"{address}/api", method="GET")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(300):
        try:
            return opener.open(request, timeout=2)
        except OSError:
            try:
                server.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(log.read_text()) from None
    raise AssertionError(f"no answer from {address}: {log.read_text()}")


def run_all(page):
    """Run every cell and wait for the last; no cell may show an error."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(
        """() => {
          const code = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map((p) => p.textContent);
          const error = document.querySelector('.jp-OutputArea-output[data-mime-type*="error"]');
          return error || (code.length && code.every((text) => /\\d/.test(text)));
        }"""
    )
    errors = page.locator('.jp-OutputArea-output[data-mime-type*="error"]')
    assert errors.count() == 0, errors.first.inner_text()
    warnings = page.locator('.jp-OutputArea-output[data-mime-type*="stderr"]')
    assert warnings.count() == 0, warnings.first.inner_text()


def redrawn(page, canvas, act):
    """Do something to a canvas, wait until it has drawn again, and give its picture
    before and after.
    """
    before, draws = canvas.screenshot(), canvas.get_attribute("data-draws")
    act()
    page.wait_for_function(
        "([c, n]) => c.dataset.draws !== n", arg=[canvas.element_handle(), draws]
    )
    return before, canvas.screenshot()


def shown(canvas):
    """What the line above a canvas says."""
    return canvas.locator("xpath=../..").locator(".status").inner_text()


@pytest.mark.parametrize("notebook", ["00_tour", "20_overlap"])
def test_a_notebook_runs_without_an_error(lab, chromium, notebook):
    with opened(chromium, lab, notebook) as page:
        run_all(page)
        assert page.locator(".jp-RenderedImage img, .jp-RenderedSVG").count() >= 2
        page.locator(
            ".jp-RenderedImage, .jp-RenderedSVG"
        ).first.scroll_into_view_if_needed()


def test_explorers_answer_to_wheel_brush_slider_filter_and_click(lab, chromium):
    with opened(chromium, lab, "01_explore") as page:
        run_all(page)
        step = page.locator(".madmax-timeline canvas").first
        step.scroll_into_view_if_needed()
        check_canvas(page, step)
        check_slider(page, step)
        redrawn(
            page, step, lambda: page.keyboard.press("Control+b")
        )  # no file browser in the picture
        page.screenshot(path=SHOTS / "step_explorer.png")
        check_space(page)
        check_width_and_theme(page, step)
        assert (
            page.locator('.jp-OutputArea-output[data-mime-type*="error"]').count() == 0
        )


def check_canvas(page, canvas):
    box = canvas.bounding_box()
    whole = shown(canvas)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    before, after = redrawn(page, canvas, lambda: page.mouse.wheel(0, -400))
    assert before != after and shown(canvas) != whole
    cells = page.locator(".jp-Cell").count()
    canvas.focus()
    before, after = redrawn(page, canvas, lambda: page.keyboard.press("d"))
    assert before != after
    redrawn(page, canvas, lambda: page.keyboard.press("0"))
    assert shown(canvas) == whole
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 30)
    tip = canvas.locator("xpath=../..").locator(".tip")
    tip.wait_for()
    assert re.search(
        r"\n(compute|communication), .+s at .+s\nrank 0 · device computes",
        tip.inner_text(),
    )
    page.keyboard.press("a")
    assert page.locator(".jp-Cell").count() == cells, (
        "keys on the canvas reached the notebook"
    )
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    report = canvas.locator("xpath=../..").locator(".report")
    report.locator("table").wait_for()
    assert "exposed communication" in report.inner_text()
    canvas.locator("xpath=../..").locator("input").fill("zzz")
    none_match = (
        "(c) => "
        "c.parentElement.parentElement.querySelector('.status').textContent.endsWith(', "
        "0 match')"
    )
    page.wait_for_function(none_match, arg=canvas.element_handle())
    canvas.locator("xpath=../..").locator("input").fill("")


def check_slider(page, canvas):
    numbers = page.locator(".widget-html-content", has_text="tokens/s").first
    before = numbers.inner_text()
    knob = page.locator(".widget-hslider", has_text=re.compile("^tp")).first.locator(
        ".noUi-handle"
    )
    knob.focus()
    old, new = redrawn(page, canvas, lambda: knob.press("ArrowRight"))
    page.wait_for_function(
        "([n, b]) => n.innerText !== b", arg=[numbers.element_handle(), before]
    )
    assert old != new
    plan = page.locator(".widget-text", has_text="plan").first.locator("input")
    assert "tp8" in plan.input_value()


def check_space(page):
    front = page.locator(".madmax-front").first
    front.scroll_into_view_if_needed()
    chosen = page.locator(".widget-html-content", has_text="chosen:").first
    before = chosen.inner_text()
    another = front.locator("circle[r='5']").last  # nothing lies over it
    plan = another.get_attribute("data-plan")
    another.click()
    page.wait_for_function(
        "([n, b]) => n.innerText !== b", arg=[chosen.element_handle(), before]
    )
    assert plan in chosen.inner_text()
    page.locator(".widget-dropdown", has_text=re.compile("^recompute")).last.locator(
        "select"
    ).select_option("full")
    page.wait_for_function(
        "(n) => n.innerText.includes('full')", arg=chosen.element_handle()
    )
    page.screenshot(path=SHOTS / "space_explorer.png")


def check_width_and_theme(page, canvas):
    page.keyboard.press("Control+b")  # the file browser again
    page.set_viewport_size({"width": 1024, "height": 1000})
    cut = """() => [...document.querySelectorAll(".madmax-explorer")].flatMap((box) => [...box.querySelectorAll(
      "input, select, button, pre, canvas, svg, td, .widget-readout")].filter((part) => part.offsetParent
      && part.getBoundingClientRect().right > box.getBoundingClientRect().right + 1)).map((part) => part.outerHTML)"""
    page.wait_for_function(f"() => !({cut})().length")
    unnamed = (
        "() => document.querySelectorAll('.madmax-explorer "
        "[role=slider]:not([aria-label])').length"
    )
    assert page.evaluate(unnamed) == 0 and "rows" in canvas.get_attribute("aria-label")
    ink = page.evaluate("(c) => getComputedStyle(c).color", canvas.element_handle())

    def dark():
        page.keyboard.press("Control+Shift+C")
        page.locator(".lm-CommandPalette-input").last.fill("JupyterLab Dark")
        page.keyboard.press("Enter")

    redrawn(page, canvas, dark)
    assert (
        page.evaluate("(c) => getComputedStyle(c).color", canvas.element_handle())
        != ink
    )
    canvas.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / "step_explorer_dark.png")
