"""A calibration of a machine whose steps are known: simulated ones stand for the runs."""

import json
import os
import sys
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
from support import CPU_CONSTANTS

import madmax_lib as mm
from madmax_lib.calibration import calibrate, compared
from madmax_lib.calibration.machine.calibrate import _planned_runs
from madmax_lib.calibration.machine.compared import case_of, predicted
from madmax_lib.calibration.machine.machine import Machine, machine, parts_of
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.catalog.models import Cluster, Device, Link
from madmax_lib.runs.read import write_json
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import start

calibrating = sys.modules[calibrate.__module__]  # the room has the call under this name
comparing = sys.modules[compared.__module__]
SIZES = [4096, 65536, 2**20]
FACTORS = {
    "all_reduce": 1,
    "all_gather": 0.5,
    "reduce_scatter": 1,
    "all_to_all": 0.5,
    "send_recv": 1,
}
LINKS = pd.DataFrame(
    [
        {
            "collective": kind,
            "ranks": 2,
            "nodes": 2,
            "size_bytes": size,
            "seconds": 4e-4 + factor * size / 37e6,
        }
        for kind, factor in FACTORS.items()
        for size in SIZES
    ]
)
KERNELS = pd.DataFrame({"kernel": ["linear forward", "copy"], "how": ["eager", "host"], "flops_per_s": [6e10, 0.0],
                        "bytes_per_s": [1e9, 2e10], "low_s": 1.0, "median_s": 2.0, "high_s": 3.0})  # fmt: skip


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A directory with timed kernels and links, and runs that take as long as a known
    machine says.
    """
    device = Device("cpu", 8e9, 2e10, {"fp32": 6e10}, family="cpu", process_bytes=1e8)
    cluster = Cluster("true", device, 1, 2, Link("a", 5e9), Link("b", 4e7))
    curves = MeasuredCollectives(LINKS).curves
    known = {"collectives": curves, "provenance": {"software": "workbench"}}
    known["constants"] = start().constants | CPU_CONSTANTS
    truth = Machine(cluster, replace(start(), **known))
    KERNELS.to_csv(tmp_path / "kernels.csv", index=False)
    LINKS.to_csv(tmp_path / "links.csv", index=False)
    made, broken = [], []

    def launch_all(specs):
        for directory, spec in specs.items():
            step = predicted(truth, spec)
            made.append(directory.name)
            directory.mkdir(parents=True)
            write_json(directory / "spec.json", asdict(spec))
            write_json(directory / "env.json", {"device": "cpu", "dtype": "fp32"})
            ranks = [
                {
                    "rank": 0,
                    "memory_peak_bytes": None,
                    "host_rss_bytes": step["predicted_bytes"],
                }
            ]
            failed = directory.name in broken
            summary = {
                "status": "failed" if failed else "completed",
                "error": "no luck" if failed else "",
            }
            write_json(
                directory / "summary.json",
                summary | {"step_s": {"median": step["predicted_s"]}, "ranks": ranks},
            )

    def parts(run):
        return (
            parts_of(Steps.stack([case_of(run.spec, truth)]), truth.parameters)
            .iloc[0]
            .to_dict()
        )

    def trace(directory):
        case = case_of(calibrating.read_run(directory).spec, truth)
        run = {
            "global_batch": case.global_batch,
            "dtype": "fp32",
            "parameters": truth.parameters,
        }
        return mm.simulate(case.model, case.cluster, case.plan, **run)

    monkeypatch.setattr(calibrating, "launch_all", launch_all)
    monkeypatch.setattr(calibrating, "traced_parts", parts)
    monkeypatch.setattr(comparing, "read_trace", trace)
    monkeypatch.setattr(calibrating, "check_hosts", lambda *settings: None)
    monkeypatch.setattr("os.getloadavg", lambda: (2.0 * os.cpu_count(), 0, 0))
    monkeypatch.setattr(calibrating, "resolve", lambda spec: None)
    return tmp_path, made, broken


def test_what_is_predicted_comes_true(world):
    folder, made, broken = world
    broken.append("vit_pp")
    found = calibrate(folder, hosts=2, network="300mbit", device="cpu")
    results = pd.read_csv(folder / "results.csv", index_col="run")
    assert (
        results["error"].abs().max() < 0.04
        and len(results) == len(_planned_runs("predicted")) - 1
    )
    for of in ("compute", "exposed_comm"):
        assert (
            results[f"predicted_{of}"] - results[f"measured_{of}"]
        ).abs().max() < 0.03
    assert (
        results["predicted_bytes"] / results["measured_bytes"] - 1
    ).abs().max() < 0.01
    assert found.provenance[
        "network"
    ] == "300mbit" and found.cluster.device.process_bytes == pytest.approx(1e8)
    assert results["inside"].all() and found.provenance["judged"]["wider"] == 1
    assert found.provenance["judged"]["runs"] == len(results)
    load, spread, failed = found.provenance["notes"]
    assert failed == "vit pp: failed, no luck" and "2.0 processes a core" in load
    assert spread == "repeats of a product differ by 100%: other work runs here"
    assert "vit pp: failed, no luck" in (folder / "page.html").read_text()
    rows = mm.calibration.predict(pd.read_csv(folder / "rows.csv"), found.parameters)
    assert rows["supported"].all() and len(rows) == len(results) + len(
        _planned_runs("fitted")
    )
    assert np.abs(np.log(rows["predicted_s"] / rows["iteration_time_s"])).max() < 0.1
    assert machine(folder).parameters.fitted == found.parameters.fitted
    best = mm.search(
        "gpt2",
        found.cluster,
        4,
        dtype="fp32",
        parameters=found.parameters,
        progress=False,
        top=2,
    )
    assert best.best.world_size == 2 and made[:2] == ["wide_dp", "mixture_dp"]


def test_a_calibration_keeps_to_its_minutes_and_goes_on(world):
    folder, made, _ = world
    calibrate(
        folder, hosts=2, network="300mbit", device="cpu", minutes=1.0
    )  # eight runs of the guessed 8 s
    first, notes = (
        len(made),
        json.loads((folder / "machine.json").read_text())["provenance"]["notes"],
    )
    assert first >= 4 and (first < 25) == any(
        "the time limit (--minutes) was reached" in note for note in notes
    )
    kept = pd.read_csv(folder / "predictions.csv", index_col="run").loc[
        "gpt dp", "predicted_s"
    ]
    calibrate(folder, hosts=2, network="300mbit", device="cpu")
    assert (
        len(made)
        == len(set(made))
        == len(_planned_runs("fitted")) + len(_planned_runs("predicted"))
    )
    assert (
        pd.read_csv(folder / "predictions.csv", index_col="run").loc[
            "gpt dp", "predicted_s"
        ]
        == kept
    )
    with pytest.raises(ValueError, match="holds a calibration with other settings"):
        calibrate(folder, hosts=2, network="1gbit", device="cpu")
