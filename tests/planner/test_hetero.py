"""Heterogeneous planning: never worse than trying everything, the cost by hand, Metis' own plans, bad input."""

import json
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from support import local_or_skip

from madmax_lib.papers.metis.generate import generate_profiles
from madmax_lib.planner import hetero
from madmax_lib.planner.hetero.costs import cost_terms, fits, memory_table, shares, stage_table
from madmax_lib.planner.hetero.nodes import Node, load_cluster, write_cluster
from madmax_lib.planner.hetero.prices import Price, Prices, bits, fleets
from madmax_lib.planner.hetero.profiles import load_profiles, write_profiles
from madmax_lib.planner.hetero.stage_plan import HeteroPlan, Rules

V100 = Node("10.0.0.1", "V100", 4, 16, 50, 10)
A100 = Node("10.0.0.4", "A100", 4, 80, 46, 10)


def small(seed, *, live=False):
    """A random problem small enough to try every plan of it."""
    rng = np.random.default_rng(seed)
    types = [("A", "A"), ("A", "A", "B"), ("A", "B", "C")][seed % 3]
    layers = int(rng.integers(2, 4 if len(types) == 3 else 5))
    nodes = [Node(name, name, int(rng.integers(1, 5 - len(types))), 1.0, float(rng.integers(40, 50)),
                  float(rng.choice([5, 10]))) for name in types]  # fmt: skip
    nodes = [replace(node, intra_gb_per_s=same.intra_gb_per_s, inter_gb_per_s=same.inter_gb_per_s)
             for node in nodes for same in [next(n for n in nodes if n.device == node.device)]]  # fmt: skip
    ways = [(1, "none"), (2, "none"), (1, "full")] if live else [(1, "none"), (2, "none"), (4, "none")]
    alike, table = rng.random() < 0.5, {}
    for name, (tp, way), batch in product(sorted(set(types)), ways, (1, 2, 4)):
        if rng.random() < 0.1:
            continue
        speed = {"A": 1.0, "B": 2.5, "C": 0.6}[name] * rng.uniform(0.8, 1.2) * batch**0.8 / tp**0.7
        speed *= 1.3 if way == "full" else 1.0
        own = rng.uniform(1, 3, layers)
        own[1:-1] = own[1] if alike else own[1:-1]
        held = rng.uniform(100, 400, layers) / tp
        held[1:-1] = held[1] if alike else held[1:-1]
        alive = np.full(layers, (60.0 if way == "full" else 150.0) * batch / tp) if live else np.zeros(layers)
        table[name, tp, way, batch] = Price(10 * speed * own, held, alive, rng.uniform(0, 3), rng.uniform(0, 1),
                                            20.0 if live else 0.0)  # fmt: skip
    size_bytes = rng.uniform(5e7, 3e8) * np.ones(layers)
    prices = Prices(table, size_bytes, {name: rng.uniform(5, 60) for name in sorted(set(types))})
    rules = Rules(int(rng.choice([4, 6])), hidden=256, sequence=int(rng.choice([64, 40000])),
                  memory_factor=float(rng.choice([0.0, 1.0, 1.6])) if not live else 1.0,
                  tp_in_node=bool(rng.random() < 0.3))  # fmt: skip
    return hetero.Problem(prices, tuple(nodes), tuple(fleets(nodes)), rules)


def compositions(total, sizes):
    """All ordered sums of sizes."""
    if total == 0:
        yield ()
    for size in sizes:
        if size <= total:
            yield from ((size, *rest) for rest in compositions(total - size, sizes))


def every_plan(given, sizes):
    """All plans there are, feasible or not."""
    layers, gbs = given.prices.layers, given.rules.global_batch
    for fleet, batches in product(given.fleets, [b for b in range(1, gbs + 1) if gbs % b == 0]):
        for groups in compositions(fleet.size, sizes):
            ways = [[(size // tp, tp, way) for tp, way in given.prices.ways
                     if size % tp == 0 and size // tp <= gbs // batches] for size in groups]  # fmt: skip
            for chosen, cuts in product(product(*ways), combinations(range(1, layers), len(groups) - 1)):
                degrees, recompute = tuple((dp, tp) for dp, tp, _ in chosen), tuple(way for *_, way in chosen)
                yield HeteroPlan(fleet.types, groups, degrees, batches, (0, *cuts, layers), recompute)


def brute_force(given, sizes):
    """Least cost over all plans, counted rank by rank."""
    best = np.inf
    for plan in every_plan(given, sizes):
        try:
            best = min(best, hetero.cost_of(plan, given))
        except ValueError:  # a missing profile, more replicas than samples, tp beyond a node
            continue
    return best


def planned(given, sizes):
    """The planner's answer, None where it finds no plan."""
    try:
        return hetero.plan_of(given, groups=sizes, progress=False)
    except ValueError as reason:
        assert str(reason).startswith("no feasible plan")
        return None


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("live", [False, True])
def test_never_worse_than_trying_everything(seed, live):
    given = small(seed, live=live)
    gpus = given.fleets[0].size
    sizes = [range(1, gpus + 1), (1, 2, 4)[: gpus.bit_length()]][seed // 3 % 2]
    best, found = brute_force(given, sizes), planned(given, sizes)
    assert (found.cost_ms if found else np.inf) == pytest.approx(best, rel=1e-9)
    if found:
        assert found.bound_ms == pytest.approx(best, rel=1e-8) and found.gap <= 1e-9
        assert sum(found.terms.values()) == pytest.approx(found.cost_ms)


@pytest.mark.parametrize("samples, weights, expected", [
    (8, [1, 1, 2], [2, 2, 4]),
    (7, [1, 1, 1], [3, 2, 2]),  # the rest goes to the first
    (2, [1, 1, 9], [0, 0, 2]),
    (5, [3, 1], [4, 1]),
    (1, [1], [1]),
])  # fmt: skip
def test_samples_are_shared_by_largest_remainder(samples, weights, expected):
    assert shares(samples, weights) == expected


def test_samples_come_in_powers_of_two():
    assert bits(11) == [8, 2, 1] and bits(64) == [64] and bits(0) == []


def by_hand(**rules):
    """Two types, two GPUs each, three layers, every number simple."""
    one = np.ones(3)
    layer_ms = np.array([1.0, 2.0, 4.0])
    table = {(name, tp, "none", batch): Price(slow * batch / tp * layer_ms, 100 / tp * one, 0 * one, 0.5, 0.25)
             for name, slow in (("A", 1.0), ("B", 3.0)) for tp in (1, 2) for batch in (1, 2, 4)}  # fmt: skip
    nodes = (Node("a", "A", 2, 1, 40, 8), Node("b", "B", 2, 1, 50, 4))
    prices = Prices(table, 2.0**20 * one, {"A": 6.0, "B": 12.0})
    return hetero.Problem(prices, nodes, tuple(fleets(nodes)), Rules(4, hidden=1024, sequence=1024, **rules))


def test_cost_by_hand():
    """Stage 0 on A: dp 2, layers 0-2; stage 1 on B: tp 2, layer 2; two micro-batches of two samples."""
    given = by_hand()
    plan = HeteroPlan(("A", "B"), (2, 2), ((2, 1), (1, 2)), 2, (0, 2, 3))
    terms = cost_terms(plan, given.prices, given.fleets[0], given.rules)
    first, second = 1 * 3.0, 2 * 4.0 * 3 / 2
    assert terms == pytest.approx({
        "execution_ms": (2 - 1) * second + first + second,
        "sync_ms": 2 * 0.5,
        "send_ms": 1 * 1024 * 1024 * 2 / (4 * 2**20),  # one sample per replica, 2 bytes, between nodes
        "generator_ms": 2 * 0.25,
        "gradients_ms": 2 * (2 - 1) / 2 * 2 / 40,  # two layers inside a node
        "optimizer_ms": max(6.0 * 2 / 3, 12.0 / 2 / 3),
    })  # fmt: skip
    assert hetero.cost_of(plan, given) == pytest.approx(sum(terms.values()))


def test_a_mixed_replica_waits_for_its_slowest_gpu_and_crosses_nodes():
    given = by_hand()
    plan = HeteroPlan(("A", "B"), (4,), ((2, 2),), 1, (0, 3))
    table = stage_table(plan, given.prices, given.fleets[0], given.rules)
    assert (table["least_samples"].item(), table["most_samples"].item()) == (1, 3)  # 3 : 1, as their speed
    assert table["stage_ms"].item() == pytest.approx(max(3 / 2, 3 / 2) * 7)
    across = HeteroPlan(("A", "B"), (4,), ((1, 4),), 1, (0, 3))
    with pytest.raises(ValueError, match=r"no profile for A tp 4 batch 4; there are tp 1, 2; batch 1, 2, 4"):
        hetero.cost_of(across, given)


def test_memory_decides_whether_a_plan_costs_anything():
    given = by_hand(memory_factor=6.0)
    plan = HeteroPlan(("A", "B"), (2, 2), ((2, 1), (1, 2)), 2, (0, 2, 3))
    table = memory_table(plan, given.prices, given.fleets[0], given.rules)
    assert table["used_mb"].tolist() == [6 * 200, 6 * 50] and table["capacity_mb"].tolist() == [1024, 1024]
    assert not fits(plan, given.prices, given.fleets[0], given.rules) and hetero.cost_of(plan, given) == np.inf
    assert hetero.cost_of(plan, by_hand()) < np.inf


def test_lost_layers_and_empty_stages_are_repaired():
    plan = HeteroPlan(("A",), (1, 1, 1), ((1, 1),) * 3, 1, (0, 0, 2, 3))
    assert plan.repaired(5).layer_partition == (0, 1, 2, 5)
    assert HeteroPlan(("A",), (1, 1, 1), ((1, 1),) * 3, 1, (0, 4, 4, 4)).repaired(4).layer_partition == (0, 2, 3, 4)
    with pytest.raises(ValueError, match="2 layers are fewer than the 3 stages"):
        plan.repaired(2)


LAYERS = {1: 10, 2: 20, 3: 20}
EXACT = {(1, 0): 2137.36, (1, 1): 2500.40, (2, 0): 2207.92, (2, 1): 2515.20, (3, 0): 1109.08, (3, 1): 1315.38,
         (4, 0): 1126.72, (4, 1): 1454.22}  # fmt: skip


def row_of_the_paper(row):
    """Nodes and profiles of a row of the fork's table: half V100, half A100, nodes of four."""
    count = {1: 4, 2: 8, 3: 16, 4: 32}[row]
    return {"profiles": generate_profiles(LAYERS.get(row, 40)), "cluster": [V100] * count + [A100] * count}


@pytest.mark.parametrize("row, memory", list(EXACT))
def test_the_optimum_of_the_papers_rows(row, memory):
    found = hetero.plan(**row_of_the_paper(row), global_batch=128, memory_factor=memory, progress=False,
                        groups=[4 << k for k in range(8) if 4 << k <= {1: 32, 2: 64, 3: 128, 4: 256}[row]])  # fmt: skip
    assert found.cost_ms == pytest.approx(EXACT[row, memory], abs=0.005)
    assert hetero.cost_of(found.plan, found.problem) == found.cost_ms and found.gap <= 1e-9


@pytest.mark.parametrize("row, memory, best", [(1, 0, 2405.89), (1, 1, 2682.67), (2, 0, 2207.92), (2, 1, 3052.12),
                                               (3, 0, 1133.83), (3, 1, 1728.06)])  # fmt: skip
def test_no_plan_of_metis_is_better(row, memory, best):
    found = hetero.plan(**row_of_the_paper(row), global_batch=128, memory_factor=memory, progress=False,
                        groups=[4 << k for k in range(6) if 4 << k <= 16 << row])  # fmt: skip
    costs = []
    for order in ("A100-V100", "V100-A100"):
        for mode in ("base", "strat"):
            run = json.loads(local_or_skip(f"metis/row{row}_{order}_{mode}.json").read_text())
            costs += [hetero.cost_of(plan, found.problem) for plan in run["top"]]
    assert min(costs) == pytest.approx(best, abs=0.005)
    assert found.cost_ms <= min(costs) * (1 + 1e-9)


def test_tp_within_a_node():
    found = hetero.plan(**row_of_the_paper(2), global_batch=128, memory_factor=0, tp_in_node=True, progress=False)
    assert found.cost_ms == pytest.approx(2766, abs=0.5) and found.stages["tp"].max() <= 4


def test_files_and_values_give_the_same(tmp_path):
    nodes, profiles = [V100, A100], generate_profiles(6, 8)
    write_profiles(profiles, tmp_path / "profiles")
    write_cluster(nodes, tmp_path / "hosts", tmp_path / "cluster.json")
    files = {"profiles": tmp_path / "profiles", "hostfile": tmp_path / "hosts", "layers": 6, "global_batch": 8,
             "clusterfile": tmp_path / "cluster.json"}  # fmt: skip
    found = hetero.plan(**files, progress=False)
    assert load_cluster(files["hostfile"], files["clusterfile"]) == tuple(nodes)
    assert load_profiles(files["profiles"]) == profiles
    same = hetero.plan(profiles=profiles, cluster=nodes[::-1], global_batch=8, progress=False)
    assert same.plan == found.plan and same.cost_ms == found.cost_ms == hetero.cost(found.plan, **files)
    assert hetero.cost(found.plan.as_dict(), **files) == found.cost_ms


def test_more_of_everything_never_costs_more():
    """Faster links, more memory, or the groups of another search, change the cost in one direction only."""
    base, given = [V100, A100], {"profiles": generate_profiles(6, 8), "global_batch": 8, "progress": False}
    cost_ms = hetero.plan(**given, cluster=base, groups=[1, 2, 4, 8]).cost_ms
    for change in ({"inter_gb_per_s": 40}, {"memory_gb": 160}, {"intra_gb_per_s": 90}):
        better = [replace(node, **change) for node in base]
        assert hetero.plan(**given, cluster=better, groups=[1, 2, 4, 8]).cost_ms <= cost_ms
    assert hetero.plan(**given, cluster=base, groups=[4, 8]).cost_ms >= cost_ms


def test_a_wider_gap_stays_within_it():
    given = {**row_of_the_paper(1), "global_batch": 128, "groups": [4, 8, 16, 32], "progress": False}
    exact, near = hetero.plan(**given), hetero.plan(**given, gap=0.1)
    assert near.sweeps < exact.sweeps and near.gap <= 0.1
    assert near.bound_ms <= exact.cost_ms * (1 + 1e-12) <= near.cost_ms * (1 + 1e-12)


@pytest.mark.parametrize("sweeps", [1, 20])
def test_an_interrupted_search_returns_its_best(sweeps, monkeypatch):
    from madmax_lib.planner.hetero import sweep as hetero_sweep

    calls, sweep = [], hetero_sweep.Sweeper.chain

    def interrupted(self, corner):
        calls.append(corner)
        if len(calls) > sweeps:
            raise KeyboardInterrupt
        return sweep(self, corner)

    monkeypatch.setattr(hetero_sweep.Sweeper, "chain", interrupted)
    found = hetero.plan(**row_of_the_paper(1), global_batch=128, groups=[4, 8, 16, 32], memory_factor=0, progress=False)
    assert found.stopped and found.gap > 0 and found.bound_ms <= 2137.37 <= found.cost_ms
    assert hetero.cost_of(found.plan, found.problem) == found.cost_ms


def test_interrupted_before_any_plan(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("madmax_lib.planner.hetero.sweep.Sweeper.chain", interrupted)
    with pytest.raises(KeyboardInterrupt, match="before a first plan"):
        hetero.plan(**row_of_the_paper(1), global_batch=4, groups=[32], progress=False)


SMALL = {"profiles": generate_profiles(6, 8), "cluster": [V100, A100], "global_batch": 8, "progress": False}


@pytest.mark.parametrize("change, message", [
    ({"profiles": None}, "give either profiles or model"),
    ({"cluster": None}, "give either hostfile and clusterfile, or cluster"),
    ({"layers": 7}, "layers=7, but there are prices for 6 layers"),
    ({"global_batch": 0}, "global_batch=0 must be above 0"),
    ({"memory_factor": -1}, "memory_factor=-1 must not be negative"),
    ({"gap": 1.5}, r"gap=1.5 is not in 0..1"),
    ({"groups": [16]}, r"groups=\[16\] must be sizes from 1 to the 8 GPUs"),
    ({"groups": [3]}, "no feasible plan: no groups, degrees and micro-batches are covered"),
    ({"cluster": [V100, replace(A100, device="T4")]}, "no profile for T4; there are A100, V100"),
    ({"cluster": [V100, replace(V100, memory_gb=32)]}, "nodes of type V100 have memory_gb=16 and 32: that makes two"),
    ({"cluster": [replace(V100, memory_gb=1)]}, r"no feasible plan: at least \d+ bytes \(\d+ MB\) are missing on a "
                                                r"V100 of 1024 MB, in stage \d of \d with \d micro-batches"),
])  # fmt: skip
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        hetero.plan(**SMALL | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change, message", [
    ({"device_groups": (4, 2)}, "dp x tp = 4 x 1 is not the 2 GPUs"),
    ({"device_groups": (4,)}, "strategies has 2 entries for 1 device groups"),
    ({"node_sequence": ("A100",)}, "node_sequence A100 is no order of A100, V100"),
    ({"device_groups": (4, 8), "strategies": ((4, 1), (8, 1))}, "device_groups hold 12 GPUs, the cluster has 8"),
    ({"batches": 3}, "batches=3 does not divide global_batch=8"),
    ({"batches": 4}, "dp=4 exceeds the 2 samples"),
    ({"strategies": None}, "not a plan"),
    ({"layer_partition": (1, 3, 6)}, r"layer_partition \[0, 3, 6\]|does not tile"),
])  # fmt: skip
def test_bad_plans(change, message):
    plan = {"node_sequence": ("V100", "A100"), "device_groups": (4, 4), "strategies": ((4, 1), (4, 1)), "batches": 1,
            "layer_partition": (0, 3, 6)}  # fmt: skip
    given = {name: value for name, value in SMALL.items() if name != "progress"}
    if change == {"layer_partition": (1, 3, 6)}:  # the repair begins at layer 0
        assert hetero.cost(plan | change, **given) == hetero.cost(plan, **given)
        return
    with pytest.raises(ValueError, match=message):
        hetero.cost(plan | change, **given)
    with pytest.raises(ValueError, match="the plan has no batches"):
        hetero.cost({name: value for name, value in plan.items() if name != "batches"}, **given)


def test_missing_profiles_are_left_out_and_named():
    profiles = generate_profiles(6, 8)
    fewer = type(profiles)({key: p for key, p in profiles.table.items() if key[1] == 1 and key[2] < 4})
    found = hetero.plan(**SMALL | {"profiles": fewer})
    assert set(found.stages["tp"]) == {1} and found.stages["most_samples"].max() < 4
    plan = HeteroPlan(("V100", "A100"), (4, 4), ((4, 1), (1, 4)), 1, (0, 3, 6))
    with pytest.raises(ValueError, match="no profile for A100 tp 4 batch 8; there are tp 1; batch 1, 2"):
        hetero.cost(plan, profiles=fewer, cluster=[V100, A100], global_batch=8)
