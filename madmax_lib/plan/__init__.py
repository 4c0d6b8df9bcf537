"""How is a model split, and what is legal? Plans, one or many, the case they belong to,
the one book of rules.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.plan.case import Case as Case
    from madmax_lib.plan.columns import Plans as Plans
    from madmax_lib.plan.plan import Plan as Plan

__all__ = open_room(__name__)
