"""What does everything stand on that knows no domain? Files, fields, intervals, units,
doors of rooms.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
