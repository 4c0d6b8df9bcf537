"""What happened when, and where did the time go? Spans of ranks and streams, and their
accounting.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.timeline.accounting import *
    from madmax_lib.timeline.side_tables import SPANS as SPANS
    from madmax_lib.timeline.timeline import *

__all__ = open_room(__name__)
