import asyncio
import json
import shlex
from dataclasses import replace

import pytest

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.base.units import format_s
from madmax_lib.planner.space import Space
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.view.explore.canvas import columns
from madmax_lib.view.explore.explorer import Later, doublings, message_html, slider
from madmax_lib.view.explore.plan_card import plan_card, plan_card_html
from madmax_lib.view.explore.step_explorer import (
    SpaceExplorer,
    StepExplorer,
    transformers,
)
from madmax_lib.view.explore.trace_explorer import TraceExplorer

STEP = {
    "model": "gpt2-large",
    "cluster": "dgx-a100",
    "nodes": 2,
    "plan": "dp4.tp2.pp2",
    "global_batch": 64,
}
SPACE = {"model": "gpt2-large", "cluster": "dgx-a100", "nodes": 1, "global_batch": 32}
SMALL = replace(
    Space.quick(),
    tp=(1, 2),
    pp=(1, 2),
    cp=(1,),
    interleave=(1,),
    recompute=("none", "full"),
)


@pytest.fixture
def step():
    return StepExplorer(**STEP)


@pytest.mark.parametrize(
    "plan", ["dp4.tp2.pp2", "dp16.z3", "dp2.tp4.pp2.full", "dp1.tp2.pp4.cp2"]
)
def test_a_plan_card_is_the_estimate_and_the_memory(plan):
    model, cluster, plan = (
        mm.model("gpt2-large"),
        mm.cluster("dgx-a100", nodes=2),
        mm.Plan.parse(plan),
    )
    card = plan_card(model, cluster, plan, global_batch=64)
    row = mm.estimate(model, cluster, plan, global_batch=64).iloc[0]
    assert card.row.equals(row) and card.time_s.sum() == pytest.approx(row["step_s"])
    assert all(
        text in card.step_text
        for text in map(format_s, row[["low_s", "step_s", "high_s"]])
    )
    peak = peak_bytes(memory(model, plan, global_batch=64))
    assert (
        card.memory_bytes.sum() == pytest.approx(peak) and card.memory_bytes.min() >= 0
    )
    assert ("does not fit" in plan_card_html(card)) == (
        peak > usable_bytes(cluster.device)
    )


@pytest.mark.parametrize(
    ("change", "plan"),
    [({"tp": 4}, "dp2.tp4.pp2"), ({"pp": 1}, "dp8.tp2"), ({"nodes": 4}, "dp8.tp2.pp2"), ({"tp": 1}, "dp8.pp2"),
     ({"zero": 1, "recompute": "full"}, "dp4.tp2.pp2.z1.full"), ({"plan": "dp16.z3"}, "dp16.z3"),
     ({"global_batch": 128}, "dp4.tp2.pp2")],
)  # fmt: skip
def test_dp_takes_the_devices_that_the_other_degrees_leave(step, change, plan):
    step.set(**change)
    assert (step.error, step.parameters["plan"]) == ("", plan)
    assert (
        step.plan.world_size == step.cluster.world_size
        and step.plan.sequence_parallel == (step.plan.tp > 1)
    )


def test_the_software_can_be_turned(step):
    before = step.card.row["step_s"], step.card.memory_bytes.sum()
    step.set(software="torchtitan")
    step.draw()
    assert (
        step.view.timelines[0].meta.provenance["software"]
        == step.parameters["software"]
        == "torchtitan"
    )
    assert (step.card.row["step_s"], step.card.memory_bytes.sum()) != before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pp": 3}, "tp=2 x pp=3 x cp=1 does not divide 16 devices"),
        ({"plan": "dp3"}, "3"),
        ({"plan": "dq3"}, "dq3"),
        ({"model": "<nobody>"}, "&lt;nobody&gt;"),
        ({"model": "/no/config.json"}, "/no/config.json"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_the_picture_stays(step, change, reason):
    before = step.view.timelines
    step.set(**change)
    step.draw()
    assert step.error and reason in step.html and "tokens/s" not in step.html
    assert step.view.timelines == before
    step.set(**{name: STEP[name] for name in ("model", "plan")})
    assert not step.error
    with pytest.raises(ValueError, match="= 7, but dgx-a100 has 16 devices"):
        StepExplorer(**STEP | {"plan": "dp7"})  # the first one must be possible


def test_the_timeline_has_few_micro_batches_on_a_rank_of_each_stage(step):
    step.set(plan="dp2.tp4.pp2", global_batch=64)
    step.draw()
    (timeline,) = step.view.timelines
    assert timeline.meta.provenance["global_batch"] == 8 * 2 and timeline.ranks == [
        0,
        8,
    ]
    labels = [row["label"] for row in columns([timeline], [""])[0]["rows"]]
    assert labels[:2] == ["rank 0 · device computes", "rank 0 · tensor parallel"]
    assert "8 of 32 micro-batches" in step.html


def test_controls_carry_the_names_of_the_parameters_and_follow_each_other(step):
    pytest.importorskip("ipywidgets")
    assert set(STEP) | {"sequence", "software"} <= set(step.controls)
    step.widget.layout.width = "100%"
    step.controls["tp"].value = 4
    assert step.parameters["plan"] == step.controls["plan"].value == "dp2.tp4.pp2"
    assert (
        "MFU" in step.numbers.value
        and step.view.timelines[0].meta.provenance["plan"] == "dp2.tp4.pp2"
    )
    step.controls["plan"].value = "dp4.tp4.mb3"
    assert (
        step.controls["tp"].value,
        step.controls["pp"].value,
        step.controls["micro_batch"].value,
    ) == (4, 1, 3)
    step.controls["nodes"].value = 1
    step.controls["pp"].value = 16
    assert "does not divide" in step.numbers.value


@pytest.fixture
def config(tmp_path):
    """A small llama as Hugging Face writes it."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    path = tmp_path / "my own" / "config.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 32000,
                "max_position_embeddings": 1024,
            }
            | sizes
        )
    )
    return str(path)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tp": 4, "zero": 1, "recompute": "full", "sequence": 512},
        {"software": "torchtitan", "nodes": 4},
        {"cluster": "kaggle-2xt4", "global_batch": 128},
        {"model": "config"},
    ],
)
def test_the_printed_command_gives_the_numbers_that_are_shown(
    step, config, change, capsys
):
    step.set(**change | ({"model": config} if "model" in change else {}))
    line = step.html.split("<pre")[1].split(">", 1)[1].split("</pre>")[0]
    assert (
        not step.error
        and main([*shlex.split(line.replace("&#x27;", "'"))[1:], "--json"]) == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    for name in ("step_s", "low_s", "high_s", "mfu", "tokens_per_s"):
        assert row[name] == pytest.approx(step.card.row[name], rel=1e-5), (
            name
        )  # six digits


def test_an_own_model_joins_the_menu_and_a_wrong_path_changes_nothing(step, config):
    pytest.importorskip("ipywidgets")
    step.widget.layout.width = "100%"
    for wrong in ("/no/config.json", "dlrm-a", " "):
        step.controls["own model"].value = wrong
        assert (wrong in step.numbers.value) and step.parameters[
            "model"
        ] == "gpt2-large"
    step.controls["tp"].value = 4
    assert "MFU" in step.numbers.value
    step.controls["own model"].value = f" {config} "
    assert (
        step.parameters["model"] == step.controls["model"].value == config
        and "MFU" in step.numbers.value
    )
    assert step.controls["sequence"].value == 1024 and step.parameters["sequence"] == 0
    step.controls["sequence"].value = 512
    step.controls["model"].value = "gpt2-large"
    assert step.controls["sequence"].value == step.parameters["sequence"] == 512
    step.controls["sequence"].value = mm.model("gpt2-large").sequence
    assert step.parameters["sequence"] == 0


@pytest.fixture(scope="module")
def space():
    return SpaceExplorer(**SPACE, space=SMALL)


def test_the_best_plan_is_chosen_and_the_front_is_marked(space):
    space.filter(tp="any", recompute="any")
    best = space.points["step_s"].idxmin()
    assert (
        space.step.parameters["plan"]
        == space.points["plan"][best]
        == str(space.result.best)
    )
    front = space.points[space.points["front"]].sort_values("step_s")
    assert (
        front["memory_gib"].is_monotonic_decreasing and space.points["plan"].is_unique
    )


def test_a_filter_searches_the_smaller_space(space):
    space.filter(tp=2, recompute="full")
    plans = [mm.Plan.parse(text) for text in space.points["plan"]]
    assert plans and {(plan.tp, plan.recompute) for plan in plans} == {(2, "full")}
    assert space.step.plan.tp == 2
    space.filter(tp="any", recompute="any")
    assert space.filters == {} and {
        mm.Plan.parse(text).tp for text in space.points["plan"]
    } == {1, 2}
    with pytest.raises(ValueError, match="no layout"):
        space.filter(tp=64)
    assert space.filters == {}


def test_a_click_shows_the_plan(space):
    pytest.importorskip("anywidget")
    space.filter(tp="any", recompute="any")
    assert space.widget.children[0].children[0].description == "tp"
    other = int(space.points["memory_gib"].idxmin())
    space.front.chosen = other
    plan = space.points["plan"][other]
    assert space.step.parameters["plan"] == plan and plan in space.numbers.value
    assert space.step.view.timelines[0].meta.provenance["plan"] == plan
    space.controls["recompute"].value = "full"
    assert all("full" in point["plan"] for point in space.front.points)
    assert (
        space.front.points[space.front.chosen]["plan"] == space.step.parameters["plan"]
    )


def test_explorers_as_pictures(step, space):
    assert (len(step.figure().axes), len(space.figure().axes)) == (1, 2)
    bundle, _ = step._repr_mimebundle_()
    assert (
        step.html in bundle["text/html"] and bundle["image/png"] in bundle["text/html"]
    )


def test_traces_are_chosen_by_set_rank_and_step():
    traces = TraceExplorer(trace="vit-ddp")
    whole = traces.recording
    assert len(traces.view.timelines[0]) == len(whole)
    traces.set(ranks=[1], step=whole.steps[-1])
    (chosen,) = traces.view.timelines
    assert chosen.ranks == [1] and chosen.steps == whole.steps[-1:]
    traces.set(trace="gpt-ddp")
    assert traces.parameters == {"trace": "gpt-ddp", "ranks": [], "step": -1}
    for change in (
        {"step": 999},
        {"ranks": [77]},
        {"trace": "/no/such/trace"},
    ):  # refused and forgotten
        with pytest.raises((ValueError, FileNotFoundError)):
            traces.set(**change)
        assert traces.parameters == {"trace": "gpt-ddp", "ranks": [], "step": -1}


def test_trace_controls_offer_what_the_trace_has():
    pytest.importorskip("ipywidgets")
    traces = TraceExplorer(trace="vit-ddp")
    assert traces.widget.children[0].children[2].options == (0, 1)
    traces.controls["ranks"].value = (0,)
    traces.controls["step"].value = traces.recording.steps[0]
    assert traces.parameters == {
        "trace": "vit-ddp",
        "ranks": [0],
        "step": traces.recording.steps[0],
    }
    assert traces.numbers.value.count("<tr") == 2
    traces.controls["trace"].value = "gpt-fsdp"
    assert (
        traces.controls["step"].value == -1
        and "gpt-fsdp" in traces.controls["trace"].options
    )
    traces.controls["own trace"].value = "/no/such/trace"
    assert (
        "/no/such/trace" in traces.numbers.value
        and traces.parameters["trace"] == "gpt-fsdp"
    )
    traces.controls["own trace"].value = own = str(mm.dataset("vit-fsdp"))
    assert traces.controls["trace"].value == traces.parameters["trace"] == own


def test_work_waits_for_the_last_change_where_a_loop_runs():
    calls = []

    async def three():
        later = Later(0.01, lambda: calls.append(1))
        for _ in range(3):
            later()
        assert calls == []
        while not calls:
            await asyncio.sleep(0)

    asyncio.run(three())
    assert calls == [1]
    Later(60, lambda: calls.append(2))()
    assert calls == [1, 2]


def test_what_fails_later_is_said_where_the_numbers_are(step, monkeypatch):
    pytest.importorskip("ipywidgets")
    step.widget.layout.width = "100%"
    monkeypatch.setattr(step, "draw", lambda: int("x"))
    step.controls["tp"].value = 4
    assert "invalid literal" in step.numbers.value and step.error


def test_controls_list_transformers_and_doublings():
    pytest.importorskip("ipywidgets")
    assert "gpt3-175b" in transformers() and not [
        name for name in transformers() if name.startswith("dlrm")
    ]
    assert slider([0, *doublings(512, 2048)], 1000).options == (
        0,
        512,
        1000,
        1024,
        2048,
    )
    assert "&lt;b&gt;" in message_html("<b>")
