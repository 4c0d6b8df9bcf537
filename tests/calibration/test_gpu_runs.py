"""Runs of this project on one H100 beside what the simulator says of them."""

import runpy

import pytest

from madmax_lib.catalog import SHIPPED

# with states on the host, in 16 bits, out of memory
OTHER = ["gpt_offload", "qwen_16-bit", "gpt_mb32"]


@pytest.fixture(scope="module")
def table():
    predict = runpy.run_path(str(SHIPPED / "benchmarks" / "gpu_hour.py"))["predict"]
    return predict(SHIPPED / "traces" / "h100" / "runs").drop(OTHER)


def test_steps_on_an_h100_are_predicted(table):
    assert len(table) == 11
    assert table["error"].abs().median() < 0.05
    inside = table["measured_s"].between(table["low_s"], table["high_s"])
    assert inside.mean() > 0.7


def test_peaks_of_an_h100_are_counted(table):
    errors = table["memory_error"].dropna().abs()
    assert len(errors) == 9
    assert errors.median() < 0.09
    assert errors.max() < 0.12
