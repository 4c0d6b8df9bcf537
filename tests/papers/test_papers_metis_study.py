"""What the study of Metis' fork says: table 1 to the digits printed, what the first file does, what defects cost."""

import pandas as pd
import pytest

from madmax_lib.papers.metis import plots as plot, studies as study
from madmax_lib.view.drawing import figure_data


@pytest.fixture(scope="module")
def runs():
    return study.run_rows([1, 3])


def test_table_1_to_the_digits_printed(runs):
    table = study.table1_errors(runs)
    assert (table["steps_error"] == 0).all() and table["cost_error"].abs().max() < 1e-5
    orders = table.set_index(["row", "mode"])["node_order"].to_dict()
    assert orders == {(1, "base"): "V100 first", (1, "strategy"): "A100 first", (3, "base"): "A100 first",
                      (3, "strategy"): "V100 first"}  # fmt: skip
    assert table["time_ratio"].round(3).tolist() == [1.092, 1.092, 1.675, 1.675]


def test_both_modes_find_the_same_cost_in_the_same_order(runs):
    assert (runs.groupby(["row", "node_order"])["our_cost_ms"].nunique() == 1).all()
    two_stages = runs[runs["node_order"] == "V100 first"]
    assert (two_stages["stages"] == 2).all() and (two_stages["counted"] == 1).all()


def test_published_tables():
    table = study.table1().pivot(index="row", columns="mode", values="steps")
    reduction = 1 - table["strategy"] / table["base"]
    assert (100 * reduction).round(1).tolist() == [8.2, 29.0, 6.7, 9.4]
    assert len(study.search_times()) == 5 and study.data_and_tensor()["median_ms"].tolist() == [82404.8, 117202.8]


@pytest.mark.parametrize("order, low, high", [(0, 1793.55, 1804.62), (1, 1898.09, 2080.09)])
def test_the_first_file_moves_the_best_cost(order, low, high):
    costs = study.model_profiles(10, 32, study.NODE_ORDERS[order])["cost_ms"]
    assert (
        len(costs) == 18
        and costs.min() == pytest.approx(low, abs=0.01)
        and costs.max() == pytest.approx(high, abs=0.01)
    )


def test_defects(runs):
    result = study.run_row(10, 32, study.NODE_ORDERS[1], "base")
    shares = study.defect_shares(result, 10)
    assert shares["plans"].tolist()[1:] == [23, 121]
    assert shares["share"].iloc[0] == pytest.approx(shares["plans"].iloc[0] / 206)
    choices = plot.defect_choices(result.plans, 10, 32).set_index("defect")
    assert choices.loc["E1", "believed_ms"] < choices.loc["E1", "best_correct_ms"] < choices.loc["E1", "correct_ms"]
    assert choices.loc["E6", "correct_ms"] == float("inf") and (choices["best_correct_ms"] < 2700).all()


def test_uniform():
    table = study.uniform(10, 8)
    assert (table["dp"] * table["tp"] * table["pp"] == 8).all() and 0 < table["fits"].sum() < len(table)


def test_pictures_keep_their_tables(runs):
    choice = pd.DataFrame({"node_order": ["A100 first"], "optimizer_ms": [1.0], "cost_ms": [2.0]})
    shares = pd.DataFrame({"case": ["a", "b"], "defect": ["E1", "E1"], "share": [0.1, 0.2]})
    logs = pd.DataFrame({"run": ["DP", "DP"], "elapsed_s": [1.0, 2.0], "loss": [3.0, 2.0]})
    times, training = plot.plot_search_time(study.search_times()), plot.plot_training(study.data_and_tensor())
    for ax in (plot.plot_orders(runs), plot.plot_profile_choice(choice), plot.plot_defects(shares), times, training):
        assert len(figure_data(ax)) and figure_data(ax).attrs["provenance"]["files"]
    assert "our_search_ms" not in figure_data(plot.plot_orders(runs))
    assert len(figure_data(plot.plot_training(study.data_and_tensor(), logs))) == 2
