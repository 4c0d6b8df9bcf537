"""What is the same in every notebook? Theme, seeds, where output goes, and saving a figure with its data and origin."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from madmax_lib.datasets import PROJECT, dataset
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.notebooks.environment import Place, place

__all__ = ["optional_dataset", "save_figure", "setup"]

_SIMULATED = ("model", "cluster", "nodes", "plan", "global_batch")
_VERSIONS = ("numpy", "pandas", "matplotlib", "torch", "holistictraceanalysis")


def setup(seed: int = 0) -> Place:
    """Theme, seeds and output folder (see `place`); the first call of every notebook."""
    plt.style.use(Path(__file__).parents[1] / "paper.mplstyle")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - also what other libraries draw from
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    return place()


def save_figure(ax: Axes, name: str, data: pd.DataFrame | None = None) -> Path:
    """Write figures/<topic>/<name>.svg, .csv (its data) and .json (its origin); returns the path of the svg.

    data: the table that is shown; pictures of `view.plots.breakdown` bring it along. The origin is the notebook's
    parameters, versions, commit and sha256 of the inputs. Files whose figure has not changed are left alone, so the
    recorded commit is the one that made them. In a notebook the file is also what is shown, and the figure is closed.
    Raises ValueError for a name that is not topic/name or a figure without data.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+", str(name)):
        raise ValueError(f"figure name {name!r} is not of the form topic/name")
    data = figure_data(ax) if data is None else data
    if data is None:
        raise ValueError(f"figure {name}: pass the table it shows as data=")
    svg = place().figures / f"{name}.svg"
    svg.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=svg.parent) as folder:
        new = Path(folder) / svg.name
        with plt.rc_context({"svg.hashsalt": name}):
            ax.figure.savefig(new, metadata={"Date": None, "Creator": None})
        data.to_csv(new.with_suffix(".csv"), index=False, float_format="%.9g")
        new.with_suffix(".json").write_text(json.dumps(_origin(data), indent=1, sort_keys=True) + "\n")
        same = [_same(new.with_suffix(suffix), svg.with_suffix(suffix)) for suffix in (".svg", ".csv")]
        if not all([*same, svg.with_suffix(".json").exists()]):
            for suffix in (".svg", ".csv", ".json"):
                new.with_suffix(suffix).replace(svg.with_suffix(suffix))
    if log := os.environ.get("MADMAX_FIGURE_LOG"):
        with open(log, "a") as file:
            file.write(f"{name}\n")
    if (shell := _shell()) and hasattr(shell, "kernel"):
        from IPython.display import display

        text = svg.read_text()
        display({"image/svg+xml": text[text.index("<svg") :]}, raw=True)
        plt.close(ax.figure)  # else the notebook draws it once more
    return svg


def optional_dataset(name: str, figure: str, *, download: bool = False) -> Path | None:
    """A dataset that may be absent: its path, or None after saying which figure is skipped and why."""
    try:
        return dataset(name, download=download)
    except FileNotFoundError as reason:
        print(f"skipped figure {figure}: {reason}" + ("" if download else "; quick=False downloads it"))
        return None


def _origin(data: pd.DataFrame) -> dict:
    provenance, parameters = data.attrs.get("provenance", {}), _parameters()
    simulated = parameters | provenance  # a prediction's input is what was asked of the notebook
    return {
        "inputs": provenance.get("files") or {key: simulated[key] for key in _SIMULATED if key in simulated},
        "rules": provenance.get("rules", ""),
        "parameters": parameters,
        "versions": {"python": platform.python_version(), **{p: v for p in _VERSIONS if (v := _version(p))}},
        "commit": _commit(),
    }


def _parameters() -> dict:
    """Values of the notebook's parameters cell: the annotated names of the notebook's namespace."""
    shell = _shell()
    names = shell.user_ns.get("__annotations__", {}) if shell else {}
    return {name: shell.user_ns[name] for name in names if name in shell.user_ns}


def _shell():
    """IPython's, if this runs in one; with a `kernel` in a notebook."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


@lru_cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Commit of the checkout, marked where files other than figures differ; unknown without a checkout or git."""
    if not (PROJECT / ".git").exists():
        return "unknown"
    git = {"cwd": PROJECT, "capture_output": True, "text": True, "check": False}
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], **git).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", ":!figures"], **git).stdout.strip()
    except OSError:
        return "unknown"
    return f"{head}-dirty" if changed else head or "unknown"


def _same(new: Path, old: Path) -> bool:
    return old.exists() and old.read_bytes() == new.read_bytes()
