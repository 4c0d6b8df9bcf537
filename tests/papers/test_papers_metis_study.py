"""What the study of Metis' fork says: table 1 to the digits printed, what the first
file does, how often plans are defective.
"""

import numpy as np
import pandas as pd
import pytest

from madmax_lib.papers.metis import generate_profiles, studies as study


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
    summary = study.published("dp_tp").set_index("strategy")
    of_run = study.published("training").groupby("strategy")
    expected = summary[["median_ms", "first_loss", "last_loss"]]
    found = of_run["iteration_ms"].median().to_frame("median_ms")
    found["first_loss"] = of_run["loss"].first().round(3)
    found["last_loss"] = of_run["loss"].last().round(3)
    pd.testing.assert_frame_equal(found, expected, check_exact=False)


def test_messages_follow_from_the_sizes_of_the_model():
    def costs(**sizes):
        run = study.run_row(10, 32, study.NODE_ORDERS[0], "base", **sizes)
        return run.plans.set_index("enum_index").sort_index()

    before = costs()
    wider_ms, twice_as_wide_ms, longer_ms = (
        costs(**sizes)["cost"] - before["cost"]
        for sizes in ({"hidden": 8192}, {"hidden": 12_288}, {"sequence": 2048})
    )
    sends = before["num_stage_used_for_cost"] > 1
    assert sends.any() and (wider_ms[~sends] == 0).all()
    assert (longer_ms[sends] > 0).all()
    np.testing.assert_allclose(2 * wider_ms, twice_as_wide_ms, atol=1e-9)
    with pytest.raises(ValueError, match="vocab=0 must be a whole number"):
        costs(vocab=0)


@pytest.mark.parametrize(
    "order, low, high", [(0, 1793.55, 1804.62), (1, 1898.09, 2080.09)]
)
def test_the_first_file_moves_the_best_cost(order, low, high):
    every = generate_profiles(10).table.values()
    # those with other times of optimizer and batch generator
    distinct = {(p.optimizer_ms, p.batch_generator_ms): p for p in every}
    names = [p.name.removeprefix("DeviceType.") for p in distinct.values()]
    of = (10, 32, study.NODE_ORDERS[order], "base")
    costs = pd.Series([study.run_row(*of, name).best_cost_ms for name in names])
    assert len(costs) == 18
    assert (costs.min(), costs.max()) == (
        pytest.approx(low, abs=0.01),
        pytest.approx(high, abs=0.01),
    )


def test_defects():
    """Layers in no stage (E2), and stages without layers (E3), of 206 plans."""
    cuts = study.run_row(10, 32, study.NODE_ORDERS[1], "base").plans["layer_partition"]
    assert len(cuts) == 206
    assert cuts.map(lambda cut: cut[-1] < 10).sum() == 23
    assert cuts.map(lambda cut: len(set(cut)) < len(cut)).sum() == 121
