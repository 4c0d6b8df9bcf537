"""Three public student projects: what they measured, what follows from it, and what the
workbench says.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.studies import (
        hybrid as hybrid,
        memory_wall as memory_wall,
        plots as plots,
        vit_study as vit_study,
        wall_plots as wall_plots,
    )
    from madmax_lib.papers.studies.memory_facts import memory_facts as memory_facts

__all__ = open_room(__name__)
