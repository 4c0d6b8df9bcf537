"""Pictures of the studies keep the table that they show, and where it comes from."""

from functools import cache

import pytest

import madmax_lib as mm
from madmax_lib.papers import studies
from madmax_lib.papers.studies import hybrid, memory_wall as wall, vit_study
from madmax_lib.simulator import power_phases
from madmax_lib.traces import launch_gain
from madmax_lib.view.drawing import figure_data

methods = cache(lambda: wall.methods_table(mm.cluster("hetero-4xv100"), ["gpt2_3b", "gpt2_14b"]))
fit = cache(vit_study.fit_and_predict)
DRAWN = {
    studies.plot_mfu: hybrid.audit,
    studies.plot_memory_rows: hybrid.memory_rows,
    studies.plot_gelu: hybrid.gelu,
    studies.plot_mlp: hybrid.mlp,
    studies.plot_phases: lambda: fit()[1],
    studies.plot_memory_parts: vit_study.memory_parts,
    studies.plot_scaling: lambda: vit_study.scaling(fit()[0]),
    studies.plot_methods: methods,
    studies.plot_limits: wall.limits_table,
    studies.plot_adam: wall.measured_host,
    studies.plot_token_energy: lambda: methods()[methods()["model"] == "gpt2_3b"],
}


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_pictures_keep_their_table_and_its_origin(draw):
    table = DRAWN[draw]()
    data = figure_data(draw(table))
    assert data.equals(table) and data.attrs["provenance"]["files"] == table.attrs["provenance"]["files"]


def test_pictures_of_a_part():
    reported, log, overlap = hybrid.runs(), vit_study.steps(), vit_study.overlap(fit()[0])
    loss = figure_data(studies.plot_loss(reported))
    assert loss["loss"].tolist() == reported["loss"].dropna().tolist()
    steps = figure_data(studies.plot_steps(log, last=300, simulated_s=2.2))
    assert len(steps) == len(log) / 16 and steps.attrs["provenance"] == log.attrs["provenance"]
    assert figure_data(studies.plot_overlap(overlap, vit_study.measured_overlap())).equals(overlap)


def test_pictures_of_a_step():
    cluster, model = mm.cluster("hetero-4xv100"), wall.shape("gpt2_3b")
    share = wall.share_table(model, cluster, mm.Plan.parse("dp4.mb16.full.offload-chunks"), global_batch=64)
    assert figure_data(studies.plot_share(share, share.attrs["best"])).equals(share)
    step = mm.estimate(model, cluster, mm.Plan.parse("dp4.z2.mb16.full"), global_batch=64).iloc[0]
    power = power_phases(step, cluster.device)
    assert figure_data(studies.plot_power(power)).equals(power)
    gains = {name: launch_gain(mm.read_trace(mm.dataset(name))) for name in ("gpt-ddp", "vit-ddp")}
    data = figure_data(studies.plot_launch_gain(gains))
    assert data["step_s"].tolist() == [step_s for gain in gains.values() for step_s in gain["step_s"]]
    assert {name.split()[0] for name in data.attrs["provenance"]["files"]} == set(gains)
