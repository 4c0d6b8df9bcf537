"""Doctor's report on this machine: packages, torch and its device, inputs, and which
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

import pandas as pd

from madmax_lib import __version__
from madmax_lib.catalog import data_file
from madmax_lib.catalog.datasets import cache_folder, dataset, names, places
from madmax_lib.runs.selftest import Missing, answers, selftest
from madmax_lib.view.notebooks.environment import environment, is_here, version
from madmax_lib.view.notebooks.runner import notebooks

# what each is for (the name of the extra that brings it is in brackets), and its module
_TABLE = pd.read_csv(data_file("view/packages.csv"), index_col="package")
_PACKAGES = _TABLE["purpose"].to_dict()
_MODULES = _TABLE["module"].to_dict()
_USES = {  # of packages that not everybody has, in the code of a notebook
    "holistictraceanalysis": r"\bhta\.\w+\(",
    "torch": r"\bmadmax_lib.*\bruns\b|\bmm\.(launch|runs)\b",
}
_INPUT = r"\b(?:optional_dataset|dataset|local_data)\(\s*\"([^\"]+)\""


def check() -> Iterator[tuple[str, str, str]]:
    """Name of each package, of torch and what it runs on, and of each dataset; works,
    missing or fails; and why.
    """

    def version_of(package):
        if not (installed := version(package)):
            raise Missing(f"is not installed: {_PACKAGES[package]}")
        # installed is not enough: a broken build fails when it is imported
        with warnings.catch_warnings(action="ignore"):
            import_module(_MODULES.get(package, package))
        return installed

    def path_of(name):
        if not is_here(name):
            raise Missing("not here; downloaded when first used")
        return str(dataset(name))

    yield from answers({name: partial(version_of, name) for name in _PACKAGES})
    yield from selftest()
    yield from answers({name: partial(path_of, name) for name in names()})


def report() -> str:
    """All of it as text, one fact per line."""
    here = environment()
    checks = list(check())
    cache = cache_folder() / "timelines"
    cache_mb = sum(path.stat().st_size for path in cache.glob("*.parquet")) / 1e6
    # bytes of a page times pages
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        f"madmax-workbench {__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}",
        f"{os.cpu_count()} CPU cores, {memory_bytes / 1e9:.0f} GB of memory",
        f"place: {here.name}, figures go to {here.figures}",
        *(f"  {status:<8}{name}: {text}" for name, status, text in checks),
        "datasets are looked for in",
    ]
    for folder in places():
        lines.append(f"  {folder}{'' if folder.is_dir() else ' (not there)'}")
    size = f"{cache_mb:,.1f} MB, may be deleted"
    lines += [f"traces that were read are kept in {cache} ({size})"]
    try:
        paths = notebooks()
    except FileNotFoundError as reason:
        return "\n".join([*lines, f"notebooks: {reason}"])
    has_gpu = any(row[:2] == ("driver", "works") for row in checks)
    verdicts = [f"  {name}: {_verdict(path, has_gpu)}" for name, path in paths.items()]
    return "\n".join([*lines, "notebooks", *verdicts])


def _verdict(path, has_gpu):
    """Whether a notebook runs here, by what its cells use and name."""
    cells = json.loads(path.read_text())["cells"]
    sources = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    code = "\n".join(source for source, kind in sources if kind == "code")
    # without what a notebook does only where a package is there
    code = re.sub(r"(?m)^if .*find_spec\(.*(\n .*)*", "", code)
    inputs = sorted(set(re.findall(_INPUT, code)))
    absent = [f"input {name}" for name in inputs if not is_here(name)]
    if absent:  # what stands under an `if` waits for an input
        code = re.sub(r"(?m)^ .*", "", code)
    packages = [name for name, use in _USES.items() if re.search(use, code)]
    packages = [name for name in packages if not version(name)]
    if packages:
        return f"does not run: package {', '.join(packages)} missing"
    text = "\n".join(source for source, _ in sources).lower()
    if not has_gpu and "on gpus, run this notebook" in text:
        absent.append("a GPU")
    if absent:
        return f"quick only, for the full size: {', '.join(absent)}"
    return "full size"
