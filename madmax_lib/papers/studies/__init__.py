"""Three public student projects: what they measured, what follows from it, and what the
workbench says.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
