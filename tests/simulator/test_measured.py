"""Measured collectives: their points, between them and beyond, and in a simulated step."""

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.simulator.rates.collectives import MeasuredCollectives

TABLE = pd.DataFrame({"collective": "all_reduce", "ranks": 8, "nodes": 1, "size_bytes": [1e6, 1e8, 1e9],
                      "seconds": [1e-4, 1e-3, 5e-3]})  # fmt: skip


@pytest.mark.parametrize(
    ("size_bytes", "seconds"), [(1e6, 1e-4), (1e8, 1e-3), (1e7, np.sqrt(1e-7)), (1e3, 1e-4), (4e9, 2e-2)]
)
def test_between_points_and_beyond(size_bytes, seconds):
    assert MeasuredCollectives(TABLE).seconds("all_reduce", 8, 1, size_bytes) == pytest.approx(seconds)


def test_repeated_measurements_count_by_their_median():
    table = pd.concat([TABLE, TABLE.assign(seconds=3 * TABLE["seconds"]), TABLE.assign(seconds=2 * TABLE["seconds"])])
    assert MeasuredCollectives(table).seconds("all_reduce", 8, 1, 1e8) == pytest.approx(2e-3)


@pytest.mark.parametrize("group", [("all_reduce", 4, 1), ("all_reduce", 8, 2), ("all_gather", 8, 1)])
def test_what_was_not_measured(group):
    assert MeasuredCollectives(TABLE).seconds(*group, 1e6) is None


def test_a_measured_group_replaces_its_formula_alone():
    model, cluster = mm.model("gpt2-large"), mm.cluster("dgx-a100")
    for plan, changed in (("dp8", True), ("dp2.tp4", False)):
        found = [mm.simulate(model, cluster, mm.Plan.parse(plan), global_batch=8, collectives=table).spans
                 for table in (None, TABLE.assign(seconds=100 * TABLE["seconds"]))]  # fmt: skip
        times = [spans[spans["kind"] == "comm"]["dur_ns"].sum() for spans in found]
        assert (times[1] > 10 * times[0]) if changed else times[1] == times[0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE.drop(columns="nodes"), "column 'nodes' is missing"),
        (TABLE.assign(collective="broadcast"), "'broadcast' is not one of all_reduce"),
        (TABLE.assign(seconds=0), "size_bytes and seconds must be positive"),
        (TABLE[:1], "all_reduce of 8 ranks needs at least two sizes"),
    ],
)
def test_tables_that_cannot_be_read(table, message):
    with pytest.raises(ValueError, match=message):
        MeasuredCollectives(table)
