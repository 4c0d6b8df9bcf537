"""The closed form: limits, conservation, monotonicity, tables against single plans,
published steps.
"""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from oracles.random_cases import STACKS, drawn_cases
from support import cells, refused

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.events.engine import run
from madmax_lib.simulator.layers.ops import pointwise, precision
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    bounds,
    load,
    save,
    shipped,
    to_json,
)
from madmax_lib.simulator.simulate import _lay_out
from madmax_lib.simulator.steady.step_time import PARTS, step_time

GPT = mm.model("gpt3-175b")
CLUSTER = mm.cluster("dgx-a100", nodes=16)
IDEAL = Parameters()


def asked(plan="dp2.tp8.pp8", model=GPT, cluster=CLUSTER, global_batch=64, **options):
    """The row of a plan."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    table = estimate(model, cluster, plan, global_batch=global_batch, **options)
    assert len(table) == 1
    return table.iloc[0]


def compute_bound(cluster):
    """The cluster with memory and links so fast that their traffic takes no time."""
    device = replace(cluster.device, memory_bandwidth_bytes_per_s=1e30)
    intra, inter = (
        replace(link, bandwidth_bytes_per_s=1e30)
        for link in (cluster.intra, cluster.inter)
    )
    return replace(cluster, device=device, intra=intra, inter=inter)


def test_parts_add_up_to_the_step():
    row = asked("dp2.tp8.pp8.z1.full")
    times = ["step_s", "low_s", "high_s"]
    assert [*row.index] == [
        *times,
        *PARTS,
        "mfu",
        "tokens_per_s",
        "memory_bytes",
        "fits",
    ]
    parts = row[list(PARTS)].astype(float)
    assert parts.sum() == pytest.approx(row["step_s"]) and (parts >= -1e-9).all()
    assert row["tokens_per_s"] == pytest.approx(64 * 2048 / row["step_s"])
    assert isinstance(row["fits"], bool | np.bool_)


def test_one_ideal_device_does_its_flops_at_the_peak():
    model, cluster = replace(mm.model("gpt2-large"), layers=2), mm.cluster("colab-t4")
    run = {"global_batch": 8, "dtype": "fp16", "parameters": IDEAL}
    real, table = (
        asked("mb4", model, one, **run) for one in (cluster, compute_bound(cluster))
    )
    s, h = model.sequence, model.hidden
    weights = 2 * 12 * h * h + h * model.vocab
    core = 2 * 4 * s * h * (s + 128) / 2  # causal, whole diagonal blocks
    backward = 2.5 * core  # flash attention computes the scores again
    flops = 8 * (s * 6 * weights + core + backward)
    peak = cluster.device.peak("fp16")
    assert table["step_s"] - table["optimizer_s"] == pytest.approx(flops / peak)
    memory = cluster.device.memory_bandwidth_bytes_per_s
    assert real["optimizer_s"] == pytest.approx(30 * model.parameters / memory)
    others = ["tp_s", "cp_s", "ep_s", "fsdp_s", "bubble_s", "pp_s", "dp_s", "launch_s"]
    assert table[others].abs().sum() < 1e-9


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
ZERO = (0, 1, 2, 3)
RUNS = {
    "zero": ZERO,
    "zero_under_pipeline": ZERO,
    "zero_plus_plus": ("qwz", "hpz", "qgz"),
    "schedules": ("gpipe", "1f1b", "zero-bubble"),
}


def everywhere(software):
    """The software, if it ran every plan."""
    return replace(catalog.software(software), **RUNS)


@pytest.mark.parametrize("size", [0, 100_000])
@pytest.mark.parametrize("name", BASES)
def test_rows_of_a_table_are_their_plans(name, size):
    """Rows share the work of those that differ in one field that it does not depend on,
    and of no others.
    """
    cluster, run = CLUSTER, {"software": everywhere("megatron-core")}
    if name == "gpt2":
        machine = mm.machine(mm.dataset("testbed"))
        cluster = replace(machine.cluster, nodes=8, devices_per_node=2)
        run = {"software": everywhere("workbench"), "dtype": "fp32"}
        run["parameters"] = machine.parameters
    run["global_batch"] = 128
    plans = [Plan.parse(base) for base in BASES[name].split()]
    rows = [vars(replace(plan, zero=zero)) for plan in plans for zero in ZERO]
    rows = [
        row | {field: value}
        for row in rows
        for field, value in [*VARIED.items(), ("zero", row["zero"])]
    ]
    copies = max(size // len(rows), 1)
    table = pd.concat([pd.DataFrame(rows)] * copies, ignore_index=True)
    table.index = [f"row {row}" for row in table.index]
    buckets = np.linspace(1e7, 1e8, len(table) - len(rows))
    table.iloc[len(rows) :, table.columns.get_loc("bucket_bytes")] = buckets
    result = estimate(name, cluster, table, **run)
    known = np.flatnonzero(result["step_s"][: len(rows)].notna())
    assert len(known) > 0.4 * len(rows) and result.index.equals(table.index)
    assert ((result.pop("reason") != "") == result["step_s"].isna()).all()
    for place in known:
        plan = Plan(**vars(Plans.from_table(table.iloc[[place]])[0]))
        alone = asked(plan, name, cluster, **run).astype(float)
        row = result.iloc[place].astype(float)
        np.testing.assert_allclose(row, alone, 1e-12, err_msg=str(plan))


def test_intervals_come_with_the_fit():
    plan = "dp2.tp8.pp8.z1"
    row, unknown = asked(plan), asked(plan, cluster=mm.cluster("mi300x-8", nodes=16))
    wide = row["high_s"] / row["step_s"]
    assert 0.05 < np.log(wide) < 0.4
    assert row["low_s"] * row["high_s"] == pytest.approx(row["step_s"] ** 2)
    assert unknown["high_s"] / unknown["step_s"] > wide
    assert asked(plan, parameters=IDEAL)[["low_s", "high_s"]].isna().all()


@pytest.mark.parametrize(
    ("model", "columns", "timed"),
    cells("""
    gpt3-175b | {"dp": [2, 2, 3], "tp": 8, "pp": [8, 4, 8]} | [True, False, False]
    gpt3-175b | {"dp": 2, "tp": 8, "cp": 8, "context": ["ring", "ulysses"]} | [True, False]
    mixtral-8x7b | {"dp": 64, "tp": 2, "ep": 8, "sequence_parallel": [True, False]} | [True, False]
    """),
)
def test_rows_that_cannot_be_laid_out_have_no_time(model, columns, timed):
    """Wrong numbers of devices; 12 heads a rank for 8 peers; experts need the split."""
    table = estimate(model, CLUSTER, pd.DataFrame(columns), global_batch=64)
    assert table["step_s"].notna().tolist() == timed


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("tp8",), "has 128 devices"),
        (("dp128", mm.model("dlrm-a"), mm.cluster("zionex"), 65536), "use simulate"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments, rule):
    with refused(rule):
        asked(*arguments)


PLANS = """
    dp1 mb2.full selective pp8 pp8.full pp4.dp2.mb2.no-overlap-dp pp8.gpipe pp8.v3
"""


@pytest.mark.parametrize("parameters", [shipped(), IDEAL], ids=["fitted", "ideal"])
@pytest.mark.parametrize("plan", PLANS.split())
def test_engine_and_closed_form_are_equal_where_streams_are_uniform(plan, parameters):
    """All but gradients and update; without a vocabulary stages are equal but for the
    lookup of tokens.
    """
    plan, model = Plan.parse(plan), replace(GPT, vocab=0)
    cluster = replace(CLUSTER, nodes=1, devices_per_node=plan.world_size)
    _, program = _lay_out(Case(model, cluster, plan, 64), parameters)
    ops = zip(run(program)[1], program.name, program.group, strict=True)
    after = ("adam", "end of step", "reductions")
    ends = [end for end, name, group in ops if name not in after and group != "dp"]
    closed = asked(plan, model, cluster, parameters=parameters)
    closed_s = closed["step_s"] - closed[["dp_s", "optimizer_s", "overhead_s"]].sum()
    assert max(ends) == pytest.approx(closed_s, rel=1e-4)


def test_engine_and_closed_form_update_the_same_parameters():
    """Random mixtures, most of them sharded; what differs: norms, router and the
    vocabulary's share.
    """
    drawn = [case for case in drawn_cases("random", 300, 16) if case.model.experts]
    assert sum(case.plan.ep > 1 and case.plan.zero > 0 for case in drawn) > 10
    for case in drawn:
        case = replace(case, model=replace(case.model, vocab=1))
        _, program = _lay_out(case, shipped())
        ops = zip(program.duration_s, program.name, strict=True)
        updates = [seconds for seconds, name in ops if name == "adam"]
        closed_s = step_time(Steps.of(case), shipped())["optimizer_s"][0]
        assert closed_s == pytest.approx(np.mean(updates), rel=2e-3), str(case)


@pytest.mark.parametrize("owners", [1, 8])
def test_muon_adds_the_products_that_make_updates_orthogonal(owners):
    """Of GPT-2's twelve layers, by hand; without ZeRO every device repeats them."""
    h = 768
    qkv_s, square, wide = 4 * h * h * 3 * h + 2 * h**3, 6 * h**3, 18 * h**3
    flops = 12 * 5 * (qkv_s + square + 2 * wide)
    run = {"global_batch": 64, "parameters": Parameters()}
    plan = "dp8.z1" if owners > 1 else "dp8"
    rows = {
        name: mm.estimate("gpt2", "dgx-a100", plan, optimizer=name, **run).iloc[0]
        for name in ("adam", "muon")
    }
    peak = mm.cluster("dgx-a100").device.peak("bf16")
    added_s = rows["muon"].optimizer_s - rows["adam"].optimizer_s
    assert added_s == pytest.approx(flops / owners / peak, rel=1e-9)
    assert rows["muon"].memory_bytes < rows["adam"].memory_bytes
    steps_s = [
        (timeline.spans["start_ns"] + timeline.spans["dur_ns"]).max() * 1e-9
        for timeline in (
            mm.simulate("gpt2", "dgx-a100", plan, optimizer=name, **run)
            for name in rows
        )
    ]
    assert steps_s[1] - steps_s[0] == pytest.approx(added_s, rel=1e-3)


@pytest.mark.parametrize("name", STACKS)
def test_plans_of_several_kinds_of_layers_are_timed_in_a_table_as_alone(name):
    cluster = mm.cluster("dgx-h100", 16)
    plans = mm.search(name, cluster, 256, top=40).table["plan"].tolist()
    table = mm.estimate(name, cluster, plans, global_batch=256)
    columns = ["step_s", "memory_bytes"]
    for row, plan in enumerate(plans):
        alone = asked(plan, name, cluster, 256)[columns].tolist()
        assert table[columns].iloc[row].tolist() == pytest.approx(alone, rel=1e-9), plan


def test_a_row_is_timed_as_alone_beside_rows_that_split_the_backward_pass():
    plans = [
        "dp2.tp4.pp4.cp2.z3.v2.dualpipev.reduce-fp32",
        "dp16.pp4.zb",
        "dp16.pp4.z3.v2.zbv",
    ]
    step = ("llama3-70b", mm.cluster("dgx-h100", 8))
    table = mm.estimate(*step, plans, global_batch=128)
    alone = [mm.estimate(*step, plan, global_batch=128)["step_s"][0] for plan in plans]
    assert table["step_s"].tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(
    "odd", [{"dp": 8.5}, {"dp": np.inf}, {"dp": 2.0**70}, {"tp": 1.5}, {"cp": 1.5}]
)
def test_a_degree_that_is_none_has_a_reason_in_a_table(odd):
    plans = pd.DataFrame(
        [{"dp": 8, "tp": 1, "cp": 1}, {"dp": 8, "tp": 1, "cp": 1} | odd]
    )
    table = mm.estimate("llama3-8b", "dgx-h100", plans, global_batch=32)
    assert table["step_s"].isna().tolist() == [False, True]
    assert table["reason"][0] == "" and "must" in table["reason"][1]


def test_stacked_cases_are_timed_as_alone():
    """Random models, with and without experts, vision, machines, dtypes, software and
    plans, in one array. Beside cp, attention is three blocks, of which each hides its
    own exchange.
    """
    cases = drawn_cases("software", 60, seed=6)
    for odd in range(1, len(cases), 2):
        dtype = cases[odd].cluster.device.nearest("fp8")
        cases[odd] = replace(cases[odd], dtype=dtype)
    together = step_time(Steps.stack(cases), shipped())
    for i, case in enumerate(cases):
        for name, (alone,) in step_time(Steps.of(case), shipped()).items():
            near = 2e-3 if name in ("tp_s", "step_s") else 1e-12
            seconds = together[name][i]
            assert seconds == pytest.approx(alone, rel=near, abs=1e-12), (name, case)


@pytest.mark.parametrize(
    ("name", "dtype"), [("rtx-5090", "nvfp4"), ("h100", "fp8"), ("b200", "nvfp4")]
)
def test_families_without_constants_are_as_wide_as_others(name, dtype):
    device = replace(catalog.device(name), family="other")
    cluster = replace(mm.cluster("dgx-h100"), device=device)
    rows = [
        asked("dp8.z3", "llama3-8b", one, 8, dtype=of)
        for one, of in ((cluster, dtype), ("dgx-b200", "bf16"))
    ]
    wide, known = (row["high_s"] / row["low_s"] for row in rows)
    assert 0 < rows[0]["low_s"] < rows[0]["step_s"] < rows[0]["high_s"]
    assert wide > known


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        *(
            ({"compute_efficiency": value}, f"compute_efficiency={value} & (0, 1]")
            for value in (0, 1.5, float("nan"))
        ),
        ({"constants": {"speed": 1.0}}, "constant 'speed' & not in"),
    ],
    ids=str,
)
def test_parameters_are_checked(fields, rule):
    with refused(rule):
        Parameters(**fields)


def test_fitted_parameters_are_within_their_bounds():
    fitted = bounds().query("scale != 'fixed'")
    values = pd.Series(shipped().constants)[fitted.index]
    for column in (fitted["start"], values):
        assert (fitted["low"] <= column).all() and (column <= fitted["high"]).all()
    assert IDEAL.constants["gemm_efficiency:ampere-16"] == 1
    assert IDEAL.constants["step_s:fused"] == 0
    # the pace of strangers is learned beside the fit
    learned = {*shipped().fitted, "stack_rate:stranger"}
    assert set(shipped().intervals) == learned
    assert len(shipped().provenance["sha256"]) == 64
    assert np.size(shipped().covariance) == len(shipped().fitted) ** 2


def test_parameters_are_written_and_read(tmp_path):
    save(shipped(), tmp_path / "p.json")
    again = load(tmp_path / "p.json")
    assert again.constants == shipped().constants
    assert again.residuals == shipped().residuals
    (tmp_path / "bad.json").write_text("{}")
    with refused("not a parameters file"):
        load(tmp_path / "bad.json")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")


def test_files_from_before_kernels_alone_keep_their_meaning(tmp_path):
    """Shares of the data sheet, without the constants that are no more."""
    old = to_json(shipped())
    del old["constants"]["data_sheet"]
    old["constants"]["device_rate:b200"] = 1.05
    old["intervals"]["device_rate:b200"] = [1.0, 1.1]
    old["fitted"] = ["device_rate:b200", *old["fitted"]]
    size = len(old["fitted"])
    old["covariance"] = np.pad(old["covariance"], ((1, 0), (1, 0))).tolist()
    assert np.shape(old["covariance"]) == (size, size)
    (tmp_path / "old.json").write_text(json.dumps(old))
    again = load(tmp_path / "old.json")
    assert again.constants == shipped().constants | {"data_sheet": 1.0}
    assert again.fitted == shipped().fitted
    assert np.allclose(again.covariance, shipped().covariance, rtol=1e-4)
    full = {"gemm_efficiency:hopper-16": 1.0}
    products = [
        mm.estimate(
            "llama2-7b",
            "dgx-h100",
            "dp8.z1",
            global_batch=8,
            parameters=Parameters(constants=full | {"data_sheet": on_paper}),
        )["gemm_s"].iloc[0]
        for on_paper in (1.0, 0.0)
    ]
    alone = mm.simulator.kernel_rates("h100", "gemm").rates[0].flops_per_s
    peak = mm.cluster("dgx-h100").device.peak("bf16")
    assert products[0] / products[1] == pytest.approx(alone / peak, rel=0.02)


def test_every_chunk_of_a_stage_costs_its_switches():
    """Per micro-batch one before its forward pass and one before its backward pass."""
    where = mm.cluster("dgx-a100", nodes=4)
    plans = [f"dp1.tp8.pp4.v{chunks}" for chunks in (1, 3, 12)]
    one, three, twelve = (
        mm.estimate("gpt3-175b", where, plan, global_batch=64)["launch_s"].item()
        for plan in plans
    )
    assert 0 < (three - one) / 2 == pytest.approx((twelve - one) / 11)


@pytest.mark.parametrize(("device", "share"), [("dgx-h100", 0.67), ("dgx-a100", 0.68)])
def test_convolutions_of_mixers_take_their_measured_rate(device, share):
    """Of memory's rate; on A100, of which no row is kept, the most of all."""
    case = Case("mamba2-2.7b", device, Plans(dp=8), 64)
    prices = Prices(Steps.of(case), shipped())
    moved = pointwise("convolution", 1e9, 1e9, precision("bf16"), kind="convolution")
    memory = case.cluster.device.memory_bandwidth_bytes_per_s
    assert prices.op_s(moved) == pytest.approx(4e9 / (share * memory), rel=0.01)
