"""One HTML page of a calibration: tables of how well a machine is predicted, and what
could not be run.
"""

import html
from pathlib import Path

import pandas as pd

from madmax_lib.calibration.machine.machine import Machine

_STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto}
body {padding: 0 1em}
table {border-collapse: collapse; margin: 1em 0}
td, th {padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd}
td:first-child, th:first-child {text-align: left}
"""
_WAITING = (
    "<p>Ranks delayed by other work on the machine are not modelled: a busy machine "
    "exposes more communication than predicted.</p>"
)
_TITLES = {
    "step_s": "step",
    "gemm_s": "products",
    "attention_s": "attention",
    "optimizer_s": "optimizer",
}
# title of a column: quantity of results.csv, factor to its unit, and its text
_QUANTITIES = {
    "step, ms": ("s", 1e3, "{:.0f}"),
    "memory, MB": ("bytes", 1e-6, "{:.0f}"),
    "compute": ("compute", 100, "{:.0f} %"),
    "exposed": ("exposed_comm", 100, "{:.0f} %"),
    "overlap": ("overlap", 100, "{:.0f} %"),
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
    if facts.get("network"):
        where += f", uplinks of {facts['network']}"
    title = html.escape(cluster.name)
    body = [f"<h1>{title}</h1><p>{html.escape(where)}. {machine.verdict}</p>"]
    if len(results):
        body.append("<h2>Runs that the fit had not seen</h2>")
        body.append(_table(_results(results)))
        body.append(_WAITING)
    ratios = {
        title: parts[f"predicted_{name}"] / parts[f"measured_{name}"]
        for name, title in _TITLES.items()
        if f"measured_{name}" in parts
    }
    parameters = machine.parameters
    constants = {
        name: (parameters.constants[name], *parameters.intervals[name])
        for name in facts.get("moved", parameters.fitted)
    }
    constants = pd.DataFrame.from_dict(
        constants, orient="index", columns=["value", "low", "high"]
    )
    body += [
        "<h2>Runs of the fit: predicted over measured</h2>",
        _table(pd.DataFrame(ratios).map("{:.2f}".format)),
        "<h2>Constants</h2>",
        _table(constants.map("{:.3g}".format)),
    ]
    # what could not be run
    body += [f"<li>{html.escape(note)}</li>" for note in facts.get("notes", ())]
    head = f"<meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
    path = directory / "page.html"
    path.write_text(f"<!doctype html>{head}{''.join(body)}\n")
    return path


def _results(results):
    """Predicted / measured, side by side; inside: whether the interval held it."""
    table = results.filter(["inside"])
    for title, (name, factor, text) in _QUANTITIES.items():
        if f"measured_{name}" not in results:
            continue
        predicted, measured = (
            (factor * results[f"{which}_{name}"]).map(text.format)
            for which in ("predicted", "measured")
        )
        table[f"{title}: predicted / measured"] = predicted + " / " + measured
    table["error of the step"] = results["error"].map("{:+.1%}".format)
    return table


def _table(table):
    # one rank has no overlap
    return table.replace(r"\bnan( %)?", "-", regex=True).to_html(border=0)
