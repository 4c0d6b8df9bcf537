"""Pictures of training runs keep the numbers of the runs that this project recorded."""

import shutil
import warnings
from dataclasses import replace

import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.calibration.published.run_rows import memory_table, trace_breakdowns
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.plan.plan import Plan
from madmax_lib.runs.read import PHASES, read_run
from madmax_lib.simulator.memory.memory import peak_bytes
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots import runs as run_plots

RECORDED = PROJECT / "traces" / "runs" / "llm"
ALONE, SHARDED = "moe-tiny_dp1", "moe-tiny_dp2.z3"


@pytest.fixture(scope="module")
def runs():
    return {name: read_run(RECORDED / name) for name in (ALONE, SHARDED)}


def test_pictures_of_runs_keep_their_numbers(runs):
    run = runs[SHARDED]
    table = figure_data(run_plots.plot_run(run))
    assert table["loss"].tolist() == run.steps["loss"].tolist()
    parts = table[[*PHASES, "other"]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(run.steps["total_s"].to_numpy(), rel=1e-3)
    assert figure_data(run_plots.plot_losses(runs))["difference"].max() < 1e-3
    alone = run_plots.plot_losses(
        {SHARDED: run}
    )  # the run on the fewest processes is what others are compared with
    assert [text.get_text() for text in alone.get_legend().get_texts()] == [
        "dp2.z3"
    ] and figure_data(alone)["difference"].max() == 0
    medians = [one.summary["step_s"]["median"] for one in runs.values()]
    assert figure_data(run_plots.plot_speed(runs))["step_s"].tolist() == medians
    assert len(figure_data(run_plots.plot_run_phases(runs))) == 2


def test_shares_come_from_breakdowns_or_traces(runs, tmp_path):
    directory = shutil.copytree(RECORDED / SHARDED, tmp_path / SHARDED)
    (directory / "breakdown.csv").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = trace_breakdowns({ALONE: runs[ALONE], SHARDED: read_run(directory)})
    assert (shares[["compute", "exposed_comm", "idle"]].sum(axis=1) <= 1.0 + 1e-9).all()
    files = {f"{ALONE}/breakdown.csv", f"{SHARDED}/trace_rank0.json.gz"}
    assert set(shares.attrs["provenance"]["files"]) == files
    assert figure_data(run_plots.plot_shares(shares)) is shares


@pytest.mark.parametrize(
    ("what", "title"),
    [
        ("step", "Steps are predicted within 15.0% (median), 20.0% at worst"),
        (
            "exposed_comm",
            "Exposed communication is off by 10 points on average, 10 at worst (gpt dp)",
        ),
        ("overlap", "Overlap is off by 5 points on average, 10 at worst (gpt dp)"),
    ],
)
def test_runs_of_a_calibration_stand_beside_their_predictions(what, title):
    table = pd.DataFrame(
        {
            "strategy": ["dp2", "pp2"],
            "measured_s": [0.1, 0.5],
            "predicted_s": [0.11, 0.6],
        }
    )
    table = table.assign(
        measured_exposed_comm=[0.2, 0.3], predicted_exposed_comm=[0.3, 0.2]
    )
    table = table.assign(
        measured_overlap=[0.0, 0.1],
        predicted_overlap=[0.1, 0.1],
        run=["gpt dp", "gpt pp"],
    ).set_index("run")
    ax = run_plots.plot_beside(table, what)
    assert ax.get_title() == title and [
        text.get_text() for text in ax.get_yticklabels()
    ] == [
        "gpt dp (dp2)",
        "gpt pp (pp2)",
    ]
    data = figure_data(ax)
    factor = 1e3 if what == "step" else 100
    name = "s" if what == "step" else what
    assert data[f"predicted_{name}"].tolist() == pytest.approx(
        (factor * table[f"predicted_{name}"]).tolist()
    )


def test_predicted_memory_stands_beside_the_measured(runs):
    run = runs[SHARDED]
    states = run.env["job"]["local_parameters"] * 4 * 4
    cpu = memory_table({SHARDED: run})
    assert (
        cpu["measured_bytes"].isna().all() and cpu["predicted_bytes"].iloc[0] > states
    )  # and activations
    ranks = [
        {"rank": rank, "memory_peak_bytes": size}
        for rank, size in enumerate((3e6, 4e6))
    ]
    gpu = replace(runs[ALONE], summary={**runs[ALONE].summary, "ranks": ranks})
    failure = {"status": "out-of-memory", "error": "CUDA out of memory"}
    full = replace(
        run,
        spec=replace(run.spec, strategy="dp2"),
        steps=run.steps[:0],
        summary=failure,
    )
    side_by_side = {ALONE: gpu, "moe-tiny_dp2": full, SHARDED: run}
    table = memory_table(side_by_side).set_index("strategy")
    assert table["measured_bytes"].dropna().to_dict() == {"dp1": 4e6}
    assert table.loc["dp2", ["plan", "status"]].tolist() == ["dp2.mb4", "out-of-memory"]
    alone = mm.memory(
        run.spec.shapes,
        Plan(micro_batch=8),
        dtype="fp32",
        software="workbench",
        global_batch=8,
    )
    assert table.loc["dp1", "predicted_bytes"] == peak_bytes(alone, allocated=True)
    assert table.loc["dp1", "predicted_bytes"] > table.loc["dp2", "predicted_bytes"]
    assert (
        figure_data(run_plots.plot_run_memory(memory_table(side_by_side)))[
            "predicted_bytes"
        ]
        .gt(0)
        .all()
    )
    with pytest.raises(
        ValueError, match="moe-tiny_dp2 made no step: out-of-memory CUDA out of memory"
    ):
        run_plots.plot_run(full)
