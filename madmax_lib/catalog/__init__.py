"""What exists? Models, devices, clusters, software and recorded inputs, each number
with its source.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
