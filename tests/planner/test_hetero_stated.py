"""Steps of stated partitions over mixed GPUs: published rows, profiles, limits, wrong
rows.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.papers.metis import write_profiles
from madmax_lib.planner import hetero
from madmax_lib.planner.hetero import Profiles
from madmax_lib.planner.hetero.profiles import LayerProfile
from madmax_lib.planner.hetero.stated import _cases, _constants, _prices
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.steady.layer_costs import layer_costs

ROW = {"model": "tiny", "layers": 6, "hidden": 512, "heads": 8, "vocab": 32000, "seq_len": 512, "n_gpus": 8,
       "software": "megatron-deepspeed", "precision": "fp16", "recompute": "none", "tp": 1, "pp": 4, "dp": 2,
       "micro_batch": 1, "global_batch": 16, "layer_partition": "[0, 2, 4, 6, 8]"}  # fmt: skip
MIXED = ROW | {
    "hetero_groups": "V100x2,T4x2,V100x2,V100x2",
    "hetero_network_gbit": "2.5,12.5,2.5,2.5",
}


def seconds(*rows, **options):
    return hetero.predict(pd.DataFrame(rows), **options)["predicted_s"].tolist()


def test_published_rows_of_mixed_gpus():
    """GPT-2 on 12 V100 and 4 T4 [AMP], to which no constant is fitted; AMP's own model
    is 40 % off. In a pipeline of tensor groups DeepSpeed's hosts stop.
    """
    table = hetero.predict(catalog.table("published_mixed", numbers=True))
    error, theirs = (
        (table[f"{of}_s"] / table["iteration_time_s"] - 1).abs()
        for of in ("predicted", "source_prediction")
    )
    assert (
        len(table) == 26
        and error.mean() <= 0.08
        and error.median() < 0.05
        and theirs.mean() > 0.39
    )
    assert table[["predicted_s", "iteration_time_s"]].corr("spearman").iloc[0, 1] > 0.75


def test_published_rows_of_equal_gpus():
    """GPT-2 on 16 T4 [AMP], in stages as even as DeepSpeed cuts them."""
    rows = pd.read_csv(local_or_skip("published_more/published_more.csv"))
    table = hetero.predict(rows[rows["source"].str.contains("DachengLi1/AMP")])
    assert (
        len(table) == 28
        and (table["predicted_s"] / table["iteration_time_s"] - 1).abs().mean() <= 0.05
    )


def test_a_stage_without_layers_waits_for_others():
    even, bare = seconds(MIXED, MIXED | {"layer_partition": "[0, 0, 3, 5, 8]"})
    assert 0 < even < bare


def test_one_gpu_is_what_estimate_says():
    row = ROW | {
        "gpu": "T4",
        "software": "megatron-2021",
        "n_gpus": 1,
        "pp": 1,
        "dp": 1,
        "layer_partition": None,
        "micro_batch": 2,
    }
    model = mm.model("gpt2")
    row |= {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "vocab": model.vocab,
    }
    plan = mm.Plan(micro_batch=2, attention="unfused")
    step = mm.estimate(replace(model, sequence=512), mm.cluster("colab-t4"), plan, global_batch=16, dtype="fp16",
                       software="megatron-2021").iloc[0]["step_s"]  # fmt: skip
    assert seconds(row) == pytest.approx([step], rel=0.01)


def test_groups_of_equal_gpus_are_equal_gpus():
    named = ROW | {"gpu": "T4", "n_gpus": 16, "dp": 4, "cluster": "g4dn-12xlarge"}
    grouped = ROW | {
        "n_gpus": 16,
        "dp": 4,
        "hetero_groups": ",".join(["T4x4"] * 4),
        "hetero_network_gbit": "12.5,12.5,12.5,12.5",
    }
    one, other = seconds(named, grouped)
    assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_faster_anything_is_never_slower(seed):
    """GPUs, networks and fewer layers on slow GPUs, with types in any order of stages."""
    rng = np.random.default_rng(seed)
    types = rng.permutation(["V100", "T4", "T4", "V100"])
    rates = rng.choice([1.0, 2.5, 10.0], 4)
    tp, dp = [(1, 2), (2, 1)][seed % 2]
    micro = int(rng.choice([1, 2, 4]))

    def row(types, rates):
        groups = {
            "hetero_groups": ",".join(f"{name}x2" for name in types),
            "hetero_network_gbit": ",".join(map(str, rates)),
        }
        return ROW | groups | {"tp": tp, "dp": dp, "micro_batch": micro}

    base, network, gpus = seconds(
        row(types, rates), row(types, 2 * rates), row(["V100"] * 4, rates)
    )
    assert network <= base and gpus <= base
    light, heavy = (
        ("[0, 1, 4, 7, 8]", "[0, 3, 4, 5, 8]")
        if types[0] == "T4"
        else ("[0, 3, 6, 7, 8]", "[0, 1, 2, 4, 8]")
    )
    assert seconds(row(types, rates) | {"layer_partition": light}) != seconds(
        row(types, rates) | {"layer_partition": heavy}
    )


def test_messages_count_with_every_micro_batch():
    """On a network that sets the pace the step grows by a message there and back per
    micro-batch and slowest stage.
    """
    row = MIXED | {"hetero_network_gbit": "0.01,0.01,0.01,0.01"}
    few, many = seconds(row | {"global_batch": 16}, row | {"global_batch": 32})
    message_s = 512 * 512 * 2 / (0.01e9 / 8 * 1448 / 1538)
    assert (many - few) / 8 == pytest.approx(2 * message_s, rel=0.01)


def measured(row, slower=1.0):
    """Profiles that hold what the simulator says of a row's GPUs, times a factor."""
    cases = _cases(row)
    pieces = {
        one.cluster.device.name: layer_costs(Steps.of(one), _constants(one))
        for one in cases
    }
    prices, table = _prices(cases[0], pieces, None), {}
    for (device, tp, _, batch), price in prices.table.items():
        layer_ms = tuple(1e3 * slower * price.layer_s)
        key, ones = (
            ({"v100-16": "V100", "t4": "T4"}[device], tp, batch),
            (1.0,) * len(layer_ms),
        )
        update_ms, whole_ms = 1e3 * prices.optimizer_s[device] / 2 / tp, sum(layer_ms)
        times = {
            "forward_backward_ms": whole_ms,
            "batch_generator_ms": 0.0,
            "layernorm_ms": 0.0,
            "embedding_ms": 0.0,
        }
        table[key] = LayerProfile(*key, layer_ms, ones, ones, total_ms=whole_ms + update_ms, optimizer_ms=update_ms,
                                  between_ms=0.0, **times)  # fmt: skip
    return Profiles(table)


@pytest.mark.parametrize("device", ["T44", "Titan RTX", "GB-10"])
def test_a_device_that_nobody_knows_costs_its_row_alone_or_has_profiles(device):
    row = MIXED | {
        "hetero_groups": f"V100x2,{device.replace(' ', '-')}x2,V100x2,V100x2"
    }
    table = hetero.predict(pd.DataFrame([MIXED, row]))
    assert table["predicted_s"].notna().tolist() == [True, False]
    assert table["reason"].str.startswith("unknown device").tolist() == [False, True]
    name = device.replace(" ", "-")
    known = measured(row | {"hetero_groups": "V100x2,T4x2,V100x2,V100x2"}, 2.0).table
    theirs = {
        (name, *key[1:]): replace(profile, device=name)
        for key, profile in known.items()
        if key[0] == "T4"
    }
    profiles = Profiles({**known, **theirs})
    there, as_t4 = seconds(row, MIXED, profiles=profiles)
    assert there == pytest.approx(as_t4)  # its times and links are those of a T4 here


def test_profiles_take_the_place_of_the_simulators_prices(tmp_path):
    row = MIXED | {"micro_batch": 2}
    assert seconds(row, profiles=measured(row)) == pytest.approx(seconds(row), rel=1e-9)
    assert seconds(row, profiles=measured(row, 2.0)) > seconds(row)
    write_profiles(measured(row), tmp_path)
    rows = tmp_path / "rows.csv"
    pd.DataFrame([row]).to_csv(rows, index=False)
    table = hetero.predict(rows, profiles=tmp_path)
    assert (
        table["predicted_s"].tolist() == pytest.approx(seconds(row), rel=1e-6)
        and "hetero_groups" in table
    )
    with pytest.raises(
        ValueError,
        match=r"row 0: no profile for .* tp 1 batch 1; there are tp 1; batch 2",
    ):
        seconds(MIXED, profiles=measured(row))
    with pytest.raises(
        ValueError,
        match="row 0: profiles of 8 layers for 10, embedding and head included",
    ):
        seconds(
            row | {"layers": 8, "layer_partition": "[0, 3, 5, 7, 10]"},
            profiles=measured(row),
        )
    with pytest.raises(
        ValueError, match="row 0: no profile for a100-80; there are T4, V100"
    ):
        seconds(
            row | {"hetero_groups": "A100-80x2,T4x2,V100x2,V100x2"},
            profiles=measured(row),
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"layer_partition": "[0, 2, 4, 6, 9]"},
            r"row 1: layer_partition \[0, 2, 4, 6, 9\] does not tile 8 layers",
        ),
        (
            {"layer_partition": "[0, 4, 2, 6, 8]"},
            r"layer_partition \[0, 4, 2, 6, 8\] does not tile 8 layers",
        ),
        ({"n_gpus": 99}, "n_gpus=99, but hetero_groups hold"),
        (
            {"layer_partition": "[0, 4, 8]"},
            r"layer_partition \[0, 4, 8\] has 3 entries, not pp \+ 1 = 5",
        ),
        (
            {"hetero_groups": "V100x2,T4x2"},
            "hetero_network_gbit has 4 entries for 2 hetero_groups",
        ),
        (
            {"hetero_groups": "V100x4,T4x2,V100x2,V100x2"},
            "dp x tp x pp = 2 x 1 x 4 are 8 GPUs, .* 10",
        ),
        (
            {"hetero_groups": "V100,T4x2,V100x2,V100x2"},
            "hetero_groups: 'V100' is not TYPExGPUS such as V100x4",
        ),
        ({"hetero_network_gbit": "2.5,-1,2.5,2.5"}, "network_gbit=-1 must be above 0"),
        (
            {"hetero_network_gbit": "2.5,fast,2.5,2.5"},
            "network_gbit='fast' is not a number",
        ),
        ({"micro_batch": None}, "global_batch and micro_batch must be stated"),
        ({"micro_batch": 9}, "micro_batch=9 exceeds 16 samples over dp=2"),
        ({"vpp": 2}, "vpp=2: up to 1 is predicted for stated partitions"),
        ({"zero_stage": 3}, "zero_stage=3: up to 2 is predicted"),
        (
            {"experts": 8, "active_experts": 2},
            "tiny: stated partitions are predicted for dense language models",
        ),
    ],
)
def test_wrong_rows(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        seconds(MIXED, MIXED | change)
    assert "\n" not in str(caught.value)
