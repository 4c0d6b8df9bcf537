"""Three public student projects: what they measured, what follows from it, and what the workbench says."""

from __future__ import annotations

from madmax_lib.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.studies import hybrid as hybrid, memory_wall as memory_wall, vit_study as vit_study
    from madmax_lib.papers.studies.memory_facts import memory_facts as memory_facts
    from madmax_lib.papers.studies.plots import (
        plot_gelu as plot_gelu,
        plot_loss as plot_loss,
        plot_memory_parts as plot_memory_parts,
        plot_memory_rows as plot_memory_rows,
        plot_mfu as plot_mfu,
        plot_mlp as plot_mlp,
        plot_overlap as plot_overlap,
        plot_phases as plot_phases,
        plot_scaling as plot_scaling,
        plot_steps as plot_steps,
    )
    from madmax_lib.papers.studies.wall_plots import (
        plot_adam as plot_adam,
        plot_launch_gain as plot_launch_gain,
        plot_limits as plot_limits,
        plot_methods as plot_methods,
        plot_power as plot_power,
        plot_share as plot_share,
        plot_token_energy as plot_token_energy,
    )

__all__ = open_room(__name__)
