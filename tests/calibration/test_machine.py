"""Fits of a machine find constants that are known, rows of runs say what ran, and files
come back as they were.
"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import CPU_CONSTANTS

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.calibration import fit, predict, run_rows
from madmax_lib.calibration.machine import machine_page
from madmax_lib.calibration.machine.calibrate import calibrate
from madmax_lib.calibration.machine.machine import (
    Machine,
    fit_constants,
    link_rates,
    machine,
    parts_of,
)
from madmax_lib.calibration.published.rows import read_rows
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Cluster, Device, Link
from madmax_lib.plan.case import Case
from madmax_lib.runs import RunSpec
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import peak_bytes
from madmax_lib.simulator.rates.parameters import start
from madmax_lib.simulator.uncertainty import COMPONENTS

CPU = Device("some cpu", 8e9, 2e10, {"fp32": 6e10}, family="cpu", process_bytes=1e8)
TESTBED = Cluster("testbed", CPU, 1, 2, Link("loopback", 5e9), Link("ethernet", 37e6))
CURVES = {
    f"{kind} 2 2": ((4e3, 1e-3), (1e6, 0.028))
    for kind in ("all_reduce", "all_gather", "reduce_scatter")
}
GPT = {"layers": 3, "hidden": 192, "heads": 6, "kv_heads": 6, "ffn": 512}
RUNS = [  # unlike shapes, one alone
    ("gpt-tiny", "dp2", {**GPT, "sequence": 64}, 16),
    (
        "gpt-tiny",
        "dp2",
        {"layers": 2, "hidden": 320, "heads": 8, "kv_heads": 4, "ffn": 1280},
        4,
    ),
    (
        "gpt-tiny",
        "dp2",
        {
            "layers": 2,
            "hidden": 64,
            "heads": 2,
            "kv_heads": 2,
            "ffn": 256,
            "sequence": 512,
        },
        8,
    ),
    ("vit-tiny", "dp2", {"hidden": 128, "ffn": 512}, 32),
    ("gpt-tiny", "dp1", {**GPT, "sequence": 64}, 16),
    ("gpt-tiny", "tp2", {**GPT, "sequence": 64}, 16),
]


def case(model, strategy, sizes, batch):
    spec = RunSpec(model, strategy, sizes=sizes, global_batch=batch, device="cpu")
    cluster = replace(TESTBED, nodes=spec.plan.world_size)
    return Case(spec.shapes, cluster, spec.plan, batch, None, "fp32", "workbench")


def known(**constants):
    base = {"gemm_bytes": 0.5, "weight_bytes:eager": 4.0, **CPU_CONSTANTS, **constants}
    return replace(start(), constants=start().constants | base, collectives=CURVES)


def test_a_fit_finds_the_constants_that_made_the_runs():
    cases = [case(*run) for run in RUNS]
    measured = parts_of(Steps.stack(cases), known())
    noise = np.random.default_rng(0).normal(0, 0.01, measured.shape)
    fitted = fit_constants(
        cases, measured * np.exp(noise), replace(start(), collectives=CURVES)
    )
    predicted = parts_of(Steps.stack(cases), fitted)
    assert np.abs(predicted["step_s"] / measured["step_s"] - 1).max() < 0.03
    for name in (
        "gemm_efficiency:other-16",
        "attention_efficiency:other",
        "alone",
        "comm_launch_s:eager",
    ):
        assert fitted.constants[name] == pytest.approx(CPU_CONSTANTS[name], rel=0.2)
        low, high = fitted.intervals[name]
        assert 0.9 * low < CPU_CONSTANTS[name] < 1.1 * high
    other = [
        case("gpt-tiny", plan, {**GPT, "layers": 5}, 8)
        for plan in ("dp2.z3", "pp2", "tp2")
    ]
    seconds = [
        parts_of(Steps.stack(other), parameters)["step_s"].to_numpy()
        for parameters in (known(), fitted)
    ]
    assert np.abs(seconds[1] / seconds[0] - 1).max() < 0.06
    assert fitted.software == "workbench" and fitted.residuals["stranger"] < 0.03


@pytest.mark.parametrize(
    ("runs", "alone", "least", "most"),
    [(RUNS[4:5], 5.0, 1.0, 1.0), (RUNS[3:5], 5.0, 0.9, 1.0), (RUNS, 0.8, 0.7, 0.9)],
)
def test_a_rank_alone_is_no_slower_than_beside_others(runs, alone, least, most):
    """And where all ran alone, nothing tells how much faster it is."""
    cases = [case(*run) for run in runs]
    measured = parts_of(Steps.stack(cases), known(alone=alone))
    fitted = fit_constants(cases, measured, replace(start(), collectives=CURVES))
    assert least <= fitted.constants["alone"] <= most


def test_parts_that_no_trace_tells_are_left_out():
    cases = [case(*run) for run in RUNS[:3]]
    measured = parts_of(Steps.stack(cases), known()).assign(
        gemm_s=np.nan, attention_s=np.nan, optimizer_s=np.nan
    )
    fitted = fit_constants(cases, measured, replace(start(), collectives=CURVES))
    predicted = parts_of(Steps.stack(cases), fitted)["step_s"]
    assert np.abs(predicted / measured["step_s"] - 1).max() < 0.05


def test_links_by_their_collectives():
    """Rates and latency that made the times; groups inside a node show the near link."""
    sizes = 4.0 ** np.arange(6, 12)
    rows = []
    for ranks, nodes, rate in ((2, 1, 4e9), (2, 2, 1e8)):
        gathered = 2e-4 + 1e-5 * (ranks - 1) + sizes / 2 / rate
        rows.append(
            pd.DataFrame(
                {
                    "ranks": ranks,
                    "nodes": nodes,
                    "size_bytes": sizes,
                    "seconds": gathered,
                }
            )
        )
    table = pd.concat(rows).assign(collective="all_gather")
    rates = link_rates(table)
    assert rates["near"] == pytest.approx(4e9, rel=0.2) and rates[
        "far"
    ] == pytest.approx(1e8, rel=0.1)
    assert rates["latency_s"] + rates["hop_s"] == pytest.approx(2.1e-4, rel=0.1)
    assert np.isnan(link_rates(table[table["nodes"] == 2])["near"])


@pytest.fixture
def saved(tmp_path):
    residuals = {"quantile": 1.645, **dict.fromkeys(COMPONENTS, 0.1)}
    parameters = replace(known(), residuals=residuals)
    made = Machine(TESTBED, parameters, provenance={"device": "some cpu", "notes": []})
    made.save(tmp_path / "machine.json")
    return tmp_path, made


def test_a_machine_comes_back_as_it_was(saved):
    folder, made = saved
    for path in (folder, folder / "machine.json"):
        found = machine(path)
        assert found.cluster == made.cluster and found.parameters.collectives == CURVES
    run = {"global_batch": 8, "dtype": "fp32", "parameters": found.parameters}
    one = mm.estimate(
        "gpt2", mm.cluster(str(folder / "machine.json"), devices=1), "dp1", **run
    )
    assert one["step_s"].iloc[0] > 0


def test_the_file_of_a_machine_brings_its_constants(saved, capsys):
    """In the place of a cluster, in calls and on the command line."""
    folder, made = saved
    path, run = str(folder / "machine.json"), {"global_batch": 8, "dtype": "fp32"}
    given = mm.estimate(
        "gpt2", made.cluster, ["dp2.z3", "dp2"], parameters=made.parameters, **run
    )
    pd.testing.assert_frame_equal(
        mm.estimate("gpt2", path, ["dp2.z3", "dp2"], **run), given
    )
    assert (
        given["step_s"][0]
        != mm.estimate("gpt2", made.cluster, "dp2.z3", **run)["step_s"][0]
    )
    steps = [mm.simulate("gpt2", place, "dp2.z3", **run, **more).spans["dur_ns"].sum()
             for place, more in [(path, {}), (made.cluster, {"parameters": made.parameters})]]  # fmt: skip
    assert steps[0] == steps[1]
    for command, plans in (("estimate", ["dp2.z3", "dp2"]), ("search", [])):
        assert (
            main(
                [
                    command,
                    "gpt2",
                    path,
                    *plans,
                    "--global-batch",
                    "8",
                    "--dtype",
                    "fp32",
                    "--json",
                ]
            )
            == 0
        )
        rows = json.loads(capsys.readouterr().out)["rows"]
        seconds = {row["plan"]: row["step_s"] for row in rows}
        one = mm.estimate(
            "gpt2", made.cluster, list(seconds), parameters=made.parameters, **run
        )["step_s"]
        assert list(seconds.values()) == pytest.approx(one.tolist(), rel=1e-5)


def test_one_host_tells_nothing_of_a_network(saved):
    folder, made = saved
    replace(made, cluster=replace(made.cluster, nodes=1)).save(folder / "machine.json")
    with pytest.raises(
        ValueError,
        match="nodes=4, but it was calibrated on one host, without a network",
    ):
        mm.cluster(folder / "machine.json", nodes=4)


def test_measured_collectives_are_scaled_to_other_links_and_say_so(saved):
    _, made = saved
    parameters = replace(made.parameters, links=(5e9, 37e6))
    run = {"global_batch": 8, "sequence": 64, "dtype": "fp32", "parameters": parameters}
    model = replace(mm.model("gpt2"), layers=4, vocab=512)
    same = [
        mm.estimate(model, TESTBED, "dp2", **run | {"parameters": of})
        for of in (parameters, made.parameters)
    ]
    assert same[0]["step_s"].iloc[0] == same[1]["step_s"].iloc[0]
    half = replace(TESTBED, inter=Link("ethernet", 18.5e6))
    with pytest.warns(
        UserWarning,
        match="collectives were measured on links of 5e\\+09 and 3.7e\\+07 bytes/s",
    ):
        slower = mm.estimate(model, half, "dp2", **run)
    assert slower["dp_s"].iloc[0] == pytest.approx(
        2 * same[0]["dp_s"].iloc[0], rel=0.05
    )  # but for its latency
    near = replace(TESTBED, intra=Link("loopback", 1e9))
    with pytest.warns(UserWarning, match="here they are scaled"):
        assert (
            mm.estimate(model, near, "dp2", **run)["dp_s"].iloc[0]
            == same[0]["dp_s"].iloc[0]
        )  # no rank is near
    with pytest.warns(UserWarning, match="here they are scaled"):
        steps = [
            mm.simulate(model, half, "dp2", **run),
            mm.simulate(model, TESTBED, "dp2", **run),
        ]
    exposed_s = [mm.breakdown(step)["exposed_comm_s"].max() for step in steps]
    assert exposed_s[0] == pytest.approx(2 * exposed_s[1], rel=0.05)


@pytest.mark.parametrize("plan", ["dp2", "dp2.z3", "pp2", "tp2"])
def test_a_process_on_a_cpu_has_one_answer_for_its_memory(saved, plan):
    run = {"global_batch": 8, "sequence": 128, "dtype": "fp32"}
    parts = mm.memory("gpt2", plan, cluster=TESTBED, **run)
    peak = peak_bytes(parts)
    assert peak == peak_bytes(parts, allocated=True) + CPU.process_bytes
    row = mm.estimate(
        "gpt2", TESTBED, plan, parameters=saved[1].parameters, **run
    ).iloc[0]
    assert (
        row["memory_bytes"]
        == pytest.approx(peak)
        == mm.estimate("gpt2", TESTBED, plan, **run)["memory_bytes"].iloc[0]
    )
    assert mm.fits("gpt2", TESTBED, plan, **run).margins_bytes[
        "device"
    ] == pytest.approx(CPU.memory_bytes - peak)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[4e3, 1e-3]], "needs at least two sizes"),
        ([[4e3, 1e-3], [1e6, -1.0]], "seconds must be a positive number"),
        ([[4e3, 1e-3], [1e6, None]], "seconds must be a positive number"),
        ([[4e3, "fast"], [1e6, 1.0]], "seconds must be a positive number"),
        ([[4e3], [1e6]], "seconds must be a positive number"),
        ("points", "size_bytes must be a positive number"),
        (7, "not iterable"),
    ],
)
def test_corrupt_points_of_collectives_are_refused_in_a_line(saved, points, message):
    path = saved[0] / "machine.json"
    content = json.loads(path.read_text())
    content["parameters"]["collectives"]["all_gather 2 2"] = points
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"machine.json: not a machine file \(.*{message}"
    ) as error:
        machine(path)
    assert "\n" not in str(error.value)


def test_files_that_are_no_machine(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        machine(tmp_path)
    for text in ("{}", "no json", '{"cluster": {"name": "x"}}'):
        (tmp_path / "machine.json").write_text(text)
        with pytest.raises(ValueError, match="not a machine file"):
            machine(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minutes": 0}, "minutes=0 must be a positive number"),
        ({"minutes": "5"}, "minutes='5' must be a positive number"),
        ({"device": "tpu"}, "device='tpu' is not one of auto, cpu, cuda"),
        ({"network": "fast", "hosts": 2}, "is not a link rate"),
        ({"network": "1gbit"}, "joins hosts, but hosts=1"),
        ({"hosts": 2, "ranks": 3}, "3 ranks cannot be spread evenly over hosts=2"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        calibrate(tmp_path / "new", **{"device": "cpu"} | settings)
    assert not (tmp_path / "new").exists()


def test_cuda_that_is_not_there_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[calibrate.__module__], "gpu_count", lambda: 0)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        calibrate(tmp_path / "new", device="cuda")
    assert not (tmp_path / "new").exists()


def test_another_calibration_is_not_overwritten(tmp_path):
    (tmp_path / "settings.json").write_text(
        json.dumps({"hosts": 2, "network": "1gbit", "device": "cpu", "ranks": 2})
    )
    with pytest.raises(ValueError, match="holds a calibration with other settings"):
        calibrate(tmp_path, device="cpu")


@pytest.fixture
def runs(saved):
    """Two finished runs as their files say, beside the machine that they ran on."""
    folder, _ = saved
    for name, strategy, step_s in (("a", "dp2.z3", 0.4), ("b", "cp2", 0.5)):
        spec = RunSpec(
            "moe-tiny",
            strategy,
            global_batch=8,
            device="cpu",
            hosts=2,
            network="300mbit",
        )
        run = folder / "runs" / name
        run.mkdir(parents=True)
        values = vars(spec) | {"speed": []}
        (run / "spec.json").write_text(json.dumps(values))
        (run / "env.json").write_text(
            json.dumps({"device": "some cpu", "dtype": "fp32"})
        )
        ranks = [{"rank": 0, "memory_peak_bytes": None, "host_rss_bytes": 3e8}]
        summary = {"status": "completed", "step_s": {"median": step_s}, "ranks": ranks}
        (run / "summary.json").write_text(json.dumps(summary))
    return folder / "runs"


def test_runs_become_rows_that_fits_take(runs):
    rows = run_rows(runs)
    assert rows.index.tolist() == ["a", "b"] and rows["iteration_time_s"].tolist() == [
        0.4,
        0.5,
    ]
    assert Path(rows["cluster"].iloc[0]).name == "machine.json" and rows[
        "zero_stage"
    ].tolist() == [3, 0]
    read = read_rows(runs)
    assert (
        read["supported"].all()
        and read["consistent"].all()
        and read["measured_s"].tolist() == [0.4, 0.5]
    )
    first, second = read["case"]
    assert (
        first.model.experts,
        first.cluster.nodes,
        first.dtype,
        first.software.name,
    ) == (4, 2, "fp32", "workbench")
    assert second.plan.context == "ulysses" and second.plan.cp == 2
    made = machine(runs.parent)
    table = predict(runs, made.parameters)
    assert (table["low_s"] < table["predicted_s"]).all() and table["supported"].all()
    updated = fit.update(runs, made.parameters)
    after = predict(rows, updated)["predicted_s"] / rows["iteration_time_s"]
    before = table["predicted_s"] / rows["iteration_time_s"]
    assert np.abs(np.log(after)).mean() <= np.abs(np.log(before)).mean() + 1e-9
    fitted = fit.fit(
        runs, starts=1, begin=made.parameters, only=["gemm_efficiency:other-16"]
    )
    assert fitted.collectives == made.parameters.collectives


def test_a_row_of_a_run_without_a_machine_says_what_is_missing(runs):
    (runs.parent / "machine.json").unlink()
    read = read_rows(runs)
    assert (
        not read["supported"].any()
        and read["reason"].str.contains("unknown device 'some cpu'").all()
    )
    with pytest.raises(FileNotFoundError, match="no run directories here"):
        run_rows(PROJECT / "tests")


def test_a_page_shows_every_run(saved):
    folder, made = saved
    names = [
        f"{which}_{of}"
        for which in ("predicted", "measured")
        for of in ("s", "compute", "exposed_comm", "overlap")
    ]
    results = pd.DataFrame(
        0.4,
        index=["gpt dp", "vit <z3>"],
        columns=[*names, "predicted_bytes", "measured_bytes"],
    )
    results = results.assign(error=[0.02, -0.1], high_s=0.5, inside=[True, False])
    results.to_csv(folder / "results.csv", index_label="run")
    parts = [
        f"{which}_{of}_s"
        for which in ("predicted", "measured")
        for of in ("step", "gemm", "attention", "optimizer")
    ]
    pd.DataFrame(0.1, index=["wide dp"], columns=parts).to_csv(
        folder / "parts.csv", index_label="run"
    )
    text = machine_page.write_page(folder, made.judged(results)).read_text()
    assert (
        "within 6.0% (median), 10.0% at worst" in text
        and "vit &lt;z3&gt;" in text
        and "<z3>" not in text
        and "<td>False</td>" in text
        and "are not modelled: a busy machine" in " ".join(text.split())
    )


@pytest.mark.parametrize(
    ("errors", "wider"),
    [
        ([], 1.0),  # never judged
        ([0.01, -0.02, 0.03], 1.0),  # inside: as wide as before
        # measured 2 x the prediction, whose interval reaches 1.25 x
        ([0.01, -0.5], np.log(2) / np.log(1.25)),
        # one of eleven may be outside
        ([0.25] + 9 * [0.5] + [9.0], np.log(1.5) / np.log(1.25)),
    ],
)
def test_intervals_hold_nine_in_ten_of_the_runs_that_were_judged(errors, wider, saved):
    _, made = saved
    results = pd.DataFrame({"error": errors}, dtype=float)
    judged = made.judged(results.assign(predicted_s=0.4, high_s=0.5))
    about = judged.provenance["judged"]
    assert about["wider"] == pytest.approx(wider) and about["runs"] == len(errors)
    run = {"cluster": TESTBED, "plan_or_table": "dp2", "global_batch": 8}
    halves = []
    for machine_ in (made, judged):
        row = mm.estimate("gpt2", **run, dtype="fp32", parameters=machine_.parameters)
        halves.append(np.log(row["high_s"] / row["step_s"]).item())
    assert halves[1] / halves[0] == pytest.approx(wider, rel=1e-6)
    assert ("Do not rely on it" in judged.verdict) == (wider > 1)


def test_a_network_that_no_calibration_saw_is_stated(saved, capsys):
    folder, made = saved
    one = replace(TESTBED, devices_per_node=2, nodes=1)
    results = pd.DataFrame({"error": [0.5], "predicted_s": 0.4, "high_s": 0.5})
    made = replace(made, cluster=one).judged(results)
    made.save(folder / "machine.json")
    words = ["estimate", "gpt2", str(folder / "machine.json"), "dp8"]
    words += ["--nodes=4", "--global-batch=8", "--dtype=fp32", "--json", "--network"]
    steps = {}
    for rate in ("1gbit", "25gbit"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main([*words, rate]) == 0
        answer = json.loads(capsys.readouterr().out)
        steps[rate] = answer["rows"][0]["step_s"]
    assert steps["1gbit"] > steps["25gbit"] > 0
    about = answer["summary"]
    assert about["devices"] == 8
    assert about["assumed"].startswith("25gbit a node of 2 device(s), over which no")
    assert "within 50.0% (median), 50.0% at worst" in about["calibration"]
    assert main([*words, "25 parsecs"]) == 2
