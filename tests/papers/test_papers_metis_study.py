"""What the study of Metis' fork says: table 1 to the digits printed, what the first
file does, what defects cost.
"""

import pytest

from madmax_lib.papers.metis import (
    DEFECTS,
    defect_table,
    generate_profiles,
    studies as study,
)
from madmax_lib.planner import hetero


@pytest.fixture(scope="module")
def runs():
    return study.run_rows([1, 3])


def test_table_1_to_the_digits_printed(runs):
    table = study.table1_errors(runs)
    assert (table["steps_error"] == 0).all() and table["cost_error"].abs().max() < 1e-5
    assert table["mode"].tolist() == ["base", "strategy"] * 2
    assert table["node_order"].tolist() == [
        "V100 first",
        "A100 first",
        "A100 first",
        "V100 first",
    ]
    assert table["time_ratio"].round(3).tolist() == [1.092, 1.092, 1.675, 1.675]


def test_both_modes_find_the_same_cost_in_the_same_order(runs):
    assert (runs.groupby(["row", "node_order"])["our_cost_ms"].nunique() == 1).all()
    two_stages = runs[runs["node_order"] == "V100 first"]
    assert (two_stages["stages"] == 2).all() and (two_stages["counted"] == 1).all()


def test_published_tables():
    table = study.published("table1").pivot(index="row", columns="mode", values="steps")
    reduction = 1 - table["strategy"] / table["base"]
    assert (100 * reduction).round(1).tolist() == [8.2, 29.0, 6.7, 9.4]
    assert len(study.published("search_time")) == 5
    assert study.published("dp_tp")["median_ms"].tolist() == [82404.8, 117202.8]


@pytest.mark.parametrize(
    "order, low, high", [(0, 1793.55, 1804.62), (1, 1898.09, 2080.09)]
)
def test_the_first_file_moves_the_best_cost(order, low, high):
    costs = study.model_profiles(10, 32, study.NODE_ORDERS[order])["cost_ms"]
    assert len(costs) == 18
    assert (costs.min(), costs.max()) == (
        pytest.approx(low, abs=0.01),
        pytest.approx(high, abs=0.01),
    )


def test_defects():
    result = study.run_row(10, 32, study.NODE_ORDERS[1], "base")
    shares = study.defect_shares(result, 10)
    assert shares["plans"].tolist()[1:] == [23, 121]
    assert shares["share"].iloc[0] == pytest.approx(shares["plans"].iloc[0] / 206)
    choices = study.defect_choices(result.plans, 10, 32).set_index("defect")
    assert (
        choices.loc["E1", "believed_ms"]
        < choices.loc["E1", "best_correct_ms"]
        < choices.loc["E1", "correct_ms"]
    )
    assert (
        choices.loc["E6", "correct_ms"] == float("inf")
        and (choices["best_correct_ms"] < 2700).all()
    )


def test_each_defect_changes_the_cost_it_is_about():
    profiles = generate_profiles(10)
    given = hetero.problem(
        profiles=profiles, cluster=study.nodes_of(32), global_batch=128
    )
    whole = {
        "node_sequence": ("A100", "V100"),
        "device_groups": (32,),
        "strategies": ((1, 32),),
        "batches": 1,
    }
    halves = {
        "device_groups": (16, 16),
        "strategies": ((16, 1), (16, 1)),
        "num_stage_used_for_cost": 1,
    }
    one, two, lost, hollow = (
        defect_table(
            whole | change | {"layer_partition": cuts}, given, profiles
        ).set_index("defect")
        for change, cuts in (
            ({}, (0, 10)),
            (halves, (0, 7, 10)),
            (halves, (0, 7, 9)),
            (halves, (0, 10, 10)),
        )
    )
    assert list(one.index) == ["none", *DEFECTS]
    assert (
        one["cost_ms"]["E4"] < one["cost_ms"]["none"] / 2
    )  # V100s at the speed of A100s
    assert two["cost_ms"]["E1"] < two["cost_ms"]["none"]
    assert two["cost_ms"]["E5"] < two["cost_ms"]["none"] < float("inf")
    assert one["cost_ms"]["E7"] < one["highest_ms"]["E7"]
    assert one["cost_ms"]["E2"] == one["cost_ms"]["E3"] == one["cost_ms"]["none"]
    assert (
        lost["cost_ms"]["E2"]
        < lost["cost_ms"]["none"]
        == pytest.approx(two["cost_ms"]["none"])
    )
    assert hollow["cost_ms"]["E3"] != hollow["cost_ms"]["none"]
    assert not one["fits"]["none"] and one["fits"]["E6"]
