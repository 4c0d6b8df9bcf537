"""Metis: counts, plans and costs of the public release, its parts in closed form, and
what does not hold.
"""

import gzip
import json
import math
import tarfile
from itertools import combinations_with_replacement, pairwise, permutations

import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from support import local_or_skip

from madmax_lib.papers.metis import generate_profiles, search
from madmax_lib.papers.metis.balance import Balancer, shift_capacity
from madmax_lib.papers.metis.space import (
    _cool_lex,
    _device_groups,
    _merged,
    group_lists,
)
from madmax_lib.planner.hetero import Node

V100, T4, A100 = (
    ("V100", 16, 50),
    ("T4", 15, 50),
    ("A100", 80, 46),
)  # type, GB, GB/s inside a node
ORDERS = {"A100-V100": ["A100", "V100"], "V100-A100": ["V100", "A100"]}
PROFILES = {layers: generate_profiles(layers, 128) for layers in (10, 20)}
PINNED = {
    "node_order": ["A100", "V100"],
    "global_batch": 128,
    "model_profile": "A100_tp4_bs4",
    "max_permute_len": 128,
    "max_tp": 128,
    "max_bs": 128,
}


def cluster(*counts, gpus=4):
    """Nodes of (type, number) pairs, in this order."""
    return [
        Node.of_file(f"0.0.0.{kind}", *kind[:1], gpus, *kind[1:], 10)
        for kind, number in counts
        for _ in range(number)
    ]


EIGHT = cluster((V100, 4), (A100, 4))  # row 1 of the table
PAIR = cluster((V100, 1), (A100, 1))


def run(nodes=EIGHT, profiles=PROFILES[10], **options):
    return search(profiles, nodes, **{"layers": profiles.layers, **PINNED, **options})


@pytest.mark.parametrize("strategy", [False, True])
@pytest.mark.parametrize(
    "row, layers, nodes, order, counts, inter, costed, best",
    [
        (1, 10, 4, "A100-V100", (612, 562), 176, (206, 183), 1793.600994348526),
        (1, 10, 4, "V100-A100", (612, 562), 176, (206, 183), 1898.3743157594101),
        (3, 20, 16, "A100-V100", (3734, 3482), 320, (454, 328), 1101.6535311937332),
        (3, 20, 16, "V100-A100", (3734, 3482), 320, (454, 328), 1098.3463258328645),
    ],
)
def test_rows_1_and_3(row, layers, nodes, order, strategy, counts, inter, costed, best):
    """Counts, inter-stage plans and costed plans without and with the fork's strategy,
    best cost, and every plan.
    """
    machines = cluster((V100, nodes), (A100, nodes))
    result = run(
        machines, PROFILES[layers], node_order=ORDERS[order], strategy=strategy
    )
    assert (result.count, result.count_total, result.inter_stage_plans) == (
        counts[strategy],
        counts[strategy],
        inter,
    )
    assert (result.costed_plans, result.best_cost_ms, result.dropped) == (
        costed[strategy],
        best,
        0,
    )
    name = f"metis/row{row}_{order}_{'strat' if strategy else 'base'}"
    reference = json.loads(local_or_skip(f"{name}.json").read_text())
    assert result.plans.head(20).to_dict("records") == reference["top"]
    with gzip.open(local_or_skip(f"{name}_all_plans.csv.gz"), "rt") as file:
        every = pd.read_csv(file, float_precision="round_trip")
    ours = result.plans.sort_values("enum_index")
    assert (
        ours["cost"].tolist() == every["cost"].tolist()
        and ours["batches"].tolist() == every["batches"].tolist()
    )
    for column in ("device_groups", "layer_partition"):
        assert [" ".join(map(str, value)) for value in ours[column]] == every[
            column
        ].astype(str).tolist()
    degrees = [
        " ".join(f"{dp}x{tp}" for dp, tp in value) for value in ours["strategies"]
    ]
    assert degrees == every["strategies_dp_tp"].tolist()


def test_files_give_what_loaded_inputs_give(tmp_path):
    with tarfile.open(local_or_skip("metis/inputs/row1_inputs.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    paths = [tmp_path / name for name in ("profile", "hostfile", "clusterfile.json")]
    from_files = search(*paths, layers=10, **PINNED | {"node_order": "V100,A100"})
    pd.testing.assert_frame_equal(from_files.plans, run(node_order="V100,A100").plans)


def test_counting_all_stages_takes_the_first_place_away():
    """Row 1, V100 first: the best plan of two stages is costed as one; one stage on all
    GPUs is not tried at all.
    """
    plans = run(node_order=ORDERS["V100-A100"]).plans
    best = plans.iloc[0]
    assert best["num_stage_used_for_cost"] == 1 and best["device_groups"] == [16, 16]
    honest = plans[plans["num_stage_used_for_cost"] == plans["device_groups"].map(len)]
    assert honest["cost"].iloc[0] == pytest.approx(2371.990, abs=5e-4)
    later = plans[plans["node_sequence"].map(lambda order: order[0] == "A100")]
    assert later["device_groups"].map(len).min() == 2


def test_the_order_of_nodes_matters_in_an_uneven_cluster():
    profiles, nodes = (
        generate_profiles(10, 128, memory="upstream"),
        cluster((V100, 3), (A100, 1), gpus=8),
    )
    first, second = (
        run(nodes, profiles, node_order=order).count for order in ORDERS.values()
    )
    assert first != second


def test_a_plan_that_is_never_worse_is_not_guaranteed():
    """Three types, small groups allowed: with the fork's strategy the search takes
    fewer steps to a worse plan.
    """
    profiles = generate_profiles(
        8, 16, slowdown={"A100": 1, "V100": 3.5, "T4": 5}, memory="upstream"
    )
    nodes, order = cluster((V100, 1), (A100, 1), (T4, 1)), ["A100", "V100", "T4"]
    limits = {
        "global_batch": 16,
        "max_permute_len": 3,
        "max_tp": 4,
        "max_bs": 64,
        "variance": 0.5,
    }
    base, fork = (
        run(nodes, profiles, node_order=order, strategy=strategy, **limits)
        for strategy in (False, True)
    )
    assert {tuple(order) for order in base.plans["node_sequence"]} <= set(
        permutations(["A100", "V100", "T4"])
    )
    assert (
        base.count > fork.count
        and base.best_cost_ms < fork.best_cost_ms
        and base.count < base.count_total
    )


@pytest.mark.parametrize("variance", [1, 0.5])
@pytest.mark.parametrize(
    "gpus, stages", [(8, 1), (8, 3), (12, 4), (16, 5), (24, 3), (7, 3), (6, 1)]
)
def test_device_groups_are_all_permutations(gpus, stages, variance):
    least = max(gpus // stages, stages // gpus) * variance
    shapes = [2**k for k in range(5) if least <= 2**k <= gpus]
    sizes = [c for c in combinations_with_replacement(shapes, stages) if sum(c) == gpus]
    groups = _device_groups(gpus, stages, variance, 128)
    assert len(groups) == len(set(groups)) and set(groups) == {
        order for c in sizes for order in permutations(c)
    }


@pytest.mark.parametrize(
    "sizes, limit, groups",
    [
        ((1, 1, 2, 4, 4, 4, 4), 4, [(1, 1, 2, 4), (4,), (4,), (4,)]),
        ((1, 1, 1, 1, 1, 1, 2, 8), 4, [(1, 1, 1, 1), (1, 1, 2), (8,)]),
        ((2, 2, 4), 3, [(2,), (2,), (4,)]),
        ((2, 2, 4), 2, [(2, 2), (4,)]),
    ],
)
def test_merging(sizes, limit, groups):
    assert _merged(sizes, limit) == groups


def test_cool_lex_shifts_prefixes():
    orders = [
        "".join(str(group[0]) for group in order)
        for order in _cool_lex([(1,), (2,), (2,), (4,)])
    ]
    assert orders[0] == "4221" and len(set(orders)) == len(orders) == 12
    for before, after in pairwise(orders):
        place = next(
            i
            for i in range(4)
            if before[:i] + before[i + 1 :] == after[1:] and before[i] == after[0]
        )
        assert place > 0


def test_later_orders_repeat_the_first_list_of_several_stages():
    lists = [
        ("".join(one.sequence), one.costed_stages, len(one.groups[0]))
        for one in group_lists("AB", 8, 4, variance=1, max_permute_len=8)
    ]
    assert lists == [("AB", n, n) for n in (1, 2, 3, 4)] + [("BA", 1, 2)] + [
        ("BA", n, n) for n in (2, 3, 4)
    ]


def test_a_total_that_is_no_power_of_two_has_no_single_stage():
    found = [
        (block.costed_stages, len(block.groups[0]))
        for block in group_lists("A", 12, 3, variance=1, max_permute_len=8)
    ]
    assert found == [(3, 3)]


@pytest.mark.parametrize(
    "demand, capacity, partition",
    [
        ([0.25] * 4, [1.0], (0, 4)),
        ([0.25] * 4, [0.25, 0.75], (0, 1, 4)),
        ([0.125] * 8, [0.25] * 4, (0, 2, 4, 6, 8)),
        ([0.1] * 10, [0.5, 0.3, 0.2], (0, 5, 8, 10)),
    ],
)
def test_layers_follow_speed(demand, capacity, partition):
    assert Balancer(demand).partition(capacity) == partition


def pieces_one_by_one(demand, capacity):
    """The balancer's pieces given out by comparing every stage for every piece: owner
    of each piece.
    """
    left, piece, stages = (
        list(capacity),
        [d / 7 for d in demand for _ in range(7)],
        range(len(capacity)),
    )
    owner, at = [None] * len(piece), 0
    for stage in stages[:-1]:
        for place in range(at, len(piece) - 8):
            at = place + 1
            if not left[stage] > piece[place]:
                break
            owner[place], left[stage] = stage, left[stage] - piece[place]
    own, last = [], len(capacity) - 1
    for place in reversed(range(len(piece))):
        if owner[place] is None and (
            len(own) < 7 or (place + 1 == own[-1] and left[last] > piece[place])
        ):
            own.append(place)
            owner[place], left[last] = last, left[last] - piece[place]
    for place in range(len(piece)):
        if owner[place] is None:
            held = {
                stage: [p for p, o in enumerate(owner) if o == stage]
                for stage in stages
            }
            below = [
                (max(held[s]), s) for s in stages if held[s] and max(held[s]) < place
            ]
            above = [
                (min(held[s]), s) for s in stages if held[s] and min(held[s]) > place
            ]
            around = range(
                max(below)[1] if below else 0, (min(above)[1] if above else last) + 1
            )
            owner[place] = max(around, key=lambda s: left[s])
            left[owner[place]] -= piece[place]
    return owner


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.05, 1.0, 1.0, 1.0, 2.0]), min_size=2, max_size=9),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.5]), min_size=2, max_size=6).filter(
        any
    ),
    st.sampled_from([0.6, 1.0, 1.3]),
)
def test_pieces_go_where_comparing_all_stages_puts_them(demand, speed, share):
    demand = [value / sum(demand) for value in demand]
    capacity = [share * value / sum(speed) for value in speed]
    assert Balancer(demand)._owners(capacity) == pieces_one_by_one(demand, capacity)


def test_capacity_moves_to_stages_with_memory_to_spare():
    shifted = shift_capacity([0.5, 0.5], [10.0, 40.0], [20.0, 20.0])
    assert shifted[0] == 0.9 * 0.25 and sum(shifted) == pytest.approx(1.0)
    assert shift_capacity([0.5, 0.5], [10.0, 21.0], [20.0, 20.0]) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layers": 12}, "layers=12, but the profiles have 10 layers"),
        ({"global_batch": 0}, "global_batch=0 must be a whole number above zero"),
        (
            {"node_order": ["A100"]},
            "node_order=A100 is not an order of the cluster's types A100, V100",
        ),
        ({"variance": 0}, "variance=0 must be above 0"),
        ({"max_permute_len": 0}, "max_permute_len=0 must be"),
        (
            {"model_profile": "T4_tp1_bs1"},
            "no profile for T4 tp 1 batch 1; there are types A100, V100",
        ),
        ({"global_batch": 96}, "no profile for .* batch (96|48|24|12|6|3)"),
        ({"nodes": cluster((T4, 2))}, "no profile for T4; there are types A100, V100"),
        (
            {"nodes": cluster((V100, 1), (A100, 1), gpus=16)},
            "slots=16: Metis reads one digit",
        ),
        ({"nodes": "hosts"}, "hostfile=hosts needs a clusterfile"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        run(**{"nodes": PAIR, "global_batch": 8} | change)


def test_nodes_that_differ_in_size():
    """The release takes the first node's size for all: it runs while no rank falls
    outside of that, else it crashes.
    """
    nodes = [*cluster((V100, 1), gpus=2), *cluster((A100, 1), gpus=6)]
    with pytest.raises(ValueError, match="nodes differ in size"):
        run(nodes, global_batch=8)


def test_no_feasible_plan():
    tiny = {
        "nodes": [Node.of_file("0.0.0.3", "V100", 4, 1, 50, 10)],
        "node_order": ["V100"],
    }
    result = run(**tiny, global_batch=8)
    assert (
        not result.costed_plans
        and math.isnan(result.best_cost_ms)
        and result.count == 0 < result.count_total
    )
    assert (
        result.reason.startswith("no feasible plan: at least ")
        and " bytes are missing, on ranks " in result.reason
    )
    limited = run(**tiny, global_batch=512, max_bs=1, max_tp=1, max_permute_len=4)
    assert limited.costed_plans == 0 and "no feasible plan" in limited.reason
