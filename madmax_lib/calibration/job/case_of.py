"""The job of a trace: model, plan, batch, dtype and software, each with its evidence.

    job = mm.calibration.case_of(mm.read_trace(mm.dataset("vit-ddp")))
    job          # the call that makes the case, and why
    job.case     # to estimate with, or to correct

Nothing is taken from what a trainer wrote about itself: shapes of products and of
attention, messages and names of kernels tell it.
"""

import re
from dataclasses import dataclass

import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.job.observed import Observed
from madmax_lib.calibration.job.shapes import shapes_of
from madmax_lib.calibration.job.splits import Facts, add_groups, add_splits
from madmax_lib.catalog.models import Cluster, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.operators.ops import operator_calls

# in names of kernels of products, the first that matches
_DTYPES = {
    "fp4": r"e2m1|fp4|mxf4",
    "fp8": r"e4m3|e5m2|fp8|float8",
    "tf32": r"tf32|s1688gemm",
    "bf16": r"bf16|bfloat16|_bb[_s]",
    "fp16": r"fp16|f16f16|h16816|h884|_hh[_s]|hgemm",
    "fp32": r"sgemm|f32f32_f32f32",
}
_PRODUCTS = r"gemm|nvjet|cijk|cutlass|xmma"
# labels and operators of a stack of the catalog, the most special first
_STACKS = {
    "deepspeed": "(?i)deepspeed",
    "megatron-core": r"(?i)megatron|transformer_engine|TEDotProduct|_LayerNormLinear",
    "fsdp2-compiled": "^CompiledF|^triton_",
}
# of the model's sizes: where they are read, and how sure that is
_EVIDENCE = {
    "layers": ("passes of attention, by micro-batches and stages",),
    "hidden": ("the size that most products share",),
    "heads": ("shapes of attention and the ranks that share it",),
    "sequence": ("tokens of attention",),
    "ffn": ("channels of the other products", "likely"),
    "vocab": ("rows that are looked up, classes of the loss",),
    "experts": ("scores that tokens choose from",),
    "image": ("convolutions that cut patches",),
    "norm": ("operators of norms; biases and positions go with them", "guess"),
}


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
        call = "no transformer: give model and plan by hand"
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
        for stack, pattern in _STACKS.items():
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
    for field, evidence in _EVIDENCE.items():
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
        next((kind for kind, p in _DTYPES.items() if re.search(p, name)), "")
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
