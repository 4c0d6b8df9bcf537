"""How is a model trained for real, in any layout, and what did it cost? Launch, train,
bench and read runs.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
