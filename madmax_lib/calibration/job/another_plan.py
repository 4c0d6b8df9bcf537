"""The measured kernels of a trace under another plan, kind by kind.

What was measured is kept: of each kind of work k the trace has t_k, and the simulator,
fitted to the trace, prices the old and the new step:

    t_new(k) = t_measured(k) x simulated_new(k) / simulated_old(k)

Of a kind that the trace has not, such as the collectives of a degree that was 1, the
simulated seconds count times measured / simulated of the whole old step. The same plan
therefore takes what was measured. The share s of the new step that differs from the
measured one is as unsure as the simulator, the rest as the measured steps spread:

    width^2 = ((1 - s) spread)^2 + (s prior)^2
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.calibration.job.case_of import case_of
from madmax_lib.calibration.machine.machine import fit_constants
from madmax_lib.calibration.trace import fit_timeline, slowest_stage, step_seconds
from madmax_lib.catalog.models import Cluster, Device, Link
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.simulate import simulate
from madmax_lib.simulator.steady.step_time import PARTS
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.comm.collectives import calls
from madmax_lib.traces.operators.ops import operators

# kernels that `slowest_stage` tells apart; what they leave of a step is communication
# that shows, and gaps
_KERNELS = ("gemm_s", "attention_s", "pointwise_s", "optimizer_s")
_RATE = 1e10  # FLOP/s or bytes/s of what a trace does not show
_MEMORY = 64e9  # bytes; nothing but `fits` depends on it
_SPREAD = 0.03  # at least, of a measured step as a logarithm
_HALF_90 = 1.645  # standard deviations to the ends of 90 % of a normal distribution


@dataclass(frozen=True)
class AnotherPlan:
    """A step that was not run, made of one that was.

    case: the new step. step_s, low_s, high_s: its seconds and their 90 % interval.
    kinds: measured_s, simulated_s of the old plan, seconds of the new one, and whether
    they rest on what was measured. breakdown: as `mm.breakdown`, of `timeline`, the
    simulated step, stretched to step_s. memory_bytes: of the fullest device. notes: what
    the fit could not meet.
    """

    case: Case
    step_s: float
    low_s: float
    high_s: float
    kinds: pd.DataFrame
    breakdown: pd.DataFrame
    memory_bytes: float
    timeline: Timeline
    notes: tuple[str, ...]

    def __repr__(self):
        text = (
            f"{self.case.plan}: {self.step_s:.4g} s, 90 % {self.low_s:.4g} to "
            f"{self.high_s:.4g} s, {self.memory_bytes / 1e9:.3g} GB a device; measured "
            f"{self.kinds['measured_s'].sum():.4g} s"
        )
        table = self.kinds.to_string(float_format="{:.4g}".format)
        return "\n".join([text, "", table, *self.notes])


def another_plan(
    timeline: Timeline,
    plan: Plan | str,
    cluster: Cluster | str | None = None,
    case: Case | None = None,
    *,
    global_batch: int | None = None,
) -> AnotherPlan:
    """The traced step under another plan, cluster or batch; the measured kernels stay.

    case: of the trace, as `case_of` proposes it if None. cluster: to run on; as many
    devices as the plan needs of the traced ones if None. global_batch: samples of the
    new step, those of the trace if None. Raises ValueError for a trace that tells no
    case, has forward passes only, or a plan that the rules refuse.
    """
    if case is None:
        job = case_of(timeline)
        if job.case is None or job.forward_only:
            why = "forward passes only" if job.forward_only else "no transformer's step"
            raise ValueError(f"timeline: {why} was traced; give its case")
        case = job.case
    if case.cluster is None:
        case = replace(case, cluster=traced_machine(timeline, case))
    plan = Plan.parse(plan)
    place = cluster or _with_devices(case.cluster, plan.world_size)
    samples = global_batch or case.global_batch
    new = replace(case, plan=plan, cluster=place, global_batch=samples)
    parameters, notes = _constants(timeline, case)
    old_row = _priced(estimate, case, parameters).iloc[0]
    new_row = _priced(estimate, new, parameters).iloc[0]
    measured = slowest_stage(timeline, case)
    kinds = _kinds(measured, _parts(old_row), _parts(new_row))
    step_s = float(kinds["new_s"].sum())
    share = (kinds["new_s"] - kinds["measured_s"]).abs().sum() / step_s
    share = min(share, 1.0)
    prior = np.log(new_row["high_s"] / new_row["step_s"])
    spread = max(_HALF_90 * np.log(step_seconds(timeline)).std(ddof=0), _SPREAD)
    width = float(np.hypot((1 - share) * spread, share * prior))
    simulated = _stretched(_priced(simulate, new, parameters), step_s)
    return AnotherPlan(
        case=new,
        step_s=step_s,
        low_s=step_s * np.exp(-width),
        high_s=step_s * np.exp(width),
        kinds=kinds,
        breakdown=breakdown(simulated),
        memory_bytes=float(new_row["memory_bytes"]),
        timeline=simulated,
        notes=notes,
    )


def traced_machine(timeline: Timeline, case: Case) -> Cluster:
    """A cluster for a device without data sheet: rates that the trace itself reaches.

    The fastest products, memory traffic and collectives stand for the peaks; operators
    that take less than a thousandth of the time are too short to tell.
    """
    table = operators(timeline, by_shape=True)
    table = table[table["share"] > 1e-3]
    flops_per_s, bytes_per_s = table[["flops_per_s", "bytes_per_s"]].max().fillna(_RATE)
    sent = calls(timeline)["bus_bytes_per_s"].quantile(0.9)
    family = "cpu" if (timeline.spans["stream"] < 0).all() else "other"
    peak_flops = {case.dtype: float(flops_per_s)}
    device = Device("traced", _MEMORY, float(bytes_per_s), peak_flops, family=family)
    link = Link("traced", float(sent) if sent > 0 else _RATE)
    return Cluster("traced", device, 1, case.plan.world_size, link, link)


def _with_devices(cluster: Cluster, world: int):
    """The same machines, as many as a plan needs."""
    each = min(max(cluster.devices_per_node, 1), world)
    return replace(cluster, devices_per_node=each, nodes=-(-world // each))


def _constants(timeline: Timeline, case: Case) -> tuple[Parameters, tuple[str, ...]]:
    """Constants of the trace and what they leave; the shipped ones where it is refused."""
    try:
        fitted = fit_timeline(timeline, case)
    except ValueError as error:
        return shipped(), (f"{error}: the shipped constants stand in",)
    notes = tuple(fitted.provenance["notes"])
    if case.cluster.device.family != "cpu":
        return fitted, notes
    # no shipped row shows a CPU: a machine's own fit begins where CPUs are
    begin = replace(shipped(), collectives=fitted.collectives, links=fitted.links)
    measured = pd.DataFrame([slowest_stage(timeline, case)])
    return fit_constants([case], measured, begin), notes


def _priced(call, case: Case, parameters: Parameters):
    """Answer of `estimate` or `simulate` for a case."""
    names = ("global_batch", "sequence", "dtype", "software")
    given = {name: getattr(case, name) for name in names}
    return call(case.model, case.cluster, case.plan, **given, parameters=parameters)


def _parts(row: pd.Series):
    """Seconds of a simulated step by part; the head's products count as such."""
    parts = row[list(PARTS)].astype(float)
    parts["gemm_s"] += parts["head_s"]
    return parts.drop("head_s")


def _kinds(measured: dict[str, float], old: pd.Series, new: pd.Series):
    """measured_s, simulated_s, new_s and rests_on of each kind of work."""
    kernels = pd.Series({name: measured[name] for name in _KERNELS})
    # kernels side by side take less than their sum
    kernels *= min(1.0, measured["step_s"] / kernels.sum())
    others = old[old.index.difference(_KERNELS, sort=False)]
    shown_s = measured["step_s"] - kernels.sum()
    shown = shown_s * others / others.sum()
    table = pd.DataFrame({"simulated_s": old, "measured_s": pd.concat([kernels, shown])})
    ratio = (table["measured_s"] / old).where(old > 0)
    bias = measured["step_s"] / old.sum()
    table["new_s"] = new * ratio.fillna(bias)
    table["rests_on"] = np.where(ratio.notna(), "trace", "simulator")
    return table[(table[["measured_s", "new_s"]] > 0).any(axis=1)]


def _stretched(timeline: Timeline, step_s: float):
    """A step whose spans all take longer by one factor, so that it lasts step_s."""
    times_ns = timeline.spans[["start_ns", "dur_ns"]]
    length_ns = times_ns.sum(axis=1).max() - times_ns["start_ns"].min()
    longer_ns = (times_ns * (step_s * NS_PER_S / length_ns)).round()
    return replace(timeline, spans=timeline.spans.assign(**longer_ns))
