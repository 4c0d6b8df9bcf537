"""How well is a machine predicted? One HTML page of a calibration: a picture, tables,
and what could not be run.
"""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.calibration.machine.machine import Machine

__all__ = ["write_page"]

# of the picture, in pixels
_EDGE = 420
_MARGIN = 50
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg text{font:12px system-ui}"""
_TITLES = {
    "step_s": "step",
    "gemm_s": "products",
    "attention_s": "attention",
    "optimizer_s": "optimizer",
}


def write_page(directory: Path, machine: Machine) -> Path:
    """Write page.html from parts.csv and results.csv of a calibration."""
    parts, results = (
        pd.read_csv(directory / f"{name}.csv", index_col="run")
        for name in ("parts", "results")
    )
    facts = machine.provenance
    cluster = machine.cluster
    where = (
        f"{cluster.nodes} host(s) of {cluster.devices_per_node} x {cluster.device.name}"
    )
    where += f", uplinks of {facts['network']}" if facts.get("network") else ""
    body = [
        f"<h1>{html.escape(cluster.name)}</h1><p>{html.escape(where)}. "
        f"{_verdict(results)}</p>"
    ]
    if len(results):
        body += [
            "<h2>Runs that the fit had not seen</h2>",
            _picture(results),
            _table(_results(results)),
        ]
    body += [
        "<h2>Runs of the fit: predicted over measured</h2>",
        _table(_residuals(parts)),
        "<h2>Constants</h2>",
    ]
    known = machine.parameters.intervals
    rows = {
        name: (machine.parameters.constants[name], *known[name])
        for name in machine.parameters.fitted
    }
    body.append(
        _table(
            pd.DataFrame.from_dict(
                rows, orient="index", columns=["value", "low", "high"]
            ).map("{:.3g}".format)
        )
    )
    body += [f"<li>{html.escape(note)}</li>" for note in facts.get("notes", ())]
    path = directory / "page.html"
    head = (
        "<meta "
        f"charset='utf-8'><title>{html.escape(cluster.name)}</title><style>{_STYLE}</style>"
    )
    path.write_text(f"<!doctype html>{head}{''.join(body)}\n")
    return path


def _verdict(results: pd.DataFrame) -> str:
    if results.empty:
        return "No further run was made."
    errors = results["error"].abs()
    within = f"{errors.median():.1%} (median), {errors.max():.1%} at worst"
    return f"Steps of {len(errors)} further runs were predicted within {within}."


def _results(results: pd.DataFrame) -> pd.DataFrame:
    """Predicted / measured, side by side."""
    table = pd.DataFrame(index=results.index)
    percent = "{:.0f} %".format
    pairs = {
        "step, ms": ("s", 1e3, "{:.0f}".format),
        "memory, MB": ("bytes", 1e-6, "{:.0f}".format),
    }
    pairs |= {
        name.removesuffix("_comm"): (name, 100, percent)
        for name in ("compute", "exposed_comm", "overlap")
    }
    for title, (name, scale, text) in pairs.items():
        both = [
            (scale * results[f"{which}_{name}"]).map(text)
            for which in ("predicted", "measured")
        ]
        table[f"{title}: predicted / measured"] = both[0] + " / " + both[1]
    table["error of the step"] = results["error"].map("{:+.1%}".format)
    return table


def _residuals(parts: pd.DataFrame) -> pd.DataFrame:
    shares = {
        title: parts[f"predicted_{name}"] / parts[f"measured_{name}"]
        for name, title in _TITLES.items()
    }
    return pd.DataFrame(shares).map("{:.2f}".format)


def _table(table: pd.DataFrame) -> str:
    return table.replace(r"\bnan( %)?", "-", regex=True).to_html(border=0)


def _picture(results: pd.DataFrame) -> str:
    """Predicted over measured steps, both on the same logarithmic scale; on the line a
    prediction is exact.
    """
    both = np.log(results[["measured_s", "predicted_s"]].to_numpy(float))
    low = both.min() - 0.2
    high = both.max() + 0.2
    x, y = ((part - low) / (high - low) * (_EDGE - 2 * _MARGIN) for part in both.T)
    near = _MARGIN
    far = _EDGE - _MARGIN
    marks = [f'<line x1="{near}" y1="{far}" x2="{far}" y2="{near}" stroke="#999"/>']
    for name, right, up in zip(map(html.escape, results.index), x, y, strict=True):
        marks.append(
            f'<circle cx="{near + right:.1f}" cy="{far - up:.1f}" r="4" '
            f'fill="#2a78b8"><title>{name}</title></circle>'
        )
        marks.append(
            f'<text x="{near + right + 7:.1f}" y="{far - up + 4:.1f}">{name}</text>'
        )
    for value in np.geomspace(np.exp(low + 0.1), np.exp(high - 0.1), 4):
        at = (np.log(value) - low) / (high - low) * (_EDGE - 2 * _MARGIN)
        marks.append(
            f'<text x="{near + at:.1f}" y="{far + 16}" '
            f'text-anchor="middle">{1e3 * value:.0f}</text>'
        )
        marks.append(
            f'<text x="{near - 6}" y="{far - at + 4:.1f}" '
            f'text-anchor="end">{1e3 * value:.0f}</text>'
        )
    axes = (
        f'<text x="{_EDGE / 2}" y="{_EDGE - 10}" text-anchor="middle">measured '
        "step, ms</text>"
    )
    axes += f'<text x="{near}" y="{near - 14}">predicted step, ms</text>'
    frame = (
        f'<rect x="{near}" y="{near}" width="{far - near}" height="{far - near}" '
        'fill="none" stroke="#ccc"/>'
    )
    return (
        f'<svg width="{_EDGE + 60}" '
        f'height="{_EDGE}">{frame}{"".join(marks)}{axes}</svg>'
    )
