"""Which plan is best? Searches over every degree on equal and on mixed GPUs, with one
stated cost.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
