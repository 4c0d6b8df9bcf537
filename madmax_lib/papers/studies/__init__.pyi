from madmax_lib.papers.studies import (
    hybrid as hybrid,
    memory_wall as memory_wall,
    vit_study as vit_study,
)
from madmax_lib.papers.studies.memory_facts import memory_facts as memory_facts
