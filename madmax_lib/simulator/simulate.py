"""What would this step look like? Model, cluster and plan in, a simulated `Timeline`
out.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S, require_int, require_type
from madmax_lib.catalog import DLRM, Cluster, Model, Software, Transformer
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.rules import check_plan
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.events.engine import (
    apply_core_sharing,
    run_with_stragglers,
    text_column,
    to_timeline,
    with_receive_kernels,
)
from madmax_lib.simulator.events.layout import StepBuilder
from madmax_lib.simulator.events.passes import MicroBatch
from madmax_lib.simulator.events.sharding import Sharding
from madmax_lib.simulator.layers.transformer import chunk_blocks
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    constants_of,
    shipped,
    software_of,
)
from madmax_lib.simulator.rates.topology import member_name
from madmax_lib.timeline import Meta, Timeline

_ALL_RANKS_UP_TO = 64
_NOTHING = Transformer("nothing", layers=1, hidden=1, heads=1, ffn=0)


def simulate(
    model: Model | str,
    cluster: Cluster | str,
    plan: Plan | str,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    parameters: Parameters | None = None,
    imbalance: float | str = 1.0,
    jitter: float | str = 0.0,
    optimizer: str = "adam",
    seed: int = 0,
    collectives: pd.DataFrame | None = None,
    policy=None,
) -> Timeline:
    """One training step of a model on a cluster under a plan, or of what their names
    and its text say.

    global_batch: samples over all devices. sequence: tokens per sample, the model's own
    if None. software: that trains, a name of `data/software.csv` or one of your own;
    that of the parameters or any if None. parameters: constants, the shipped fit if
    None; `Parameters()` is the ideal machine (recommendation models: the data sheet, or
    the shares of it that parameters name). imbalance, jitter, optimizer: how uneven
    experts and ranks are, and what updates the weights, as in `Case`; seed: of the delays
    drawn.
    collectives: measured seconds that replace the formulas, and those of parameters, as
    in `MeasuredCollectives`.
    policy: how states leave the device under offload, a `Policy`; the share that makes
    the step shortest is found if it names none.
    Ranks: one per pipeline stage, standing for all devices of the stage
    (meta.represents); all ranks of up to 64 devices. Streams, and with offload threads
    of the host, are numbered by `schedule.streams.Stream`. Raises ValueError, in the
    field's words, for a plan that cannot be laid over model and cluster. See also:
    mm.estimate, mm.breakdown, mm.plot_timeline, mm.export_trace.

    >>> from madmax_lib.catalog.tables import cluster, model
    >>> nodes = cluster("dgx-a100", nodes=16)
    >>> step = simulate(model("gpt2"), nodes, Plan(dp=64, pp=2), global_batch=128)
    >>> {rank: len(devices) for rank, devices in step.meta.represents.items()}
    {0: 64, 64: 64}
    """
    parameters = constants_of(cluster, parameters)
    step = (
        Plan.parse(plan),
        global_batch,
        sequence,
        dtype,
        software_of(software, parameters),
        imbalance,
        jitter,
        optimizer,
    )
    case = Case.of_step(model, cluster, *step)
    seed = require_int("seed", seed)
    # recommendation models are priced by the data sheet
    default = Parameters if isinstance(case.model, DLRM) else shipped
    parameters = require_type("parameters", parameters, Parameters, default)
    plan = case.plan
    if collectives is not None:
        parameters = replace(
            parameters, collectives=MeasuredCollectives(collectives).curves, links=()
        )
    step, program = _lay_out(case, parameters, policy)
    meta = _meta(case, seed, getattr(step.sharding, "offloaded", None))
    if (alone := float(step.batch.prices.solo_time_ratio)) != 1 and plan.pp > 1:
        apply_core_sharing(program, alone)
    timeline = to_timeline(program, meta)
    if not case.jitter:
        return _with_device_ranks(with_receive_kernels(timeline), plan, step.groups)
    timeline = _with_device_ranks(timeline, plan, step.groups)
    return with_receive_kernels(_delayed(timeline, program, case, step.groups, seed))


def _meta(case, seed, offloaded):
    """Facts that a timeline tells of the step; offloaded: the split of states that leave the
    device, if any does.
    """
    plan = case.plan
    software = case.software.name
    width = plan.world_size // plan.pp
    return Meta(
        source="simulated",
        world_size=plan.world_size,
        represents={
            stage: list(range(stage * width, (stage + 1) * width))
            for stage in range(plan.pp)
        },
        device=case.device.name,
        provenance={
            "model": case.model.name,
            "cluster": case.cluster.name,
            "nodes": case.cluster.nodes,
            "plan": str(plan),
            "global_batch": case.global_batch,
            **({"jitter": case.jitter, "seed": seed} if case.jitter else {}),
            **({"software": software} if software != "none" else {}),
            **({"offloaded": vars(offloaded.split)} if offloaded else {}),
        },
    )


def _lay_out(case, parameters, policy=None):
    """Operations of `simulate` before they are timed, one rank per pipeline stage;
    arguments and errors as there.
    """
    check_plan(case)
    sharding_of = Sharding
    if policy is not None or case.plan.offload is not None:
        # offload is a wing: imported where a step needs it
        from madmax_lib.simulator.offload.staging import staged

        case, sharding_of = staged(case, parameters, policy)
    plan = case.plan
    sizes = dict.fromkeys((plan.micro_batch, plan.last_micro_batch(case.global_batch)))
    batches = [_micro_batch(case, samples, parameters) for samples in sizes]
    sharding = sharding_of(batches[0].prices)
    step = StepBuilder(case, batches[0], batches[-1], sharding)
    return step, step.build(plan.micro_batches(case.global_batch))


def _micro_batch(case, samples, parameters):
    """Blocks of a micro-batch of so many samples per device, their prices and the
    message between stages.
    """
    case = case.with_plan(micro_batch=samples)
    # recommendation models give their work as blocks
    is_dlrm = isinstance(case.model, DLRM)
    steps = Steps.of(replace(case, model=_NOTHING) if is_dlrm else case)
    sent_bytes = float(steps.work.sent_bytes)
    return MicroBatch(chunk_blocks(case), Prices(steps, parameters), sent_bytes)


def _with_device_ranks(timeline, plan, groups):
    """Stage numbers become device ranks: the first of each stage, or every one in a
    small world.
    """
    of_stage = timeline.meta.represents
    every = timeline.meta.world_size <= _ALL_RANKS_UP_TO
    count = len(timeline)
    first = np.array([of_stage[stage][0] for stage in sorted(of_stage)], dtype=np.int32)
    ranks = first[timeline.spans["rank"].to_numpy()]
    copies = range(len(of_stage[0]) if every else 1)
    spans = pd.concat(
        [timeline.spans.assign(rank=ranks + copy) for copy in copies], ignore_index=True
    )
    ends = timeline.edges[["source", "target"]]
    edges = pd.concat(
        [timeline.edges.assign(**(ends + copy * count)) for copy in copies],
        ignore_index=True,
    )
    represents = {
        rank: [rank] if every else ranks
        for ranks in of_stage.values()
        for rank in ranks[: len(copies)]
    }
    group = _with_members(spans["group"], spans["rank"], plan, groups)
    meta = replace(timeline.meta, represents=represents)
    return Timeline(spans.assign(group=group), meta, edges)


def _delayed(timeline, program, case, groups, seed):
    """The same with ranks that compute behind the fastest one, each by a delay drawn
    for the step.
    """
    delays = np.random.default_rng(seed).exponential(
        case.jitter, (case.plan.pp, case.plan.world_size // case.plan.pp)
    )
    members = {
        name: (int(groups[name].ranks), int(groups[name].stride))
        for name in {*program.group} - {"", "pp"}
    }
    times_s = run_with_stragglers(
        program, 1 + delays - delays.min(), members, len(timeline) // len(program)
    )
    # (ops, devices) of each, devices below each other: (devices x ops)
    start_ns, end_ns = (
        np.rint(seconds.T.reshape(-1) * NS_PER_S).astype(np.int64)
        for seconds in times_s
    )
    return replace(
        timeline,
        spans=timeline.spans.assign(start_ns=start_ns, dur_ns=end_ns - start_ns),
    )


def _with_members(group, rank, plan, groups):
    """Names of groups with their ranks; tp, dp and pp alone need none, they follow from
    the plan.
    """
    plain = ("tp", "dp", "pp") if plan.cp == 1 else ()
    texts = group.astype(object).where(group.notna(), "").to_numpy(copy=True)
    for (kind, member), rows in rank.groupby(
        [group, rank], observed=True
    ).indices.items():
        if kind not in plain:
            one = groups[kind]
            texts[rows] = member_name(kind, member, one.ranks, one.stride)
    return text_column(texts.tolist())
