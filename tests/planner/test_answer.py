"""The answer of a search: ten different plans, how likely each is the fastest, why, and
what it is limited by.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib import plan_flags
from madmax_lib.catalog.software import STACKS
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import STATED
from madmax_lib.planner import Space, plan_of
from madmax_lib.planner.answer import Described, _chances, _limits, _reasons
from madmax_lib.planner.evaluate import LAYOUT_KEY
from madmax_lib.simulator import Parameters
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import plans_peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.simulator.uncertainty import components, shared_errors

MODEL, CLUSTER, BATCH = mm.model("llama2-13b"), mm.cluster("dgx-h100", nodes=4), 256


@pytest.fixture(scope="module")
def found():
    return mm.search(
        MODEL, CLUSTER, BATCH, space=Space.quick(), top=200, progress=False
    )


def test_ten_plans_differ_in_how_they_split_the_model(found):
    ten = found.different
    assert (
        len(ten) == 10
        and not ten.duplicated(list(LAYOUT_KEY)).any()
        and ten["launched_s"].is_monotonic_increasing
    )
    best = found.table.drop_duplicates(list(LAYOUT_KEY))
    pd.testing.assert_frame_equal(
        best[["plan", "step_s"]].head(5).reset_index(drop=True),
        ten[["plan", "step_s"]].head(5),
    )
    assert (ten["low_s"] < ten["step_s"]).all() and (
        ten["step_s"] < ten["high_s"]
    ).all()
    assert (
        ten["probability"].between(0, 1).all() and 0.2 < ten["probability"].sum() <= 1
    )
    assert ten["probability"].iloc[0] > ten["probability"].max() - 0.02
    assert ten[["why", "limit"]].map(len).gt(5).all(axis=None)


def test_the_table_goes_back_into_estimate(found):
    for table in (
        found.table,
        found.different,
        found.pareto,
        found.table[["plan", "dp", "step_s"]],
    ):
        again = mm.estimate(MODEL, CLUSTER, table, global_batch=BATCH)
        for column in {"step_s", "low_s", "high_s", "mfu"} & set(table):
            np.testing.assert_allclose(again[column], table[column], rtol=1e-11)
    stacks = found.table["stacks"].str.split(" ").str[0]
    for stack, table in found.table.groupby(stacks):
        again = mm.estimate(MODEL, CLUSTER, table, global_batch=BATCH, software=stack)
        costs = again[["step_s", "memory_bytes"]]
        np.testing.assert_allclose(
            costs, table[["launched_s", "memory_bytes"]], rtol=1e-11
        )
        assert again["fits"].all()


def test_each_stack_of_a_row_launches_it_in_its_memory_and_no_other(found):
    rows = found.table.sample(40, random_state=1)
    for row in rows.to_dict("records"):
        cases = {
            stack: Case(MODEL, CLUSTER, plan_of(row), BATCH, software=stack)
            for stack in STACKS
        }
        launched = [stack for stack, case in cases.items() if legal(case, STATED).mask]
        roomy = [
            stack
            for stack in launched
            if plans_peak_bytes(cases[stack])[0] <= usable_bytes(CLUSTER.device)
        ]
        run = {"global_batch": BATCH, "fits": False}
        roomy.sort(
            key=lambda stack: mm.estimate(
                MODEL, CLUSTER, row["plan"], software=stack, **run
            )["step_s"][0]
        )
        assert row["stacks"].split() == roomy and roomy


def test_every_row_can_be_written(found):
    for row in range(0, len(found.table), 9):
        plan, stacks = (
            plan_of(found.table.iloc[row].to_dict()),
            found.table["stacks"].iloc[row].split(),
        )
        for stack in stacks:
            text = found.configuration(row, stack)
            stated = plan_flags.read(
                text, stack, world_size=CLUSTER.world_size, layers=MODEL.layers
            )
            assert (stated.plan, stated.global_batch, stated.sequence) == (
                plan,
                BATCH,
                MODEL.sequence,
            )
    with pytest.raises(ValueError, match="framework='nanotron' is not one of"):
        found.configuration(0, "nanotron")
    with pytest.raises(ValueError, match="row=999: the table has 200"):
        found.configuration(999)


def test_a_plan_is_timed_as_its_first_stack_too(found):
    for row in found.different.to_dict("records"):
        run = {"global_batch": BATCH, "software": row["stacks"].split()[0]}
        one = mm.estimate(MODEL, CLUSTER, row["plan"], **run)
        assert (
            one["step_s"][0] == pytest.approx(row["launched_s"], rel=1e-9)
            and one["fits"][0]
        )


@pytest.mark.parametrize(
    "software",
    ["torchtitan", "deepspeed", "accelerate", "nanotron", "torchtitan-compiled"],
)
def test_a_named_software_launches_all(software):
    found = mm.search(
        MODEL,
        CLUSTER,
        BATCH,
        space=Space.quick(),
        software=software,
        top=50,
        progress=False,
    )
    assert (found.table["stacks"] == software).all()
    plans = Plans.from_table(
        found.table[[name for name in vars(Plan()) if name in found.table]]
    )
    assert legal(
        Case(MODEL, CLUSTER, plans, BATCH, software=software), STATED
    ).mask.all()
    if software != "nanotron":
        text = found.configuration()
        assert (
            plan_flags.read(text, software, world_size=32, layers=MODEL.layers).plan
            == found.best
        )


def test_nothing_to_launch():
    with pytest.raises(ValueError, match="nanotron launches none of the"):
        mm.search(
            MODEL,
            CLUSTER,
            BATCH,
            space=Space(zero=3, pp=1),
            software="nanotron",
            progress=False,
        )


def timed(*texts):
    case = Case(
        MODEL,
        CLUSTER,
        Plans.from_table(pd.DataFrame([vars(Plan.parse(text)) for text in texts])),
        BATCH,
    )
    steps = Steps.of(case)
    return steps, step_time(steps, shipped())


def test_shared_errors_are_those_of_the_interval():
    """On the diagonal; equal plans err alike, and the matrix is a covariance."""
    steps, times = timed(
        "dp32.z3.mb2",
        "dp32.z3.mb2",
        "dp8.tp4.z1.full",
        "dp4.tp8.mb2",
        "dp8.pp4.z1.selective",
    )
    shared = shared_errors(steps, times, shipped())
    own = (
        components(steps, times, shipped())["constants"]
        * shipped().residuals["constants"] ** 2
    )
    np.testing.assert_allclose(np.diag(shared), own, rtol=1e-9)
    assert (
        shared[0, 1] == pytest.approx(shared[0, 0])
        and np.linalg.eigvalsh(shared).min() > -1e-12
    )


def test_probabilities_follow_the_gap():
    """Equal plans share them, one far behind has none; a machine that knows no
    intervals gives none.
    """
    steps, times = timed("dp32.z3.mb2", "dp32.z3.mb2")
    case = Case(MODEL, CLUSTER, Plan(dp=32), BATCH)

    def chances(gap, parameters):
        seconds = np.array([1.0, gap]) * times["step_s"]
        plans = Described(pd.DataFrame(), steps, times | {"step_s": seconds})
        return _chances(plans, SimpleNamespace(case=case, parameters=parameters))

    assert chances(1.0, shipped()) == pytest.approx([0.5, 0.5], abs=0.03)
    first = [chances(gap, shipped())[0] for gap in (1.02, 1.1, 2.0)]
    assert 0.5 < first[0] < first[1] < first[2] == 1.0
    assert np.isnan(chances(1.1, Parameters())).all()


def test_reasons_and_limits_name_the_parts():
    seconds = pd.DataFrame(
        {
            "compute": [8.0, 8.0, 8.0],
            "pipeline bubble": [0.0, 2.0, 2.0],
            "tp communication": [1.0, 1.0, 0.0],
        }
    )
    assert _reasons(seconds) == [
        "saves 20% of a step in pipeline bubble",
        "no part stands out",
        "saves 10% of a step in tp communication",
    ]
    assert _limits(seconds) == [
        "tp communication 11%",
        "pipeline bubble 18%, tp communication 9%",
        "pipeline bubble 20%",
    ]
    assert _reasons(seconds[:1]) == ["no other way to split it fits"]


def test_a_hint_where_batch_or_devices_are_the_problem(found):
    assert found.hint == "" or "2x" not in found.hint
    for nodes, batch, words in (
        (4, 250, "batch 256 would be"),
        (3, 100, "batch|devices"),
    ):
        odd = mm.search(
            MODEL,
            mm.cluster("dgx-h100", nodes=nodes),
            batch,
            space=Space.quick(),
            progress=False,
        )
        assert pd.Series([odd.hint]).str.contains(words).all(), odd.hint


def test_what_is_shown(found):
    lines = repr(found).splitlines()
    assert (
        len(lines) == 6
        and str(found.best) in lines[1]
        and f"{found.evaluated:,}" in lines[0]
    )
    page = found._repr_html_()
    assert page.count("<tr") == 11 and all(
        plan in page for plan in found.different["plan"]
    )
    empty = mm.search(
        "gpt3-175b",
        mm.cluster("dgx-a100", nodes=2),
        16,
        space=Space.quick(),
        shard=0,
        shards=8,
        progress=False,
    )
    assert (
        repr(empty).endswith("no plan fits") and "no plan fits" in empty._repr_html_()
    )
    with pytest.raises(ValueError, match="no plan fits"):
        empty.configuration()


def test_llama_405b_as_run_is_in_the_space():
    """126 layers with embedding and head as 128, interleaved; and DeepSeek-V3's 61 with
    a last stage of one.
    """
    cases = (
        ("llama3-405b", 64, 2048, 16, 8, "z1.v8.embedding-layer.head-layer"),
        ("deepseek-v3", 32, 4096, 16, 1, "ep16.z1.last1"),
    )
    for model, nodes, batch, pp, chunks, text in cases:
        tp = 8 if model == "llama3-405b" else 1
        wanted = Plan.parse(
            f"dp{nodes * 8 // (pp * tp)}.tp{tp}.pp{pp}.{text}.overlap-gather"
        )
        one = {
            "tp": tp,
            "pp": pp,
            "cp": 1,
            "ep": wanted.ep,
            "zero": 1,
            "micro_batch": 1,
            "recompute": "none",
            "interleave": chunks,
        }
        space = replace(
            Space.quick(), **one, usual_interleave=False, reduce_fp32=(False,)
        )
        try:
            found = mm.search(
                model,
                mm.cluster("dgx-b300", nodes=nodes),
                batch,
                space=space,
                top=20,
                progress=False,
            )
        except ValueError as error:
            pytest.fail(str(error))
        assert str(wanted) in found.table["plan"].tolist()
