"""Place where a notebook runs, where its output goes, and which inputs and packages
are here.
"""

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from madmax_lib.catalog.datasets import PROJECT, dataset, local_data, names


@dataclass(frozen=True)
class Environment:
    """Place where a notebook runs.

    >>> environment().figures                                       # doctest: +SKIP
    PosixPath('/home/me/madmax/build/figures')
    """

    name: str  # local, ci, colab or kaggle
    output: Path  # folder of what it writes
    figures: Path  # folder of its figures


def environment() -> Environment:
    """The environment of this process.

    Output goes to `build/` of the checkout that this runs in. Elsewhere it goes to the
    working folder, on Colab and Kaggle too, where nobody looks into the clone. Figures
    go to MADMAX_FIGURES if set (`make run` sets it to the committed `figures/`), else
    to `figures/` of the output.
    """
    # a command in a cell of Colab is a process without google.colab: it has the
    # variable
    if "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ:
        name = "colab"
    elif "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        name = "kaggle"
    else:
        name = "ci" if os.environ.get("CI") else "local"
    is_checkout = name in ("local", "ci") and (PROJECT / "notebooks").is_dir()
    in_checkout = is_checkout and Path.cwd().is_relative_to(PROJECT)
    output = PROJECT / "build" if in_checkout else Path.cwd()
    return Environment(
        name, output, Path(os.environ.get("MADMAX_FIGURES", output / "figures"))
    )


def is_here(name: str) -> bool:
    """Whether a dataset, or a file of the data directories, can be read without a
    download.
    """
    try:
        if name in names():
            return dataset(name, download=False).exists()
        return local_data(name).exists()
    except (OSError, ValueError):
        return False


@lru_cache
def version(package: str) -> str | None:
    """Version of an installed package, None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def shell():
    """IPython's shell, if this runs in one; with a `kernel` in a notebook."""
    # imported already wherever there is a shell; importing it here would take a second
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
