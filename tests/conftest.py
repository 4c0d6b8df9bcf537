"""What all tests share: inputs by name that skip with the reason when absent, and small timelines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side, and fits solve small systems

import matplotlib
import pandas as pd
import pytest

from madmax_lib.datasets import dataset, local_data
from madmax_lib.timeline import Meta, Timeline

matplotlib.use("agg")


def local_or_skip(relative: str) -> Path:
    """A file of the data directories, or a skip that names it."""
    try:
        return local_data(relative)
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


def dataset_or_skip(name: str) -> Path:
    """A registered dataset on this machine, or a skip that names it; tests never download."""
    try:
        return dataset(name, download=False)
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


def make_timeline(rows: list[tuple], **meta) -> Timeline:
    """Timeline of (rank, stream, kind, name, start_ns, dur_ns) rows."""
    spans = pd.DataFrame(rows, columns=["rank", "stream", "kind", "name", "start_ns", "dur_ns"])
    spans = spans.assign(step=0, correlation=-1, op=-1, group=None, size_bytes=float("nan"))
    return Timeline(spans, Meta(**meta))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads what another, or the user, has cached."""
    monkeypatch.setenv("MADMAX_NO_CACHE", "1")


@pytest.fixture(autouse=True)
def closed_figures():
    """Figures that a test leaves open do not add up."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


def core_flops(block) -> float:
    """Forward FLOPs of a block's attention scores."""
    return sum(op.flops for op in block.ops if op.core)


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left():
    """A job of one process opens a group of its own; the next file starts without it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def dask_client():
    """Two worker processes."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", protocol="tcp") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module", name="rows")
def published_rows():
    """Usable rows behind the shipped constants, vTrain's included."""
    from madmax_lib.calibration import fit

    local_or_skip("vtrain/ground_truth_multi.shared.csv")
    read = fit.known_rows()
    return read[fit.usable(read)]
