"""Ranks on hosts that are network namespaces: equal losses, a rate that holds, and
nothing left behind.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from madmax_lib import Plan, RunSpec, launch, read_trace
from madmax_lib.runs import parallelize, read_run, testbed, train
from madmax_lib.traces import stragglers
from tests.support import needs_namespaces

pytestmark = pytest.mark.slow

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256}
OPTIONS = {"sizes": SMALL, "sequence": 32, "steps": 4, "profile": False}
OPTIONS |= {"device": "cpu", "timeout_s": 60.0}


@pytest.mark.parametrize(
    "text, bits",
    [("300mbit", 3e8), ("1 Gbit", 1e9), ("2.5gbit/s", 2.5e9), ("56kbit", 56e3)],
)
def test_rates_are_read_as_tc_writes_them(text, bits):
    assert testbed.bits_per_s(text) == bits


def test_missing_tools_name_their_package(monkeypatch, tmp_path):
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None)
    needs = "needs the command ip; apt install iproute2|need Linux"
    for asked, text in (
        ({"hosts": 2}, "hosts=2"),
        ({"speed": (0.5, 1)}, r"speed=\[0.5, 1\]"),
    ):
        with pytest.raises(OSError, match=f"{text} {needs}"):
            launch(RunSpec(strategy="dp2", **asked, **OPTIONS), tmp_path)


@pytest.fixture(scope="module")
def slow_link(tmp_path_factory):
    """Two hosts of two ranks each, joined at 10 Mbit/s."""
    spec = RunSpec(strategy="dp2.tp2", hosts=2, network="10mbit", **OPTIONS)
    return read_run(launch(spec, tmp_path_factory.mktemp("hosts")))


@needs_namespaces
def test_losses_do_not_depend_on_where_ranks_are(slow_link):
    spec = slow_link.spec
    threads = torch.get_num_threads()
    alone = parallelize(spec.model, Plan(micro_batch=8), spec, sizes=SMALL)
    data = spec.get_data()
    draw = partial(train._draw, data, spec, alone)
    losses = [alone.step(draw(step))["loss"] for step in range(spec.steps)]
    torch.set_num_threads(threads)
    assert slow_link.steps["loss"].tolist() == pytest.approx(losses, rel=1e-4)
    assert spec.name.endswith("_dp2.tp2_2x10mbit")


@needs_namespaces
def test_no_step_is_faster_than_its_bytes_over_the_link(slow_link):
    # an all-reduce of two ranks sends each byte once, and a host has both tp shards
    gradient_bytes = 4 * slow_link.spec.shapes.parameters
    burst_bytes = 2 * 128 * 1024
    least_s = 8 * (gradient_bytes - burst_bytes) / 10e6
    assert least_s > 0 and (slow_link.steps["total_s"] >= least_s).all()


@needs_namespaces
def test_user_namespaces_do_where_nobody_is_root(monkeypatch, tmp_path):
    probe = ["unshare", "--user", "--map-root-user", "--mount", "--net", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    run = read_run(launch(RunSpec(strategy="dp2", hosts=2, **OPTIONS), tmp_path))
    assert run.summary["status"] == "completed"


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_launcher_is_ended(number, tmp_path):
    code = """
import sys
from madmax_lib import RunSpec, launch
launch(RunSpec.from_dict(eval(sys.argv[1])), sys.argv[2])
"""
    values = OPTIONS | {"strategy": "dp2", "hosts": 2, "steps": 10_000}
    command = [sys.executable, "-c", code, repr(values), str(tmp_path)]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _until(lambda: (tmp_path / "steps.csv").exists() or launcher.poll() is not None)
    assert launcher.poll() is None
    # two agents, two ranks, who made the hosts
    assert len(_processes(tmp_path)) >= 5
    launcher.send_signal(number)
    launcher.wait()
    _until(lambda: not _processes(tmp_path))
    assert not Path("/run/netns/host0").exists()


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    """Two ranks, the second with a fifth of a core."""
    try:
        testbed.check_hosts(1, "", (1, 0.2), 2)
    except OSError as error:
        pytest.skip(str(error))
    stale = testbed._group_root() / "madmax-999999999-0"  # of a run that was killed
    stale.mkdir()
    options = OPTIONS | {"profile": True, "steps": 6, "global_batch": 16}
    options["sizes"] = SMALL | {"hidden": 128}
    spec = RunSpec(strategy="tp2", speed=(1, 0.2), **options)
    return read_run(launch(spec, tmp_path_factory.mktemp("slowed")))


@needs_namespaces
def test_slowed_devices_leave_no_control_groups(slowed):
    assert slowed.summary["status"] == "completed" and slowed.spec.speed == (1, 0.2)
    assert not list(testbed._group_root().glob("madmax-999999999-*"))


@needs_namespaces
def test_the_slow_rank_of_a_real_run_is_found(slowed):
    """The bound is that of a machine with other work on it."""
    table = stragglers(read_trace(slowed.directory))
    assert table["rank"].iloc[0] == 1
    table = table.set_index("rank")
    assert table.loc[1, "share"] > 0.5
    assert table.loc[1, "exposed_cost_s"] > 2 * table.loc[0, "exposed_cost_s"]


def _processes(directory: Path) -> list[str]:
    """Command lines that name the directory, of other processes than the launcher."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:
            continue
        named = str(directory) in line and "madmax_lib.runs" in line
        if named and int(path.parent.name) != os.getpid():
            lines.append(line)
    return lines


def _until(condition) -> None:
    end_s = time.monotonic() + 60
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert condition()
