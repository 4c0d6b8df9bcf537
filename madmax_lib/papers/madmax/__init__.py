"""MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784]: its model, released and
corrected, and its figures.
"""

from madmax_lib.base.doors import open_room

__all__ = open_room(__name__)
