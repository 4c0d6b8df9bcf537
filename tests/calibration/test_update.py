"""A few measured rows of one stack: its constants move towards it, its intervals
shrink, and nothing gets worse.
"""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.calibration.fit import fit, update
from madmax_lib.calibration.judge.intervals import predict
from madmax_lib.calibration.published.rows import to_steps
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.step_time import step_s


@pytest.fixture(scope="module")
def stack(rows):
    """Dense rows of one software, timed by a machine whose kernels are slower than the
    model knows.
    """
    rows = rows[(rows["software"] == "nemo") & (rows["kind"] == "dense")].reset_index(
        drop=True
    )
    constants = shipped().constants
    slower = Parameters(
        constants=constants | {"stack_rate:nemo": 0.85 * constants["stack_rate:nemo"]}
    )
    return rows.assign(measured_s=step_s(to_steps(rows), slower))


def few_rows():
    row = {
        "model": "llama2-7b",
        "gpu": "H100",
        "n_gpus": 8,
        "global_batch": 8,
        "iteration_time_s": 1.0,
    }
    return pd.DataFrame([row, row])


def error(rows, parameters):
    return float(
        np.abs(
            step_s(to_steps(rows), parameters) / rows["measured_s"].astype(float) - 1
        ).mean()
    )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_slower_stack_is_found_from_a_few_rows(stack, size):
    few = stack.sample(size, random_state=size)
    rest, own = stack.drop(few.index), update(few)
    assert error(rest, shipped()) > 0.09 and error(rest, own) < 0.7 * error(
        rest, shipped()
    )
    assert own.constants["stack_rate:nemo"] < shipped().constants["stack_rate:nemo"]
    assert (
        own.provenance["update"]["rows"] == size
        and own.residuals == shipped().residuals
    )


@pytest.mark.parametrize("seed", range(6))
def test_given_rows_never_get_worse(rows, seed):
    """Any rows, of any stacks: an update that cannot help them leaves the constants
    alone.
    """
    few = rows.sample(4, random_state=seed)
    assert error(few, update(few)) <= error(few, shipped()) + 1e-12


def test_intervals_shrink():
    table = catalog.table("published_train")
    table = table[table["source"].str.contains("bigscience")].head(20)
    own = update(table.head(4))
    before, after = (
        predict(table.tail(16), parameters) for parameters in (shipped(), own)
    )
    assert (
        after["high_s"] / after["predicted_s"]
        < before["high_s"] / before["predicted_s"] + 0.02
    ).all()


OWN = {"model": "llama3-8b", "gpu": "h100", "software": "torchtitan"}


def of_estimate(plans, parameters, **options):
    """One's own rows, timed by `estimate`: what a plan leaves at its default is not
    stated.
    """
    rows = []
    for text in plans:
        plan = mm.Plan.parse(text)
        cluster = mm.cluster("dgx-h100", devices=plan.world_size)
        run = {
            "global_batch": 4 * plan.dp * plan.micro_batch,
            "software": OWN["software"],
            "sequence": 4096,
        } | options
        step = mm.estimate(OWN["model"], cluster, plan, **run, parameters=parameters)[
            "step_s"
        ].item()
        stated = {
            "dp": plan.dp,
            "tp": plan.tp,
            "pp": plan.pp,
            "zero_stage": plan.zero or None,
        }
        stated |= {
            "micro_batch": plan.micro_batch if plan.micro_batch > 1 else None,
            "plan": text,
        }
        stated |= {
            "global_batch": run["global_batch"],
            "seq_len": 4096,
            "software": run["software"],
        }
        rows.append(
            OWN | stated | {"n_gpus": plan.world_size, "iteration_time_s": step}
        )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "software", ["torchtitan", "megatron-core", "deepspeed", "nemo-graph", None]
)
@pytest.mark.parametrize(
    "unsaid", ["plan", ["dp", "tp", "pp", "zero_stage", "micro_batch", "n_gpus"]]
)
def test_estimate_says_what_an_update_has_learned(software, unsaid):
    """Moved constants give rows; after an update with them `estimate` says the same,
    and is nearer on other plans.
    """
    known = shipped()
    rates = {
        name: 0.85 * value
        for name, value in known.constants.items()
        if name.startswith("stack_rate")
    }
    slower = replace(known, constants=known.constants | rates)
    few = of_estimate(["dp8.z3", "dp4.tp2", "dp2.pp4.mb2"], slower, software=software)
    own = update(few.drop(columns=unsaid))
    again = of_estimate(few["plan"], own, software=software)["iteration_time_s"]
    assert predict(few.drop(columns=unsaid), own)[
        "predicted_s"
    ].to_numpy() == pytest.approx(again, rel=1e-12)
    others = ["dp16", "dp2.tp4", "dp8.pp2", "dp4.tp2.pp2"]
    steps = (
        of_estimate(others, of, software=software)["iteration_time_s"]
        for of in (known, own, slower)
    )
    before, after, truth = steps
    assert ((after / truth - 1).abs() < (before / truth - 1).abs()).all()


@pytest.mark.parametrize("software", ["torchtitan", "nemo", "deepspeed", None])
@pytest.mark.parametrize("other", ["jax", None])
def test_rows_that_agree_never_widen_an_interval(software, other):
    """Neither of plans of the same software nor of another's."""
    own = update(
        of_estimate(["dp8", "dp4.z3", "dp2.mb2"], shipped(), software=software)
    )
    assert own.constants == pytest.approx(dict(shipped().constants))
    for model in ("llama3-8b", "mixtral-8x7b", "vit-huge"):
        for name in (software, other):
            run = {"global_batch": 64, "software": name}
            nodes = mm.cluster("dgx-h100", nodes=2)
            before, after = (
                mm.estimate(model, nodes, "dp16", **run, parameters=of)
                for of in (shipped(), own)
            )
            assert (
                after["high_s"] / after["low_s"]
                <= before["high_s"] / before["low_s"] * (1 + 1e-9)
            ).all()


def test_software_without_rows_moves_the_stack_that_is_not_named(stack):
    unnamed = stack.assign(
        case=[type(case)(**{**vars(case), "software": None}) for case in stack["case"]]
    )
    own = update(unnamed.head(3))
    assert own.constants["stack_rate:other"] != 1 and "stack_rate:other" in own.fitted


def test_the_first_row_that_cannot_be_used_is_named():
    rows = pd.DataFrame([
        {"model": "llama2-7b", "gpu": "H100", "n_gpus": 8, "global_batch": 8, "seq_len": 4096},
        {"model": "llama2-7b", "gpu": "abacus", "n_gpus": 8, "global_batch": 8, "seq_len": 4096, "iteration_time_s": 1},
    ])  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^row 0: no time is measured \(1 more rows cannot be used\)$"
    ):
        update(rows)
    with pytest.raises(ValueError, match=r"^row 1: unknown device 'abacus'.*[^)]$"):
        update(rows.tail(1))
    for take in (update, fit):
        with pytest.raises(
            ValueError, match=r"^row 1: micro_batch='two' is not a number$"
        ):
            take(few_rows().assign(micro_batch=[1, "two"]))
    with pytest.raises(ValueError, match="rows: empty"):
        update(rows.head(0))


@pytest.mark.parametrize(
    ("factor", "message"), [(1000, "is it in seconds"), (1e-3, "is it in seconds")]
)
def test_times_in_another_unit_are_refused(stack, factor, message):
    few = stack.head(2)
    with pytest.raises(
        ValueError, match=rf"row 0: .* s measured, .* s predicted; {message}"
    ):
        update(few.assign(measured_s=factor * few["measured_s"]))
    with pytest.raises(ValueError, match="row 1: no time is measured"):
        update(few.assign(measured_s=[few["measured_s"].iloc[0], np.inf]))


@pytest.mark.parametrize("software", ["megatron-core", "jax"])
def test_slower_rows_that_agree_move_a_stack_farther(software):
    """A common shift is no outlier, however large: three rows within 1 %."""
    usual = mm.estimate(
        "llama3-8b", "dgx-h100", "dp8.z3", global_batch=16, software=software
    )["step_s"].item()
    row = {
        "model": "llama3-8b",
        "gpu": "h100",
        "n_gpus": 8,
        "global_batch": 16,
        "zero_stage": 3,
        "software": software,
    }
    moved = []
    for factor in (1.1, 1.3, 1.6, 2, 3):
        rows = pd.DataFrame(
            [
                row | {"iteration_time_s": factor * usual * noise}
                for noise in (0.99, 1, 1.01)
            ]
        )
        how = {"global_batch": 16, "software": software, "parameters": update(rows)}
        moved.append(
            mm.estimate("llama3-8b", "dgx-h100", "dp8.z3", **how)["step_s"].item()
            / usual
        )
    assert moved == sorted(moved) and moved[0] > 1.05 and moved[-1] > 1.5


UNEVEN = {"model": "qwen3-235b-a22b", "seq_len": 4096, "pp": 32, "vpp": 3}


@pytest.mark.parametrize(
    ("row", "refusal"),
    [
        (UNEVEN | {"n_gpus": 256, "ep": 8}, ""),
        ({"tp": 3, "n_gpus": 24}, ""),
        ({"global_batch": 511}, ""),
        ({"n_gpus": 12, "dp": 8}, "dp x tp x pp x cp = 8, but n_gpus = 12"),
        ({"micro_batch": 512}, "micro_batch=512 exceeds 512 samples over dp=8"),
    ],
)
@pytest.mark.parametrize("software", ["internevo", None])
@pytest.mark.filterwarnings("ignore:software 'internevo'")
def test_what_ran_is_not_refused_for_the_rules_of_another_stack(row, refusal, software):
    """Stages of unequal length and padding, but no contradiction in the row."""
    row = (
        few_rows().iloc[0].to_dict() | {"global_batch": 512, "software": software} | row
    )
    table = pd.DataFrame([row | {"dp": row.get("dp")}]).drop(columns="iteration_time_s")
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            update(table.assign(iteration_time_s=1.0))
        return
    seconds = predict(table)["predicted_s"].item()
    own = update(table.assign(iteration_time_s=1.2 * seconds))
    assert predict(table, own)["predicted_s"].item() > 1.05 * seconds


@pytest.mark.filterwarnings("ignore:software 'internevo'")
def test_rows_of_a_stack_of_its_own_move_that_alone():
    """Its pace, and rows of one step say that they tell no more."""
    rows = few_rows().assign(software="internevo")
    rows["iteration_time_s"] = 1.3 * predict(rows)["predicted_s"]
    own = update(rows)
    before, after = (of.constants for of in (shipped(), own))
    assert after["stack_rate:stranger"] < before["stack_rate:stranger"]
    assert after["stack_rate:nemo"] == pytest.approx(
        before["stack_rate:nemo"], rel=0.02
    )
    assert "step time" in own.provenance["update"]["note"]
    run = ("llama2-7b", "dgx-h100", "dp8")
    steps = [
        mm.estimate(*run, global_batch=8, software="internevo", parameters=of)
        for of in (shipped(), own)
    ]
    assert steps[1]["step_s"].item() > 1.1 * steps[0]["step_s"].item()


def test_rows_that_scatter_widen_the_intervals(stack):
    few = stack.head(5)
    noisy = few.assign(measured_s=few["measured_s"] * np.array([0.7, 1.4, 1, 0.8, 1.3]))
    sizes = [update(rows).residuals["stranger"] for rows in (few, noisy)]
    assert sizes[0] == shipped().residuals["stranger"] < sizes[1]


@pytest.mark.parametrize(("gpu", "warns"), [("a100-80", True), ("v100", False)])
def test_rows_in_fp32_may_be_in_tf32(gpu, warns):
    rows = pd.DataFrame({"model": "gpt2", "gpu": gpu, "precision": "fp32"}, [0, 1])
    rows = rows.assign(n_gpus=8, global_batch=[64, 128], software="torchtitan")
    rows = rows.assign(iteration_time_s=[1.0, 2.0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update(rows)
    assert any("tf32" in str(one.message) for one in caught) == warns
