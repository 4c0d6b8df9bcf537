"""Setup of every notebook: theme, seeds, where output goes, and saving a figure with
its data and origin.
"""

import io
import json
import os
import platform
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from madmax_lib.base.atomic import replacing, write_text
from madmax_lib.base.fields import short_repr
from madmax_lib.catalog import PROJECT, dataset
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.notebooks.environment import (
    Environment,
    environment,
    shell,
    version,
)

# parameters of a notebook that are the input of a prediction
_SIMULATED = ("model", "cluster", "nodes", "plan", "software", "global_batch")
_VERSIONS = ("numpy", "pandas", "matplotlib", "torch", "holistictraceanalysis")


def setup(seed: int = 0) -> Environment:
    """Theme, seeds and output folder (see `environment`); the first call of every
    notebook.

    See also: mm.save_figure.
    """
    plt.style.use(Path(__file__).parents[1] / "paper.mplstyle")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - also what other libraries draw from
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    return environment()


def save_figure(ax: Axes, name: str, data: pd.DataFrame | None = None) -> Path:
    """Write figures/<topic>/<name>.svg, .csv (its data) and .json (its origin); returns
    the path of the svg.

    data: the table that is shown; pictures of this room bring it along. The origin is
    the notebook's parameters, versions, commit and sha256 of the inputs. Numbers have
    six significant digits; files of a figure whose numbers are the same as before are
    left alone, unless MADMAX_REDRAW is set, which a picture that only looks otherwise
    needs. In a notebook the file is also what is shown, and the figure is closed.
    Raises ValueError for a name that is not topic/name or a figure without data. See
    also: mm.setup, mm.plot_timeline.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+", str(name)):
        raise ValueError(
            f"figure name {short_repr(name)} is not of the form topic/name"
        )
    data = figure_data(ax) if data is None else data
    # a figure without its numbers could not be compared, by CI or by a reader
    if data is None:
        raise ValueError(f"figure {name}: pass the table it shows as data=")
    svg = environment().figures / f"{name}.svg"
    text = data.to_csv(index=False, float_format="%.6g")
    if os.environ.get("MADMAX_REDRAW") or not _same(text, svg):
        origin = json.dumps(_origin(data), indent=1, sort_keys=True)
        # no date and no random ids: the same figure is the same file
        undated = {"Date": None, "Creator": None}
        with plt.rc_context({"svg.hashsalt": name}), replacing(svg) as new:
            ax.figure.savefig(new, format="svg", metadata=undated)
        write_text(svg.with_suffix(".csv"), text)
        write_text(svg.with_suffix(".json"), f"{origin}\n")
    if log := os.environ.get("MADMAX_FIGURE_LOG"):
        with open(log, "a") as file:
            file.write(f"{name}\n")
    if hasattr(shell(), "kernel"):
        from IPython.display import display

        text = svg.read_text()  # a notebook wants the element without its XML header
        display({"image/svg+xml": text[text.index("<svg") :]}, raw=True)
        plt.close(ax.figure)  # else the notebook draws it once more
    return svg


def _same(text, svg):
    """Whether a figure is there whole and its table has these numbers, to one unit of
    the sixth digit.
    """
    table = svg.with_suffix(".csv")
    if not all(path.exists() for path in (svg, table, svg.with_suffix(".json"))):
        return False
    try:
        new = pd.read_csv(io.StringIO(text))
        old = pd.read_csv(table)
        # the last digit differs between machines, by the order of their sums
        pd.testing.assert_frame_equal(new, old, rtol=1e-5, atol=0, check_dtype=False)
    except (AssertionError, ValueError):
        return False
    return True


def optional_dataset(name: str, figure: str, *, download: bool = False) -> Path | None:
    """A dataset that may be absent: its path, or None after saying which figure is
    skipped and why.
    """
    try:
        return dataset(name, download=download)
    except FileNotFoundError as reason:
        hint = "" if download else "; quick=False downloads it"
        print(f"skipped figure {figure}: {reason}{hint}")
        return None


def _origin(data):
    provenance = data.attrs.get("provenance", {})
    # only the names of the parameters cell are annotated
    namespace = getattr(shell(), "user_ns", {})
    annotated = set(namespace.get("__annotations__", {}))
    parameters = {name: namespace[name] for name in annotated & set(namespace)}
    # a prediction's input is what was asked of the notebook
    asked = parameters | provenance
    asked = {name: asked[name] for name in _SIMULATED if name in asked}
    versions = {name: version(name) for name in _VERSIONS}
    versions = {name: text for name, text in versions.items() if text}
    return {
        "inputs": provenance.get("files") or asked,
        "rules": provenance.get("rules", ""),
        "parameters": parameters,
        "versions": {"python": platform.python_version()} | versions,
        **_commit(),
    }


def _commit():
    """`commit`: the last commit of the main branch that the checkout holds, which no
    rebase or squash can lose.

    `clean`: whether the figure was drawn by exactly that commit. Empty without a
    checkout or git.
    """
    if not (PROJECT / ".git").exists():
        return {}
    try:
        head = _git("rev-parse", "HEAD")
        branches = ("origin/HEAD", "origin/main", "main")
        shared = (_git("merge-base", "HEAD", branch) for branch in branches)
        commit = next(filter(None, shared), head)
        # figures themselves may differ: this run is drawing them
        clean = commit == head and not _git("status", "--porcelain", "--", ":!figures")
    except OSError:
        return {}
    return {"commit": commit, "clean": clean} if commit else {}


def _git(*arguments):
    """Output of git; empty where it fails."""
    return subprocess.run(
        ["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False
    ).stdout.strip()
