"""What happened when, and where did the time go? Spans of ranks and streams, and their
accounting.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
