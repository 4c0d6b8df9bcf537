"""What do the papers' own models say, exactly as published, and do their figures come
out? One room a paper.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers import (
        madmax as madmax,
        metis as metis,
        studies as studies,
        vtrain as vtrain,
    )

__all__ = open_room(__name__)
