"""How soon do the explorers follow? Redraws of a million spans in a browser, and
GPT-3's step after a slider.
"""

import argparse
import base64
import json
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

import madmax_lib
from madmax_lib.view import StepExplorer

SCRIPT = Path(madmax_lib.__file__).parent / "view" / "explore" / "widgets.js"
PAGE = """<style>{css}</style><div id="at"></div><script type="module">{script}
const bytes = Uint8Array.from(atob("{data}"), (c) => c.charCodeAt(0));
const values = {{ _about: {about}, _report: "", selection: [] }};
values._data = new DataView(bytes.buffer);
const model = {{ get: (name) => values[name], on() {{}}, off() {{}}, set() {{}}, save_changes() {{}} }};
render({{ model, el: document.getElementById("at") }});</script>"""  # noqa: E501
PRESS = """(key) => new Promise((done) => {
  const canvas = document.querySelector("canvas"), began = performance.now();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
  requestAnimationFrame(() => done(performance.now() - began));
})"""
CHANGES = [
    {"tp": 4},
    {"tp": 8},
    {"zero": 2},
    {"recompute": "full"},
    {"micro_batch": 2},
    {"pp": 4},
    {"pp": 8},
    {"nodes": 128},
]


def spans(rows: int, count: int) -> tuple[dict, bytes]:
    """Spans of four kinds one after another on each row, in ns."""
    each, random = count // rows, np.random.default_rng(0)
    gap, dur = (
        random.integers(0, 3000, (rows, each)),
        random.integers(1000, 9000, (rows, each)),
    )
    start = (gap + dur).cumsum(axis=1) - dur
    kinds = {
        "compute": "#3b75af",
        "communication": "#e1812c",
        "copies": "#8cc269",
        "other": "#56378c",
    }
    drawn = [
        {"label": f"rank {row} · stream 7", "rank": row, "stream": 7, "level": -1}
        for row in range(rows)
    ]
    about = {"panel": 0, "title": "", "simulated": True}
    drawn = [
        row | about | {"first": k * each, "end": (k + 1) * each}
        for k, row in enumerate(drawn)
    ]
    name = random.integers(0, 50, rows * each)
    numbers = b"".join(
        column.astype(np.int32).tobytes()
        for column in (start.ravel(), dur.ravel(), name)
    )
    about = {
        "rows": drawn,
        "names": [f"kernel {k}" for k in range(50)],
        "count": rows * each,
        "tick_s": 1e-9,
    }
    about |= {
        "kinds": [{"label": label, "color": color} for label, color in kinds.items()],
        "links": False,
    }
    return about | {"reach": int((start + dur).max())}, numbers + (name % 4).astype(
        np.uint8
    ).tobytes()


def redraws_ms(page, rows: int, count: int, script: str) -> list[float]:
    """From a key to the next frame, for zooming in and out, and panning."""
    about, data = spans(rows, count)
    css = SCRIPT.with_suffix(".css").read_text()
    text = {
        "script": script,
        "css": css,
        "about": json.dumps(about),
        "data": base64.b64encode(data).decode(),
    }
    page.set_content(PAGE.format(**text))
    page.wait_for_function("() => document.querySelector('canvas')?.dataset.draws")
    return [page.evaluate(PRESS, key) for key in "0wwwddaaasss0"]


def sliders_ms() -> list[float]:
    """From a control that was turned to the spans that are sent to the browser."""
    step = StepExplorer(
        model="gpt3-175b",
        cluster="dgx-a100",
        nodes=64,
        plan="dp8.tp8.pp8.z1",
        global_batch=1536,
    )
    step.widget.layout.width, taken_ms = "100%", []
    for change in CHANGES:
        began = time.perf_counter()
        step.set(**change)
        step.draw()
        taken_ms.append((time.perf_counter() - began) * 1e3)
    return taken_ms


def report(what: str, taken_ms: list[float]) -> None:
    """A line of the table."""
    print(f"{what:<44}{statistics.median(taken_ms):>10.1f}{max(taken_ms):>10.1f}")


def main() -> None:
    """Print the medians and the most of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--script", type=Path, default=SCRIPT, help="another version of the canvas"
    )
    script = parser.parse_args().script.read_text().replace("export default", "//")
    print(f"{'':<44}{'median ms':>10}{'most ms':>10}")
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1920, "height": 1000})
        for rows, count in ((16, 1_000_000), (1024, 1_000_000)):
            report(
                f"redraw, {count:,} spans in {rows:,} rows",
                redraws_ms(page, rows, count, script),
            )
        browser.close()
    for what, taken_ms in (("first time", sliders_ms()), ("again", sliders_ms())):
        report(f"GPT-3 on 512 GPUs after a slider, {what}", taken_ms)


if __name__ == "__main__":
    main()
