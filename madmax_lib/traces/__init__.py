"""What did the ranks do, where did the time go, what would help? Traces read, analysed,
compared and written.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
