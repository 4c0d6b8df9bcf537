"""Costs of compute and of collectives: closed forms, monotonicity, measured points and
what lies between them.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support import cells, refused

import madmax_lib as mm
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import with_spare_compute
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.rates.compute import attention_flops
from madmax_lib.simulator.rates.parameters import Parameters, load, save, start

CLUSTER = mm.cluster("dgx-a100", nodes=16)
TABLE = pd.DataFrame({"size_bytes": [1e6, 1e8, 1e9], "seconds": [1e-4, 1e-3, 5e-3]})
TABLE = TABLE.assign(collective="all_reduce", ranks=8, nodes=1)


def prices(plan="dp1", **machine):
    """Ideal prices of a plan on a machine."""
    steps = Steps.of(Case(mm.model("gpt3-175b"), CLUSTER, mm.Plan.parse(plan), 64))
    steps = replace(steps, machine=replace(steps.machine, **machine))
    return Prices(steps, Parameters())


@pytest.mark.parametrize(
    ("plan", "group", "bandwidth"),
    cells("""
    tp8 | tp | 300e9
    dp2.tp4 | dp | 300e9
    tp16 | tp | 200e9
    dp2.tp8 | dp | 25e9
    dp8.tp4 | dp | 50e9
    tp6 | tp | 50e9
    tp3 | tp | 25e9
    dp4.cp2.tp4 | cp | 300e9
    """),
)
def test_bandwidth_of_groups(plan, group, bandwidth):
    """Eight devices to a node, links of 300 GB/s, ports of 25 GB/s; groups that
    straddle nodes have less of them.
    """
    one, faster = (prices(plan, node=8, link=300e9, nic=nic) for nic in (25e9, 50e9))
    ranks = one.groups[group].ranks
    seconds, less_s = (
        of.comm_s("all_gather", bandwidth, of.groups[group]) for of in (one, faster)
    )
    assert seconds == pytest.approx((ranks - 1) / ranks)
    assert bandwidth / 300e9 <= less_s / seconds * 1.001 <= 1.001


@pytest.mark.parametrize(
    ("plan", "group", "seconds"),
    [
        ("dp1", "tp", 0),
        ("tp8", "tp", 7 / 300e9),
        ("tp16", "tp", 8 / 25e9),
        ("dp2.tp8", "dp", 1 / 25e9),
        ("dp8.ep8", "ep", 7 / 300e9),
    ],
)
def test_the_root_of_a_gather_receives_from_all_others(plan, group, seconds):
    """A byte from each rank, over links of 300 GB/s or its port of 25 GB/s."""
    one = prices(plan, node=8, link=300e9, nic=25e9)
    group = one.groups[group]
    assert one.comm_s("gather", group.ranks, group) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather"]
)
def test_latency_grows_with_ranks_and_like_a_tree_over_many_nodes(kind):
    sizes = 8 * 2 ** np.arange(0, 14)
    steps = Steps.of(Case(mm.model("gpt3-175b"), CLUSTER, Plans(dp=sizes), 64))
    one = Prices(steps, start())
    seconds = one.comm_s(kind, 1.0, one.groups["dp"])
    assert (np.diff(seconds) > 0).all()
    # a rank sends to every other one, or receives from each
    if kind not in ("all_to_all", "gather"):
        assert seconds[-1] < 1.2 * seconds[-2]


@pytest.mark.parametrize(
    ("sequence", "options", "keys"),
    [
        (4096, {"causal": False}, 4096),
        (4096, {}, (4096 + 128) / 2),  # half and the diagonal blocks
        (4096, {"window": 128}, 128 + 64),
        (128, {"window": 8192}, 128),
    ],
)
def test_attention_flops(sequence, options, keys):
    assert attention_flops(1000, sequence, 64, **options) == 4 * 1000 * keys * 64


@pytest.mark.parametrize(
    ("size_bytes", "seconds"),
    [(1e6, 1e-4), (1e8, 1e-3), (1e7, 1e-4 + 9e-4 * 9 / 99), (1e3, 1e-4), (4e9, 2e-2)],
)
def test_between_points_and_beyond(size_bytes, seconds):
    """A latency and a rate join two sizes, however far they lie apart."""
    measured = MeasuredCollectives(TABLE)
    assert measured.seconds("all_reduce", 8, 1, size_bytes) == pytest.approx(seconds)


def test_repetitions_count_by_their_median():
    rows = [TABLE.assign(seconds=factor * TABLE["seconds"]) for factor in (1, 3, 2)]
    measured = MeasuredCollectives(pd.concat(rows))
    assert measured.seconds("all_reduce", 8, 1, 1e8) == pytest.approx(2e-3)


def test_a_measured_gather_replaces_its_formula():
    measured = MeasuredCollectives(TABLE.assign(collective="gather"))
    one = Prices(prices("tp8").steps, Parameters(collectives=measured.curves))
    assert one.comm_s("gather", 1e8, one.groups["tp"]) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "group", [("all_reduce", 4, 1), ("all_reduce", 8, 2), ("all_gather", 8, 1)]
)
def test_other_groups_are_unknown(group):
    assert MeasuredCollectives(TABLE).seconds(*group, 1e6) is None


@pytest.mark.parametrize(
    ("plan", "least", "most"), [("dp8", 10, 999), ("dp2.tp4", 1, 1)]
)
def test_a_measured_group_replaces_its_formula_alone(plan, least, most):
    def communication_ns(collectives):
        run = {"global_batch": 8, "collectives": collectives}
        spans = mm.simulate("gpt2-large", "dgx-a100", plan, **run).spans
        return spans.loc[spans["kind"] == "comm", "dur_ns"].sum()

    slow = TABLE.assign(seconds=100 * TABLE["seconds"])
    assert least <= communication_ns(slow) / communication_ns(None) <= most


ASKED = "gpt2-large", "dgx-a100"


@pytest.fixture
def carried():
    """Parameters with measured collectives."""
    return replace(start(), collectives=MeasuredCollectives(TABLE).curves)


def test_parameters_carry_measured_collectives(carried, tmp_path):
    save(carried, tmp_path / "parameters.json")
    assert load(tmp_path / "parameters.json").collectives == carried.collectives


def test_measured_collectives_price_simulate(carried):
    mine, given = (
        mm.simulate(*ASKED, "dp8", global_batch=8, **prices).spans["dur_ns"].tolist()
        for prices in (
            {"parameters": carried},
            {"collectives": TABLE, "parameters": start()},
        )
    )
    assert mine == given


def test_measured_collectives_price_a_table_as_each_plan(carried):
    run = {"global_batch": 8, "parameters": carried}
    plans = ["dp8", "dp4.tp2"]
    alone = [mm.estimate(*ASKED, plan, **run)["step_s"].iloc[0] for plan in plans]
    table = mm.estimate(*ASKED, plans, **run)["step_s"]
    assert table.tolist() == pytest.approx(alone)


def test_measured_collectives_are_split_into_calls(carried):
    prices = Prices(Steps.of(Case(*ASKED, mm.Plan(dp=8), 8)), carried)
    each_s = MeasuredCollectives(TABLE).seconds("all_reduce", 8, 1, 2.5e6)
    four_s = prices.comm_s("all_reduce", 1e7, prices.groups["dp"], 4.0)
    assert four_s == pytest.approx(4 * each_s)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (TABLE.drop(columns="nodes"), "column 'nodes' & missing"),
        (TABLE.assign(collective="gossip"), "'gossip' & one of all_reduce"),
        (TABLE.assign(seconds=0), "seconds & a positive number in every row"),
        (TABLE.assign(seconds=np.inf), "seconds & a positive number in every row"),
        (TABLE.assign(ranks="eight"), "ranks & a positive number in every row"),
        (TABLE[:1], "all_reduce of 8 ranks & at least two sizes"),
    ],
)
def test_tables_that_cannot_be_read(table, rule):
    with refused(rule):
        MeasuredCollectives(table)


@pytest.mark.parametrize(
    ("computed", "hidden", "expected"),
    [
        ([4.0, 2.0], [0.0, 1.0], [4.0, 2.0]),  # a block hides its own exchanges
        ([4.0, 2.0], [0.0, 5.0], [1.0, 5.0]),  # what it lacks comes from the other
        ([4.0, 2.0], [0.0, 9.0], [0.0, 6.0]),  # no more than the layer computes
        ([3.0, 1.0, 2.0], [0.0, 0.0, 4.0], [1.5, 0.5, 4.0]),  # others give alike
    ],
)
def test_compute_with_spare_compute(computed, hidden, expected):
    moved = with_spare_compute(computed, hidden)
    assert [float(part) for part in moved] == pytest.approx(expected)
    assert sum(expected) == sum(computed)


def test_scores_move_the_bytes_that_their_software_says():
    """timm 0.6 scales, casts and normalises in kernels of their own, Megatron in one."""
    case = Case("vit-huge", CLUSTER, mm.Plan.parse("dp1.unfused"), 64, dtype="fp16")
    steps = [Steps.of(replace(case, software=name)) for name in ("none", "timm")]
    plain, cast = (
        Prices(one, Parameters(constants=start().constants))._pointwise["core"]
        for one in steps
    )
    assert cast / plain == pytest.approx(26 / 10)
