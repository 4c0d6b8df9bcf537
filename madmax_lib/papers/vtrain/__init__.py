"""vTrain [Bang et al., MICRO 2024]: its model, released (behaviour recorded) and
corrected, and its case studies.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
