"""Every legal plan once, and nothing else; what is dropped has a rule."""

from dataclasses import replace
from itertools import product

import pytest
from support import plans_of_space as plans

import madmax_lib as mm
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.planner.space import Degrees, Space, legal_degrees, pass_choices

MODEL = replace(mm.model("gpt2-large"), layers=12, heads=8, kv_heads=8, head_dim=160)
WIDE = replace(MODEL, heads=16, kv_heads=16, head_dim=80)
NODE = mm.cluster("dgx-a100", nodes=1)


@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, experts=4, active_experts=2, expert_ffn=64)]
)
def test_plans_are_legal_and_different(model, batch):
    found = plans(Space(attention=("flash",), prefetch=(1,)), model, NODE, batch)
    assert len(set(found)) == len(found) > 10
    for plan in found:
        plan.check(model, NODE)
        assert batch % (plan.dp * plan.micro_batch) == 0


def test_no_legal_plan_is_left_out():
    """Against all combinations of a few values, by the rules of Plan itself."""
    space = Space(schedule=("1f1b",), recompute=("none", "full"), sequence_parallel=(True,), attention=("flash",),
                  zero=(0, 3), hybrid=(), interleave=(1,), reduce_fp32=(False,), quantised=False,
                  prefetch=(1,))  # fmt: skip
    wanted = set()
    degrees = (1, 2, 4, 8)
    for dp, tp, pp, cp, micro, recompute, zero, context in product(
        degrees,
        degrees,
        degrees,
        degrees,
        (1, 2, 4, 8),
        ("none", "full"),
        (0, 3),
        ("ring", "ulysses"),
    ):
        if (
            dp * tp * pp * cp != 8
            or 8 % (dp * micro)
            or (context == "ulysses" and (cp == 1 or (8 // tp) % cp))
        ):
            continue
        if not (zero and dp * cp == 1):
            wanted.add(Plan(dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro, recompute=recompute, zero=zero,
                            context=context))  # fmt: skip
    assert set(plans(space, MODEL, NODE, 8)) == wanted


def test_choices_that_change_nothing_are_not_listed():
    alone = replace(NODE, devices_per_node=1)
    assert {(p.zero, p.schedule, p.context, p.reduce_fp32) for p in plans(Space(), MODEL, alone, 4)} == {
        (0, "1f1b", "ring", False)}  # fmt: skip
    at = Degrees(tp=1, cp=1, pp=2, ep=1, dp=4)
    one = pass_choices(
        Space(attention=("flash",), recompute=("none",)),
        Case(MODEL, alone, Plan(), 4),
        at,
    )
    assert set(one["schedule"][:, 0]) == {"1f1b"} and not one["sequence_parallel"].any()


def test_interleaving_as_megatron_cuts_it():
    at = Degrees(tp=1, cp=1, pp=4, ep=1, dp=2)
    space = Space(schedule=("1f1b",), recompute=("none",), attention=("flash",))
    rows = pass_choices(space, Case(MODEL, NODE, Plan(), 16), at)
    found = set(zip(rows["micro_batch"][:, 0], rows["interleave"][:, 0], strict=True))
    assert found == {
        (1, 1),
        (1, 3),
        (2, 1),
        (2, 3),
        (4, 1),
        (8, 1),
    }  # 8, 4, 2 and 1 micro-batches on 4 stages


USUAL = {("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("zero-bubble", 2)}
FOLDED = {("zbv", 2), ("dualpipev", 2)}


@pytest.mark.parametrize(
    ("space", "software", "batch", "wanted"),
    [
        (Space(), None, 8, USUAL),
        (Space(), "torchtitan", 8, USUAL | FOLDED),
        (Space(), "torchtitan", 2, USUAL | {("zbv", 2)}),  # less than 2 pp
        (Space(schedule=("zbv",)), None, 8, {("zbv", 2)}),
    ],
)
def test_a_v_is_tried_where_it_is_launched_or_asked_for(space, software, batch, wanted):
    case = Case(MODEL, NODE, Plan(), batch, software=software)
    space = replace(space, micro_batch=(1,), interleave=(1, 2))
    rows = pass_choices(space, case, Degrees(tp=8, cp=1, pp=2, ep=1, dp=1))
    found = set(zip(rows["schedule"][:, 0], rows["interleave"][:, 0], strict=True))
    assert found - {("1f1b", 2)} == wanted


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"batch": 1}, "dp must divide the global batch"),
        (
            {"model": replace(MODEL, heads=4, kv_heads=4, head_dim=320)},
            "tp must divide the attention heads",
        ),
        ({"model": replace(MODEL, layers=2)}, "pp must not exceed the layers"),
        (
            {"sequence": 10, "space": Space(context=("ring",))},
            "2 cp must divide the sequence",
        ),
        ({"sequence": 10}, "cp must divide the sequence"),
        (
            {"space": Space(tp_beyond_node=False), "nodes": 2, "model": WIDE},
            "tp must stay inside a node",
        ),
        (
            {"model": replace(MODEL, experts=8, active_experts=1, expert_ffn=64)},
            "ep must divide dp x cp",
        ),
    ],
)
def test_rules_are_counted(change, rule):
    arguments = {
        "space": Space(),
        "model": MODEL,
        "nodes": 1,
        "batch": 16,
        "sequence": 1024,
    } | change
    cluster = replace(NODE, nodes=arguments["nodes"])
    case = Case(
        arguments["model"], cluster, Plan(), arguments["batch"], arguments["sequence"]
    )
    degrees, dropped = legal_degrees(arguments["space"], case)
    assert dropped[rule] > 0 and degrees


def test_ulysses_takes_a_sequence_that_a_causal_ring_does_not():
    assert {
        plan.context
        for plan in plans(Space(cp=(2,)), replace(MODEL, sequence=10), NODE, 16)
    } == {"ulysses"}


def test_empty_choices():
    assert legal_degrees(Space(tp=(3,)), Case(MODEL, NODE, Plan(), 16)) == ([], {})
    with pytest.raises(ValueError, match=r"zero=\(\) leaves nothing to search"):
        Space(zero=())
