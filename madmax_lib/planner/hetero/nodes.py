"""Nodes: which GPUs stand in which one, and how they are joined.

Host file ("ADDRESS slots=N" a line) and cluster file (JSON by address) of Metis [Um et
al., USENIX ATC 2024]. Their GB and GB/s become bytes and bytes/s here, at the door.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from madmax_lib.base import is_number
from madmax_lib.catalog import read_object

_GB_BYTES = 2.0**30
_GB_PER_S = 2.0**20 * 1e3  # bytes/s: Metis takes 1 GB/s for 2^20 bytes a millisecond
_HOST = re.compile(r"(?P<address>\S+)\s+slots\s*=\s*(?P<slots>\d+)")
# argument of `Node.of_file`: name in the cluster file, field of a Node and its unit
_FIELDS = {
    "memory_gb": ("memory", "memory_bytes", _GB_BYTES),
    "intra_gb_per_s": ("intra_bandwidth", "intra_bytes_per_s", _GB_PER_S),
    "inter_gb_per_s": ("inter_bandwidth", "inter_bytes_per_s", _GB_PER_S),
}
# A memory or bandwidth beyond is in the other unit: no node has 100 TB, or 100 kB.
_MOST_GB = 1e5
_LEAST_BYTES = 1e5


@dataclass(frozen=True)
class Node:
    """A node: GPUs of one type.

    address: what names it in the host file.
    device: the type of its GPUs.
    gpus: their number.
    memory_bytes: memory of one GPU.
    intra_bytes_per_s, inter_bytes_per_s: bandwidth inside the node and beyond it.
    sharing: GPUs that share a network port, of which inter_bytes_per_s is then the part
        of one, as intra_bytes_per_s is of its links; 0 where both are what any group of
        GPUs gets, as Metis counts (default 0).
    intra_s, inter_s: latency of a message (default 0).
    """

    address: str
    device: str
    gpus: int
    memory_bytes: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    sharing: int = 0
    intra_s: float = 0.0
    inter_s: float = 0.0

    def __post_init__(self):
        _check("gpus", self.gpus)
        for _, name, _ in _FIELDS.values():
            if _check(name, value := getattr(self, name)) < _LEAST_BYTES:
                raise ValueError(
                    f"{name}={value:g} is below {_LEAST_BYTES:g}: is it in GB? "
                    "Node.of_file takes those"
                )

    @classmethod
    def of_file(
        cls,
        address: str,
        device: str,
        gpus: int,
        memory_gb: float,
        intra_gb_per_s: float,
        inter_gb_per_s: float,
    ) -> "Node":
        """Node with GB of 2^30 bytes and GB/s as Metis' files have them. Raises ValueError
        for other units.
        """
        values = {
            "memory_gb": memory_gb,
            "intra_gb_per_s": intra_gb_per_s,
            "inter_gb_per_s": inter_gb_per_s,
        }
        for name, value in values.items():
            if _check(name, value) > _MOST_GB:
                raise ValueError(
                    f"{name}={value:g} is over {_MOST_GB:g}: is it in bytes?"
                )
        return cls(
            address,
            device,
            gpus,
            *(value * _FIELDS[name][2] for name, value in values.items()),
        )

    def in_file(self) -> dict[str, float]:
        """Memory and bandwidths as `of_file` takes them."""
        return {
            key: getattr(self, name) / unit for key, (_, name, unit) in _FIELDS.items()
        }


def _check(name, value):
    if not is_number(value) or value == 0:
        raise ValueError(f"{name}={value!r} is not a number above 0")
    return value


def load_cluster(hostfile: str | Path, clusterfile: str | Path) -> tuple[Node, ...]:
    """The nodes in the order of the host file.

    Raises FileNotFoundError, or ValueError naming file, line or field and rule.
    """
    types = read_object(Path(clusterfile))
    nodes = []
    for number, line in enumerate(Path(hostfile).read_text().splitlines(), 1):
        if not line.strip():  # blank lines are no hosts
            continue
        where = f"{hostfile} line {number}"
        if not (host := _HOST.fullmatch(line.strip())):
            raise ValueError(f"{where}: {line.strip()!r} is not ADDRESS slots=N")
        if host["address"] not in types:
            raise ValueError(f"{where}: {host['address']} is not in {clusterfile}")
        try:
            about = types[host["address"]]
            device = str(about["instance_type"])
            sizes = {name: about[key] for name, (key, _, _) in _FIELDS.items()}
            slots = int(host["slots"])
            nodes.append(Node.of_file(host["address"], device, slots, **sizes))
        except KeyError as error:
            raise ValueError(
                f"{clusterfile}: {host['address']} has no {error.args[0]}"
            ) from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}, {clusterfile}: {error}") from None
    if not nodes:
        raise ValueError(f"{hostfile}: no line such as '10.0.0.1 slots=4'")
    return tuple(nodes)
