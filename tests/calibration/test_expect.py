"""Is a run normal: the rule, what is measured in which words, causes that are put in
and found, parts of a trace.
"""

from dataclasses import replace

import numpy as np
import pytest

import madmax_lib as mm
from madmax_lib.calibration.machine.compared import case_of
from madmax_lib.calibration.published.rows import model_flops, read_rows
from madmax_lib.calibration.verdict.expect import VERDICTS, expect, verdicts
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Transformer
from madmax_lib.catalog.tables import table
from madmax_lib.plan.case import Case
from madmax_lib.runs.read import read_run
from madmax_lib.simulator.rates.parameters import Parameters

RUN = ("llama3-8b", "dgx-h100", "dp8.z3.full")
HOW = {"global_batch": 32, "software": "torchtitan"}


@pytest.fixture(scope="module")
def row():
    return mm.estimate(*RUN, **HOW).iloc[0]


def test_the_rule():
    """Inside narrow: fine; inside wide or unknown: cannot tell; outside, and above the
    peak always: slow or fast.
    """
    draw = np.random.default_rng(0)
    log, width = draw.normal(0, 0.5, 2000), draw.uniform(0.05, 0.8, 2000)
    said = verdicts(np.exp(log), 1.0, np.exp(width), floor_s=0.5)
    assert set(said) == set(VERDICTS)
    assert ((said == "slow") == (log > width)).all()
    assert (
        (said == "suspiciously fast") == ((log < -width) | (log < np.log(0.5)))
    ).all()
    inside = ~np.isin(said, ["slow", "suspiciously fast"])
    assert ((said == "fine") == (inside & (width <= np.log(1.5)))).all()
    assert (
        verdicts(1.0, 1.0, np.nan) == "cannot tell"
        and verdicts(0.1, 1.0, np.nan, 0.2) == "suspiciously fast"
    )


def test_four_words_for_one_measurement(row):
    """Tokens of all devices, of one, model FLOPs and seconds say the same."""
    case = Case(*RUN[:2], mm.Plan.parse(RUN[2]), HOW["global_batch"])
    seconds, tokens = 1.3 * row["step_s"], case.global_batch * case.sequence
    flops = model_flops(case, {}) / (8e12 * seconds)
    said = [{"step_s": seconds}, {"tokens_per_s": tokens / seconds}, {"tflops": flops}]
    said.append({"tokens_per_s_per_device": tokens / seconds / 8})
    results = [expect(*RUN, **HOW, **one) for one in said]
    for result in results:
        assert (
            result.step_s == pytest.approx(seconds)
            and result.verdict == results[0].verdict
        )
        assert [result.predicted_s, result.low_s, result.high_s] == pytest.approx(
            list(row[["step_s", "low_s", "high_s"]])
        )


def test_percentiles_are_those_of_the_interval(row):
    for seconds, percentile in (("low_s", 5.0), ("step_s", 50.0), ("high_s", 95.0)):
        assert expect(*RUN, **HOW, step_s=row[seconds]).percentile == pytest.approx(
            percentile, abs=1e-6
        )
    for factor, verdict in {
        1: "fine",
        1.6: "slow",
        3: "slow",
        1 / 2: "suspiciously fast",
    }.items():
        result = expect(*RUN, **HOW, step_s=factor * row["step_s"])
        assert (
            result.verdict == verdict
            and repr(result).startswith(verdict)
            and len(repr(result)) < 600
        )


@pytest.mark.parametrize("seed", range(6))
def test_a_cause_that_was_put_in_is_found(seed):
    """A slower network, another precision, recompute: the cause is among the first, and
    explains all.
    """
    draw = np.random.default_rng(seed)
    dp, tp = [(16, 1), (8, 2), (4, 4), (2, 8)][draw.integers(4)]
    plan, cluster = (
        mm.Plan(dp=dp, tp=tp, zero=int(draw.integers(4)) if tp == 1 else 1),
        mm.cluster("dgx-a100", 2),
    )
    how = {"global_batch": int(32 * draw.integers(1, 5)), "sequence": 2048}
    inter = replace(
        cluster.inter, bandwidth_bytes_per_s=cluster.inter.bandwidth_bytes_per_s / 10
    )
    put_in = {
        "network between nodes at 1/10 of its rate": (
            replace(cluster, inter=inter),
            plan,
            "bf16",
        ),
        "products in tf32, not bf16": (cluster, plan, "tf32"),
        "recompute is full": (cluster, replace(plan, recompute="full"), "bf16"),
    }
    for cause, (there, other, dtype) in put_in.items():
        seconds = mm.estimate("llama-7b", there, other, **how, dtype=dtype)[
            "step_s"
        ].iloc[0]
        result = expect("llama-7b", cluster, plan, **how, step_s=seconds)
        found = result.explanations.set_index("cause")
        assert cause in found.index[:3] and found.at[
            cause, "explains"
        ] == pytest.approx(1), (cause, result)


@pytest.mark.parametrize(
    ("given", "factor", "cause"),
    [
        ("tokens_per_s", 8, "tokens_per_s is for one device, not for all"),
        (
            "tokens_per_s_per_device",
            1 / 8,
            "tokens_per_s_per_device is for all devices",
        ),
        ("step_s", 1e3, "step_s is in milliseconds"),
        ("step_s", 1 / 4, "step_s covers one micro-batch"),
        ("tflops", 1 / 8, "tflops is for all devices"),
    ],
)
def test_a_misread_number_is_named(row, given, factor, cause):
    case = Case(*RUN[:2], mm.Plan.parse(RUN[2]), HOW["global_batch"])
    seconds = 1.02 * factor * row["step_s"]
    rate = case.global_batch * case.sequence / seconds
    values = {
        "step_s": seconds,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / 8,
    }
    values["tflops"] = model_flops(case, {}) / (8e12 * seconds)
    assert (
        expect(*RUN, **HOW, **{given: values[given]}).explanations["cause"].iloc[0]
        == cause
    )


def test_a_trace_tells_which_part_is_off():
    """Of a run on a network of a tenth: communication is longer by what the step is,
    all else as predicted.
    """
    cluster, how = mm.cluster("dgx-a100", 2), {"global_batch": 32, "sequence": 1024}
    slow = replace(cluster, inter=replace(cluster.inter, bandwidth_bytes_per_s=2.5e9))
    timeline = mm.simulate("gpt2-xl", slow, "dp16", **how)
    result = expect("gpt2-xl", cluster, "dp16", **how, timeline=timeline)
    assert result.verdict == "slow" and result.parts["part"].iloc[0] == "communication"
    assert result.parts["excess_s"].iloc[0] == pytest.approx(
        result.step_s - result.predicted_s, rel=0.1
    )
    assert result.explanations["part"].iloc[0] == "communication"
    assert result.parts["measured_s"].sum() == pytest.approx(result.step_s, rel=0.05)
    other = expect("gpt2-large", cluster, "dp16", **how, timeline=timeline)
    assert other.parts["measured_s"].notna().all() and other.step_s == result.step_s


def test_a_measured_run_of_a_calibrated_machine():
    """The testbed's own run: fine by the number and by the trace, whose parts are most
    of its step and as predicted.
    """
    folder = PROJECT / "traces" / "testbed"
    machine, run = mm.machine(folder), read_run(folder / "runs" / "gpt_z3")
    case, timeline = case_of(run.spec, machine), mm.read_trace(run.directory)
    how = {
        "global_batch": case.global_batch,
        "sequence": case.sequence,
        "dtype": case.dtype,
        "software": case.software,
    }
    how["parameters"] = machine.parameters
    by_trace = expect(case.model, case.cluster, case.plan, **how, timeline=timeline)
    by_number = expect(
        case.model,
        case.cluster,
        case.plan,
        **how,
        step_s=run.summary["step_s"]["median"],
    )
    assert by_trace.verdict == by_number.verdict == "fine"
    assert by_trace.step_s == pytest.approx(by_number.step_s, rel=0.1)
    parts = by_trace.parts.set_index("part")
    assert parts["measured_s"].sum() == pytest.approx(by_trace.step_s, rel=0.05)
    assert parts.at["communication", "measured_s"] == pytest.approx(
        parts.at["communication", "predicted_s"], rel=0.2
    )


def test_a_trace_of_another_run_is_contradicted_first():
    """A CPU's trace for two T4; and without marked steps it cannot tell how long one
    takes.
    """
    timeline, run = (
        mm.read_trace(mm.dataset("gpt-ddp")),
        ("gpt2-medium", "kaggle-2xt4", "dp2"),
    )
    result = expect(*run, global_batch=16, dtype="fp16", timeline=timeline)
    assert result.explanations["part"].iloc[0] == "trace"
    assert result.verdict == "cannot tell" and "CPU" in result.reason
    unmarked = replace(timeline, spans=timeline.spans.assign(step=-1))
    with pytest.raises(ValueError, match="no step marks"):
        expect(*run, global_batch=16, dtype="fp16", timeline=unmarked)
    told = expect(*run, global_batch=16, dtype="fp16", timeline=unmarked, step_s=5.0)
    assert told.parts["measured_s"].isna().all() and told.step_s == 5.0


def test_the_nearest_published_run_of_a_published_run_is_itself():
    rows = read_rows(table("published_train").iloc[::60])
    rows = rows[rows["supported"].astype(bool) & (rows["measured_s"] > 0)]
    for row in rows.to_dict("records"):
        case = row["case"]
        how = {
            "global_batch": case.global_batch,
            "sequence": case.sequence,
            "dtype": case.dtype,
        }
        result = expect(
            case.model,
            case.cluster,
            case.plan,
            **how,
            software=case.software,
            step_s=row["measured_s"],
        )
        first = result.nearest.iloc[0]
        assert (
            first["gpu"] == row["gpu"]
            and first["n_gpus"] == row["n_gpus"]
            and first["plan"] == str(case.plan)
        )
        assert len(result.nearest) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "give one measurement, step_s, .* or a timeline; got none"),
        ({"step_s": 1.0, "tflops": 400.0}, "got step_s and tflops"),
        ({"step_s": 0.0}, "step_s=0.0 must be positive"),
        ({"step_s": 1e300}, r"step_s=1e\+300: .* s are expected; is the unit right"),
        ({"tflops": 1e300}, r"tflops=1e\+300: 0 s a step, but"),
        ({"tokens_per_s": "many"}, "tokens_per_s='many' must be a number"),
        ({"step_s": 1.0, "plan": "dp3"}, "dp"),
        ({"step_s": 1.0, "model": "dlrm-a"}, "recommendation"),
        ({"timeline": 3}, "timeline=3"),
        ({"step_s": 1.0, "parameters": {}}, "parameters="),
    ],
)
def test_bad_input_is_one_line(change, message):
    run = dict(zip(("model", "cluster", "plan"), RUN, strict=True)) | HOW | change
    with pytest.raises(ValueError, match=message) as error:
        expect(**run)
    assert "\n" not in str(error.value)


def test_constants_without_intervals_tell_nothing_but_the_peak():
    own = Transformer(
        "own", layers=2, hidden=1024, heads=8, ffn=4096, vocab=1000, sequence=512
    )
    run = (own, mm.cluster("dgx-a100", devices=1), "dp1")
    result = expect(*run, global_batch=8, step_s=1.0, parameters=Parameters())
    assert result.verdict == "cannot tell"
    assert (
        expect(*run, global_batch=8, step_s=1e-6, parameters=Parameters()).verdict
        == "suspiciously fast"
    )


@pytest.mark.parametrize(("dtype", "asks"), [("fp32", True), ("bf16", False)])
def test_fp32_where_a_device_has_tf32_asks_which_ran(dtype, asks):
    run = {"global_batch": 8, "dtype": dtype, "step_s": 3.0}
    verdict = mm.expect("gpt2-large", "dgx-a100", "dp8.z3", **run)
    assert ("name dtype tf32" in verdict.reason) == asks


@pytest.mark.parametrize("software", ["megatron-core", "torchtitan"])
def test_flops_are_those_that_the_stack_prints(software):
    """Megatron counts half of the scores, as attention is causal."""
    convention = {"megatron-core": "megatron-lm"}.get(software, software)
    counted = mm.flops("llama3-8b", sequence=65536, convention=convention)
    tflops = 16 * counted.total / (8e12 * 30.0)
    how = {"global_batch": 16, "sequence": 65536, "software": software}
    run = mm.expect("llama3-8b", "dgx-h100", "dp8.z3.full", **how, tflops=tflops)
    assert run.step_s == pytest.approx(30.0, rel=0.01)
