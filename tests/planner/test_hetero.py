"""Heterogeneous planning: never worse than trying everything, the cost by hand, Metis'
own plans, bad input.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
from support import local_or_skip

from madmax_lib.papers.metis import generate_profiles, write_cluster, write_profiles
from madmax_lib.planner import hetero
from madmax_lib.planner.hetero import (
    CostRules,
    HeteroPlan,
    HeteroProblem,
    Node,
    PlanCost,
)
from madmax_lib.planner.hetero.costs import shares
from madmax_lib.planner.hetero.fleets import Span, fleets
from madmax_lib.planner.hetero.prices import MB_BYTES, Price, PriceList, bits
from madmax_lib.planner.hetero.stages import Grid
from madmax_lib.planner.hetero.sweep import Sweeper

V100 = Node.of_file("10.0.0.1", "V100", 4, 16, 50, 10)
A100 = Node.of_file("10.0.0.4", "A100", 4, 80, 46, 10)
TINY = {"profiles": generate_profiles(6, 8), "cluster": [V100, A100], "global_batch": 8}


def small(seed, *, live=False):
    """A random problem small enough to try every plan of it; live: with recompute,
    activations in flight count.
    """
    rng = np.random.default_rng(seed)
    types = [("A", "A"), ("A", "A", "B"), ("A", "B", "C")][seed % 3]
    layers = int(rng.integers(2, 4 if len(types) == 3 else 5))
    links = {
        name: (float(rng.integers(40, 50)), float(rng.choice([5, 10])))
        for name in sorted(set(types))
    }
    shared = {
        "sharing": int(rng.integers(0, 4)),
        "intra_s": 1e-4,
        "inter_s": rng.uniform(0, 2e-3),
    }
    nodes = [
        Node.of_file(
            name, name, int(rng.integers(1, 5 - len(types))), 1.0, *links[name]
        )
        for name in types
    ]
    nodes = [replace(node, **shared) for node in nodes]
    ways = (
        [(1, "none"), (2, "none"), (1, "full")]
        if live
        else [(1, "none"), (2, "none"), (4, "none")]
    )
    alike, table = rng.random() < 0.5, {}
    for name, (tp, way), batch in product(links, ways, (1, 2, 4)):
        if rng.random() < 0.1:
            continue
        slow = (
            {"A": 1.0, "B": 2.5, "C": 0.6}[name]
            * rng.uniform(0.8, 1.2)
            * batch**0.8
            / tp**0.7
        )
        layer_s = (
            slow * (1.3 if way == "full" else 1.0) * rng.uniform(0.01, 0.03, layers)
        )
        memory_bytes = MB_BYTES * rng.uniform(100, 400, layers) / tp
        for values in (layer_s, memory_bytes) if alike else ():
            values[1:-1] = values[1]
        live_bytes = np.full(
            layers, live * MB_BYTES * (60 if way == "full" else 150) * batch / tp
        )
        table[name, tp, way, batch] = Price(
            layer_s=layer_s,
            memory_bytes=memory_bytes,
            live_bytes=live_bytes,
            sync_s=rng.uniform(0, 0.003),
            generator_s=rng.uniform(0, 0.001),
            base_bytes=20 * MB_BYTES * live,
        )
    optimizer_s = {name: rng.uniform(0.005, 0.06) for name in links}
    prices = PriceList(
        table,
        np.full(layers, rng.uniform(5e7, 3e8)),
        rng.choice([0.0, 4e7]),
        optimizer_s,
    )
    batch, sequence = int(rng.choice([4, 6])), int(rng.choice([64, 40000]))
    memory_factor = 1.0 if live else float(rng.choice([0.0, 1.0, 1.6]))
    rules = CostRules(
        batch,
        256,
        sequence,
        memory_factor=memory_factor,
        tp_in_node=bool(rng.random() < 0.3),
    )
    return HeteroProblem(prices, tuple(nodes), tuple(fleets(nodes)), rules)


def compositions(total, sizes):
    """All ordered sums of sizes."""
    if total == 0:
        yield ()
    for size in sizes:
        if size <= total:
            yield from ((size, *rest) for rest in compositions(total - size, sizes))


def every_plan(given, sizes):
    """All plans there are, feasible or not."""
    layers = given.prices.layers
    for batches, fleet in given.spaces():
        samples = given.rules.global_batch // batches
        for groups in compositions(fleet.size, sizes):
            ways = [
                [
                    ((size // tp, tp), way)
                    for tp, way in given.prices.ways
                    if size % tp == 0 and size // tp <= samples
                ]
                for size in groups
            ]
            for chosen, cuts in product(
                product(*ways), combinations(range(1, layers), len(groups) - 1)
            ):
                degrees, recompute = zip(*chosen, strict=True)
                yield HeteroPlan(
                    fleet.types, groups, degrees, batches, (0, *cuts, layers), recompute
                )


def brute_force_ms(given, sizes):
    """Least cost over all plans, counted rank by rank."""
    best = np.inf
    for plan in every_plan(given, sizes):
        try:
            best = min(best, hetero.cost(plan, given))
        except (
            ValueError
        ):  # a missing profile, more replicas than samples, tp beyond a node
            continue
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("live", [False, True])
def test_never_worse_than_trying_everything(seed, live):
    given = small(seed, live=live)
    gpus = given.fleets[0].size
    sizes = [range(1, gpus + 1), (1, 2, 4)[: gpus.bit_length()]][seed // 3 % 2]
    best_ms = brute_force_ms(given, sizes)
    if not np.isfinite(best_ms):
        with pytest.raises(ValueError, match="no feasible plan"):
            hetero.plan(given, groups=sizes, progress=False)
        return
    best = hetero.plan(given, groups=sizes, progress=False)
    assert best.cost_ms == pytest.approx(best_ms, rel=1e-9)
    assert best.bound_ms == pytest.approx(best_ms, rel=1e-8) and best.gap <= 1e-9
    assert sum(best.terms.values()) == pytest.approx(best.cost_ms)


@pytest.mark.parametrize(
    ("seed", "known_ms"), [(40, 376.37), (44, 756.12), (52, 476.08), (79, 317.60)]
)
def test_a_fast_next_stage_lets_in_what_a_slow_one_excludes(seed, known_ms):
    """Few GPUs and large messages: plans of these costs exist, with stages that only go
    before a fast one.
    """
    rng, gpus, nodes, table = np.random.default_rng(seed), {}, [], {}
    layers, types = int(rng.integers(5, 9)), "AB" if rng.random() < 0.7 else "A"
    for name in types:
        for number in range(1 + (rng.random() < 0.5)):
            gpus.setdefault(name, int(rng.integers(2, 4)))
            nodes.append(
                Node.of_file(
                    f"{name}{number}",
                    name,
                    gpus[name],
                    1.0,
                    50.0,
                    2.0 if name == "A" else 9.0,
                )
            )
    for name, tp, batch in product(types, (1, 2), (1, 2, 4)):
        slow = (
            (1.0 if name == "A" else 1.7) * rng.uniform(0.8, 1.2) * batch**0.8 / tp**0.7
        )
        layer_s = (
            slow
            * 0.02
            * np.array(
                [rng.uniform(0.3, 2), *[1.0] * (layers - 2), rng.uniform(0.3, 2)]
            )
        )
        memory_bytes = np.full(layers, MB_BYTES * rng.uniform(50, 300) / tp)
        table[name, tp, "none", batch] = Price(
            layer_s, memory_bytes, live_bytes=np.zeros(layers)
        )
    prices = PriceList(table, np.full(layers, 1e8), 0.0, dict.fromkeys(types, 0.02))
    rules = CostRules(
        8,
        256,
        int(rng.choice([40000, 200000, 400000])),
        memory_factor=float(rng.choice([0.0, 1.0])),
    )
    given = HeteroProblem(prices, tuple(nodes), tuple(fleets(nodes)), rules)
    assert hetero.plan(given, progress=False).cost_ms <= known_ms


@pytest.mark.parametrize("seed", range(6))
def test_no_step_takes_longer_than_it_costs(seed):
    """Random plans laid out event by event, messages beside compute: the cost is never
    below, and rarely far above.
    """
    given, rng, ratios = (
        replace(small(seed), rules=CostRules(6, 256, 4000, memory_factor=0)),
        np.random.default_rng(seed),
        [],
    )
    plans = list(every_plan(given, range(1, given.fleets[0].size + 1)))
    for number in rng.choice(len(plans), 12):
        try:
            planned = hetero.Planned.of(plans[number], given)
            spans = hetero.timeline(planned).spans
        except ValueError:  # as in `brute_force_ms`
            continue
        ratios.append(
            (spans["start_ns"] + spans["dur_ns"]).max() / 1e6 / planned.cost_ms
        )
    assert ratios and max(ratios) <= 1 + 1e-5 and np.median(ratios) > 0.8


def test_samples_are_shared_by_largest_remainder_in_powers_of_two():
    assert (
        shares(8, [1, 1, 2]) == [2, 2, 4]
        and shares(5, [3, 1]) == [4, 1]
        and shares(1, [1]) == [1]
    )
    assert shares(7, [1, 1, 1]) == [3, 2, 2] and shares(2, [1, 1, 9]) == [
        0,
        0,
        2,
    ]  # the rest goes to the first
    assert bits(11) == [8, 2, 1] and bits(64) == [64] and bits(0) == []


def by_hand(**rules):
    """Two types, two GPUs each, three layers, every number simple."""
    one, layer_s = np.ones(3), 1e-3 * np.array([1.0, 2.0, 4.0])
    slowness, table = {"A": 1.0, "B": 3.0}, {}
    for name, tp, batch in product(slowness, (1, 2), (1, 2, 4)):
        time_s, memory_bytes = (
            slowness[name] * batch / tp * layer_s,
            100 * MB_BYTES / tp * one,
        )
        table[name, tp, "none", batch] = Price(
            time_s, memory_bytes, 0 * one, sync_s=5e-4, generator_s=2.5e-4
        )
    nodes = (Node.of_file("a", "A", 2, 1, 40, 8), Node.of_file("b", "B", 2, 1, 50, 4))
    prices = PriceList(table, MB_BYTES * one, 0.0, {"A": 6e-3, "B": 12e-3})
    return HeteroProblem(
        prices,
        nodes,
        tuple(fleets(nodes)),
        CostRules(4, hidden=1024, sequence=1024, **rules),
    )


HALVES = HeteroPlan(("A", "B"), (2, 2), ((2, 1), (1, 2)), 2, (0, 2, 3))


def test_cost_by_hand():
    """Stage 0 on A: dp 2, layers 0-2; stage 1 on B: tp 2, layer 2; two micro-batches of
    two samples.
    """
    planned = hetero.Planned.of(HALVES, by_hand())
    first, second = 1 * 3.0, 2 * 4.0 * 3 / 2
    expected = {
        "execution_ms": (2 - 1) * second + first + second,
        "sync_ms": 2 * 0.5,
        "send_ms": 2
        * 1024
        * 1024
        * 2
        / (4 * 2**20),  # there and back, one sample per replica, 2 bytes, between nodes
        "generator_ms": 2 * 0.25,
        "gradients_ms": 2 * (2 - 1) / 2 * 2 / 40,  # two layers inside a node
        "tied_ms": 0.0,
        "optimizer_ms": max(6.0 * 2 / 3, 12.0 / 2 / 3),
    }
    assert planned.terms == pytest.approx(expected)
    assert (
        planned.cost_ms
        == hetero.cost(HALVES, by_hand())
        == pytest.approx(sum(expected.values()))
    )


def test_a_mixed_replica_waits_for_its_slowest_gpu_and_crosses_nodes():
    table = hetero.Planned.of(
        HeteroPlan(("A", "B"), (4,), ((2, 2),), 1, (0, 3)), by_hand()
    ).stages
    assert (table["least_samples"].item(), table["most_samples"].item()) == (
        1,
        3,
    )  # 3 : 1, as their speed
    assert table["stage_ms"].item() == pytest.approx(max(3 / 2, 3 / 2) * 7)
    with pytest.raises(
        ValueError,
        match=r"no profile for A tp 4 batch 4; there are tp 1, 2; batch 1, 2, 4",
    ):
        hetero.cost(HeteroPlan(("A", "B"), (4,), ((1, 4),), 1, (0, 3)), by_hand())


def test_stages_of_one_type_need_not_be_neighbours():
    """The search tries every order of few nodes, so that the slow GPU in between gets
    the light layer.
    """
    table = {
        (name, 1, "none", 1): Price(
            slow * 1e-3 * np.array([4.0, 1.0, 4.0]), np.ones(3), np.zeros(3)
        )
        for name, slow in (("A", 1.0), ("B", 3.0))
    }
    nodes = tuple(
        Node.of_file(address, address[0], 1, 1, 40, 40)
        for address in ("A1", "B1", "A2")
    )
    prices = PriceList(table, np.ones(3), 0.0, {"A": 1e-3, "B": 1e-3})
    given = HeteroProblem(prices, nodes, tuple(fleets(nodes)), CostRules(8, hidden=1))
    assert [fleet.order for fleet in given.fleets] == [
        ("A", "B"),
        ("A", "B", "A"),
        ("B", "A"),
    ]
    best = hetero.plan(given, progress=False)
    assert best.plan.node_sequence == ("A", "B", "A") and best.terms[
        "execution_ms"
    ] == pytest.approx(7 * 4 + 11)
    assert best.stages["types"].tolist() == ["A", "B", "A"] and hetero.as_json(best)[
        "node_sequence"
    ] == ["A", "B", "A"]
    assert hetero.alone(best)["types"].tolist() == ["A", "B", "A+B"]
    with pytest.raises(
        ValueError, match="node_sequence A, B, B is not an order of A, B"
    ):
        hetero.cost(replace(best.plan, node_sequence=("A", "B", "B")), given)


def test_an_order_with_two_nodes_of_a_type_between_others_is_named_by_nodes():
    nodes = [
        replace(node, address=f"{node.address}{i}")
        for node in (V100, A100)
        for i in "ab"
    ]
    given = hetero.problem(
        profiles=generate_profiles(12, 8), cluster=nodes, global_batch=8
    )
    for fleet in given.fleets:
        batches = Sweeper(given, Grid(16, [4, 8], given.prices), 4, fleet)
        plan = batches.chain().plan
        assert plan.node_sequence == fleet.order and hetero.cost(plan, given) > 0


def test_links_have_the_rate_of_where_stages_lie():
    """Four GPUs share a port: a lone stage of a node sends at the rate of all, a ring
    uses what its replicas have.
    """
    nodes = tuple(replace(node, sharing=4, inter_s=1e-3) for node in (V100, A100))
    fleet, rate = fleets(nodes)[0], V100.inter_bytes_per_s
    send_s = [
        fleet.send_s(1e6, Span(0, 0, gpus), tp, False) - 1e-3
        for gpus, tp in ((1, 1), (2, 1), (4, 1), (4, 4), (8, 4))
    ]
    assert send_s == pytest.approx([1e6 / rate / times for times in (4, 2, 1, 4, 4)])
    assert fleet.send_s(1e6, Span(0, 0, 4), 1, True) == pytest.approx(
        1e6 / A100.intra_bytes_per_s
    )
    assert fleet.send_s(1e6, Span(0, 1, 4), 1, False, rate / 5) == pytest.approx(
        1e-3 + 5e6 / rate
    )
    ring_s = [fleet.ring_s(Span(0, 1, 8), tp, False) for tp in (1, 2, 4, 8)]
    assert ring_s == pytest.approx(
        [max(1 / A100.intra_bytes_per_s, 1 / rate / n) for n in (4, 2)] + [1 / rate] * 2
    )
    assert fleets([V100, A100])[0].ring_s(Span(0, 1, 8), 1, False) == pytest.approx(
        1 / rate
    )  # as Metis counts


def test_memory_decides_whether_a_plan_costs_anything():
    given = by_hand(memory_factor=6.0)
    table = hetero.Planned.of(HALVES, given).memory
    assert table["used_mb"].tolist() == [6 * 200, 6 * 50] and table[
        "capacity_mb"
    ].tolist() == [1024, 1024]
    assert not PlanCost(HALVES, given).fits() and hetero.cost(HALVES, given) == np.inf
    assert hetero.cost(HALVES, by_hand()) < np.inf


@pytest.mark.parametrize(
    "cuts, layers, repaired",
    [((0, 0, 2, 3), 5, (0, 1, 2, 5)), ((0, 4, 4, 4), 4, (0, 2, 3, 4))],
)
def test_lost_layers_and_empty_stages_are_repaired(cuts, layers, repaired):
    plan = HeteroPlan(("A",), (1, 1, 1), ((1, 1),) * 3, 1, cuts)
    assert plan.repaired(layers).layer_partition == repaired
    with pytest.raises(ValueError, match="2 layers are fewer than the 3 stages"):
        plan.repaired(2)


LAYERS = {1: 10, 2: 20, 3: 20, 4: 40}
GPUS = {1: 32, 2: 64, 3: 128, 4: 256}


def row_of_the_paper(row, **options):
    """A row of the fork's table: half V100, half A100, nodes of four, groups of powers
    of two.
    """
    count = GPUS[row] // 8
    cluster = [V100] * count + [A100] * count
    groups = [4 << k for k in range(8) if 4 << k <= GPUS[row]]
    inputs = {
        "profiles": generate_profiles(LAYERS[row]),
        "cluster": cluster,
        "global_batch": 128,
        "groups": groups,
    }
    return hetero.plan(**inputs | {"progress": False} | options)


ROWS = [  # row, memory factor, optimum, and the best of Metis' plans by the same cost
    (1, 0, 2137.36, 2405.89), (1, 1, 2502.00, 2694.67), (2, 0, 2207.92, 2207.92), (2, 1, 2590.43, 3078.52),
    (3, 0, 1109.08, 1133.83), (3, 1, 1336.44, 1780.06), (4, 0, 1126.72, None), (4, 1, 1600.65, None),
]  # fmt: skip


@pytest.mark.parametrize("row, memory, cost_ms, metis_ms", ROWS)
def test_the_optimum_of_the_papers_rows(row, memory, cost_ms, metis_ms):
    best, costs_ms = row_of_the_paper(row, memory_factor=memory), []
    assert best.cost_ms == pytest.approx(cost_ms, abs=0.005)
    assert hetero.cost(best.plan, best.problem) == best.cost_ms and best.gap <= 1e-9
    for order, mode in product(
        ("A100-V100", "V100-A100"), ("base", "strat") if metis_ms else ()
    ):
        run = json.loads(
            local_or_skip(f"metis/row{row}_{order}_{mode}.json").read_text()
        )
        costs_ms += [hetero.cost(plan, best.problem) for plan in run["top"]]
    if metis_ms:
        assert min(costs_ms) == pytest.approx(metis_ms, abs=0.005)
        assert best.cost_ms <= min(costs_ms) * (1 + 1e-9)


def test_tp_within_a_node():
    best = row_of_the_paper(2, groups=None, memory_factor=0, tp_in_node=True)
    assert best.cost_ms == pytest.approx(2766, abs=0.5) and best.stages["tp"].max() <= 4


def test_files_and_values_give_the_same(tmp_path):
    write_profiles(TINY["profiles"], tmp_path / "profiles")
    write_cluster(TINY["cluster"], tmp_path / "hosts", tmp_path / "cluster.json")
    names = {"profiles": "profiles", "hostfile": "hosts", "clusterfile": "cluster.json"}
    files = {
        "layers": 6,
        "global_batch": 8,
        **{key: tmp_path / name for key, name in names.items()},
    }
    best = hetero.plan(**files, progress=False)
    same = hetero.plan(**TINY | {"cluster": [A100, V100]}, progress=False)
    assert same.plan == best.plan and same.cost_ms == best.cost_ms
    assert (
        hetero.cost(best.plan, **files)
        == hetero.cost(asdict(best.plan), **files)
        == best.cost_ms
    )


def test_more_of_everything_never_costs_more():
    """Faster links, more memory, or the groups of another search, change the cost in
    one direction only.
    """

    def cost_ms(groups=(1, 2, 4, 8), **change):
        nodes = [replace(node, **change) for node in TINY["cluster"]]
        return hetero.plan(
            **TINY | {"cluster": nodes}, groups=groups, progress=False
        ).cost_ms

    base_ms = cost_ms()
    for change in (
        {"inter_bytes_per_s": 40e9},
        {"memory_bytes": 160e9},
        {"intra_bytes_per_s": 90e9},
        {"sharing": 4},
    ):
        assert cost_ms(**change) <= base_ms
    assert cost_ms(groups=(4, 8)) >= base_ms


def test_a_wider_gap_stays_within_it():
    exact, near = row_of_the_paper(1), row_of_the_paper(1, gap=0.1)
    assert near.sweeps < exact.sweeps and near.gap <= 0.1
    assert near.bound_ms <= exact.cost_ms * (1 + 1e-12) <= near.cost_ms * (1 + 1e-12)


@pytest.mark.parametrize("sweeps", [0, 1, 5])
def test_an_interrupted_search_returns_its_best(sweeps, monkeypatch):
    calls, sweep = [], Sweeper.chain

    def interrupted(self, *box):
        calls.append(box)
        if len(calls) > sweeps:
            raise KeyboardInterrupt
        return sweep(self, *box)

    monkeypatch.setattr(Sweeper, "chain", interrupted)
    if not sweeps:
        with pytest.raises(KeyboardInterrupt, match="before a first plan"):
            row_of_the_paper(1)
        return
    best = row_of_the_paper(1, memory_factor=0)
    assert (
        best.stopped
        and best.gap > 0
        and best.bound_ms <= 2137.37
        and best.cost_ms >= 2137.36
    )
    assert hetero.cost(best.plan, best.problem) == best.cost_ms


LACKING = (
    r"no feasible plan: the fastest lacks \d+ MB on a V100 of 1024 MB, in stage \d of \d "
    r"with \d"
)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"profiles": None}, "give either profiles or model"),
        ({"cluster": None}, "give either hostfile and clusterfile, or cluster"),
        ({"hostfile": "hosts"}, "give either hostfile and clusterfile, or cluster"),
        ({"warp": 1}, "no input warp"),
        ({"dtype": "bf16"}, "dtype: not an input of profiles"),
        ({"layers": 7}, "layers=7, but there are prices for 6 layers"),
        ({"global_batch": 0}, "global_batch=0 must be a whole number above zero"),
        ({"memory_factor": -1}, "memory_factor=-1 must not be negative"),
        ({"gap": 1.5}, r"gap=1.5 is not in 1e-12..1"),
        ({"groups": [16]}, r"groups=\[16\] must be sizes from 1 to the 8 GPUs"),
        (
            {"groups": [3]},
            "no feasible plan: no groups, degrees and micro-batches are covered",
        ),
        (
            {"cluster": [V100, replace(A100, device="T4")]},
            "no profile for T4; there are A100, V100",
        ),
        (
            {"cluster": [V100, replace(V100, memory_bytes=3e10)]},
            "nodes of type V100 have memory_bytes=1.71799e[+]10 and 3e",
        ),
        ({"cluster": [replace(V100, memory_bytes=2.0**30)]}, LACKING),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        hetero.plan(**TINY | change, progress=False)
    assert "\n" not in str(caught.value)


PLAN = {
    "node_sequence": ("V100", "A100"),
    "device_groups": (4, 4),
    "strategies": ((4, 1), (4, 1)),
    "batches": 1,
}
PLAN["layer_partition"] = (0, 3, 6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device_groups": (4, 2)}, "dp x tp = 4 x 1 is not the 2 GPUs"),
        ({"device_groups": (4,)}, "strategies has 2 entries for 1 device groups"),
        (
            {"node_sequence": ("A100",)},
            "node_sequence A100 is not an order of A100, V100",
        ),
        (
            {"device_groups": (4, 8), "strategies": ((4, 1), (8, 1))},
            "device_groups hold 12 GPUs, the cluster has 8",
        ),
        ({"batches": 3}, "batches=3 does not divide global_batch=8"),
        ({"batches": 4}, "dp=4 exceeds the 2 samples"),
        ({"batches": 1.5}, "batches=1.5 must be a whole number"),
        ({"layer_partition": (0, 4, 9)}, "does not go up to the 6 layers"),
        ({"layer_partition": (0, 5, 3)}, "does not go up to the 6 layers"),
        ({"strategies": None}, "not a plan"),
        ({"batches": ...}, "the plan has no batches"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(ValueError, match=message):
        hetero.cost(
            {
                name: value
                for name, value in (PLAN | change).items()
                if value is not ...
            },
            **TINY,
        )


def test_a_problem_or_its_inputs_and_a_plan_in_a_few_lines():
    given = hetero.problem(**TINY)
    for call in (hetero.plan, partial(hetero.cost, PLAN)):
        with pytest.raises(
            ValueError, match="global_batch is part of the given problem"
        ):
            call(problem=given, global_batch=4)
    lines = repr(planned := hetero.Planned.of(PLAN, given)).splitlines()
    assert len(lines) == 4 and lines[0].startswith(
        f"{planned.cost_ms:,.4g} ms for 8 samples"
    )
    assert lines[1].split()[:3] == ["gpus", "types", "dp"] and lines[2].split()[:6] == [
        "4",
        "V100",
        "4",
        "1",
        "0",
        "3",
    ]


def test_cuts_of_a_plan_are_repaired_where_it_is_read_and_checked_where_it_is_given():
    assert hetero.cost(PLAN | {"layer_partition": (1, 3, 6)}, **TINY) == hetero.cost(
        PLAN, **TINY
    )
    for cuts, message in (
        ((1, 3, 6), "does not tile 6 layers"),
        ((0, 6, 6), "with 1 or more a stage"),
    ):
        with pytest.raises(ValueError, match=message):
            PlanCost(
                HeteroPlan(**PLAN | {"layer_partition": cuts}), hetero.problem(**TINY)
            )


def test_missing_profiles_are_left_out_and_named():
    table = TINY["profiles"].table
    fewer = TINY | {
        "profiles": hetero.Profiles(
            {key: p for key, p in table.items() if key[1] == 1 and key[2] < 4}
        )
    }
    best = hetero.plan(**fewer, progress=False)
    assert set(best.stages["tp"]) == {1} and best.stages["most_samples"].max() < 4
    with pytest.raises(
        ValueError, match="no profile for A100 tp 4 batch 8; there are tp 1; batch 1, 2"
    ):
        hetero.cost(PLAN | {"strategies": ((4, 1), (1, 4))}, **fewer)
