"""Summaries of tables whose answer is known."""

from math import isnan, nan

import numpy as np
import pandas as pd
import pytest

from madmax_lib.catalog.models import Transformer
from madmax_lib.runs.read import with_nulls
from madmax_lib.runs.summary import _summarise, counted_steps, flops_per_sample

FLOPS = {"forward": 1e9, "model": 3e9, "hardware": 4e9}


def steps(total_s, samples=8, **columns) -> pd.DataFrame:
    """Steps of the given times; loss falls by one each."""
    count = len(total_s)
    table = pd.DataFrame({"step": range(count), "total_s": total_s, "samples": samples})
    table["loss"] = np.arange(count, 0.0, -1)
    return table.assign(overflow=False, tokens=table["samples"] * 10, **columns)


def summarise(table, devices=1, warmup=0, **env):
    return _summarise(table, flops=FLOPS, devices=devices, env=env, warmup=warmup)


def test_throughput_is_samples_over_wall_time():
    summary = summarise(steps([0.5, 1.0, 1.5, 1.0]), devices=2, peak_flops=1e11)
    mfu = 8 * 3e9 / 2e11
    expected = {"samples_per_s": 32 / 4, "tokens_per_s": 320 / 4, "mfu": mfu}
    expected |= {"hfu": 4 / 3 * mfu, "loss_first": 4.0, "loss_last": 1.0}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert summary["step_s"] == {"median": 1.0, "p25": 0.875, "p75": 1.125, "mean": 1.0}


def test_warm_up_short_batches_and_overflow_do_not_count():
    table = steps([9.0, 9.0, 1.0, 0.1, 1.0, 0.2, 1.0], samples=[8, 8, 8, 8, 8, 3, 8])
    table.loc[3, "overflow"] = True
    summary = summarise(table, warmup=2)
    dropped = {"warm-up": 2, "short": 1, "overflow": 1, "profiled": 0}
    assert summary["steps_dropped"] == dropped
    assert summary["samples_per_s"] == pytest.approx(8.0)
    assert summary["steps_counted"] == 3
    assert isnan(summary["mfu"])  # no peak, no share of it


@pytest.mark.parametrize(
    ("count", "counted", "included"),
    [(20, 15, False), (8, 3, False), (6, 4, True), (3, 1, True)],
)
def test_profiled_steps_count_only_where_few_others_remain(count, counted, included):
    kept, dropped = counted_steps(steps([1.0] * count), 2, range(1, 5))
    assert len(kept) == counted and (kept["step"].isin(range(1, 5))).any() == included
    assert len(kept) + sum(dropped.values()) == count


def test_each_start_of_a_run_warms_up():
    kept, dropped = counted_steps(steps([1.0] * 12), 2, starts=(0, 6))
    assert kept["step"].tolist() == [2, 3, 4, 5, 8, 9, 10, 11]
    assert dropped["warm-up"] == 4


@pytest.mark.parametrize("total_s", [[], [1.0]])
def test_nothing_left_is_unknown_not_an_error(total_s):
    summary = summarise(steps(total_s), peak_flops=1e9, warmup=2)
    assert summary["steps_counted"] == 0
    assert isnan(summary["samples_per_s"]) and isnan(summary["mfu"])


def test_energy_per_step_sample_and_token():
    table = steps([2.0] * 5, energy_j=[100.0, 60, 60, 60, 60])
    summary = summarise(table, warmup=1, power_cap_w=70.0)
    expected = {"power_w": 30, "power_share": 3 / 7, "energy_per_step_j": 60}
    expected |= {"energy_per_sample_j": 7.5, "energy_per_token_j": 0.75}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


SIZES = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 32}
GPT = Transformer("gpt", sequence=16, vocab=100, **SIZES)
VIT = Transformer("vit", image=16, patch=4, classes=10, **SIZES)


@pytest.mark.parametrize(
    ("model", "ends"),
    [(GPT, 2 * 16 * 8 * 100), (VIT, 2 * 16 * 3 * 16 * 8 + 2 * 8 * 10)],
)
def test_flops_by_recomputation(model, ends):
    none, some, full = (
        flops_per_sample(model, recompute=how) for how in ("none", "selective", "full")
    )
    forward = model.forward_flops(1)
    assert none["forward"] == forward
    assert none["model"] == none["hardware"] == full["model"] == 3 * forward
    assert full["hardware"] == pytest.approx(4 * forward - ends)
    # scores and values, two layers
    assert some["hardware"] - some["model"] == 4 * model.sequence**2 * 8 * 2
    assert flops_per_sample(model, frozen=True)["model"] == 2 * forward
    # at another sequence
    assert flops_per_sample(GPT, 4)["forward"] == GPT.forward_flops(1, 4)


def test_unknown_becomes_null():
    row = {"a": nan, "b": [1.0, nan], "c": "x", "d": True}
    assert with_nulls(row) == row | {"a": None, "b": [1.0, None]}
