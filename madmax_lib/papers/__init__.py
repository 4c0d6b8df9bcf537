"""What do the papers' own models say, exactly as published, and do their figures come
out? One room a paper.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
