"""Pictures of the studies keep the table that they show, and where it comes from."""

from functools import cache

import pytest

import madmax_lib as mm
from madmax_lib.papers.studies import hybrid, memory_wall as wall, plots, vit_study, wall_plots
from madmax_lib.view.drawing import figure_data

methods = cache(lambda: wall.methods_table(mm.cluster("hetero-4xv100"), ["gpt2_3b", "gpt2_14b"]))
fit = cache(vit_study.fit_and_predict)
DRAWN = {
    plots.plot_mfu: hybrid.audit,
    plots.plot_memory_rows: hybrid.memory_rows,
    plots.plot_gelu: hybrid.gelu,
    plots.plot_memory_parts: vit_study.memory_parts,
    plots.plot_scaling: lambda: vit_study.scaling(fit()[0]),
    wall_plots.plot_methods: methods,
    wall_plots.plot_limits: wall.limits_table,
    wall_plots.plot_adam: wall.measured_host,
    wall_plots.plot_token_energy: lambda: methods()[methods()["model"] == "gpt2_3b"],
}


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_pictures_keep_their_table_and_its_origin(draw):
    table = DRAWN[draw]()
    data = figure_data(draw(table))
    assert data.equals(table) and data.attrs["provenance"]["files"] == table.attrs["provenance"]["files"]


def test_pictures_of_a_part():
    log, overlap = vit_study.steps(), vit_study.overlap(fit()[0])
    steps = figure_data(plots.plot_steps(log, last=300, simulated_s=2.2))
    assert len(steps) == len(log) / 16 and steps.attrs["provenance"] == log.attrs["provenance"]
    assert figure_data(plots.plot_overlap(overlap, vit_study.measured_overlap())).equals(overlap)


def test_pictures_of_a_step():
    cluster, model = mm.cluster("hetero-4xv100"), wall.shape("gpt2_3b")
    share = wall.share_table(model, cluster, mm.Plan.parse("dp4.mb16.full.offload-chunks"), global_batch=64)
    assert figure_data(wall_plots.plot_share(share, share.attrs["best"])).equals(share)
