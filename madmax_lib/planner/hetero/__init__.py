"""Which plan trains a model fastest on GPUs of several types? Stages, groups, degrees and layer cuts, exactly."""

from __future__ import annotations

from madmax_lib.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.planner.hetero.export import (
        as_json as as_json,
        plan_text as plan_text,
        save_plan as save_plan,
        timeline as timeline,
    )
    from madmax_lib.planner.hetero.model import clusters_of as clusters_of, nodes_of as nodes_of
    from madmax_lib.planner.hetero.nodes import (
        Node as Node,
        load_cluster as load_cluster,
        write_cluster as write_cluster,
    )
    from madmax_lib.planner.hetero.prices import prices_of as prices_of
    from madmax_lib.planner.hetero.profiles import (
        Profiles as Profiles,
        load_profiles as load_profiles,
        write_profiles as write_profiles,
    )
    from madmax_lib.planner.hetero.solve import (
        Planned as Planned,
        Problem as Problem,
        cost as cost,
        cost_of as cost_of,
        group_sizes as group_sizes,
        plan as plan,
        plan_of as plan_of,
        planned_of as planned_of,
        problem as problem,
    )
    from madmax_lib.planner.hetero.stage_plan import DEFECTS as DEFECTS, HeteroPlan as HeteroPlan
    from madmax_lib.planner.hetero.study import alone as alone, defect_table as defect_table

__all__ = open_room(__name__)
