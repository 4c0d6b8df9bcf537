"""Steps under a stated partition over GPUs of several types: rows of published tables,
predicted.

A row has the columns of `data/published_train.csv` and three more: `hetero_groups`, the
nodes in the order of ranks, such as "V100x4,T4x4"; `layer_partition`, the first layer
of each stage and the number of layers, embedding and head among them;
`hetero_network_gbit`, Gbit/s of the network per GPU of each node. Ranks count stages
outermost, then replicas, then tensor ranks. The cost is that of `hetero.cost`, with as
many samples on every replica.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.stated import (
    completed,
    count_of,
    habits_of,
    machine_of,
    model_of,
    software_of,
    text_of,
)
from madmax_lib.planner.hetero.costs import PlanCost
from madmax_lib.planner.hetero.fleets import CostRules, Fleet, HeteroProblem
from madmax_lib.planner.hetero.model import gradients_of, nodes_of, passes_s, per_layer
from madmax_lib.planner.hetero.prices import Price, PriceList, prices_of
from madmax_lib.planner.hetero.profiles import Profiles, load_profiles
from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.simulator import shipped
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.states import width_of
from madmax_lib.simulator.steady.layer_costs import layer_costs

# Seconds of a stage and micro-batch for which DeepSpeed's pipeline stops the hosts of a
# tensor group, there and back: each rank sends its part of a tensor, and the next stage
# reads on the host what it is part of before it gathers it [runtime/pipe/engine.py,
# PartitionedTensor.from_meta, as recalled]. Fitted to 11 plans on 16 T4 [AMP], none of
# them with V100; mixed plans alone asked for 38 ms.
_GATHER_S = 0.016


def predict(
    rows: pd.DataFrame | str | Path, profiles: Profiles | str | Path | None = None
) -> pd.DataFrame:
    """The rows, or those of a CSV file, with predicted_s beside them: seconds of a
    step, and reason: empty, or why a row has none (NaN), as neither the catalog nor a
    profile knows its device.

    Rows without the columns of the head of the module are of equal GPUs, and of equal
    stages. profiles (or a folder): measured times of layers, embedding and head among
    them, in place of the simulator's; a micro-batch without one comes in powers of two.
    Raises ValueError that names the first row which contradicts itself, and OSError.
    """
    table = rows if isinstance(rows, pd.DataFrame) else pd.read_csv(rows)
    if isinstance(profiles, (str, Path)):
        profiles = load_profiles(profiles)
    seconds = []
    reasons = []
    for label, raw in zip(table.index, table.to_dict("records"), strict=True):
        reason = ""
        try:
            step_s = _step_s(raw, profiles)
        except _UnknownDevice as error:
            step_s = math.nan
            reason = str(error)
        except ValueError as error:
            raise ValueError(f"row {label}: {error}") from None
        seconds.append(step_s)
        reasons.append(reason)
    return table.assign(predicted_s=seconds, reason=reasons)


class _UnknownDevice(ValueError):
    """A device that neither the catalog nor a profile has."""


def _placed(row, gpus, profiles):
    """A node's row with what is known of its source, and its device. One that profiles
    alone know stands in a server whose links are PCIe, as is that of most such cards.
    """
    try:
        row, device = completed(row)
        if not text_of(row, "cluster"):
            catalog.cluster_with(device, gpus)
    except ValueError as error:
        name = text_of(row, "gpu")
        if not profiles or name not in profiles.devices:
            raise _UnknownDevice(error) from None
        row, device = completed(row | {"gpu": "T4", "cluster": "g4dn-12xlarge"})
        device = replace(device, name=name)
    return row, device


class _Stated(PlanCost):
    """Cost of a plan that somebody ran: every replica takes as much, a stage may have
    no layer, and each stage takes the time outside of its layers.
    """

    least_layers = 0

    def stage_s(self, stage):
        return super().stage_s(stage) + super().sync_s(stage)

    def sync_s(self, stage):
        return 0.0

    def speeds(self, types, tp, recompute):
        return [1.0] * len(types)


def _step_s(raw, profiles):
    cases = _cases(raw, profiles)
    case = cases[0]
    plan = case.plan
    pieces = {
        one.cluster.device.name: layer_costs(Steps.of(one), _constants(one))
        for one in cases
    }
    fleet = Fleet(nodes_of([one.cluster for one in cases]))
    if plan.world_size != fleet.size:
        degrees = f"dp x tp x pp = {plan.dp} x {plan.tp} x {plan.pp}"
        raise ValueError(
            f"{degrees} are {plan.world_size} GPUs, hetero_groups or n_gpus {fleet.size}"
        )
    if (devices := count_of(raw, "n_gpus", fleet.size)) != fleet.size:
        raise ValueError(f"n_gpus={devices}, but hetero_groups hold {fleet.size}")
    prices = _prices(case, pieces, profiles)
    stated = HeteroPlan(
        node_sequence=fleet.order,
        device_groups=(plan.dp * plan.tp,) * plan.pp,
        strategies=((plan.dp, plan.tp),) * plan.pp,
        batches=int(case.micro_batches),
        layer_partition=_partition(raw, case, prices.layers),
        recompute=(plan.recompute,) * plan.pp,
    )
    samples = stated.batches * plan.dp * plan.micro_batch
    width = width_of(case.dtype)
    # it ran, so it fitted: no limit of memory
    rules = CostRules(samples, case.model.hidden, case.sequence, width, memory_factor=0)
    cost = _Stated(stated, HeteroProblem(prices, fleet.nodes, (fleet,), rules))
    return cost.total_s() + max(float(one.prices.host_s) for one in pieces.values())


def _constants(case):
    """The shipped constants. Without ZeRO, which keeps fp32 copies, DeepSpeed adds the
    gradients of a micro-batch to those before in the type of the weights: one is
    written, two are read, their sum is written.
    """
    parameters = shipped()
    if not case.software.engine or case.plan.zero:
        return parameters
    added = {f"weight_bytes:{case.software.kernels}": 4 * width_of(case.dtype)}
    return replace(parameters, constants=parameters.constants | added)


def _cases(raw, profiles=None):
    """The step on each node as if all were like it; on all of equal GPUs, one."""
    nodes = [(_placed(*node, profiles), node[1]) for node in _nodes(raw)]
    for name, most in (("cp", 1), ("ep", 1), ("vpp", 1), ("zero_stage", 2)):
        if count_of(raw, name, 0, least=0) > most:
            raise ValueError(
                f"{name}={count_of(raw, name, least=0)}: up to {most} is predicted "
                "for stated partitions"
            )
    model = model_of(raw)
    tp = count_of(raw, "tp", 1)
    pp = count_of(raw, "pp", 1)
    if model.experts or model.image:
        raise ValueError(
            f"{model.name}: stated partitions are predicted for dense language models"
        )
    batch = count_of(raw, "global_batch")
    micro = count_of(raw, "micro_batch")
    if not (batch and micro):
        raise ValueError("global_batch and micro_batch must be stated")
    cases = []
    gpus = sum(count for _, count in nodes)
    dp = count_of(raw, "dp", max(gpus // (tp * pp), 1))
    if dp * micro > batch:
        raise ValueError(f"micro_batch={micro} exceeds {batch} samples over dp={dp}")
    for (row, device), count in nodes:
        cluster, dtype = machine_of(row, device, count)
        plan = Plan(dp=dp, tp=tp, pp=pp, micro_batch=micro)
        sequence = count_of(row, "seq_len", model.sequence)
        software = software_of(row, device)
        case = Case(model, cluster, plan, batch, sequence, dtype, software)
        # habits (recompute, ZeRO, ...) depend on model and machine
        cases.append(case.with_plan(**habits_of(row, case)))
    return cases


def _nodes(raw):
    """A row for each node with its GPUs alone, and their number; one of all for equal
    GPUs.
    """
    if not (groups := text_of(raw, "hetero_groups")):
        degrees = math.prod(count_of(raw, name, 1) for name in ("dp", "tp", "pp"))
        return [(raw, count_of(raw, "n_gpus", degrees))]
    groups = groups.split(",")
    gbit = text_of(raw, "hetero_network_gbit")
    rates = gbit.split(",") if gbit else [""] * len(groups)
    if len(rates) != len(groups):
        raise ValueError(
            f"hetero_network_gbit has {len(rates)} entries for {len(groups)} "
            "hetero_groups"
        )
    nodes = []
    for group, rate in zip(groups, rates, strict=True):
        if not (match := re.fullmatch(r"\s*(\S+)x([1-9]\d*)\s*", group)):
            raise ValueError(
                f"hetero_groups: {group!r} is not TYPExGPUS such as V100x4"
            )
        gpus = int(match[2])
        node = {"gpu": match[1], "devices_per_node": gpus, "network_gbit": rate}
        nodes.append((raw | node, gpus))
    return nodes


def _partition(raw, case, layers):
    """Cuts as stated; else of equal stages, where embedding and head count as layers if
    the software cuts so.
    """
    pp = case.plan.pp
    if not (text := text_of(raw, "layer_partition")):
        ends = case.software.ends_as_layers
        counted = layers if ends else layers - 2
        # rounded half up, and the embedding stands before the layers that are counted
        inner = [
            math.floor(counted * stage / pp + 0.5) + (not ends)
            for stage in range(1, pp)
        ]
        cuts = [0, *inner, layers]
        return tuple(cuts)
    cuts = re.findall(r"-?\d+", text)
    if len(cuts) != pp + 1:
        raise ValueError(
            f"layer_partition {text} has {len(cuts)} entries, not pp + 1 = {pp + 1}"
        )
    return tuple(map(int, cuts))


def _prices(case, pieces, profiles):
    """Prices of each GPU type: the simulator's, or those of its profiles; gradients as
    model and software have them.
    """
    plan = case.plan
    model = case.model
    table = {}
    optimizer_s = {}
    nothing = np.zeros(model.layers + 2)
    measured = prices_of(profiles) if profiles else None
    if measured and measured.layers != model.layers + 2:
        raise ValueError(
            f"profiles of {measured.layers} layers for {model.layers + 2}, embedding "
            "and head included"
        )
    # by the catalog's names of the devices, where it knows them
    names = {
        getattr(catalog.device_named(one), "name", one): one
        for one in (profiles.devices if profiles else ())
    }
    for name, piece in pieces.items():
        prices = piece.prices
        key = (name, plan.tp, plan.recompute)
        if measured:
            there = names.get(name)
            if not there:
                devices = ", ".join(profiles.devices)
                raise ValueError(f"no profile for {name}; there are {devices}")
            for (kind, tp, _, batch), price in measured.table.items():
                if (kind, tp) == (there, plan.tp):
                    table[(*key, batch)] = price
            optimizer_s[name] = measured.optimizer_s[there]
        else:
            layer_s = per_layer(model, *passes_s(piece)[0])
            traits = prices.traits
            # the host of some software waits for each message of a pipeline
            stop_s = traits.blocking_sends * prices.constants["send_stop_s"]
            stop_s += traits.buckets * (plan.tp > 1) * _GATHER_S
            stop_s = float(stop_s * (plan.pp > 1))
            price = Price(layer_s, nothing, nothing, sync_s=stop_s)
            table[(*key, plan.micro_batch)] = price
            # of the whole model, of which a rank owns a tp x pp-th
            owned = plan.pp * plan.tp * piece.stage.owned(prices)
            optimizer_s[name] = float(prices.update_s(owned))
    gradients = gradients_of(model, next(iter(pieces.values())).prices)
    return PriceList(table, *gradients, optimizer_s)
