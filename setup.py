"""The wheel holds notebooks and traces inside the package, where `madmax run` and
`mm.dataset` find them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

usual = shutil.ignore_patterns("*.py", "*.md", ".*", "__pycache__")


def unwanted(folder, names):
    """Sources, pages, and the traces of the recorded runs, a third of all bytes, which
    have their breakdown.csv beside them.
    """
    of_runs = Path(folder).parts[:2] == ("traces", "runs")
    traces = {name for name in names if of_runs and name.startswith("trace_rank")}
    return usual(folder, names) | traces


class BuildWithNotebooks(build_py):
    """Copies the two folders beside the modules; an editable installation reads those
    of the checkout.
    """

    def run(self):
        super().run()
        if not self.editable_mode:
            shipped = Path(self.build_lib, "madmax_lib", "shipped")
            shutil.rmtree(shipped, ignore_errors=True)
            for folder in ("notebooks", "traces"):
                shutil.copytree(folder, shipped / folder, ignore=unwanted)


# build/ itself is where `madmax run` writes notebooks
setup(
    cmdclass={"build_py": BuildWithNotebooks},
    options={"build": {"build_base": "build/package"}},
)
