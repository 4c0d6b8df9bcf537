"""Inputs of heterogeneous planning, read and checked once: layers and their prices,
GPUs, rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from madmax_lib import catalog
from madmax_lib.base.fields import require_int, require_type
from madmax_lib.catalog import Cluster, Model
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.hetero.fleets import Fleet, fleet_of, fleets
from madmax_lib.planner.hetero.model import nodes_of, simulated_prices
from madmax_lib.planner.hetero.nodes import Node, load_cluster
from madmax_lib.planner.hetero.prices import PriceList, prices_of
from madmax_lib.planner.hetero.profiles import Profiles, load_profiles

_OF_MODEL = ("dtype", "recompute", "parameters")  # inputs beside a model alone


@dataclass(frozen=True)
class CostRules:
    """Rules of what a plan is charged for.

    global_batch: samples of a step.
    hidden, sequence: elements of an activation per token, and tokens of a sample (4096
    and 1024).
    bytes_per_element: of an activation sent between stages (2).
    memory_factor: bytes needed per byte of the prices (1); 0 is no limit.
    tp_in_node: whether the GPUs of a replica must lie in one node (False).
    """

    global_batch: int
    hidden: int = 4096
    sequence: int = 1024
    bytes_per_element: float = 2.0
    memory_factor: float = 1.0
    tp_in_node: bool = False

    def __post_init__(self):
        for name in ("global_batch", "hidden", "sequence", "bytes_per_element"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.memory_factor >= 0:
            raise ValueError(f"memory_factor={self.memory_factor} must not be negative")

    @property
    def sample_bytes(self) -> float:
        """Activations of one sample between two stages."""
        return self.sequence * self.hidden * self.bytes_per_element


@dataclass(frozen=True, eq=False)
class HeteroProblem:
    """Input of `plan` and `cost`."""

    prices: PriceList
    nodes: tuple[Node, ...]
    fleets: tuple[Fleet, ...]  # the cluster in all orders that are tried
    rules: CostRules

    def fleet(self, order: Sequence[str]) -> Fleet:
        """The cluster in one order of its types, or of its nodes by type. Raises
        ValueError for others.
        """
        for fleet in self.fleets:  # their arrays may be worked out already
            if fleet.order == tuple(order):
                return fleet
        return fleet_of(self.nodes, order)

    def spaces(self) -> list[tuple[int, Fleet]]:
        """Every number of micro-batches that divides the batch, ascending, with every
        order of types or nodes.
        """
        batch = self.rules.global_batch
        counts = [count for count in range(1, batch + 1) if batch % count == 0]
        return [(count, fleet) for count in counts for fleet in self.fleets]


def problem_from(stated: HeteroProblem | None, inputs: dict) -> HeteroProblem:
    """The stated problem, or that of inputs. Raises ValueError for both."""
    if stated is None:
        return problem(**inputs)
    if inputs:
        raise ValueError(
            f"{next(iter(inputs))} is part of the given problem; give only one of them"
        )
    return require_type("problem", stated, HeteroProblem)


def problem(
    *,
    profiles: Profiles | str | Path | None = None,
    model: Model | str | None = None,
    hostfile: str | Path | None = None,
    clusterfile: str | Path | None = None,
    cluster: Cluster | str | Sequence[Cluster | Node | str] | None = None,
    layers: int | None = None,
    global_batch: int,
    **rules,
) -> HeteroProblem:
    """The inputs of `plan` and `cost`; models and clusters may be names of the catalog.

    profiles (a folder or `Profiles`) or model: where prices come from. hostfile and
    clusterfile, or cluster (a Cluster, several, or nodes, these with profiles): the
    GPUs, all of which are used. layers: with embedding and head; all there are if None.
    rules: fields of `CostRules`, for a model tp_in_node by default; and for a model
    recompute (none and full by default, chosen per stage), dtype and parameters. Raises
    ValueError for bad input, OSError for files.
    """
    if (profiles is None) == (model is None):
        raise ValueError("give either profiles or model")
    files = [one is not None for one in (hostfile, clusterfile)]
    if any(files) != all(files) or (cluster is None) != all(files):
        raise ValueError("give either hostfile and clusterfile, or cluster")
    _check_names(rules, with_model=model is not None)
    global_batch = require_int("global_batch", global_batch, 1)
    members = _members(cluster)
    clusters = [member for member in members if isinstance(member, Cluster)]
    if clusters:
        nodes = nodes_of(clusters, rules.get("parameters"))
    elif cluster is None:
        nodes = load_cluster(hostfile, clusterfile)
    else:
        nodes = tuple(members)
    if profiles is not None:
        if not isinstance(profiles, Profiles):
            profiles = load_profiles(profiles)
        prices = prices_of(profiles)
    else:
        if not clusters:
            raise ValueError("model goes with clusters; nodes and files with profiles")
        model = catalog.model(model)
        hidden = getattr(model, "hidden", None)
        if rules.get("hidden", hidden) != hidden:
            raise ValueError(
                f"hidden={rules['hidden']} is not that of {model.name}, {hidden}"
            )
        options = {name: rules.pop(name) for name in _OF_MODEL if name in rules}
        types = {one.device.name: one for one in clusters}
        dtype = options.pop("dtype", "bf16")
        sequence = rules.pop("sequence", None)
        case = Case(model, None, Plan(), global_batch, sequence, dtype)
        prices = simulated_prices(case, types, **options)
        # simulated groups of tp are those of a node, as their prices
        usual = {"hidden": hidden, "sequence": case.sequence, "tp_in_node": True}
        rules = usual | rules
    checked_rules = CostRules(global_batch, **rules)
    if layers is not None and layers != prices.layers:
        raise ValueError(
            f"layers={layers}, but there are prices for {prices.layers} layers, ends "
            "included"
        )
    orders = tuple(fleets(nodes))
    for name in orders[0].types:
        if name not in prices.optimizer_s:
            raise ValueError(
                f"no profile for {name}; there are {', '.join(prices.optimizer_s)}"
            )
    return HeteroProblem(prices, tuple(nodes), orders, checked_rules)


def _check_names(rules, with_model):
    """Raises ValueError for an input that does not exist, or only beside a model."""
    names = {*CostRules.__dataclass_fields__}
    if with_model:
        names.update(_OF_MODEL)
    for name in sorted(rules.keys() - names):
        if name in _OF_MODEL:
            raise ValueError(f"{name}: not an input of profiles")
        raise ValueError(f"no input {name}")


def _members(cluster):
    """Clusters and nodes of the argument, those with names read from the catalog."""
    if cluster is None:
        return []
    if isinstance(cluster, (Cluster, str)):
        return [catalog.cluster(cluster)]
    listed = require_type("cluster", cluster, Sequence | None)
    if not listed:
        raise ValueError("cluster=[] names no cluster or node")
    return [one if isinstance(one, Node) else catalog.cluster(one) for one in listed]
