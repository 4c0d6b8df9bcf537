"""MAD-Max Workbench: run, trace, calibrate, simulate and plan distributed training.

The names in `__init__.pyi` are all a notebook needs, the rooms included; each is loaded
when it is first used, so that importing the package stays light (no torch, hta, matplotlib,
dask or widgets).
"""

from madmax_lib.base.doors import open_room

__version__ = "0.2.0"

__all__ = open_room(__name__)
