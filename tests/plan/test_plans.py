"""One rule book: every door of the workbench gives the same verdict on a plan, in the
same words.
"""

import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from support import rows_beside

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.catalog.models import DLRM
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans, owned
from madmax_lib.plan.layers import chunk_layers
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import DEFAULTS, Plan
from madmax_lib.planner.money.compare import lever_table, variants
from madmax_lib.planner.space import Degrees, Space, legal_degrees
from madmax_lib.runs import checks
from madmax_lib.runs.settings import Settings
from madmax_lib.simulator.simulate import _lay_out

NAMES = [
    "gpt2",
    "gpt2-large",
    "llama3-8b",
    "qwen2.5-3b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "vit-base",
    "dlrm-a",
]
GROUPS, PLANS = 50, 40  # of a model, cluster and batch each
DEGREES = list(Degrees._fields)
OTHER_FIELDS = {"ep": (2, 3, 4, 8), "zero": (1, 2, 3, 4), "micro_batch": (2, 3, 0), "interleave": (2, 3),
                "schedule": ("gpipe", "zero-bubble", "none"), "recompute": ("full", "selective"),
                "sequence_parallel": (False, True), "context": ("ulysses",), "shard": (2, 4, -1), "qwz": (True,),
                "overlap_gather": (True,), "first_layers": (1, 2), "last_layers": (1, 3),
                "embedding_as_layer": (True,), "head_as_layer": (True,), "capacity": (1.25, -1.0),
                "etp": (1, 2, 3), "lora_rank": (16, -1), "overlap_tp": (True, False), "overlap_ep": (True, 2.0),
                "overlap_dp": (False,), "bucket_bytes": (float("inf"), 1e6, 0.0)}  # fmt: skip


def drawn_situation(draw):
    """A model of a few layers, a cluster, a batch and a sequence."""
    model = mm.model(draw.choice(NAMES))
    sequence = None
    if not isinstance(model, DLRM):
        model = replace(model, layers=draw.randint(2, 8), dense_layers=0)
        sequence = None if model.image else draw.choice([model.sequence, 96, 100, 1024])
    nodes, devices = draw.choice(
        [(1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8), (2, 8), (3, 4)]
    )
    cluster = replace(mm.cluster("dgx-a100", nodes=nodes), devices_per_node=devices)
    return model, cluster, draw.choice([4, 12, 16, 24, 48]), sequence


def drawn_fields(draw, world):
    """Fields of a plan that mostly fills the devices, and mostly obeys; most choices
    are at their default.
    """
    fields, rest = {}, world if draw.random() < 0.95 else world + 1
    for name in draw.sample(["tp", "pp", "cp"], 3):
        fields[name] = draw.choice([d for d in range(1, rest + 1) if rest % d == 0])
        rest //= fields[name]
    fields["dp"] = rest
    for name, values in OTHER_FIELDS.items():
        if draw.random() < (0.3 if name in ("ep", "zero", "context") else 0.07):
            fields[name] = draw.choice(values)
    return fields


def refusal(door, *arguments, **options):
    """What a door says of a plan, nothing if it takes it."""
    try:
        door(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


def search_drops(case, plan):
    """Name of the rule by which a search drops the degrees of a plan, nothing if it
    keeps them; None if not listed.
    """
    space = Space(
        **{name: (getattr(plan, name),) for name in ("tp", "cp", "pp", "ep")},
        context=(plan.context,),
        tp_beyond_node=True,
    )
    kept, dropped = legal_degrees(space, case)
    assert len(kept) + len(dropped) <= 1
    return "" if kept else next(iter(dropped), None)


@pytest.mark.parametrize("seed", range(GROUPS))
def test_all_doors_give_the_same_verdict_in_the_same_words(seed):
    draw = random.Random(seed)
    model, cluster, batch, sequence = drawn_situation(draw)
    rows = [drawn_fields(draw, cluster.world_size) for _ in range(PLANS)]
    table = pd.DataFrame(
        [DEFAULTS | {"sequence_parallel": row["tp"] > 1} | row for row in rows]
    )
    case = Case(model, cluster, Plans.from_table(table), batch, sequence)
    verdict = legal(case)
    words = verdict.words()
    transformer = not isinstance(model, DLRM)
    if transformer:
        timed = mm.estimate(
            model, cluster, table, global_batch=batch, sequence=sequence
        )["step_s"].notna()
        assert timed.tolist() == verdict.mask.tolist()
    for fields, said in zip(rows, words, strict=True):
        if (refused := refusal(Plan, **fields)) or (not transformer and "got" in said):
            assert said.startswith(refused) and bool(refused or "got" in said)
            continue
        plan, shape = Plan(**fields), {"global_batch": batch, "sequence": sequence}
        alone = replace(case, plan=plan)
        assert refusal(plan.check, model, cluster, batch, sequence) == said
        assert refusal(_lay_out, alone) == said
        if not transformer:
            continue
        assert refusal(mm.estimate, model, cluster, plan, **shape) == said
        if without_cluster := legal(replace(case, cluster=None, plan=plan)).words()[()]:
            settings = Settings(global_batch=batch, sequence=sequence or 0)
            assert refusal(checks.check, plan, model, settings) == without_cluster
        if plan.world_size != cluster.world_size:
            continue  # a search makes no such degrees
        plain = legal(
            replace(
                case,
                plan=Plans(
                    **{name: getattr(plan, name) for name in (*DEGREES, "context")}
                ),
            )
        )
        dropped = search_drops(case, plan)
        assert (dropped == "") == bool(plain.mask)
        assert not dropped or dropped == plain.rules[plain.first_broken_rule].name


def test_products_broadcast_and_are_not_copied():
    micro, zero = np.array([[1], [2], [3]]), np.array([[0, 1, 2, 3]])
    plans = Plans(dp=4, micro_batch=micro, zero=zero)
    assert (
        plans.shape == (3, 4) and plans.micro_batch is micro and plans[1, 3].zero == 3
    )
    verdict = legal(Case(mm.model("gpt2"), None, plans, 6))
    assert verdict.mask.shape == (3, 4) and not verdict.mask.any()
    assert set(verdict.words().ravel().tolist()) == {
        f"global_batch=6 is not a multiple of dp x micro_batch = 4 x {m}, nor, with "
        "a short last micro-batch, of dp"
        for m in (1, 2, 3)
    }


def test_parts_of_a_table_are_views():
    table = Plans.from_table(
        pd.DataFrame({"dp": [1, 2, 4], "recompute": ["none", "full", "full"]})
    )
    part = table[1:]
    assert (
        np.shares_memory(part.dp, table.dp)
        and part.recompute.tolist() == ["full", "full"]
        and part.tp == 1
    )
    gaps = Plans.from_table(
        pd.DataFrame(
            [{"tp": 2, "zero": 3, "qwz": 1.0}, {"tp": 1}, {"tp": 4, "offload": "all"}]
        )
    )
    assert gaps.zero.tolist() == [3, 0, 0] and gaps.qwz.tolist() == [True, False, False]
    assert gaps.offload.tolist() == [
        None,
        None,
        "all",
    ] and gaps.sequence_parallel.tolist() == [True, False, True]
    assert Plans.from_table(pd.DataFrame({"dp": []})).shape == (0,)
    small = Plans.from_table(
        pd.DataFrame({"cp": np.array([8], dtype="int8"), "bucket_bytes": [np.inf]})
    )
    assert small.cp.dtype == np.int64 and small.bucket_bytes[0] == np.inf
    with pytest.raises(ValueError, match="'tensor' is not a field of Plan"):
        Plans.from_table(pd.DataFrame({"tensor": [8]}))
    for column in (["8", "4"], [8, "4"]):
        with pytest.raises(
            ValueError, match=r"column 'dp' must hold numbers, but holds '[48]'"
        ):
            Plans.from_table(pd.DataFrame({"dp": column}))


def test_overlaps_of_a_plan_or_of_its_software():
    nemo, titan = catalog.software("nemo"), catalog.software("torchtitan")
    rows = Plans.from_table(
        pd.DataFrame(
            {"overlap_tp": [None, True, False], "overlap_dp": [np.nan, 1.0, 0.0]}
        )
    )
    assert rows.overlaps("tp", nemo).tolist() == [True, True, False]
    assert rows.overlaps("tp", titan).tolist() == [False, True, False]
    assert (
        rows.overlaps("dp", titan).tolist() == [True, True, False]
        and rows.overlaps("ep", titan) is False
    )
    assert [rows[row].overlap_tp for row in range(3)] == [None, 1.0, 0.0]
    assert (
        Plan().overlaps("tp", nemo) is True
        and Plan(overlap_tp=False).overlaps("tp", nemo) is False
    )
    with pytest.raises(
        ValueError, match="column 'overlap_tp' must hold numbers, but holds 'yes'"
    ):
        Plans.from_table(pd.DataFrame({"overlap_tp": ["yes", None]}))


@pytest.mark.parametrize(
    ("tp", "etp", "ep", "spread", "parameters"),
    [
        (8, 0, 4, 1, 450),
        (8, 8, 4, 1, 450),
        (8, 1, 4, 8, 187.5),
        (8, 2, 4, 4, 225),
        (8, 1, 64, 8, 750),
        (1, 0, 4, 1, 450),
    ],
)
def test_experts_laid_over_tp_are_shared_by_more(tp, etp, ep, spread, parameters):
    """Of 1,200 dense and 600 experts' parameters on each of 8 x tp devices."""
    plan = Plan(dp=8, tp=tp, ep=ep, etp=etp, zero=1)
    assert plan.expert_spread == spread
    assert owned(1200.0, 600.0, plan.sharing, ep, plan.expert_spread) == pytest.approx(
        parameters
    )
    assert Plans(tp=np.array([tp]), etp=np.array([etp])).expert_spread.tolist() == [
        spread
    ]


@pytest.mark.parametrize(
    ("layers", "plan", "first", "last"),
    [
        (
            126,
            "pp16.v8.first7.last7",
            [0, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 1, 0],
        ),  # Llama 3 405B
        (
            126,
            "pp16.v8.embedding-layer.head-layer",
            [0, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 1, 0],
        ),
        (126, "pp16.v4.first7.last7", [1, 2, 2, 2], [2, 2, 2, 1]),
        (14, "pp4.v2.first2.last4", [1, 1], [2, 2]),
        (62, "pp8.v4.first6", [0, 2, 2, 2], [2, 2, 2, 2]),
    ],
)
def test_ends_of_interleaved_pipelines_may_be_shorter(layers, plan, first, last):
    model = replace(mm.model("llama3-405b"), layers=layers)
    plan = Plan.parse(plan)
    plan.check(model, None)
    chunks = chunk_layers(layers, plan)
    assert [len(part) for part in chunks[0]] == first and [
        len(part) for part in chunks[-1]
    ] == last
    order = [
        layer
        for chunk in range(plan.interleave)
        for stage in chunks
        for layer in stage[chunk]
    ]
    assert order == list(range(layers))


@pytest.mark.parametrize(
    ("sharing", "ep", "parameters"),
    [(1, 1, 1800), (1, 4, 1800), (8, 1, 225), (8, 4, 450), (8, 8, 750), (2, 4, 1200)],
)
def test_experts_are_shared_by_what_expert_parallelism_leaves(sharing, ep, parameters):
    assert owned(1200.0, 600.0, sharing, ep) == pytest.approx(parameters)


def test_ends_that_count_as_layers_need_a_pipeline_to_matter():
    assert chunk_layers(4, Plan(embedding_as_layer=True, head_as_layer=True)) == [
        [range(4)]
    ]


def test_a_case_resolves_its_software_once():
    """By name, by value, or none, which is false: the usual software of a plan can
    stand in for it.
    """
    case = Case(mm.model("gpt2"), None, Plan(), software="megatron")
    assert (
        case.software is catalog.software(case.software)
        and case.software.name == "megatron-core"
    )
    assert (
        replace(case, software=None).software.name == "none"
        and not replace(case, software=None).software
    )
    with pytest.raises(ValueError, match="unknown software 'megatronne'"):
        replace(case, software="megatronne")


@pytest.mark.parametrize(
    ("model", "plan", "software", "words"),
    rows_beside(__file__, "refused_by_software"),
)
def test_a_software_runs_what_its_table_says(model, plan, software, words):
    """One plan is refused in every door; a row of a table is no plan; a search does not
    try it.
    """
    model, plan = mm.model(model), Plan.parse(plan)
    cluster = mm.cluster("dgx-h100", devices=plan.world_size)
    doors = [
        partial(door, model, cluster, plan, global_batch=16)
        for door in (mm.estimate, mm.simulate, mm.fits)
    ]
    for door in (*doors, partial(mm.memory, model, plan, global_batch=16)):
        with pytest.raises(ValueError, match=re.escape(words)):
            door(software=software)
        door()
    table = pd.DataFrame([vars(plan), vars(Plan(dp=plan.world_size))])
    seconds = mm.estimate(model, cluster, table, global_batch=16, software=software)[
        "step_s"
    ]
    assert np.isnan(seconds[0]) and np.isnan(seconds[1]) == ("models" in words)


def test_a_search_tries_what_the_software_runs():
    cluster, space = (
        mm.cluster("dgx-h100", nodes=1),
        replace(Space.quick(), zero=(0, 3), schedule=("1f1b", "gpipe")),
    )
    for name, more in (("jax", "gpipe"), ("llm-foundry", "1f1b"), (None, "1f1b")):
        found = mm.search(
            "gpt2", cluster, 16, software=name, space=space, top=10**4, progress=False
        )
        plans = [Plan.parse(text) for text in found.table["plan"]]
        assert all(
            legal(Case(mm.model("gpt2"), cluster, plan, 16, software=name)).mask
            for plan in plans
        )
        assert {plan.schedule for plan in plans if plan.pp > 1} <= {
            more,
            "gpipe",
        } and plans
        assert (max(plan.pp for plan in plans) > 1) == (name != "llm-foundry")


DOORS = {
    "estimate": lambda model, cluster, plan, **run: mm.estimate(
        model, cluster, plan, **run
    )["step_s"].item(),
    "simulate": lambda *plan, **run: mm.breakdown(mm.simulate(*plan, **run))[
        "total_s"
    ].max(),
    "fits": lambda *plan, **run: mm.fits(*plan, **run).margins_bytes,
    "memory": lambda model, cluster, plan, **run: mm.memory(model, plan, **run)[
        "size_bytes"
    ].tolist(),
    "variants": lambda model, cluster, plan, **run: variants(
        model, cluster, [plan], **run
    )["step_s"].tolist(),
    "search": lambda model, cluster, plan, **run: search(model, cluster, **run)[
        "step_s"
    ].tolist(),
    "levers": lambda model, cluster, plan, **run: lever_table(
        model, cluster, plan, global_batch=64
    )["fits"].tolist(),
}


def search(*arguments, **run):
    return mm.search(
        *arguments,
        **run,
        top=3,
        space=replace(Space.quick(), tp=(1, 2)),
        progress=False,
    ).table


@pytest.mark.parametrize("door", DOORS)
def test_names_and_text_stand_for_what_they_name(door):
    names, run = (
        ("gpt2-large", "dgx-a100", "dp4.tp2.z2"),
        {"global_batch": 64, "software": "torchtitan"},
    )
    things = mm.model(names[0]), mm.cluster(names[1]), Plan.parse(names[2])
    assert DOORS[door](*names, **run) == DOORS[door](
        *things, **run | {"software": catalog.software("torchtitan")}
    )
    if door != "levers":
        assert DOORS[door](*names, **run) != DOORS[door](
            *names, **run | {"software": "megatron-core"}
        )
    for place in {0, 1, 2} - {"memory": {1}, "search": {2}}.get(door, set()):
        wrong = [*names[:place], "dp8.nosuch", *names[place + 1 :]]
        with pytest.raises(ValueError, match=r"nosuch'( |; )[^\n]*$"):
            DOORS[door](*wrong, **run)


@pytest.mark.parametrize(
    "column", ["overlap_tp", "overlap_dp", "capacity", "recompute", "lora_rank", "cp"]
)
def test_a_plan_takes_as_long_in_a_table_as_alone(column):
    """In a table long enough that rows with equal passes are timed once."""
    choices = {
        "capacity": (0.0, 1.25),
        "recompute": ("none", "full"),
        "lora_rank": (0, 16),
        "cp": (1, 4),
    }
    values = choices.get(column, (True, False))
    rows = [
        {"tp": 2, "micro_batch": size, column: value}
        for size in (1, 2)
        for value in values
    ]
    rows = [{"dp": 4 // row.get("cp", 1), **row} for row in rows]
    times = mm.estimate(
        "mixtral-8x7b", "dgx-h100", pd.DataFrame(rows * 100), global_batch=64
    )["step_s"]
    alone = [
        mm.estimate("mixtral-8x7b", "dgx-h100", Plan(**row), global_batch=64)[
            "step_s"
        ].item()
        for row in rows
    ]
    assert (
        times.tolist() == pytest.approx(alone * 100, rel=1e-12) and times.nunique() > 1
    )
