"""How is a model split, and what is legal? Plans, one or many, the case they belong to,
the one book of rules.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
