"""Batches of servers: what their names tell, and what ran for them."""

import numpy as np
import pytest
from support import local_or_skip, make_timeline

from madmax_lib import read_trace
from madmax_lib.traces import batches

NAN = float("nan")
NAMES = {
    "execute_context_2(6144)_generation_3(3)": ("mixed", 5, 6147),
    "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)": (
        "decode",
        32,
        32,
    ),
    "execute_15360_context_15(sq15360sk15360sqsq157sqsk157)_generation_0(sq0sk0sqsq0sqsk0)": (
        "prefill",
        15,
        15360,
    ),
    "execute_new_3_cached_29": ("mixed", 32, NAN),
    "execute_new_0_cached_29": ("decode", 29, 29),
    "step[EXTEND bs=2 toks=14721]": ("prefill", 2, 14721),
    "step[DECODE bs=64]": ("decode", 64, 64),
    "step[MIXED bs=2]": ("mixed", 2, NAN),
    "prefill[bs=2 tok=14721 ctx=[7803, 6918]]": ("prefill", 2, 14721),
    "decode[bs=117/128 tok=117 d=117]": ("decode", 117, 117),
}


def row(name, start, dur, stream=-1, kind="annotation", correlation=-1):
    return (0, stream, kind, name, start, dur, correlation)


@pytest.mark.parametrize(("name", "told"), NAMES.items())
def test_names_of_engines(name, told):
    # not on the device
    rows = [
        row(name, 1_000, 500),
        row(name, 3_000, 500),
        row(name, 1_000, 900, stream=7),
    ]
    rows += [row("l", 1_100 + 100 * n, 10, -2, "cpu", n) for n in range(3)]
    rows += [
        row("k", 1_200, 300, 7, "compute", 0),
        row("k", 1_400, 300, 8, "compute", 1),
        row("x", 900, 50, 7),
    ]
    # between the batches
    rows += [row("l", 1_600, 10, -2, "cpu", 9), row("k", 1_700, 300, 7, "compute", 9)]
    table = batches(make_timeline(rows))
    first, last = table.to_dict("records")
    assert (first["phase"], first["requests"]) == told[:2]
    assert first["tokens"] == pytest.approx(told[2], nan_ok=True)
    assert [first[key] for key in ("wall_s", "period_s", "device_s")] == pytest.approx(
        [5e-7, 2e-6, 5e-7]
    )
    rates = [told[2] / 2e-6, told[2] / 5e-7]
    assert [first["tokens_per_s"], last["tokens_per_s"]] == pytest.approx(
        rates, nan_ok=True
    )
    assert np.isnan(last["period_s"]) and last["device_s"] == 0


def test_who_does_not_serve_has_no_batch():
    rows = [
        row("ProfilerStep#1", 0, 9),
        row("step", 0, 9),
        row("decode", 0, 9),
        row("k", 0, 9, 7, "compute"),
    ]
    assert not len(batches(make_timeline(rows)))


@pytest.mark.parametrize(
    ("name", "phase"),
    [("vllm_decode_exec", "decode"), ("sglang_prefilldecode", "prefill")],
)
def test_recorded_batches(name, phase):
    (batch,) = batches(
        read_trace(local_or_skip(f"traces/more/tracelens/{name}.json.gz"))
    ).to_dict("records")
    assert (
        batch["phase"] == phase
        and batch["tokens"] == {"decode": 32, "prefill": 15360}[phase]
    )
    assert batch["device_s"] > 0 and batch["tokens_per_s"] > 0
