"""What the study of Metis' fork says: table 1 to the digits printed, what the first
file does, how often plans are defective.
"""

import pytest

from madmax_lib.papers.metis import studies as study


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
