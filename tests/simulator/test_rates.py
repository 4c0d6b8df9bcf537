"""Costs of compute and of collectives: closed forms, monotonicity, measured points and
what lies between them.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

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
    return Prices(
        replace(steps, machine=replace(steps.machine, **machine)), Parameters()
    )


@pytest.mark.parametrize(
    ("plan", "group", "bandwidth"),
    [("tp8", "tp", 300e9), ("dp2.tp4", "dp", 300e9), ("tp16", "tp", 200e9), ("dp2.tp8", "dp", 25e9),
     ("dp8.tp4", "dp", 50e9), ("tp6", "tp", 50e9), ("tp3", "tp", 25e9), ("dp4.cp2.tp4", "cp", 300e9)],
)  # fmt: skip
def test_bandwidth_of_groups(plan, group, bandwidth):
    """Eight devices to a node, links of 300 GB/s, ports of 25 GB/s; groups that
    straddle nodes have less of them.
    """
    one, faster = (prices(plan, node=8, link=300e9, nic=nic) for nic in (25e9, 50e9))
    seconds, less_s = (
        of.comm_s("all_gather", bandwidth, of.groups[group]) for of in (one, faster)
    )
    ranks = one.groups[group].ranks
    assert (
        seconds == pytest.approx((ranks - 1) / ranks)
        and bandwidth / 300e9 <= less_s / seconds * 1.001 <= 1.001
    )


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
)
def test_latency_grows_with_ranks_and_like_a_tree_over_many_nodes(kind):
    sizes = 8 * 2 ** np.arange(0, 14)
    steps = Steps.of(Case(mm.model("gpt3-175b"), CLUSTER, Plans(dp=sizes), 64))
    one = Prices(steps, start())
    seconds = one.comm_s(kind, 1.0, one.groups["dp"])
    assert (np.diff(seconds) > 0).all()
    if kind != "all_to_all":  # each of its ranks sends to every other one
        assert seconds[-1] < 1.2 * seconds[-2]


def test_attention_flops():
    assert attention_flops(1000, 4096, 64, causal=False) == 4 * 1000 * 4096 * 64
    assert (
        attention_flops(1000, 4096, 64) == 4 * 1000 * (4096 + 128) / 2 * 64
    )  # half and the diagonal blocks
    assert attention_flops(1000, 4096, 64, window=128) == 4 * 1000 * (128 + 64) * 64
    assert attention_flops(1000, 128, 64, window=8192) == attention_flops(1000, 128, 64)


@pytest.mark.parametrize(
    ("size_bytes", "seconds"),
    [(1e6, 1e-4), (1e8, 1e-3), (1e7, np.sqrt(1e-7)), (1e3, 1e-4), (4e9, 2e-2)],
)
def test_between_points_and_beyond(size_bytes, seconds):
    assert MeasuredCollectives(TABLE).seconds(
        "all_reduce", 8, 1, size_bytes
    ) == pytest.approx(seconds)


def test_repetitions_count_by_their_median_and_other_groups_are_unknown():
    table = pd.concat(
        [TABLE.assign(seconds=factor * TABLE["seconds"]) for factor in (1, 3, 2)]
    )
    assert MeasuredCollectives(table).seconds("all_reduce", 8, 1, 1e8) == pytest.approx(
        2e-3
    )
    for group in (("all_reduce", 4, 1), ("all_reduce", 8, 2), ("all_gather", 8, 1)):
        assert MeasuredCollectives(TABLE).seconds(*group, 1e6) is None


def test_a_measured_group_replaces_its_formula_alone():
    def communication_ns(plan, collectives):
        model, cluster = mm.model("gpt2-large"), mm.cluster("dgx-a100")
        spans = mm.simulate(
            model, cluster, mm.Plan.parse(plan), global_batch=8, collectives=collectives
        ).spans
        return spans.loc[spans["kind"] == "comm", "dur_ns"].sum()

    slow = TABLE.assign(seconds=100 * TABLE["seconds"])
    assert communication_ns("dp8", slow) > 10 * communication_ns("dp8", None)
    assert communication_ns("dp2.tp4", slow) == communication_ns("dp2.tp4", None)


def test_parameters_carry_measured_collectives(tmp_path):
    """They price simulate and estimate, of one plan or a table, split into calls as the
    plan says.
    """
    parameters = replace(start(), collectives=MeasuredCollectives(TABLE).curves)
    save(parameters, tmp_path / "parameters.json")
    assert load(tmp_path / "parameters.json").collectives == parameters.collectives
    run = {"global_batch": 8}
    given = mm.simulate(
        "gpt2-large", "dgx-a100", "dp8", collectives=TABLE, parameters=start(), **run
    )
    carried = mm.simulate("gpt2-large", "dgx-a100", "dp8", parameters=parameters, **run)
    assert carried.spans["dur_ns"].tolist() == given.spans["dur_ns"].tolist()
    plans = pd.DataFrame({"dp": [8, 4], "tp": [1, 2]})
    table = mm.estimate("gpt2-large", "dgx-a100", plans, parameters=parameters, **run)
    alone = [
        mm.estimate("gpt2-large", "dgx-a100", p, parameters=parameters, **run)
        for p in ("dp8", "dp4.tp2")
    ]
    assert table["step_s"].tolist() == pytest.approx(
        [row["step_s"].iloc[0] for row in alone]
    )
    case = Case("gpt2-large", "dgx-a100", mm.Plan(dp=8), 8)
    prices = Prices(Steps.of(case), parameters)
    measured = MeasuredCollectives(TABLE)
    assert prices.comm_s("all_reduce", 1e7, prices.groups["dp"], 4.0) == pytest.approx(
        4 * measured.seconds("all_reduce", 8, 1, 2.5e6)
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE.drop(columns="nodes"), "column 'nodes' is missing"),
        (TABLE.assign(collective="gossip"), "'gossip' is not one of all_reduce"),
        (TABLE.assign(seconds=0), "seconds must be a positive number in every row"),
        (
            TABLE.assign(seconds=np.inf),
            "seconds must be a positive number in every row",
        ),
        (TABLE.assign(ranks="eight"), "ranks must be a positive number in every row"),
        (TABLE[:1], "all_reduce of 8 ranks needs at least two sizes"),
    ],
)
def test_tables_that_cannot_be_read(table, message):
    with pytest.raises(ValueError, match=message):
        MeasuredCollectives(table)


@pytest.mark.parametrize(
    ("computed", "hidden", "expected"),
    [
        ([4.0, 2.0], [0.0, 1.0], [4.0, 2.0]),  # a block hides its own exchanges
        ([4.0, 2.0], [0.0, 5.0], [1.0, 5.0]),  # what it lacks comes from the other
        (
            [4.0, 2.0],
            [0.0, 9.0],
            [0.0, 6.0],
        ),  # there is no more than the layer computes
        ([3.0, 1.0, 2.0], [0.0, 0.0, 4.0], [1.5, 0.5, 4.0]),  # others give alike
    ],
)
def test_compute_with_spare_compute(computed, hidden, expected):
    moved = with_spare_compute(computed, hidden)
    assert [float(part) for part in moved] == pytest.approx(expected) and sum(
        moved
    ) == pytest.approx(sum(computed))


def test_scores_move_the_bytes_that_their_software_says():
    """timm 0.6 scales, casts and normalises in kernels of their own, Megatron in one."""
    case = Case("vit-huge", CLUSTER, mm.Plan.parse("dp1.unfused"), 64, dtype="fp16")
    steps = [Steps.of(replace(case, software=name)) for name in ("none", "timm")]
    plain, cast = (
        Prices(one, Parameters(constants=start().constants))._pointwise["core"]
        for one in steps
    )
    assert cast / plain == pytest.approx(26 / 10)
