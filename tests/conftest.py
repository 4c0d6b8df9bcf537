"""Fixtures that all tests share."""

import os
import sys
from zlib import crc32

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # tests run side by side, and fits solve small systems

import hypothesis
import matplotlib
import pytest
from support import local_or_skip

matplotlib.use("agg")
hypothesis.settings.register_profile("untimed", deadline=None)  # tests never time
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where layouts are compared: gloo or NCCL",
    )
    parser.addoption(
        "--quarter",
        choices=range(4),
        type=int,
        help="only the files of one quarter, as .ci/nightly takes them by turns",
    )


def pytest_collection_modifyitems(config, items):
    """A file stays whole, as its tests share what is slow to set up, unless it is apart."""
    quarter = config.getoption("--quarter")
    if quarter is None:
        return

    def part(item):
        is_apart = item.get_closest_marker("apart")
        return crc32((item.name if is_apart else item.path.stem).encode()) % 4

    items[:] = [item for item in items if part(item) == quarter]


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
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", protocol="tcp"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="session", name="rows")
def published_rows():
    """Usable rows behind the shipped constants, vTrain's included; no test changes
    them.
    """
    from madmax_lib.calibration import fit

    local_or_skip("vtrain/ground_truth_multi.shared.csv")
    read = fit.known_rows()
    return read[fit.usable(read)]
