"""The closed form: limits, conservation, monotonicity, tables against single plans,
published steps.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from oracles.random_cases import STACKS, drawn_cases

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.events.engine import run
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    bounds,
    load,
    save,
    shipped,
)
from madmax_lib.simulator.simulate import _lay_out
from madmax_lib.simulator.steady.step_time import PARTS, step_time

GPT = mm.model("gpt3-175b")
CLUSTER = mm.cluster("dgx-a100", nodes=16)
IDEAL = Parameters()


def step_s(plan="dp2.tp8.pp8", batch=64, model=GPT, cluster=CLUSTER, **options):
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return estimate(model, cluster, plan, global_batch=batch, **options)["step_s"][0]


def timed(model=GPT, batch=64, **columns):
    """Which plans of a table have a time on the cluster."""
    return (
        estimate(model, CLUSTER, pd.DataFrame(columns), global_batch=batch)["step_s"]
        .notna()
        .tolist()
    )


def compute_bound(cluster):
    """The cluster with memory and links so fast that their traffic takes no time."""
    device = replace(cluster.device, memory_bandwidth_bytes_per_s=1e30)
    links = {
        name: replace(getattr(cluster, name), bandwidth_bytes_per_s=1e30)
        for name in ("intra", "inter")
    }
    return replace(cluster, device=device, **links)


def test_parts_add_up_to_the_step():
    table = estimate(
        GPT, CLUSTER, Plan(tp=8, pp=8, dp=2, zero=1, recompute="full"), global_batch=64
    )
    assert list(table.columns) == [
        "step_s",
        "low_s",
        "high_s",
        *PARTS,
        "mfu",
        "tokens_per_s",
        "memory_bytes",
        "fits",
    ]
    assert len(table) == 1 and table["fits"].dtype == bool
    assert table[list(PARTS)].sum(axis=1).iloc[0] == pytest.approx(
        table["step_s"].iloc[0]
    )
    assert (table[list(PARTS)] >= -1e-9).all(axis=None)
    assert table["tokens_per_s"].iloc[0] == pytest.approx(
        64 * 2048 / table["step_s"].iloc[0]
    )


def test_one_ideal_device_does_its_flops_at_the_peak():
    model, cluster = replace(mm.model("gpt2-large"), layers=2), mm.cluster("colab-t4")
    real, table = (
        estimate(
            model,
            c,
            Plan(micro_batch=4),
            global_batch=8,
            dtype="fp16",
            parameters=IDEAL,
        ).iloc[0]
        for c in (cluster, compute_bound(cluster))
    )
    s, h = model.sequence, model.hidden
    weights = 2 * 12 * h * h + h * model.vocab
    core = 2 * 4 * s * h * (s + 128) / 2  # causal, whole diagonal blocks
    backward = 2.5 * core  # flash attention computes the scores again
    flops = 8 * (s * 6 * weights + core + backward)
    peak, memory = (
        cluster.device.peak("fp16"),
        cluster.device.memory_bandwidth_bytes_per_s,
    )
    assert table["step_s"] - table["optimizer_s"] == pytest.approx(flops / peak)
    assert real["optimizer_s"] == pytest.approx(30 * model.parameters / memory)
    assert (
        table[
            ["tp_s", "cp_s", "ep_s", "fsdp_s", "bubble_s", "pp_s", "dp_s", "launch_s"]
        ]
        .abs()
        .sum()
        < 1e-9
    )


VARIED = {"micro_batch": 2, "recompute": "full", "sequence_parallel": False, "schedule": "zero-bubble", "prefetch": 0,
          "shard": 2, "qwz": True, "hpz": True, "qgz": True, "overlap_gather": True, "reduce_fp32": True,
          "context": "ulysses", "attention": "unfused", "first_layers": 3, "last_layers": 5, "capacity": 1.25, "etp": 1,
          "embedding_as_layer": True, "overlap_tp": 1.0, "overlap_ep": 1.0, "overlap_dp": 0.0, "bucket_bytes": np.inf,
          "head_as_layer": True, "interleave": 2, "zero": 0, "lora_rank": 8}  # fmt: skip


BASES = {
    "gpt3-175b": "dp4.tp8.pp4.selective dp16.tp4.cp2 dp8.tp2.pp4.cp2.overlap-tp",
    "mixtral-8x7b": "dp8.tp4.pp4.ep4 dp16.tp2.pp4.ep8",
    "gpt2": "dp16 dp4.tp2.pp2 dp2.pp8 dp8.cp2 dp16.tp1",
}  # on processes that share a CPU with their host
RUNS = {"zero": (0, 1, 2, 3), "zero_under_pipeline": (0, 1, 2, 3), "zero_plus_plus": ("qwz", "hpz", "qgz"),
        "schedules": ("gpipe", "1f1b", "zero-bubble")}  # fmt: skip


@pytest.mark.parametrize("size", [0, 100_000])
@pytest.mark.parametrize("name", BASES)
def test_rows_of_a_table_are_their_plans(name, size):
    """Rows share the work of those that differ in one field that it does not depend on,
    and of no others.
    """
    cluster, options = (
        CLUSTER,
        {"software": replace(catalog.software("megatron-core"), **RUNS)},
    )
    if name == "gpt2":
        testbed = mm.machine(mm.dataset("testbed"))
        cluster = replace(testbed.cluster, nodes=8, devices_per_node=2)
        options = {
            "software": replace(catalog.software("workbench"), **RUNS),
            "dtype": "fp32",
        }
        options |= {"parameters": testbed.parameters}
    rows = [
        vars(replace(Plan.parse(base), zero=zero))
        for base in BASES[name].split()
        for zero in (0, 1, 2, 3)
    ]
    few = pd.DataFrame(
        [
            row | dict([change])
            for row in rows
            for change in [*VARIED.items(), ("zero", row["zero"])]
        ]
    )
    table = pd.concat([few] * max(size // len(few), 1), ignore_index=True).rename(
        index="row {}".format
    )
    table.iloc[len(few) :, table.columns.get_loc("bucket_bytes")] = np.linspace(
        1e7, 1e8, len(table) - len(few)
    )
    result = estimate(name, cluster, table, global_batch=128, **options)
    known = np.flatnonzero(result["step_s"][: len(few)].notna())
    assert len(known) > 0.4 * len(few) and result.index.equals(table.index)
    assert ((result.pop("reason") != "") == result["step_s"].isna()).all()
    for place in known:
        plan = Plan(**vars(Plans.from_table(table.iloc[[place]])[0]))
        single = estimate(name, cluster, plan, global_batch=128, **options).iloc[0]
        np.testing.assert_allclose(
            result.iloc[place].astype(float),
            single.astype(float),
            1e-12,
            err_msg=str(plan),
        )


def test_intervals_come_with_the_fit():
    plan = Plan(tp=8, pp=8, dp=2, zero=1)
    row = estimate(GPT, CLUSTER, plan, global_batch=64).iloc[0]
    known, unknown = (
        0.05 < np.log(row["high_s"] / row["step_s"]) < 0.4,
        mm.cluster("mi300x-8", nodes=16),
    )
    assert known and row["low_s"] * row["high_s"] == pytest.approx(row["step_s"] ** 2)
    wide = estimate(GPT, unknown, plan, global_batch=64).iloc[0]
    assert wide["high_s"] / wide["step_s"] > row["high_s"] / row["step_s"]
    assert (
        estimate(GPT, CLUSTER, plan, global_batch=64, parameters=IDEAL)[
            ["low_s", "high_s"]
        ]
        .isna()
        .all(axis=None)
    )


def test_what_cannot_be_laid_out():
    assert timed(dp=[2, 2, 3], tp=[8, 8, 8], pp=[8, 4, 8]) == [True, False, False]
    assert timed(dp=2, tp=8, cp=8, context=["ring", "ulysses"]) == [
        True,
        False,
    ]  # 12 heads a rank, 8 peers
    experts = mm.model("mixtral-8x7b")
    assert timed(model=experts, dp=64, tp=2, ep=8, sequence_parallel=[True, False]) == [
        True,
        False,
    ]
    with pytest.raises(ValueError, match="has 128 devices"):
        step_s("tp8")
    with pytest.raises(ValueError, match="use simulate"):
        step_s("dp128", 65536, mm.model("dlrm-a"), mm.cluster("zionex"))


@pytest.mark.parametrize("parameters", [shipped(), IDEAL], ids=["fitted", "ideal"])
@pytest.mark.parametrize(
    "plan",
    [
        "dp1",
        "mb2.full",
        "selective",
        "pp8",
        "pp8.full",
        "pp4.dp2.mb2.no-overlap-dp",
        "pp8.gpipe",
        "pp8.v3",
    ],
)
def test_engine_and_closed_form_are_equal_where_streams_are_uniform(plan, parameters):
    """All but gradients and update; without a vocabulary stages are equal but for the
    lookup of tokens.
    """
    plan = Plan.parse(plan)
    model, cluster = (
        replace(GPT, vocab=0),
        replace(CLUSTER, nodes=1, devices_per_node=plan.world_size),
    )
    _, program = _lay_out(Case(model, cluster, plan, 64), parameters)
    ends = zip(run(program)[1], program.name, program.group, strict=True)
    after = ("adam", "end of step", "reductions")
    engine_s = max(
        end for end, name, group in ends if name not in after and group != "dp"
    )
    closed = estimate(
        model, cluster, plan, global_batch=64, parameters=parameters
    ).iloc[0]
    closed_s = closed["step_s"] - closed[["dp_s", "optimizer_s", "overhead_s"]].sum()
    assert engine_s == pytest.approx(closed_s, rel=1e-4)


def test_engine_and_closed_form_update_the_same_parameters():
    """Random mixtures, most of them sharded; what differs: norms, router and the
    vocabulary's share.
    """
    drawn = [case for case in drawn_cases("random", 300, 16) if case.model.experts]
    assert sum(case.plan.ep > 1 and case.plan.zero > 0 for case in drawn) > 10
    for case in drawn:
        case = replace(case, model=replace(case.model, vocab=1))
        _, program = _lay_out(case)
        updates = [
            s
            for s, name in zip(program.duration_s, program.name, strict=True)
            if name == "adam"
        ]
        closed_s = step_time(Steps.of(case), shipped())["optimizer_s"][0]
        assert closed_s == pytest.approx(np.mean(updates), rel=2e-3), str(case)


@pytest.mark.parametrize("name", STACKS)
def test_plans_of_several_kinds_of_layers_are_timed_in_a_table_as_alone(name):
    cluster = mm.cluster("dgx-h100", 16)
    plans = mm.search(name, cluster, 256, top=40).table["plan"].tolist()
    table = mm.estimate(name, cluster, plans, global_batch=256)
    for row, plan in enumerate(plans):
        alone = mm.estimate(name, cluster, plan, global_batch=256)
        for column in ("step_s", "memory_bytes"):
            assert table[column].iloc[row] == pytest.approx(
                alone[column].iloc[0], rel=1e-9
            ), plan


def test_stacked_cases_are_timed_as_alone():
    """Random models, with and without experts, vision, machines, dtypes, software and
    plans, in one array.
    """
    cases = [
        replace(case, dtype=case.cluster.device.nearest("fp8")) if number % 2 else case
        for number, case in enumerate(drawn_cases("software", 60, seed=6))
    ]
    together = step_time(Steps.stack(cases), shipped())
    for i, case in enumerate(cases):
        for name, seconds in step_time(Steps.of(case), shipped()).items():
            near = (
                2e-3 if name in ("tp_s", "step_s") else 1e-12
            )  # beside cp, attention is three blocks: each hides its own
            assert together[name][i] == pytest.approx(
                seconds[0], rel=near, abs=1e-12
            ), (name, case)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (catalog.device("rtx-5090"), "nvfp4"),
        (replace(catalog.device("h100"), family="other"), "fp8"),
        (replace(catalog.device("b200"), family="other"), "nvfp4"),
    ],
)
def test_families_without_constants_are_as_wide_as_others(device, dtype):
    cluster = replace(mm.cluster("dgx-h100"), device=device)
    row = mm.estimate("llama3-8b", cluster, "dp8.z3", global_batch=8, dtype=dtype).iloc[
        0
    ]
    known = mm.estimate("llama3-8b", "dgx-b200", "dp8.z3", global_batch=8).iloc[0]
    assert 0 < row["low_s"] < row["step_s"] < row["high_s"]
    assert row["high_s"] / row["low_s"] > known["high_s"] / known["low_s"]


def test_parameters_are_checked_written_and_read(tmp_path):
    for efficiency in (0, 1.5, float("nan")):
        with pytest.raises(
            ValueError, match=rf"compute_efficiency={efficiency} is not in \(0, 1\]"
        ):
            Parameters(compute_efficiency=efficiency)
    with pytest.raises(ValueError, match="constant 'speed' is not in"):
        Parameters(constants={"speed": 1.0})
    table = bounds()
    fitted = table[table["scale"] != "fixed"]
    assert (fitted["low"] <= fitted["start"]).all() and (
        fitted["start"] <= fitted["high"]
    ).all()
    assert (
        IDEAL.constants["gemm_efficiency:ampere-16"] == 1
        and IDEAL.constants["step_s:fused"] == 0
    )
    values = shipped().constants
    assert all(
        table.at[n, "low"] <= values[n] <= table.at[n, "high"] for n in fitted.index
    )
    assert (
        set(shipped().intervals) == set(shipped().fitted)
        and len(shipped().provenance["sha256"]) == 64
    )
    assert np.size(shipped().covariance) == len(shipped().fitted) ** 2
    save(shipped(), tmp_path / "p.json")
    again = load(tmp_path / "p.json")
    assert (
        again.constants == shipped().constants
        and again.residuals == shipped().residuals
    )
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="not a parameters file"):
        load(tmp_path / "bad.json")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")
