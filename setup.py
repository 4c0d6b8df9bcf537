"""The wheel holds notebooks and traces inside the package, where `madmax run` and
`mm.dataset` find them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


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
                unwanted = shutil.ignore_patterns("*.py", "*.md", ".*", "__pycache__")
                shutil.copytree(folder, shipped / folder, ignore=unwanted)


setup(cmdclass={"build_py": BuildWithNotebooks})
