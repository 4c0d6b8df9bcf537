"""The measured kernels of a trace under another plan, kind by kind.

What was measured is kept: of each kind of work k the trace has t_k, and the simulator,
fitted to the trace, prices the old and the new step:

    t_new(k) = t_measured(k) x simulated_new(k) / simulated_old(k)

Of a kind that the trace has not, such as the collectives of a degree that was 1, the
simulated seconds count times measured / simulated of the whole old step. The same plan
therefore takes what was measured. The share s of the new step that differs from the
measured one is as unsure as the simulator, all of it as the measured steps spread:

    width^2 = spread^2 + (s prior)^2

The job of a trace: model, plan, batch, dtype and software, each with its evidence.

    job = mm.calibration.case_of(mm.read_trace(mm.dataset("vit-ddp")))
    job          # the call that makes the case, and why
    job.case     # to estimate with, or to correct

Nothing is taken from what a trainer wrote about itself: shapes of products and of
attention, messages and names of kernels tell it.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import NS_PER_S
from madmax_lib.calibration.job.attention import check_attention
from madmax_lib.calibration.job.observed import Observed
from madmax_lib.calibration.job.shapes import shapes_of
from madmax_lib.calibration.job.splits import Facts, add_groups, add_splits
from madmax_lib.calibration.machine.machine import Machine, fit_constants
from madmax_lib.calibration.trace import fit_timeline, slowest_stage, step_seconds
from madmax_lib.calibration.trace_checks import fit_notes
from madmax_lib.catalog import Cluster, Device, Link, Transformer
from madmax_lib.plan import Case, Plan
from madmax_lib.simulator import PARTS, estimate, shipped, simulate
from madmax_lib.timeline import Timeline, breakdown
from madmax_lib.traces import calls
from madmax_lib.traces.operators.ops import operator_calls, operators

# kernels that `slowest_stage` tells apart; what they leave of a step is communication
# that shows, and gaps
_KERNELS = ("gemm_s", "attention_s", "pointwise_s", "optimizer_s")
_RATE = 1e10  # FLOP/s or bytes/s of what a trace lacks
_SPREAD = 0.03  # at least, of a measured step as a logarithm
_HALF_90 = 1.645  # standard deviations to the ends of 90 % of a normal distribution


@dataclass(frozen=True)
class AnotherPlan:
    """A step that was not run, made of one that was.

    case: the new step. step_s, low_s, high_s: its seconds and their 90 % interval.
    kinds: measured_s, simulated_s of the old plan, seconds of the new one, and whether
    they rest on what was measured. breakdown: as `mm.breakdown`, of `timeline`, the
    simulated step, stretched to step_s. memory_bytes: of the fullest device. machine:
    the traced one with its constants, to save. notes: what the fit could not meet.
    """

    case: Case
    step_s: float
    low_s: float
    high_s: float
    kinds: pd.DataFrame
    breakdown: pd.DataFrame
    memory_bytes: float
    timeline: Timeline
    machine: Machine
    notes: tuple[str, ...]

    def __repr__(self):
        text = (
            f"{self.case.plan}: {self.step_s:.4g} s, 90 % {self.low_s:.4g} to "
            f"{self.high_s:.4g} s, {self.memory_bytes / 1e9:.3g} GB a device; measured "
            f"{self.kinds['measured_s'].sum():.4g} s (median total_s)"
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
    new step, those of the trace if None. A text that says no micro-batch keeps their
    number in a step, or has one for each stage if that is more. Raises ValueError for a
    trace that tells no case, has forward passes only, or a plan that the rules refuse.
    """
    case = case or case_of(timeline).case
    if case is None:
        raise ValueError("timeline: not a step of a transformer; pass its case")
    if case.cluster is None:
        case = replace(case, cluster=_traced_machine(timeline, case))
    new = _changed(case, plan, cluster, global_batch or case.global_batch)
    parameters = _constants(timeline, case)
    old_row = case.answer(estimate, parameters=parameters).iloc[0]
    new_row = new.answer(estimate, parameters=parameters).iloc[0]
    measured = slowest_stage(timeline, case)
    kinds = _kinds(
        measured, *(row[list(PARTS)].astype(float) for row in (old_row, new_row))
    )
    # of the constants in use; a part that the trace lacks has no error
    errors = kinds["simulated_s"].div(kinds["measured_s"]).reindex(_KERNELS) - 1
    errors = dict(errors[np.isfinite(errors)])
    notes = fit_notes(timeline, case, errors, parameters)
    step_s = float(kinds["new_s"].sum())
    share = min((kinds["new_s"] - kinds["measured_s"]).abs().sum() / step_s, 1.0)
    prior = np.log(new_row["high_s"] / new_row["step_s"])
    spread = max(_HALF_90 * np.log(step_seconds(timeline)).std(ddof=0), _SPREAD)
    width = float(np.hypot(spread, share * prior))
    crowded = ["more ranks than traced: assuming that each has its own cores"]
    if case.device.family != "cpu" or new.plan.world_size <= case.plan.world_size:
        crowded = []
    simulated = new.answer(simulate, parameters=parameters)
    # all spans take longer by one factor, so that the step lasts step_s
    times_ns = simulated.spans[["start_ns", "dur_ns"]]
    length_ns = times_ns.sum(axis=1).max() - times_ns["start_ns"].min()
    longer_ns = (times_ns * (step_s * NS_PER_S / length_ns)).round()
    simulated = replace(simulated, spans=simulated.spans.assign(**longer_ns))
    return AnotherPlan(
        case=new,
        step_s=step_s,
        low_s=step_s * np.exp(-width),
        high_s=step_s * np.exp(width),
        kinds=kinds,
        breakdown=breakdown(simulated),
        memory_bytes=float(new_row["memory_bytes"]),
        timeline=simulated,
        machine=Machine(case.cluster, parameters, case.dtype),
        notes=(*notes, *crowded),
    )


def _changed(case, plan, cluster, global_batch):
    """The traced step under another plan, on a cluster or else on more or fewer of the
    traced devices.
    """
    plan = _with_micro_batch(plan, case, global_batch)
    if cluster is None and case.cluster.name in catalog.names("clusters"):
        cluster = catalog.cluster(case.cluster.name, devices=plan.world_size)
    # as many of the same machines as the plan needs
    nodes = -(-plan.world_size // case.cluster.devices_per_node)
    return replace(
        case,
        plan=plan,
        cluster=cluster or replace(case.cluster, nodes=nodes),
        global_batch=global_batch,
    )


def _with_micro_batch(text, case, global_batch):
    """The plan, its step in as many micro-batches as the traced one where it does not
    say; in the next number that divides a rank's samples.
    """
    plan = Plan.parse(text)
    if text is plan or re.search("mb|micro", text, re.IGNORECASE):
        return plan
    samples = max(global_batch // plan.dp, 1)
    traced = case.global_batch // (case.plan.dp * case.plan.micro_batch)
    least = min(max(traced, plan.pp), samples)
    count = next(n for n in range(least, samples + 1) if samples % n == 0)
    return replace(plan, micro_batch=samples // count)


def _traced_machine(timeline, case):
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
    # nothing depends on its capacity but `fits`
    device = Device("traced", 64e9, float(bytes_per_s), peak_flops, family=family)
    link = Link("traced", float(sent) if sent > 0 else _RATE)
    return Cluster("traced", device, 1, case.plan.world_size, link, link)


def _constants(timeline, case):
    """Constants fitted to the trace."""
    check_attention(timeline, case)
    fitted = fit_timeline(timeline, case)
    if case.device.family != "cpu":
        return fitted
    # no shipped row shows a CPU: a machine's own fit begins where CPUs are
    begin = replace(shipped(), collectives=fitted.collectives, links=fitted.links)
    measured = pd.DataFrame([slowest_stage(timeline, case)])
    machine = fit_constants([case], measured, begin)
    # what the first fit missed says nothing about the second
    origin = fitted.provenance | machine.provenance | {"errors": [], "notes": []}
    return replace(machine, provenance=origin)


def _kinds(measured, old, new):
    """measured_s, simulated_s, new_s and rests_on of each kind of work."""
    for parts in (old, new):  # the head's products are products
        parts["gemm_s"] += parts["head_s"]
        parts["head_s"] = 0.0
    kernels = pd.Series({name: measured[name] for name in _KERNELS})
    # kernels side by side take less than their sum
    kernels *= min(1.0, measured["step_s"] / kernels.sum())
    others = old[old.index.difference(_KERNELS, sort=False)]
    exposed_s = measured["step_s"] - kernels.sum()
    exposed = exposed_s * others / others.sum()
    columns = {"simulated_s": old, "measured_s": pd.concat([kernels, exposed])}
    table = pd.DataFrame(columns, index=old.index)
    ratio = (table["measured_s"] / old).where(old > 0)
    table["new_s"] = new * ratio.fillna(measured["step_s"] / old.sum())
    table["rests_on"] = np.where(ratio.notna(), "trace", "simulator")
    return table[(table[["measured_s", "new_s"]] > 0).any(axis=1)]


_PRODUCTS = r"gemm|nvjet|cijk|cutlass|xmma"
# what tells them: of dtypes the names of kernels of products, of stacks of the catalog
# labels and operators, each the first that matches; of the model's sizes where they are
# read, and how sure that is
_SIGNS = catalog.read_object(catalog.data_file("traced_jobs.json"))


@dataclass(frozen=True)
class Job:
    """A proposed case and its evidence.

    case: None where the products are no transformer's. facts: a row a field: field,
    value, evidence, sure (certain, likely or guess).
    """

    case: Case | None
    facts: pd.DataFrame

    def __repr__(self):
        case = self.case
        call = "no transformer: give model, plan, cluster and global batch"
        if case is not None:
            cluster = case.cluster and case.cluster.name
            call = (
                f"Case({case.model!r}, {cluster!r}, Plan.parse({str(case.plan)!r}), "
                f"{case.global_batch}, {case.sequence}, {case.dtype!r}, "
                f"{case.software.name!r})"
            )
        return f"{call}\n\n{self.facts.to_string(index=False)}"


def case_of(timeline: Timeline, cluster: Cluster | str | None = None) -> Job:
    """The job read off its trace: print it, correct it, pass `.case` on.

    cluster: where it ran; the catalog's with the traced device if None, and none for a
    device it lacks, such as a CPU. A trace without shapes of operators tells groups and
    dtype only.
    """
    seen = Observed.of(timeline)
    facts = Facts()
    shapes = shapes_of(seen)
    dtype = _dtype(timeline, facts)
    labels = seen.names.str.extract(r"^Optimizer\.step#(\w+)\.step")[0].dropna()
    if len(labels):
        facts.add("optimizer", labels.iloc[0], "label of its step")
    case = None
    if shapes is None:
        add_groups(seen, facts)
    else:
        add_splits(seen, shapes, facts)
        names = Plan.__dataclass_fields__
        plan = Plan(**{name: facts[name][0] for name in names if name in facts})
        model = _model(seen, shapes, plan, facts)
        # the last micro-batch may be short
        entered = seen.patches if seen.lookups.empty else seen.lookups
        each = entered.groupby("rank")["samples"].sum().max()
        each = int(each if each > 0 else seen.micro_batches * shapes.batch)
        samples = facts.add("global_batch", each * plan.dp, f"{each} enter a pipeline")
        device = timeline.meta.device
        if cluster is None and catalog.device_named(device) is not None:
            cluster = catalog.cluster(device, devices=plan.world_size)
            facts.add("cluster", cluster.name, f"a trace of {device}", "guess")
        on_cpu = bool((timeline.spans["stream"] < 0).all())
        software = "workbench" if on_cpu else "fsdp2"  # plain PyTorch
        for stack, pattern in _SIGNS["stacks"].items():
            if seen.names.str.contains(pattern).any():
                software = facts.add(
                    "software", stack, f"names with {pattern}", "likely"
                )
        case = Case(model, cluster, plan, samples, model.sequence, dtype, software)
    rows = [(field, *fact) for field, fact in facts.items()]
    table = pd.DataFrame(rows, columns=["field", "value", "evidence", "sure"])
    return Job(case, table)


def _model(seen, shapes, plan, facts):
    """The transformer whose parts these are."""
    split = plan.tp * plan.cp
    is_counted = seen.attentions["backward"] == shapes.backward
    # every rank of a stage runs that stage's layers
    counts = seen.attentions[is_counted].groupby("rank").size()
    is_rms = seen.names.str.contains("rms_norm").any()
    classes = max([*seen.losses["classes"], *seen.lookups["rows"]], default=0)
    sizes = {
        "layers": round(counts.mean() * plan.pp / seen.micro_batches),
        "hidden": shapes.hidden,
        "heads": shapes.heads * split,
        "kv_heads": shapes.kv_heads * split,
        "head_dim": shapes.head_dim,
        "sequence": shapes.tokens,
        "ffn": shapes.ffn * plan.tp,
        "gated": shapes.gated,
        "mlp_bias": not is_rms,
        "vocab": classes,
    }
    if is_rms:  # as in LLaMA
        sizes |= {"norm": "rms", "positions": "rope", "attention_bias": "none"}
    if len(seen.routers):
        sizes |= _mixture(seen, shapes, plan)
    if len(seen.patches):
        image = seen.patches[["edge", "patch"]].iloc[0].tolist()
        sizes |= dict(zip(["image", "patch"], image, strict=True))
        sizes["classes"] = sizes.pop("vocab")
    for field, evidence in _SIGNS["evidence"].items():
        if sizes.get(field):
            facts.add(field, sizes[field], *evidence)
    return Transformer("traced", **sizes)


def _mixture(seen, shapes, plan):
    """Experts, how many a token uses, and their channels."""
    experts, active = seen.routers[["experts", "active"]].iloc[0].tolist()
    grouped = seen.grouped
    widths = {*grouped["k"], *grouped["n"]} - {shapes.hidden}
    width = int(min(widths, default=shapes.ffn)) * plan.tp
    # each matrix is a product forward and one backward: two matrices, or three
    products = grouped["rank"].value_counts().max() / shapes.attentions
    return {
        "experts": experts,
        "active_experts": active,
        "expert_ffn": width,
        "ffn": shapes.ffn * plan.tp or width,
        "gated": bool(products > 5) or shapes.gated,
    }


def _dtype(timeline, facts):
    """Data type of the products: as their inputs, or as their kernels are named."""
    spans = timeline.spans
    kernels = spans[(spans["kind"] == "compute") & (spans["stream"] >= 0)]
    kernels = kernels[kernels["name"].str.contains(_PRODUCTS)]
    table, _ = operator_calls(timeline)
    shares = table[table["dtype"] != ""].groupby("dtype")["flops"].sum()
    by_name = kernels.groupby("name", observed=True)["dur_ns"].sum()
    kinds = [
        next((kind for kind, p in _SIGNS["dtypes"].items() if re.search(p, name)), "")
        for name in by_name.index
    ]
    named = by_name.groupby(kinds).sum().drop("", errors="ignore")
    # operators around kernels in 8 bits or less may have wider inputs
    narrow = named.reindex(["fp4", "fp8"]).sum()
    if not shares.sum() or narrow > named.sum() / 2:
        shares = named
    if not shares.sum():
        return facts.add("dtype", "bf16", "no product names its type", "guess")
    text = f"{shares.max() / shares.sum():.0%} of the products"
    return facts.add("dtype", str(shares.idxmax()), text)
