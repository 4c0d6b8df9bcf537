"""Ranks of a run spread over hosts that do not exist: network namespaces of Linux, joined
at a stated rate.

Each host is a namespace with one address. A switch in a further one joins their
uplinks, and a token bucket shapes each of them both ways; ranks of one host talk over
its loopback, so that the network has two levels. `launch` starts this module in the
place of torchrun, in a mount namespace of its own: it makes the hosts, starts one
torchrun agent in each and waits. Namespaces, links and buckets belong to these
processes alone and vanish with the last of them, whatever ends it. A slowed device is a
control group with a quota of a core; a group that outlived its run is removed by the
next start.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from madmax_lib.runs.watch import die_with_parent, end

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s)?", re.IGNORECASE)
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9}
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
_MOST_HOSTS = 64
# rates that a token bucket holds
_LEAST_BITS_PER_S = 1e4
_MOST_BITS_PER_S = 1e12
_POLL_S = 0.05
_GRACE_S = 15.0
_PORT = 29500  # each host has ports of its own
# that TCP hands over at once, at least and at most
_PACKETS_BYTES = (16 * 1024, 64 * 1024)
# what a token bucket may save up, two packets at least, and how long one may wait
_BURST_S = 2e-4
_QUEUE_MS = 200
# whatever the system's own: a link that neither loses nor paces packets
_TCP = "congctl reno initcwnd 64 initrwnd 64"
# of a quota: short beside a step, and a tenth of it is the 1 ms that the kernel wants
_PERIOD_US = 10_000
_LEAST_SPEED = 0.1


def canonical(network: str) -> str:
    """One spelling of an uplink's rate. Raises ValueError for a text that is none.

    >>> canonical("300mbit"), canonical("1.5 Gbit/s"), canonical("")
    ('300mbit', '1.5gbit', '')
    """
    if network:
        bits_per_s(network)
    return re.sub(r"\s+|/s$", "", network.strip().lower())


def bits_per_s(network: str) -> float:
    """Rate of a text such as 300mbit. Raises ValueError for a text that is none."""
    match = _RATE.fullmatch(network.strip())
    rate = float(match[1]) * _SCALES[match[2].lower()] if match else 0.0
    if not _LEAST_BITS_PER_S <= rate <= _MOST_BITS_PER_S:
        raise ValueError(
            f"network={network!r} is not a link rate such as 300mbit, in "
            "10kbit..1000gbit"
        )
    return rate


def check_hosts(hosts: int, network: str, speed: tuple[float, ...], ranks: int) -> None:
    """Whether the ranks can be spread so here.

    Raises ValueError for values that do not fit together, OSError where a tool or the
    right to use it is missing.
    """
    if not 1 <= hosts <= _MOST_HOSTS:
        raise ValueError(f"hosts={hosts} is not in 1..{_MOST_HOSTS}")
    if ranks % hosts:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over hosts={hosts}")
    if canonical(network) and hosts == 1:
        raise ValueError(f"network={network!r} joins hosts, but hosts=1")
    shares = f"speed={list(speed)}"
    in_range = all(_LEAST_SPEED <= share <= 1 for share in speed)
    if speed and not (len(speed) == ranks and in_range):
        rule = f"shares {_LEAST_SPEED}..1 of a core for each of {ranks} ranks"
        raise ValueError(f"{shares} must be {rule}")
    if hosts == 1 and not speed:
        return
    asked = f"hosts={hosts}" if hosts > 1 else shares
    if sys.platform != "linux":
        raise OSError(f"{asked}: network namespaces and quotas need Linux")
    for tool, package in _TOOLS.items():
        if not shutil.which(tool):
            raise FileNotFoundError(
                f"{asked} needs the command {tool}; apt install {package}"
            )
    probe = subprocess.run([*_unshare(), "true"], capture_output=True, text=True)
    if probe.returncode:
        reason = probe.stderr.strip()
        raise PermissionError(f"{asked} needs root or user namespaces: {reason}")
    root = _group_root()
    if speed and not os.access(root, os.W_OK):
        raise PermissionError(
            f"{asked} needs the right to make control groups in {root}"
        )


def command(
    ranks: int,
    module: str,
    *arguments: object,
    hosts: int = 1,
    network: str = "",
    speed: Sequence[float] = (),
) -> list[str]:
    """Command that runs a module on so many ranks of this machine; the rest as in
    `check_hosts`.
    """
    if hosts == 1 and not speed:
        local = ("--standalone", "--local-addr", "127.0.0.1")
        return _torchrun(local, ranks, module, *arguments)
    python = [sys.executable, "-m", "madmax_lib.runs.testbed"]
    shares = ",".join(map(str, speed))
    values = (ranks, hosts, network, shares, module, *arguments)
    return [*_unshare(), *python, *map(str, values)]


def _torchrun(rendezvous, ranks, module, *arguments):
    python = [sys.executable, "-m", "torch.distributed.run"]
    options = (*rendezvous, "--nproc-per-node", ranks, "-m", module, *arguments)
    return [*python, *map(str, options)]


def join(rank: int) -> None:
    """Enter the control group of a slowed device, where this run has one."""
    if prefix := os.environ.get("MADMAX_TESTBED_GROUPS"):
        Path(f"{prefix}{rank}", "cgroup.procs").write_text(str(os.getpid()))


def spread() -> tuple[int, list[float]]:
    """Hosts of the run that this process is a rank of, and share of a core that each
    rank has (all of it if empty).
    """
    hosts = os.environ.get("MADMAX_TESTBED_HOSTS") or 1
    return int(hosts), _shares(os.environ.get("MADMAX_TESTBED_SPEED", ""))


def main(
    ranks: str, hosts: str, network: str, speed: str, module: str, *arguments: str
) -> int:
    """Run what `command` says; the exit status of the first agent that failed."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ |= {"MADMAX_TESTBED_HOSTS": hosts, "MADMAX_TESTBED_SPEED": speed}
    with _groups(_shares(speed)) as environment:
        addresses = _join_hosts(int(hosts), network)
        rendezvous = (
            "--master-addr",
            addresses[0],
            "--master-port",
            _PORT,
            "--nnodes",
            hosts,
        )
        agents = []
        try:
            for host, address in enumerate(addresses):
                node = (*rendezvous, "--node-rank", host, "--local-addr", address)
                agent = _torchrun(node, int(ranks) // int(hosts), module, *arguments)
                inside = ["nsenter", f"--net=/run/netns/host{host}", *agent]
                agents.append(
                    subprocess.Popen(
                        inside, env=environment, preexec_fn=die_with_parent
                    )
                )
            return _first_failure(agents)
        finally:
            end(agents, _GRACE_S)


def _unshare():
    """Prefix of a command whose mounts and network namespaces nobody else sees."""
    # without root, a namespace of users in which this one is
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--mount", "--net", *as_root, "--"]


def _join_hosts(hosts, network):
    """Make the hosts and their links; addresses of the hosts."""
    _call("mount -t tmpfs tmpfs /run")  # where ip names its namespaces
    Path("/run/netns").mkdir()
    _call(
        "ip netns add switch",
        "ip -n switch link add joint type bridge",
        "ip -n switch link set joint up",
    )
    addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
    for host, address in enumerate(addresses):
        port = f"port{host}"  # on the switch
        ip = f"ip -n host{host}"
        _call(
            f"ip netns add host{host}",
            f"{ip} link add eth0 type veth peer name {port} netns switch",
            f"{ip} addr add {address}/24 dev eth0",
            f"{ip} link set lo up",
            f"{ip} link set eth0 up",
            f"ip -n switch link set {port} master joint up",
        )
        if network:
            bytes_per_s = bits_per_s(network) / 8
            least, most = _PACKETS_BYTES
            packet_bytes = int(min(max(_BURST_S * bytes_per_s / 2, least), most))
            burst_bytes = int(max(_BURST_S * bytes_per_s, 2 * packet_bytes))
            bucket = f"tbf rate {8 * bytes_per_s:.0f}bit burst {burst_bytes}"
            bucket += f" latency {_QUEUE_MS}ms"
            route = f"10.77.0.0/24 dev eth0 src {address}"
            _call(
                f"{ip} link set eth0 gso_max_size {packet_bytes}",
                f"{ip} route change {route} {_TCP}",
                f"tc -n host{host} qdisc add dev eth0 root {bucket}",
                f"tc -n switch qdisc add dev {port} root {bucket}",
            )
    return addresses


def _call(*lines):
    for line in lines:
        done = subprocess.run(line.split(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{line}: {done.stderr.strip()}")


def _group_root():
    root = Path("/sys/fs/cgroup")
    return root if (root / "cgroup.controllers").exists() else root / "cpu"


@contextmanager
def _groups(speed):
    """Environment of the agents, with the control groups of slowed devices while they
    run; stale groups are removed.
    """
    root = _group_root()
    version_1 = root.name == "cpu"  # of control groups
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    for stale in root.glob("madmax-*-*"):  # madmax-PROCESS-RANK
        if not Path("/proc", stale.name.split("-")[1]).exists():
            with suppress(OSError):
                stale.rmdir()
    if not speed:
        yield environment
        return
    prefix = root / f"madmax-{os.getpid()}-"
    groups = [Path(f"{prefix}{rank}") for rank in range(len(speed))]
    try:
        control = root / "cgroup.subtree_control"
        if not version_1 and "cpu" not in control.read_text().split():
            control.write_text("+cpu")
        for group, share in zip(groups, speed, strict=True):
            group.mkdir()
            # A quota of a whole core is less than one: what a process does not use
            # before it moves to another core is lost.
            if share == 1:
                continue
            quota_us = round(share * _PERIOD_US)
            if version_1:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        yield environment | {"MADMAX_TESTBED_GROUPS": str(prefix)}
    finally:
        until_s = time.monotonic() + _GRACE_S
        for group in groups:
            # a group can be removed when the last rank has left it
            while group.exists() and time.monotonic() < until_s:
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(_POLL_S)


def _first_failure(agents):
    """Wait until all agents ended well, or one did not; its status."""
    while True:
        codes = [agent.poll() for agent in agents]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_S)


def _shares(speed):
    return [float(share) for share in speed.split(",") if share]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
