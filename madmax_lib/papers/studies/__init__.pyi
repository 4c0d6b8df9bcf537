from madmax_lib.papers.studies import (
    hybrid as hybrid,
    memory_wall as memory_wall,
    plots as plots,
    vit_study as vit_study,
    wall_plots as wall_plots,
)
from madmax_lib.papers.studies.memory_facts import memory_facts as memory_facts
