"""Ranks on hosts that are network namespaces: equal losses, a rate that holds, and
nothing left behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from madmax_lib import RunSpec, launch, read_trace
from madmax_lib.runs import read_run, testbed
from madmax_lib.traces import stragglers
from tests.support import needs_namespaces

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256}
OPTIONS = {
    "sizes": SMALL,
    "sequence": 32,
    "steps": 4,
    "profile": False,
    "device": "cpu",
    "timeout_s": 60.0,
}


@pytest.mark.parametrize(
    "text, bits",
    [("300mbit", 3e8), ("1 Gbit", 1e9), ("2.5gbit/s", 2.5e9), ("56kbit", 56e3)],
)
def test_rates_are_read_as_tc_writes_them(text, bits):
    assert testbed._rate_bits_per_s(text) == bits


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"hosts": 2, "network": "fast"},
            "network='fast' is no rate of a link, such as 300mbit",
        ),
        *(
            ({"hosts": 2, "network": text}, f"network='{text}' is no rate")
            for text in ("0mbit", "9kbit", "1001gbit")
        ),
        ({"hosts": 3}, "2 ranks cannot be spread evenly over hosts=3"),
        ({"hosts": 0}, "hosts=0 is not in 1..64"),
        ({"network": "1gbit"}, "network='1gbit' joins hosts, but hosts=1"),
        (
            {"speed": [0.5]},
            r"speed=\[0.5\] must be shares 0.1..1 of a core for each of 2 ranks",
        ),
        ({"speed": [0.05, 1]}, "must be shares 0.1..1 of a core"),
        ({"speed": [0.5, 1.5]}, "must be shares 0.1..1 of a core"),
    ],
)
def test_hosts_that_cannot_be_made_are_refused(values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        launch(RunSpec(strategy="dp2", **OPTIONS, **values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_tools_name_their_package(monkeypatch, tmp_path):
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None)
    for asked, text in (
        ({"hosts": 2}, "hosts=2"),
        ({"speed": (0.5, 1)}, r"speed=\[0.5, 1\]"),
    ):
        with pytest.raises(
            OSError,
            match=rf"{text} needs the command ip; apt install iproute2|need Linux",
        ):
            launch(RunSpec(strategy="dp2", **asked, **OPTIONS), tmp_path)


@needs_namespaces
def test_losses_do_not_depend_on_where_ranks_are(tmp_path):
    together = read_run(
        launch(RunSpec(strategy="dp2.tp2", **OPTIONS), tmp_path / "one")
    )
    apart = read_run(
        launch(
            RunSpec(strategy="dp2.tp2", hosts=2, network="1gbit", **OPTIONS),
            tmp_path / "two",
        )
    )
    pd.testing.assert_series_equal(
        apart.steps["loss"], together.steps["loss"], rtol=1e-5
    )
    assert apart.spec.name.endswith("_dp2.tp2_2x1gbit")


@needs_namespaces
def test_no_step_is_faster_than_its_bytes_over_the_link(tmp_path):
    spec = RunSpec(strategy="dp2", hosts=2, network="10mbit", **OPTIONS)
    steps = read_run(launch(spec, tmp_path)).steps
    gradient_bytes = (
        4 * spec.shapes.parameters
    )  # an all-reduce of two ranks sends each byte once
    burst_bytes = 2 * 128 * 1024
    assert (steps["total_s"] >= 8 * (gradient_bytes - burst_bytes) / 10e6).all()


@needs_namespaces
def test_user_namespaces_do_where_nobody_is_root(monkeypatch, tmp_path):
    probe = ["unshare", "--user", "--map-root-user", "--mount", "--net", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    assert (
        read_run(launch(RunSpec(strategy="dp2", hosts=2, **OPTIONS), tmp_path)).summary[
            "status"
        ]
        == "completed"
    )


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_launcher_is_ended(number, tmp_path):
    code = (
        "import sys; from madmax_lib import RunSpec, launch; "
        "launch(RunSpec.from_dict(eval(sys.argv[1])), sys.argv[2])"
    )
    values = OPTIONS | {"strategy": "dp2", "hosts": 2, "steps": 10_000}
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, repr(values), str(tmp_path)],
        stderr=subprocess.DEVNULL,
    )
    _until(lambda: (tmp_path / "steps.csv").exists() or launcher.poll() is not None)
    assert (
        launcher.poll() is None and len(_processes(tmp_path)) >= 5
    )  # two agents, two ranks, who made the hosts
    launcher.send_signal(number)
    launcher.wait()
    _until(lambda: not _processes(tmp_path))
    assert not Path("/run/netns/host0").exists()


@needs_namespaces
def test_slowed_devices_leave_no_control_groups(tmp_path):
    try:
        testbed.check_hosts(1, "", (0.5, 0.5), 2)
    except OSError as error:
        pytest.skip(str(error))
    root = testbed._group_root()
    (root / "madmax-999999999-0").mkdir()  # of a run that was killed
    run = read_run(
        launch(RunSpec(strategy="dp2", speed=(0.5, 0.4), **OPTIONS), tmp_path)
    )
    assert run.summary["status"] == "completed" and run.spec.speed == (0.5, 0.4)
    assert not list(root.glob("madmax-999999999-*"))


@needs_namespaces
def test_the_slow_rank_of_a_real_run_is_found(tmp_path):
    """A fifth of a core beside a whole one; the bound is that of a machine with other
    work on it.
    """
    try:
        testbed.check_hosts(1, "", (1, 0.2), 2)
    except OSError as error:
        pytest.skip(str(error))
    options = OPTIONS | {
        "profile": True,
        "steps": 6,
        "sizes": SMALL | {"hidden": 128},
        "global_batch": 16,
    }
    table = stragglers(
        read_trace(launch(RunSpec(strategy="tp2", speed=(1, 0.2), **options), tmp_path))
    )
    slow, other = (table.set_index("rank").loc[rank] for rank in (1, 0))
    assert table["rank"].iloc[0] == 1 and slow["share"] > 0.5
    assert slow["exposed_cost_s"] > 2 * other["exposed_cost_s"]


def _processes(directory: Path) -> list[str]:
    """Command lines that name the directory, of other processes than the launcher."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:
            continue
        if (
            str(directory) in line
            and "madmax_lib.runs" in line
            and int(path.parent.name) != os.getpid()
        ):
            lines.append(line)
    return lines


def _until(condition) -> None:
    end_s = time.monotonic() + 60
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert condition()
