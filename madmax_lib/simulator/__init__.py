"""How long would a step take, what would it hold in memory, and why? Time, memory and
timeline of any plan.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
