"""Which plan trains a model fastest on GPUs of several types? Stages, groups, degrees
and layer cuts, exactly.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
