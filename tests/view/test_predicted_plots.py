"""Pictures of a predicted step show its causes, streams and components."""

import pandas as pd

import madmax_lib as mm
from madmax_lib.papers.studies import memory_wall as wall
from madmax_lib.simulator.memory.memory import PHASES
from madmax_lib.view.drawing import COMPONENTS, components_key, figure_data
from madmax_lib.view.plots.breakdown import plot_timeline
from madmax_lib.view.plots.predicted import plot_causes

CLUSTER, MODEL = mm.cluster("hetero-4xv100"), wall.shape("gpt2_3b")
RUN = MODEL, CLUSTER, mm.Plan.parse("dp4.mb16.full.offload-chunks")


def test_causes_are_what_nothing_hides():
    plans = ["dp1.tp8", "dp8.z3", "dp8"]
    rows = {
        plan: mm.estimate("llama3-8b", "dgx-h100", plan, global_batch=8).iloc[0]
        for plan in plans
    }
    shown = figure_data(plot_causes(pd.DataFrame(rows).T)).set_index("step")
    assert shown.at["dp1.tp8", "tensor parallelism"] == rows["dp1.tp8"]["tp_s"] > 0
    assert (
        shown.at["dp8.z3", "sharded weights"]
        > shown.at["dp8", "sharded weights"]
        == 0
        < shown.at["dp8", "gradients"]
    )


def test_streams_are_blocks_of_the_step():
    step = mm.simulate(*RUN, global_batch=64, dtype="fp16")
    ax = plot_timeline(step, hosts=True)
    rows = {label.get_text().split(" · ")[1] for label in ax.get_yticklabels()}
    assert {"device computes", "host computes", "copies to the host"} <= rows
    drawn = figure_data(ax)
    assert (drawn["start_s"] + drawn["dur_s"]).max() <= mm.breakdown(step)[
        "total_s"
    ].max() * 1.001
    assert drawn.attrs["provenance"] == step.meta.provenance


def test_every_component_of_memory_has_a_colour_of_its_own():
    assert (
        set(PHASES) <= set(COMPONENTS)
        and len({*COMPONENTS.values(), *components_key(["?"]).values()})
        == len(COMPONENTS) + 1
    )
