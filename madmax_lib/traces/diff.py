"""Differences of two timelines in seconds: measured against measured, or against
simulated.

Steps and ranks are paired first; then both sides are means over what is paired, so that
two ranks and a hundred steps compare with a simulated rank and its one step.
Differences are always b - a.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import NS_PER_S
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import BUSY_KINDS, KINDS, Timeline, busy_spans, with_origin
from madmax_lib.timeline.kinds import collective_names, collectives_of
from madmax_lib.traces.tables import stacked
from madmax_lib.traces.waits.step_times import breakdown_of_cells, counted_steps

_LEVELS = ("name", "op", "class")
_CARRIED_AS = {
    "all_to_all": "send_recv"
}  # NCCL runs an all-to-all as SendRecv kernels; their name says no more
_OPS = [
    "name",
    "class",
    "kind",
    "matched",
    "count_a",
    "count_b",
    "total_a_s",
    "total_b_s",
    "difference_s",
    "status",
]


def compare(
    a: Timeline, b: Timeline, *, labels: tuple[str, str] | None = None
) -> pd.DataFrame:
    """Time of a step in `a` and in `b`, one row per quantity of
    `breakdown`.

    quantity, a, b, difference (b - a), ratio (b / a), a_min, a_max, b_min, b_max. a and
    b: mean over paired ranks and steps in seconds, overlap in 0..1 of the mean
    communication; min and max over the single ranks and steps. NaN for a timeline
    without device work. labels: what to call the two, in `.attrs`, with their sources
    and provenance. See also: mm.breakdown, mm.traces.compare_ops, mm.traces.gate.
    """
    a = require_type("a", a, Timeline)
    b = require_type("b", b, Timeline)
    left, right = (_means(*side) for side in _weighted(a, b))
    ends = ["min", "max"]
    table = pd.DataFrame(
        {
            "a": left["mean"],
            "b": right["mean"],
            "difference": right["mean"] - left["mean"],
            "ratio": right["mean"] / left["mean"].where(left["mean"] != 0),
        }
    )
    table = table.join([left[ends].add_prefix("a_"), right[ends].add_prefix("b_")])
    table = table.rename_axis("quantity").reset_index()
    return _with_origin(table, a, b, labels)


def compare_ops(
    a: Timeline,
    b: Timeline,
    *,
    by: str | None = None,
    kinds: Sequence[str] = BUSY_KINDS,
    labels: tuple[str, str] | None = None,
) -> pd.DataFrame:
    """Operations of both timelines, largest difference first; nothing is counted twice,
    so differences add up by kind.

    by: "name" as recorded, "op" (see `op_names`), "class" (see `op_classes`). None: by
    name; names without a partner by op; what is left of a measured against a simulated
    timeline by class. What has no partner at all keeps its name, or, measured against
    simulated, its op. kinds: of the spans to compare, for example ("cpu",) for
    operators and launches on the host.

    Columns: name (op or class where matched by it), class, kind, matched (name, op,
    class, or empty), count_a, count_b, total_a_s, total_b_s (mean per paired rank and
    step), difference_s (b - a), status: missing (from b), extra (in b), more, fewer,
    both (as often). A simulated block stands for many kernels, so measured and
    simulated computation that is matched by class is "both" whatever the counts. Raises
    ValueError for a `by` or a kind that does not exist.
    """
    if by not in (None, *_LEVELS):
        raise ValueError(f"by={by!r} is not one of {', '.join(_LEVELS)}")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"kind {unknown[0]!r} is not one of {', '.join(KINDS)}")
    mixed = a.meta.source != b.meta.source
    # Measured kernels have names; a simulation has blocks, which only a class matches.
    levels = (by,) if by else _LEVELS[: 3 if mixed else 2]
    left, right = (_ops(*side, kinds, mixed) for side in _weighted(a, b))
    parts = []
    for level in levels:
        key_a, key_b = (
            pd.MultiIndex.from_frame(side[["kind", level]]) for side in (left, right)
        )
        # What both sides have is joined at this level; the rest goes on to the next.
        in_b = key_a.isin(key_b)
        in_a = key_b.isin(key_a)
        parts.append(_joined(left[in_b], right[in_a], level, level))
        left = left[~in_b]
        right = right[~in_a]
    # what has no partner keeps its name, or measured against simulated its op
    parts.append(_joined(left, right, levels[: 2 if mixed else 1][-1], ""))
    table = stacked(parts)
    table["difference_s"] = table["total_b_s"] - table["total_a_s"]
    count_a = table["count_a"]
    count_b = table["count_b"]
    # A simulated block stands for many kernels: its count says nothing. Counts are
    # means over steps: equal ones may differ in the last bits.
    block = mixed & (table["matched"] == "class") & (table["kind"] != "comm")
    same = np.isclose(count_a, count_b, rtol=1e-9) | block
    cases = [count_b == 0, count_a == 0, same, count_b > count_a]
    table["status"] = np.select(cases, ["missing", "extra", "both", "more"], "fewer")
    # Largest difference first, equal ones by name.
    by_size = table["difference_s"].abs()
    table = table.iloc[np.lexsort((table["name"], -by_size))]
    return _with_origin(table[_OPS].reset_index(drop=True), a, b, labels)


def align_steps(a: Timeline, b: Timeline) -> pd.DataFrame:
    """Pairs of steps to compare: step_a, step_b; only steps with device work, measured
    ones without warm-up and cut ones, or -1 where no step has any.

    A single step, simulated or of another number, stands for every step of the other
    timeline. Else equal numbers pair; without any, steps pair in order. Empty when a
    timeline has no device work.
    """
    steps_a = _busy_steps(a)
    steps_b = _busy_steps(b)
    # Steps of equal numbers are the same step of a run.
    common = [(step, step) for step in steps_a if step in set(steps_b)]
    if len(steps_b) == 1 and (b.meta.source == "simulated" or not common):
        pairs = [(step, steps_b[0]) for step in steps_a]
    elif len(steps_a) == 1 and (a.meta.source == "simulated" or not common):
        pairs = [(steps_a[0], step) for step in steps_b]
    else:
        pairs = common or list(zip(steps_a, steps_b, strict=False))
    return pd.DataFrame(pairs, columns=["step_a", "step_b"], dtype="int64")


def align_ranks(a: Timeline, b: Timeline) -> pd.DataFrame:
    """Pairs of ranks to compare: device, rank_a, rank_b, one row per device that both
    timelines have.

    A measured rank is its own device; a simulated one stands for those in
    meta.represents. Empty when the timelines share no device: then each side is a mean
    over its own.
    """
    of_a = _devices(a)
    of_b = _devices(b)
    rows = [
        (device, of_a[device], of_b[device]) for device in sorted({*of_a} & {*of_b})
    ]
    return pd.DataFrame(rows, columns=["device", "rank_a", "rank_b"], dtype="int64")


def op_names(names: Sequence[str]) -> np.ndarray:
    """Names less what changes with version, shape and layer: template and call
    arguments, tile sizes, architecture.

    Of an elementwise kernel the function stays; a collective is called by its name.

    >>> op_names(["volta_sgemm_128x64_tn", "attention 3 forward"]).tolist()
    ['sgemm_tn', 'attention forward']
    >>> op_names(["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]).tolist()
    ['all_reduce']
    """
    return _collective_or(names, _op_name)


def op_classes(names: Sequence[str]) -> np.ndarray:
    """Class of work of each name, (n,) of str: the first matching row of
    `data/op_classes.csv`.

    >>> op_classes(["aten::addmm", "head backward", "ncclDevKernel_AllGather"]).tolist()
    ['gemm', 'layer', 'all_gather']
    """
    rows = _class_table()

    def class_of(name):
        # The first row that matches decides: rows go from the particular to the general.
        return next(each for each, _, search in rows if search(name))

    return _collective_or(names, class_of)


def _collective_or(names, rule):
    """The collective (n,) of each name, else what a rule makes of it."""
    pairs = zip(collective_names(list(names)), names, strict=True)
    values = [collective or rule(name) for collective, name in pairs]
    return np.array(values, dtype=object)


def _weighted(a, b):
    """Each side with the count of each rank and of each step in a mean: once per pair,
    else as if it stood alone.
    """
    ranks = align_ranks(a, b)
    steps = align_steps(a, b)
    for side, timeline in (("a", a), ("b", b)):
        devices = {
            rank: max(len(stands_for), 1)
            for rank, stands_for in timeline.meta.represents.items()
        }
        of_rank = ranks[f"rank_{side}"].value_counts().to_dict() or devices
        of_step = steps[f"step_{side}"].value_counts().to_dict()
        yield timeline, of_rank, of_step or dict.fromkeys(_busy_steps(timeline), 1)


def _devices(timeline):
    """Rank that stands for each device."""
    return {
        device: rank
        for rank, devices in timeline.meta.represents.items()
        for device in devices or [rank]
    }


def _busy_steps(timeline):
    steps = sorted(busy_spans(timeline.spans)["step"].unique().tolist())
    counted = timeline.steps
    if timeline.meta.source == "measured":
        counted = counted_steps(timeline)
    return [step for step in steps if step in counted] or steps


def _paired(timeline, ranks, steps):
    spans = timeline.spans
    return spans[spans["rank"].isin(list(ranks)) & spans["step"].isin(list(steps))]


def _means(timeline, ranks, steps):
    """mean, min and max of each quantity over ranks and steps; the pairs of them become
    the ranks of one breakdown.
    """
    spans = busy_spans(_paired(timeline, ranks, steps))
    cells = pd.MultiIndex.from_product([sorted(ranks), sorted(steps)])
    table = breakdown_of_cells(timeline, spans, cells)
    table = table.drop(columns="rank").astype(float)
    if table.empty:
        return pd.DataFrame(np.nan, index=table.columns, columns=["mean", "min", "max"])
    # A cell counts as often as its rank and its step were paired.
    weight = [ranks[rank] * steps[step] for rank, step in cells]
    mean = pd.Series(np.average(table, axis=0, weights=weight), index=table.columns)
    # Overlap of the mean communication, not the mean of overlaps.
    mean["overlap"] = 1 - mean["exposed_comm_s"] / (mean["comm_s"] or np.nan)
    return pd.DataFrame({"mean": mean, "min": table.min(), "max": table.max()})


def _ops(timeline, ranks, steps, kinds, mixed):
    """name, kind, op, class, count, total_s of each operation, per rank and step."""
    spans = _paired(timeline, ranks, steps)
    spans = spans[spans["kind"].isin(kinds)]
    weight = spans["rank"].map(ranks) * spans["step"].map(steps)
    # Sums over spans become means per paired rank and step.
    per_cell = weight / max(sum(ranks.values()) * sum(steps.values()), 1)
    total_s = per_cell * spans["dur_ns"] / NS_PER_S
    spans = spans[["name", "kind"]].assign(count=per_cell, total_s=total_s)
    table = spans.groupby(["name", "kind"], observed=True).sum().reset_index()
    table = table.astype({"name": object, "kind": object})
    names = list(table["name"])
    collective = np.where(table["kind"] == "comm", collectives_of(timeline, names), "")
    is_named = collective != ""
    table["op"] = np.where(is_named, collective, op_names(names))
    table["class"] = np.where(is_named, collective, op_classes(names))
    if mixed:
        # What a simulation does in one block has the class of that block.
        simulated = {c: s or c for c, s, _ in _class_table()} | _CARRIED_AS
        table["class"] = [simulated.get(c, c) for c in table["class"]]
    return table


def _joined(left, right, level, matched):
    """Rows of both sides with the same kind and name, op or class."""
    sides = [side.groupby(["kind", level]) for side in (left, right)]
    classes = [side["class"].first() for side in sides]
    sums = [side[["count", "total_s"]].sum().astype(float) for side in sides]
    table = sums[0].add_suffix("_a").join(sums[1].add_suffix("_b"), how="outer")
    table = table.fillna(0.0)
    table["class"] = classes[0].combine_first(classes[1])
    table = table.reset_index(names=["kind", "name"]).assign(matched=matched)
    return table.rename(columns={"total_s_a": "total_a_s", "total_s_b": "total_b_s"})


def _with_origin(table, a, b, labels):
    """Attributes for plots and figures. provenance["files"] lists the inputs of both
    sides, simulations too.
    """
    sources = (a.meta.source, b.meta.source)
    labels = tuple(labels or map("{} ({})".format, "ab", sources))
    inputs = {}
    for label, timeline in zip(labels, (a, b), strict=True):
        provenance = timeline.meta.provenance
        inputs[label] = provenance.get("files") or {timeline.meta.source: provenance}
    rules = a.meta.provenance.get("rules", "") or b.meta.provenance.get("rules", "")
    origin = {
        "files": inputs,
        "rules": rules,
        "a": a.meta.provenance,
        "b": b.meta.provenance,
    }
    source = "simulated" if "simulated" in sources else "measured"
    return with_origin(table, origin, source=source, sources=sources, labels=labels)


@lru_cache(maxsize=1)
def _class_table():
    """(class, class that a simulation has for it, search) by row of op_classes.csv."""
    table = catalog.table("op_classes")
    searches = [
        re.compile(pattern, re.IGNORECASE).search for pattern in table["pattern"]
    ]
    return list(zip(table["class"], table["simulated"], searches, strict=True))


_FUNCTION = re.compile(
    r"\w*(?:functor\w*|_kernel_cuda|_cuda_kernel|_kernel_impl|_kernel|Ops|launch_\w+)\b",
    re.IGNORECASE,
)
_FRAME = re.compile(
    r"(?:[AB]?Unary|Binary)Functor|gpu_kernel_impl\w*|ReduceOps?"
    r"|\w*elementwise_kernel\w*|multi_tensor_apply_kernel",
    re.IGNORECASE,
)
_ARCHITECTURE = re.compile(
    r"(?:volta|turing|ampere|hopper|blackwell|maxwell|sm\d+|gfx\w+|gtcx?\d+)_",
    re.IGNORECASE,
)


def _op_name(name):
    """See op_names; no regular expression here goes back over a name, some have
    thousands of characters.
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", plain, maxsplit=1)[0]
    outer = head.rpartition("::")[2] or head
    is_elementwise = "elementwise_kernel" in outer
    if is_elementwise or outer in ("reduce_kernel", "multi_tensor_apply_kernel"):
        # The function inside of the template tells elementwise kernels apart.
        words = _FUNCTION.findall(name[len(head) :])
        inner = [word for word in words if not _FRAME.fullmatch(word)]
        return " ".join(["elementwise" if is_elementwise else outer, *inner[:1]])
    # CUTLASS: the kernel is the template's argument
    if outer in ("Kernel", "Kernel2", "device_kernel"):
        outer = re.split(r"[<(>]", name)[1].rpartition("::")[2]
    outer = re.sub(r"_MT\d.*", "", outer)  # Tensile: tile and everything after it
    # Tile sizes such as 128x64, and every other number.
    outer = re.sub(r"(?:\d+x)*\d+", "", _ARCHITECTURE.sub("", outer))
    return re.sub(r"([_ ])[_ ]+", r"\1", outer).strip("_ ") or name
