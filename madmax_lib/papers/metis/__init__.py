"""Metis [Um et al., USENIX ATC 2024] and its fork: the search as released (behaviour
recorded), and its tables.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
