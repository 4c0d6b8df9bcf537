"""A calibration of the testbed, made here and now: the rates of its links, and how well
it predicts.

Some 40 s alone on a machine, and only there: `.ci/run` asks for it behind all other
tests. Its bounds hold beside other work too; `benchmarks/testbed.py` measures what a
quiet machine does.
"""

import os
import sys

import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.calibration.machine.calibrate import _planned_runs
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from tests.support import needs_namespaces

RECORDED, NETWORK, RATE = PROJECT / "traces" / "testbed", "300mbit", 300e6 / 8
LARGE_BYTES = 2**18  # the link's rate counts above, latency below
STEP_ERROR, MEMORY_ERROR = 0.6, 0.15
# kind: bytes on the wire over the size, and seconds over those of the wire at most;
# gloo gathers both ways, or in turn
LINKS = {"all_reduce": (1.0, 1.35), "send_recv": (1.0, 1.35), "all_gather": (0.5, 2.3)}


@pytest.mark.skipif(
    not os.environ.get("MADMAX_TESTBED"), reason="MADMAX_TESTBED=1 calibrates here"
)
@needs_namespaces
def test_a_calibration_made_here_agrees_with_the_recorded_one(tmp_path, monkeypatch):
    few = {
        "fitted": ["wide dp", "short dp", "long dp", "short tp"],
        "predicted": ["gpt dp", "gpt z3"],
    }
    stages = sys.modules[mm.calibrate.__module__]
    monkeypatch.setattr(
        stages,
        "_planned_runs",
        lambda purpose: [
            run for run in _planned_runs(purpose) if run.name in few[purpose]
        ],
    )
    monkeypatch.setattr(sys.modules[_planned_runs.__module__], "_STEPS", 6)
    made = mm.calibrate(tmp_path, hosts=2, network=NETWORK, device="cpu")
    curves = [
        MeasuredCollectives(pd.read_csv(folder / "links.csv"))
        for folder in (tmp_path, RECORDED)
    ]
    for kind, (share, most) in LINKS.items():
        for size_bytes in (LARGE_BYTES, 4 * LARGE_BYTES):
            seconds, wire_s = (
                curves[0].seconds(kind, 2, 2, size_bytes),
                share * size_bytes / RATE,
            )
            assert 0.85 * wire_s < seconds < most * wire_s, (kind, size_bytes)
    all_reduce_s = [of.seconds("all_reduce", 2, 2, 4 * LARGE_BYTES) for of in curves]
    assert all_reduce_s[0] == pytest.approx(all_reduce_s[1], rel=0.1)
    results = pd.read_csv(tmp_path / "results.csv", index_col="run")
    assert results.index.tolist() == ["gpt dp", "gpt z3"]
    # what ran here before may still count as load
    assert not [note for note in made.provenance["notes"] if "busy" not in note]
    assert results["error"].abs().max() < STEP_ERROR
    assert (
        results["measured_exposed_comm"] - results["predicted_exposed_comm"]
    ).abs().max() < STEP_ERROR / 2
    assert (
        results["predicted_bytes"] / results["measured_bytes"] - 1
    ).abs().max() < MEMORY_ERROR
