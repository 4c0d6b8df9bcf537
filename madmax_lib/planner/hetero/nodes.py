"""Which GPUs stand in which node, and how are they joined?

Host file ("ADDRESS slots=N" a line) and cluster file (JSON by address) of Metis [Um et al., USENIX ATC 2024]. A `Node`
holds what the files say, in their units; `prices.fleets` converts them to bytes and bytes/s.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from madmax_lib.atomic import write_text
from madmax_lib.planner.hetero.profiles import read_json

__all__ = ["GB_BYTES", "GB_PER_S", "Node", "load_cluster", "write_cluster"]

GB_BYTES = 2.0**30
GB_PER_S = 2.0**20 * 1e3  # bytes/s: Metis takes 1 GB/s for 2^20 bytes a millisecond

_HOST = re.compile(r"(?P<address>\S+)\s+slots\s*=\s*(?P<slots>\d+)")
_FIELDS = {  # of a Node: name in the cluster file
    "device": "instance_type",
    "inter_gb_per_s": "inter_bandwidth",
    "intra_gb_per_s": "intra_bandwidth",
    "memory_gb": "memory",
}
_MOST_GB = 1e5  # above, a memory or a bandwidth is given in bytes


@dataclass(frozen=True)
class Node:
    """A node: GPUs of one type.

    address: what names it in the host file.
    device: the type of its GPUs.
    gpus: their number.
    memory_gb: memory of one GPU in GB of 1024 MB.
    intra_gb_per_s, inter_gb_per_s: bandwidth inside the node and beyond it, as Metis counts GB/s.
    """

    address: str
    device: str
    gpus: int
    memory_gb: float
    intra_gb_per_s: float
    inter_gb_per_s: float

    def __post_init__(self):
        for name in ("gpus", "memory_gb", "intra_gb_per_s", "inter_gb_per_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} is not a number above 0")
            if value > _MOST_GB:
                raise ValueError(f"{name}={value:g} is over {_MOST_GB:g}: is it in bytes?")


def load_cluster(hostfile: str | Path, clusterfile: str | Path) -> tuple[Node, ...]:
    """The nodes in the order of the host file.

    Raises FileNotFoundError, or ValueError naming file, line or field and rule.
    """
    types = read_json(Path(clusterfile))
    nodes = []
    for number, line in enumerate(Path(hostfile).read_text().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{hostfile} line {number}"
        if not (host := _HOST.fullmatch(line.strip())):
            raise ValueError(f"{where}: {line.strip()!r} is not ADDRESS slots=N")
        if host["address"] not in types:
            raise ValueError(f"{where}: {host['address']} is not in {clusterfile}")
        try:
            about = {name: types[host["address"]][key] for name, key in _FIELDS.items()}
            about |= {"device": str(about["device"]), "gpus": int(host["slots"])}
            nodes.append(Node(host["address"], **about))
        except KeyError as error:
            raise ValueError(f"{clusterfile}: {host['address']} has no {error.args[0]}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}, {clusterfile}: {error}") from None
    if not nodes:
        raise ValueError(f"{hostfile}: no line such as '10.0.0.1 slots=4'")
    return tuple(nodes)


def write_cluster(nodes: Iterable[Node], hostfile: str | Path, clusterfile: str | Path) -> None:
    """The host file and the cluster file of nodes, as `load_cluster` reads them."""
    nodes = list(nodes)
    types = {node.address: {key: getattr(node, name) for name, key in _FIELDS.items()} for node in nodes}
    write_text(hostfile, "".join(f"{node.address} slots={node.gpus}\n" for node in nodes))
    write_text(clusterfile, json.dumps(types, indent=4))
