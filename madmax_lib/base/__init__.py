"""What does everything stand on that knows no domain? Files, fields, intervals, units,
doors of rooms.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.base.intervals import *
    from madmax_lib.base.units import *

__all__ = open_room(__name__)
