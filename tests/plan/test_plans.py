"""One rule book: every door of the workbench gives the same verdict on a plan, in the
same words.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import pytest
from support import cells, refused, rows_beside

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
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.simulate import _lay_out

MODELS = """
    gpt2 gpt2-large llama3-8b qwen2.5-3b mixtral-8x7b qwen3-30b-a3b vit-base dlrm-a
"""
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8), (2, 8), (3, 4)]
GROUPS, PLANS = 50, 40  # of a model, cluster and batch each
DEGREES = list(Degrees._fields)
OTHER_FIELDS = {"ep": (2, 3, 4, 8), "zero": (1, 2, 3, 4), "micro_batch": (2, 3, 0), "interleave": (2, 3),
                "schedule": ("gpipe", "zero-bubble", "none"), "recompute": ("full", "selective", "mlp+moe"),
                "sequence_parallel": (False, True), "context": ("ulysses",), "shard": (2, 4, -1), "qwz": (True,),
                "overlap_gather": (True,), "first_layers": (1, 2), "last_layers": (1, 3),
                "embedding_as_layer": (True,), "head_as_layer": (True,), "capacity": (1.25, -1.0),
                "etp": (1, 2, 3), "lora_rank": (16, -1), "overlap_tp": (True, False), "overlap_ep": (True, 2.0),
                "overlap_dp": (False,), "bucket_bytes": (float("inf"), 1e6, 0.0)}  # fmt: skip


def drawn_situation(draw):
    """A model of a few layers, a cluster, a batch and a sequence."""
    model = mm.model(draw.choice(MODELS.split()))
    sequence = None
    if not isinstance(model, DLRM):
        model = replace(model, layers=draw.randint(2, 8), dense_layers=0)
        sequence = None if model.image else draw.choice([model.sequence, 96, 100, 1024])
    nodes, devices = draw.choice(SHAPES)
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
    names = ("tp", "cp", "pp", "ep", "context")
    choices = {name: (getattr(plan, name),) for name in names}
    kept, dropped = legal_degrees(Space(**choices, tp_beyond_node=True), case)
    assert len(kept) + len(dropped) <= 1
    return "" if kept else next(iter(dropped), None)


@pytest.mark.parametrize("seed", range(GROUPS))
def test_all_doors_give_the_same_verdict_in_the_same_words(seed):
    draw = random.Random(seed)
    model, cluster, batch, sequence = drawn_situation(draw)
    shape = {"global_batch": batch, "sequence": sequence}
    rows = [drawn_fields(draw, cluster.world_size) for _ in range(PLANS)]
    full = [DEFAULTS | {"sequence_parallel": row["tp"] > 1} | row for row in rows]
    table = pd.DataFrame(full)
    case = Case(model, cluster, Plans.from_table(table), batch, sequence)
    verdict = legal(case)
    transformer = not isinstance(model, DLRM)
    if transformer:
        timed = mm.estimate(model, cluster, table, **shape)["step_s"].notna()
        assert timed.tolist() == verdict.mask.tolist()
    for fields, said in zip(rows, verdict.words(), strict=True):
        if (words := refusal(Plan, **fields)) or (not transformer and "got" in said):
            assert said.startswith(words) and bool(words or "got" in said)
            continue
        plan = Plan(**fields)
        alone = replace(case, plan=plan)
        assert refusal(plan.check, model, cluster, batch, sequence) == said
        assert refusal(_lay_out, alone, shipped()) == said
        if not transformer:
            continue
        assert refusal(mm.estimate, model, cluster, plan, **shape) == said
        if without_cluster := legal(replace(alone, cluster=None)).words()[()]:
            settings = Settings(global_batch=batch, sequence=sequence or 0)
            assert refusal(checks.check, plan, model, settings) == without_cluster
        if plan.world_size != cluster.world_size:
            continue  # a search makes no such degrees
        degrees = {name: getattr(plan, name) for name in (*DEGREES, "context")}
        plain = legal(replace(case, plan=Plans(**degrees)))
        dropped = search_drops(case, plan)
        assert (dropped == "") == bool(plain.mask)
        assert not dropped or dropped == plain.rules[plain.first_broken_rule].name


def test_products_broadcast_and_are_not_copied():
    micro, zero = np.array([[1], [2], [3]]), np.array([[0, 1, 2, 3]])
    plans = Plans(dp=4, micro_batch=micro, zero=zero)
    assert plans.shape == (3, 4) and plans.micro_batch is micro
    assert plans[1, 3].zero == 3
    verdict = legal(Case(mm.model("gpt2"), None, plans, 6))
    assert verdict.mask.shape == (3, 4) and not verdict.mask.any()
    for row, said in enumerate(verdict.words(), 1):
        assert len(set(said)) == 1
        assert f"=6 is not a multiple of dp x micro_batch = 4 x {row}" in said[0]


def of_table(**columns):
    return Plans.from_table(pd.DataFrame(columns))


def test_parts_of_a_table_are_views():
    table = of_table(dp=[1, 2, 4], recompute=["none", "full", "full"])
    part = table[1:]
    assert np.shares_memory(part.dp, table.dp) and part.tp == 1
    assert part.recompute.tolist() == ["full", "full"]
    assert of_table(dp=[]).shape == (0,)


def test_gaps_of_a_table_are_defaults():
    rows = [{"tp": 2, "zero": 3, "qwz": 1.0}, {"tp": 1}, {"tp": 4, "offload": "all"}]
    gaps = Plans.from_table(pd.DataFrame(rows))
    assert gaps.zero.tolist() == [3, 0, 0] and gaps.qwz.tolist() == [True, False, False]
    assert gaps.offload.tolist() == [None, None, "all"]
    assert gaps.sequence_parallel.tolist() == [True, False, True]
    small = of_table(cp=np.array([8], dtype="int8"), bucket_bytes=[np.inf])
    assert small.cp.dtype == np.int64 and small.bucket_bytes[0] == np.inf


@pytest.mark.parametrize(
    ("column", "values", "rule"),
    cells("""
    tensor | [8] | 'tensor' & not a field of Plan
    dp | ["8", "4"] | column 'dp' & numbers & '8'
    dp | [8, "4"] | column 'dp' & numbers & '4'
    overlap_tp | ["yes", None] | column 'overlap_tp' & numbers & 'yes'
    """),
)
def test_bad_columns_are_refused(column, values, rule):
    with refused(rule):
        of_table(**{column: values})


def test_overlaps_of_a_plan_or_of_its_software():
    nemo, titan = catalog.software("nemo"), catalog.software("torchtitan")
    rows = of_table(overlap_tp=[None, True, False], overlap_dp=[np.nan, 1.0, 0.0])
    assert rows.overlaps("tp", nemo).tolist() == [True, True, False]
    assert rows.overlaps("tp", titan).tolist() == [False, True, False]
    assert rows.overlaps("dp", titan).tolist() == [True, True, False]
    assert rows.overlaps("ep", titan) is False
    assert [rows[row].overlap_tp for row in range(3)] == [None, 1.0, 0.0]
    assert Plan().overlaps("tp", nemo) is True
    assert Plan(overlap_tp=False).overlaps("tp", nemo) is False


@pytest.mark.parametrize(
    ("tp", "etp", "ep", "spread", "parameters"),
    cells("""
    8 | 0 | 4 | 1 | 450
    8 | 8 | 4 | 1 | 450
    8 | 1 | 4 | 8 | 187.5
    8 | 2 | 4 | 4 | 225
    8 | 1 | 64 | 8 | 750
    1 | 0 | 4 | 1 | 450
    """),
)
def test_experts_laid_over_tp_are_shared_by_more(tp, etp, ep, spread, parameters):
    """Of 1,200 dense and 600 experts' parameters on each of 8 x tp devices."""
    plan = Plan(dp=8, tp=tp, ep=ep, etp=etp, zero=1)
    assert plan.expert_spread == spread
    each = owned(1200.0, 600.0, plan.sharing, ep, plan.expert_spread)
    assert each == pytest.approx(parameters)
    table = Plans(tp=np.array([tp]), etp=np.array([etp]))
    assert table.expert_spread.tolist() == [spread]


@pytest.mark.parametrize(
    ("layers", "plan", "first", "last"),
    cells("""
    126 | pp16.v8.first7.last7 | [0,1,1,1,1,1,1,1] | [1,1,1,1,1,1,1,0]
    126 | pp16.v8.embedding-layer.head-layer | [0,1,1,1,1,1,1,1] | [1,1,1,1,1,1,1,0]
    126 | pp16.v4.first7.last7 | [1,2,2,2] | [2,2,2,1]
    14 | pp4.v2.first2.last4 | [1,1] | [2,2]
    62 | pp8.v4.first6 | [0,2,2,2] | [2,2,2,2]
    """),
)
def test_ends_of_interleaved_pipelines_may_be_shorter(layers, plan, first, last):
    """As those of Llama 3 405B, of which the first two rows are."""
    model = replace(mm.model("llama3-405b"), layers=layers)
    plan = Plan.parse(plan)
    plan.check(model, None)
    stages = chunk_layers(layers, plan)
    assert [len(part) for part in stages[0]] == first
    assert [len(part) for part in stages[-1]] == last
    chunks = range(plan.interleave)
    order = [layer for c in chunks for stage in stages for layer in stage[c]]
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
    assert case.software is catalog.software(case.software)
    assert case.software.name == "megatron-core"
    without = replace(case, software=None).software
    assert without.name == "none" and not without
    with pytest.warns(UserWarning, match="'megatronne' .* nearest: megatron-core"):
        assert not replace(case, software="megatronne").software


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
        with refused(words):
            door(software=software)
        door()
    table = pd.DataFrame([vars(plan), vars(Plan(dp=plan.world_size))])
    times = mm.estimate(model, cluster, table, global_batch=16, software=software)
    assert times["step_s"].isna().tolist() == [True, "models" in words]


@pytest.mark.parametrize(
    ("name", "schedules", "pipelines"),
    [
        ("jax", {"gpipe"}, True),
        ("llm-foundry", {"1f1b", "gpipe"}, False),
        (None, {"1f1b", "gpipe"}, True),
    ],
)
def test_a_search_tries_what_the_software_runs(name, schedules, pipelines):
    cluster = mm.cluster("dgx-h100", nodes=1)
    space = replace(Space.quick(), zero=(0, 3), schedule=("1f1b", "gpipe"))
    found = mm.search(
        "gpt2", cluster, 16, software=name, space=space, top=10**4, progress=False
    )
    plans = [Plan.parse(text) for text in found.table["plan"]]
    cases = [Case(mm.model("gpt2"), cluster, plan, 16, software=name) for plan in plans]
    assert plans and all(legal(case).mask for case in cases)
    assert {plan.schedule for plan in plans if plan.pp > 1} <= schedules
    assert any(plan.pp > 1 for plan in plans) == pipelines


def by_plan(door, column):
    return lambda *asked, **run: door(*asked, **run)[column].tolist()


DOORS = {
    "estimate": by_plan(mm.estimate, "step_s"),
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
    "levers": lambda *plan, **run: lever_table(*plan, global_batch=64)["fits"].tolist(),
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
    names = ["gpt2-large", "dgx-a100", "dp4.tp2.z2"]
    things = mm.model(names[0]), mm.cluster(names[1]), Plan.parse(names[2])

    def asked(of, software):
        return DOORS[door](*of, global_batch=64, software=software)

    titan = asked(names, "torchtitan")
    assert titan == asked(things, catalog.software("torchtitan"))
    if door != "levers":
        assert titan != asked(names, "megatron-core")
    for place in {0, 1, 2} - {"memory": {1}, "search": {2}}.get(door, set()):
        wrong = [*names[:place], "dp8.nosuch", *names[place + 1 :]]
        with pytest.raises(ValueError, match=r"nosuch'( |; )[^\n]*$"):
            asked(wrong, "torchtitan")


@pytest.mark.parametrize(
    ("column", "values"),
    cells("""
    overlap_tp | (True, False)
    overlap_dp | (True, False)
    capacity | (0.0, 1.25)
    recompute | ("none", "full")
    recompute | ("none", "layernorm+moe")
    lora_rank | (0, 16)
    cp | (1, 4)
    """),
)
def test_a_plan_takes_as_long_in_a_table_as_alone(column, values):
    """In a table long enough that rows with equal passes are timed once."""

    def seconds(plans):
        asked = "mixtral-8x7b", "dgx-h100", plans
        return mm.estimate(*asked, global_batch=64)["step_s"]

    pairs = product((1, 2), values)
    rows = [{"tp": 2, "micro_batch": size, column: value} for size, value in pairs]
    rows = [{"dp": 4 // row.get("cp", 1), **row} for row in rows]
    times = seconds(pd.DataFrame(rows * 100))
    alone = [seconds(Plan(**row)).item() for row in rows]
    assert times.tolist() == pytest.approx(alone * 100, rel=1e-12)
    assert times.nunique() > 1
