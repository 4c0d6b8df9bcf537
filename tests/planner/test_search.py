"""The best plan is the best of all, however the search is spread out, stopped and
resumed.
"""

import ast
import pickle
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support import launched, plans_of_space as plans

import madmax_lib as mm
from madmax_lib import memory, search
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.software import STACKS
from madmax_lib.planner import (
    Goodput,
    Space,
    codesign,
    distribute as shards_module,
    evaluate as evaluate_module,
    plan_of,
    practice,
    training,
)
from madmax_lib.planner.evaluate import _OBJECTIVES
from madmax_lib.planner.money.codesign import _RESOURCES, _scaled
from madmax_lib.simulator import peak_bytes, usable_bytes
from madmax_lib.simulator.power import device_energy_j
from madmax_lib.simulator.steady.step_time import PARTS

MODEL = replace(mm.model("gpt2-large"), layers=12, heads=8, kv_heads=8, head_dim=160)
NODE = mm.cluster("dgx-a100", nodes=1)
SPACE = Space(attention=("flash",), recompute=("none", "full"), schedule=("1f1b", "zero-bubble"), hybrid=(2, 4),
              overlap_gather=(True,), reduce_fp32=(False,), prefetch=(1,), quantised=False)  # fmt: skip
GPT, LARGE = mm.model("gpt3-175b"), mm.cluster("dgx-a100", nodes=16)


@pytest.fixture(scope="module")
def brute():
    """Every plan that a stack launches on its own: step_s and memory_bytes by plan."""
    rows = {}
    for plan in plans(SPACE, MODEL, NODE, 16):
        if not launched(plan, MODEL, NODE, 16):
            continue
        step_s = mm.estimate(MODEL, NODE, plan, global_batch=16)["step_s"][0]
        rows[plan] = step_s, peak_bytes(memory(MODEL, plan, global_batch=16))
    return rows


def test_the_winner_is_the_best_of_all(brute, found):
    assert found.evaluated == len(brute) > 200
    left = found.dropped.set_index("rule")["count"]["a stack must launch it"]
    assert left == len(plans(SPACE, MODEL, NODE, 16)) - len(brute) > 0
    feasible = {
        plan: cost
        for plan, cost in brute.items()
        if cost[1] <= usable_bytes(NODE.device)
    }
    assert found.feasible == len(feasible)
    distinct = sorted(
        {tuple(map(float, np.float32(cost))) for cost in feasible.values()}
    )[:20]
    everything = search(MODEL, NODE, 16, space=SPACE, top=10**6, progress=False).table
    np.testing.assert_allclose(
        everything["step_s"].sort_values().head(20),
        [step_s for step_s, _ in distinct],
        rtol=1e-6,
    )
    assert found.best == plan_of(everything.iloc[0])
    assert found.table["launched_s"].is_monotonic_increasing
    assert not found.table.duplicated(["step_s", "memory_bytes"]).any()
    assert found.feasible > len(everything)


@pytest.fixture(scope="module")
def found():
    return search(MODEL, NODE, 16, space=SPACE, progress=False)


def test_rows_are_the_estimate_and_the_memory_of_their_plans(brute, found):
    for row in pd.concat([found.table, found.pareto]).to_dict("records"):
        stack = row["stacks"].split()[0]
        held = peak_bytes(memory(MODEL, plan_of(row), global_batch=16, software=stack))
        cost = brute[plan_of(row)][0], held
        assert cost == pytest.approx((row["step_s"], row["memory_bytes"]), rel=1e-12)
        assert mm.Plan.parse(row["plan"]) == plan_of(row)


def test_uneven_stages_cost_what_estimate_and_memory_say():
    model, run = (
        replace(MODEL, layers=14),
        {"global_batch": 16, "software": "megatron-core"},
    )
    space = replace(Space.quick(), pp=(4,), recompute="none")
    table = search(
        model, NODE, 16, space=space, software="megatron-core", top=30, progress=False
    ).table
    assert (table["last_layers"] > 0).any() and table["head_as_layer"].any()
    for row in table.to_dict("records"):
        step_s = mm.estimate(model, NODE, plan_of(row), **run)["step_s"][0]
        assert row["memory_bytes"] == pytest.approx(
            peak_bytes(memory(model, plan_of(row), **run)), rel=1e-12
        )
        assert row["step_s"] == pytest.approx(step_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_every_row_of_a_table_goes_through_estimate(seed):
    draw = np.random.default_rng(seed)
    experts = {"experts": 8, "active_experts": 2} if seed % 2 else {}
    model = replace(MODEL, layers=int(draw.integers(2, 16)), **experts)
    space, batch = (
        replace(Space.quick(), usual_interleave=False),
        int(draw.choice([16, 24, 32])),
    )
    table = search(model, NODE, batch, space=space, top=10**6, progress=False).table
    for plans_of_table in (table, table[["plan"]]):
        steps = mm.estimate(model, NODE, plans_of_table, global_batch=batch, fits=False)
        np.testing.assert_allclose(steps["step_s"], table["step_s"], rtol=1e-12)


@pytest.mark.parametrize(
    ("software", "column"), [("megatron-core", "step_s"), (None, "launched_s")]
)
def test_no_plan_is_better_in_time_and_memory_than_the_front(software, column):
    asked = {"space": SPACE, "software": software, "progress": False}
    front = search(MODEL, NODE, 16, **asked, top=10**6 if software is None else 20)
    everything = search(MODEL, NODE, 16, **asked, top=10**6).table
    front = front.pareto[[column, "memory_bytes"]].to_numpy()
    assert (np.diff(front[:, 0]) > 0).all() and (np.diff(front[:, 1]) < 0).all()
    for cost in everything[[column, "memory_bytes"]].to_numpy():
        assert (front <= cost * (1 + 1e-12)).all(axis=1).any()


@pytest.mark.parametrize(("objective", "column"), _OBJECTIVES.items())
def test_objectives(objective, column):
    run = {"space": SPACE, "usd_per_hour": 2.0, "progress": False}
    found = search(MODEL, NODE, 16, objective, top=5, **run)
    least = search(MODEL, NODE, 16, top=10**6, **run).table[column].min()
    if objective == "time":
        column = "launched_s"
    if objective in ("time", "memory"):  # no stack has a better plan
        asked = run | {"top": 1, "objective": objective}
        named = [search(MODEL, NODE, 16, software=name, **asked) for name in STACKS]
        least = min(one.table[_OBJECTIVES[objective]][0] for one in named)
    assert len(found.table) == 5 and found.table[column].is_monotonic_increasing
    assert found.table[column].iloc[0] == pytest.approx(least, rel=1e-12)


def test_equal_memory_goes_to_the_faster_plan():
    space = replace(
        SPACE, zero=(1,), pp=(1,), tp=(1,), overlap_gather=(False, True)
    )  # the slower gather comes first
    run = {"objective": "memory", "space": space, "progress": False}
    everything = search(MODEL, NODE, 16, top=10**6, **run).table
    for top in (1, 3):
        found = search(MODEL, NODE, 16, top=top, **run).table
        ordered = everything.sort_values(["memory_bytes", "step_s"])[:top]
        np.testing.assert_array_equal(
            found[["memory_bytes", "step_s"]], ordered[["memory_bytes", "step_s"]]
        )


def test_simulate_agrees_with_the_winner():
    best = search(GPT, LARGE, 128, space=Space.quick(), top=3, progress=False)
    for row in best.table.to_dict("records"):
        step = mm.simulate(GPT, LARGE, plan_of(row), global_batch=128).spans
        assert (step["start_ns"] + step["dur_ns"]).max() / 1e9 == pytest.approx(
            row["step_s"], rel=0.03
        )


def test_shards_together_are_the_whole(found):
    parts = [
        search(MODEL, NODE, 16, space=SPACE, shard=i, shards=3, progress=False)
        for i in range(3)
    ]
    assert sum(part.evaluated for part in parts) == found.evaluated
    # parts keep more plans between them, of which some are launched better
    launched_s = pd.concat([part.table for part in parts])["launched_s"]
    assert (np.sort(launched_s)[:20] <= found.table["launched_s"]).all()
    np.testing.assert_array_equal(
        np.sort(launched_s)[:1], found.table["launched_s"][:1]
    )


def test_a_shard_may_hold_no_plan_that_fits():
    large = replace(NODE, nodes=2)
    parts = [
        search(GPT, large, 16, space=Space.quick(), shard=i, shards=8, progress=False)
        for i in range(8)
    ]
    assert not any(part.feasible for part in parts) and all(
        part.table.empty for part in parts
    )


def test_a_stopped_search_has_the_best_so_far(monkeypatch, found):
    real = shards_module.evaluated

    def stops(problem, part):
        for result in real(problem, part):
            yield result
            if result.feasible:
                raise KeyboardInterrupt

    monkeypatch.setattr(shards_module, "evaluated", stops)
    half = search(MODEL, NODE, 16, progress=False)
    assert not half.complete and half.evaluated > 0
    assert len(half.table) == 20 and half.hint == ""


@pytest.mark.parametrize("name", ["gpt2-large", "mixtral-8x7b", "nemotron-h-8b"])
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_plans_of_many_degrees_are_found_as_in_their_products(
    monkeypatch, name, objective
):
    """The formulas see the plans of small products as one column, else as products."""

    def found(most):
        monkeypatch.setattr(evaluate_module, "_SMALL_PLANS", most)
        cluster = mm.cluster("dgx-h100", nodes=2)
        options = {"space": Space.quick(), "progress": False}
        return search(name, cluster, 64, objective, **options)

    in_columns, in_products = found(1 << 30), found(0)
    for table in ("table", "pareto", "different", "dropped"):
        both = (getattr(result, table) for result in (in_columns, in_products))
        pd.testing.assert_frame_equal(*both, check_exact=True)
    assert in_columns.evaluated == in_products.evaluated


def test_the_best_does_not_depend_on_how_many_are_asked_for():
    """Stacks change the order of plans: one is the best under DeepSpeed's step, another
    as Megatron-Bridge launches it.
    """
    cluster = mm.cluster("dgx-a100", devices=5)
    run = {"sequence": 2048, "progress": False}
    first, ten = (search("llama2-7b", cluster, 8, top=top, **run) for top in (1, 10))
    assert first.best == ten.best and len(first.table) == 1
    # what beats a recipe is compared as launched, too
    beaten = search("llama2-7b", cluster, 8, like="pp5", **run).beats
    assert beaten["plan"][1] == str(first.best)
    gain = 1 - beaten["launched_s"][1] / beaten["launched_s"][0]
    assert beaten["saves"][1] == pytest.approx(gain) and gain > 0.1


@pytest.mark.parametrize("objective", ["time", "memory", "energy"])
def test_no_plan_of_the_front_is_beaten(objective):
    space = replace(Space.quick(), zero=(0, 1, 3))
    found = search("llama3-8b", "dgx-h100", 64, objective, space=space, progress=False)
    front = found.pareto.sort_values("launched_s")
    assert front["memory_bytes"].is_monotonic_decreasing and len(front) > 3
    assert found.pareto.index.tolist() == list(range(len(front)))
    assert ("to be the fastest" in repr(found)) == (objective == "time")


def test_workers_find_what_one_process_finds(dask_client, found):
    options = {"space": SPACE, "progress": False}
    spread = search(MODEL, NODE, 16, client=dask_client, **options)
    pd.testing.assert_frame_equal(spread.table, found.table)
    pd.testing.assert_frame_equal(spread.pareto, found.pareto)
    assert (spread.evaluated, spread.feasible) == (found.evaluated, found.feasible)
    assert spread == found


def test_slurm_workers_are_asked_for_as_the_docs_say():
    """The lines of the page make a job script; nothing is submitted."""
    jobqueue = pytest.importorskip("dask_jobqueue")
    page = (PROJECT / "docs" / "which-plan-is-best.md").read_text()
    asked = re.search(r"SLURMCluster\((.*?)n_workers=32", page, re.DOTALL)[1]
    options = dict(re.findall(r"(\w+)=([^,]+),", asked))
    with jobqueue.SLURMCluster(**{name: ast.literal_eval(value) for name, value in options.items()},
                               scheduler_options={"dashboard_address": ":0"}) as cluster:  # fmt: skip
        script = cluster.job_script()
    assert (
        "#SBATCH -p cpu" in script
        and "#SBATCH --cpus-per-task=8" in script
        and "#SBATCH -t 01:00:00" in script
    )
    assert "--nworkers 8" in script


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"objective": "speed"},
            "objective='speed' is not one of time, cost, energy, memory",
        ),
        (
            {"objective": "cost", "cluster": mm.cluster("mi300x-8", nodes=1)},
            "objective='cost' needs a price",
        ),
        (
            {"objective": "cost", "cluster": mm.cluster("dgx-h100", nodes=1)},
            "h100-80 has none of this year",
        ),
        (
            {"global_batch": 7, "space": Space(pp=(1,), tp=(1,), cp=(1,))},
            "dp must divide the global batch",
        ),
        (
            {"model": GPT},
            "no plan of gpt3-175b fits: the least needs .* GB per device, a100-80 has 8",
        ),
        ({"model": mm.model("dlrm-a")}, "recommendation models are split by dp only"),
        (
            {"model": replace(MODEL, sequence=0)},
            "gpt2-large has no sequence of its own; give sequence=",
        ),
        (
            {"space": Space(micro_batch=(5,))},
            "names no micro-batch, schedule or ZeRO stage that divides",
        ),
        ({"shard": 3, "shards": 3}, "shard=3 is not one of 0 to 2"),
        ({"top": 0}, "top=0 must be a whole number above zero"),
    ],
)
def test_what_cannot_be_searched(change, message):
    arguments = {
        "model": MODEL,
        "cluster": NODE,
        "global_batch": 16,
        "space": SPACE,
        "progress": False,
    } | change
    with pytest.raises(ValueError, match=message):
        search(**arguments)


def test_energy_is_between_idle_and_the_limit():
    table = mm.estimate(GPT, LARGE, mm.Plan.parse("dp2.tp8.pp8.full"), global_batch=64)
    energy = device_energy_j(table[[*PARTS, "step_s"]], LARGE.device)[0]
    assert 0.15 * 400 * table["step_s"][0] < energy < 400 * table["step_s"][0]
    with pytest.raises(ValueError, match="has no TDP in the catalog"):
        device_energy_j(table, replace(LARGE.device, tdp_w=float("nan")))


def test_more_of_a_resource_is_never_worse():
    table = codesign(MODEL, NODE, 16, (0.5, 2.0))
    assert table["resource"].tolist() == ["as it is", *np.repeat([*_RESOURCES], 2)]
    more = table[table["factor"] > 1]
    assert (more["speedup"] >= 1 - 1e-9).all() and (
        table["value"].dropna() > -1e-9
    ).all()
    assert table.set_index("resource")["value"].get("compute").max() > 0.2


def test_scaled_clusters():
    faster = _scaled(NODE, "compute", 2.0)
    assert faster.device.peak("bf16") == 2 * NODE.device.peak("bf16")
    assert (faster.intra, faster.inter) == (NODE.intra, NODE.inter)
    wider = _scaled(NODE, "inter", 3.0)
    assert wider.inter.bandwidth_bytes_per_s == 3 * NODE.inter.bandwidth_bytes_per_s
    with pytest.raises(ValueError, match="intra: factor=0 must"):
        _scaled(NODE, "intra", 0)


def test_training_time_and_cost(found):
    """Days are steps over the goodput, as much longer as trainings take; hours, money
    and energy follow from them.
    """
    (factor, width), price = practice(), 5.12125
    table = training(found.table, 1e12, NODE, price)
    first = table.iloc[0]
    assert first["days"] * 86400 == pytest.approx(
        factor * 1e12 / first["tokens_per_s"] / first["goodput"]
    )
    assert first["usd"] == pytest.approx(first["days"] * 24 * 8 * price)
    assert first["mwh"] * 3.6e9 == pytest.approx(
        first["energy_j"] / first["step_s"] * first["days"] * 86400
    )
    for name in ("days", "device_hours", "usd", "mwh"):
        low, high = (
            np.log(first[f"{name}_low"] / first[name]),
            np.log(first[f"{name}_high"] / first[name]),
        )
        assert low == pytest.approx(-high) and high >= width - 1e-12
    free = training(
        found.table[["tokens_per_s"]],
        1e12,
        NODE,
        goodput=Goodput(restart_s=0, evaluation=0),
    )
    assert (
        free["goodput"].iloc[0] == 1
        and (free["days"] < table["days"]).all()
        and "mwh" not in free
    )


def test_answers_are_equal_after_a_round_trip():
    """Tables and unknown numbers (NaN) included."""
    run = {"model": "gpt2", "cluster": "dgx-a100", "global_batch": 64}
    found, again = (
        mm.search(**run, software="megatron-core", progress=False) for _ in range(2)
    )
    assert found == again and found != replace(again, evaluated=0)
    held = [mm.fits(**run, plan=plan) for plan in ("dp8", "dp8.z1")]
    for answer in (found, *held):
        assert pickle.loads(pickle.dumps(answer)) == answer != 3
    assert held[0] != held[1]
