"""Packages that not every installation has, and the extra that brings each, by
`extras.json`.
"""

import json
from pathlib import Path


def with_extra(error: Exception) -> Exception:
    """Error that says in one line what to install, in place of Python's about a module
    that is not there; any other error as it is.

    >>> print(with_extra(ModuleNotFoundError(name="wandb.server")))
    wandb is not installed: pip install 'madmax-workbench[study]'
    """
    name = str(getattr(error, "name", None)).partition(".")[0]
    lines = json.loads(Path(__file__).with_name("extras.json").read_text())
    return ModuleNotFoundError(lines[name]) if name in lines else error
