"""A few measured rows of one stack: its constants move towards it, its intervals shrink, and nothing gets worse."""

import numpy as np
import pandas as pd
import pytest

from madmax_lib import catalog
from madmax_lib.calibration.fit import update
from madmax_lib.calibration.published_rows import to_steps
from madmax_lib.calibration.validate import predict
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.step_time import step_s


@pytest.fixture(scope="module")
def stack(rows):
    """Dense rows of one software, timed by a machine whose kernels are slower than the model knows."""
    rows = rows[(rows["software"] == "nemo") & (rows["kind"] == "dense")].reset_index(drop=True)
    constants = shipped().constants
    slower = Parameters(constants=constants | {"stack_rate:nemo": 0.85 * constants["stack_rate:nemo"]})
    return rows.assign(measured_s=step_s(to_steps(rows), slower))


def error(rows, parameters):
    return float(np.abs(step_s(to_steps(rows), parameters) / rows["measured_s"].astype(float) - 1).mean())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_slower_stack_is_found_from_a_few_rows(stack, size):
    few = stack.sample(size, random_state=size)
    rest, own = stack.drop(few.index), update(few)
    assert error(rest, shipped()) > 0.09 and error(rest, own) < 0.7 * error(rest, shipped())
    assert own.constants["stack_rate:nemo"] < shipped().constants["stack_rate:nemo"]
    assert own.provenance["update"]["rows"] == size and own.residuals == shipped().residuals


@pytest.mark.parametrize("seed", range(6))
def test_given_rows_never_get_worse(rows, seed):
    """Any rows, of any stacks: an update that cannot help them leaves the constants alone."""
    few = rows.sample(4, random_state=seed)
    assert error(few, update(few)) <= error(few, shipped()) + 1e-12


def test_intervals_shrink():
    table = catalog.table("published_train")
    table = table[table["source"].str.contains("bigscience")].head(20)
    own = update(table.head(4))
    before, after = (predict(table.tail(16), parameters) for parameters in (shipped(), own))
    assert (after["high_s"] / after["predicted_s"] < before["high_s"] / before["predicted_s"] + 0.02).all()


def test_software_without_rows_moves_the_stack_that_is_not_named(stack):
    unnamed = stack.assign(case=[type(case)(**{**vars(case), "software": None}) for case in stack["case"]])
    own = update(unnamed.head(3))
    assert own.constants["stack_rate:other"] != 1 and "stack_rate:other" in own.fitted


def test_rows_that_cannot_be_used_are_named_in_a_line_each():
    rows = pd.DataFrame([
        {"model": "llama2-7b", "gpu": "H100", "n_gpus": 8, "global_batch": 8, "seq_len": 4096},
        {"model": "llama2-7b", "gpu": "abacus", "n_gpus": 8, "global_batch": 8, "seq_len": 4096, "iteration_time_s": 1},
    ])  # fmt: skip
    with pytest.raises(ValueError) as raised:
        update(rows)
    lines = str(raised.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["row 0", "row 1"] and "abacus" in lines[1]
    with pytest.raises(ValueError, match="there are none"):
        update(rows.head(0))


@pytest.mark.parametrize(("factor", "message"), [(1000, "is it in seconds"), (1e-3, "is it in seconds")])
def test_times_in_another_unit_are_refused(stack, factor, message):
    few = stack.head(2)
    with pytest.raises(ValueError, match=rf"row 0: .* s measured, .* s predicted; {message}"):
        update(few.assign(measured_s=factor * few["measured_s"]))
    with pytest.raises(ValueError, match="row 1: no time is measured"):
        update(few.assign(measured_s=[few["measured_s"].iloc[0], np.inf]))
