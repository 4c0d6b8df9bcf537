"""Metis [Um et al., USENIX ATC 2024] and its fork: the search as released (behaviour
recorded), and its tables.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.metis import plots as plots, studies as studies
    from madmax_lib.papers.metis.defects import (
        DEFECTS as DEFECTS,
        defect_table as defect_table,
    )
    from madmax_lib.papers.metis.generate import *
    from madmax_lib.papers.metis.walk import *

__all__ = open_room(__name__)
