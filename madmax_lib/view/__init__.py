"""How does it look? Pictures, widgets, notebooks run headless, pages and reports:
everything that draws.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
