"""Differences of two timelines in seconds: measured against measured, or against
simulated.

Steps and ranks are paired first; then both sides are means over what is paired, so that
two ranks and a hundred steps compare with a simulated rank and its one step.
Differences are always b - a.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base.fields import require_type
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.accounting import rank_breakdown
from madmax_lib.timeline.kinds import collective_names, collectives_of
from madmax_lib.timeline.timeline import BUSY_KINDS, KINDS, Timeline

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
    sides = [
        _means(timeline, *weights)
        for timeline, weights in zip((a, b), _weights(a, b), strict=True)
    ]
    table = pd.concat(sides, axis=1, keys=["a", "b"])
    table.columns = [
        side if value == "mean" else f"{side}_{value}" for side, value in table.columns
    ]
    table = table.rename_axis("quantity").reset_index()
    ratio = table["b"] / table["a"].where(table["a"] != 0)
    table = table.assign(difference=table["b"] - table["a"], ratio=ratio)
    table = table[
        [
            "quantity",
            "a",
            "b",
            "difference",
            "ratio",
            "a_min",
            "a_max",
            "b_min",
            "b_max",
        ]
    ]
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
    left, right = (
        _ops(timeline, *weights, kinds, mixed)
        for timeline, weights in zip((a, b), _weights(a, b), strict=True)
    )
    parts = []
    for level in levels:
        keys = [
            pd.MultiIndex.from_frame(side[["kind", level]]) for side in (left, right)
        ]
        # What both sides have is joined at this level; the rest goes on to the next.
        shared = keys[0].isin(keys[1]), keys[1].isin(keys[0])
        parts.append(_joined(left[shared[0]], right[shared[1]], level, level))
        left = left[~shared[0]]
        right = right[~shared[1]]
    parts.append(
        _joined(
            left, right, levels[min(1, len(levels) - 1)] if mixed else levels[0], ""
        )
    )
    table = pd.concat(
        [part for part in parts if len(part)] or parts[:1], ignore_index=True
    )
    table["difference_s"] = table["total_b_s"] - table["total_a_s"]
    table["status"] = _status(table, mixed)
    # Largest difference first, equal ones by name.
    by_size = table["difference_s"].abs().to_numpy()
    table = table.iloc[np.lexsort((table["name"], -by_size))].reset_index(drop=True)[
        _OPS
    ]
    return _with_origin(table, a, b, labels)


def align_steps(a: Timeline, b: Timeline) -> pd.DataFrame:
    """Pairs of steps to compare: step_a, step_b; only steps with device work, or -1
    where no step has any.

    A single step, simulated or of another number, stands for every step of the other
    timeline. Else equal numbers pair; without any, steps pair in order. Of three or
    more pairs the first is dropped as warm-up, unless both timelines are simulated.
    Empty when a timeline has no device work.
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
    # The first measured step allocates and compiles; a simulated one does not.
    warm_up = len(pairs) > 2 and "measured" in (a.meta.source, b.meta.source)
    return pd.DataFrame(
        pairs[1 if warm_up else 0 :], columns=["step_a", "step_b"], dtype="int64"
    )


def align_ranks(a: Timeline, b: Timeline) -> pd.DataFrame:
    """Pairs of ranks to compare: device, rank_a, rank_b, one row per device that both
    timelines have.

    A measured rank is its own device; a simulated one stands for those in
    meta.represents. Empty when the timelines share no device: then each side is a mean
    over its own.
    """
    of_a = _devices(a)
    of_b = _devices(b)
    both = sorted(set(of_a) & set(of_b))
    columns = {
        "device": both,
        "rank_a": [of_a[d] for d in both],
        "rank_b": [of_b[d] for d in both],
    }
    return pd.DataFrame(columns, dtype="int64")


def op_names(names: Sequence[str]) -> np.ndarray:
    """Names less what changes with version, shape and layer: template and call
    arguments, tile sizes, architecture.

    Of an elementwise kernel the function stays; a collective is called by its name.

    >>> op_names(["volta_sgemm_128x64_tn", "attention 3 forward"]).tolist()
    ['sgemm_tn', 'attention forward']
    >>> op_names(["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]).tolist()
    ['all_reduce']
    """
    collectives = collective_names(list(names))
    return np.array(
        [c or _op_name(n) for n, c in zip(names, collectives, strict=True)],
        dtype=object,
    )


def op_classes(names: Sequence[str]) -> np.ndarray:
    """Class of work of each name, (n,) of str: the first matching row of
    `data/op_classes.csv`.

    >>> op_classes(["aten::addmm", "head backward", "ncclDevKernel_AllGather"]).tolist()
    ['gemm', 'layer', 'all_gather']
    """
    collectives = collective_names(list(names))
    # The first row that matches decides: rows go from the particular to the general.
    rows = _class_table()
    classes = [next(c for c, _, search in rows if search(name)) for name in names]
    return np.array(
        [c or f for c, f in zip(collectives, classes, strict=True)], dtype=object
    )


def _weights(a: Timeline, b: Timeline):
    """Count of each rank and of each step in a mean, of a and of b: once per pair,
    else as if it stood alone.
    """
    ranks = align_ranks(a, b)
    steps = align_steps(a, b)
    for side, timeline in (("a", a), ("b", b)):
        devices = {
            rank: max(len(stands_for), 1)
            for rank, stands_for in timeline.meta.represents.items()
        }
        of_rank, of_step = (
            pairs.value_counts().to_dict()
            for pairs in (ranks[f"rank_{side}"], steps[f"step_{side}"])
        )
        yield of_rank or devices, of_step or dict.fromkeys(_busy_steps(timeline), 1)


def _devices(timeline: Timeline):
    """Rank that stands for each device."""
    return {
        device: rank
        for rank, devices in timeline.meta.represents.items()
        for device in devices or [rank]
    }


def _busy_steps(timeline: Timeline):
    steps = timeline.spans.loc[timeline.spans["kind"].isin(BUSY_KINDS), "step"].unique()
    return sorted(int(step) for step in steps if step >= 0) or sorted(
        int(step) for step in steps
    )


def _means(timeline: Timeline, ranks: dict[int, int], steps: dict[int, int]):
    """mean, min and max of each quantity over ranks and steps; the pairs of them become
    the ranks of one breakdown.
    """
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    spans = spans[spans["rank"].isin(list(ranks)) & spans["step"].isin(list(steps))]
    cells = pd.MultiIndex.from_product([sorted(ranks), sorted(steps)])
    cell = cells.get_indexer(pd.MultiIndex.from_frame(spans[["rank", "step"]]))
    # One breakdown of all (rank, step) cells, each as if it were a rank.
    every = {cell: [cell] for cell in range(len(cells))}
    meta = replace(timeline.meta, represents=every)
    table = (
        rank_breakdown(Timeline(spans.assign(rank=cell.astype(np.int32)), meta))
        .drop(columns="rank")
        .astype(float)
    )
    if not len(table):
        return pd.DataFrame(np.nan, index=table.columns, columns=["mean", "min", "max"])
    # A cell counts as often as its rank and its step were paired.
    weight = cells.map(lambda cell: ranks[cell[0]] * steps[cell[1]]).to_numpy(
        dtype=float
    )
    mean = pd.Series(np.average(table, axis=0, weights=weight), index=table.columns)
    # Overlap of the mean communication, not the mean of overlaps.
    mean["overlap"] = (
        1 - mean["exposed_comm_s"] / mean["comm_s"] if mean["comm_s"] else np.nan
    )
    return pd.DataFrame({"mean": mean, "min": table.min(), "max": table.max()})


def _ops(
    timeline: Timeline, ranks: dict[int, int], steps: dict[int, int], kinds, mixed: bool
):
    """name, kind, op, class, count, total_s of each operation, per rank and step."""
    spans = timeline.spans[timeline.spans["kind"].isin(kinds)]
    spans = spans[spans["rank"].isin(list(ranks)) & spans["step"].isin(list(steps))]
    weight = spans["rank"].map(ranks).to_numpy(float) * spans["step"].map(
        steps
    ).to_numpy(float)
    # Sums over spans become means per paired rank and step.
    per_cell = weight / max(sum(ranks.values()) * sum(steps.values()), 1)
    spans = spans[["name", "kind"]].assign(
        count=per_cell, total_s=per_cell * spans["dur_ns"] / NS_PER_S
    )
    table = (
        spans.groupby(["name", "kind"], observed=True)[["count", "total_s"]]
        .sum()
        .reset_index()
    )
    table = table.astype({"name": object, "kind": object})
    collective = np.where(
        table["kind"] == "comm", collectives_of(timeline, list(table["name"])), ""
    )
    table["op"] = np.where(collective != "", collective, op_names(list(table["name"])))
    table["class"] = np.where(
        collective != "", collective, op_classes(list(table["name"]))
    )
    if mixed:
        # What a simulation does in one block has the class of that block.
        simulated = {c: s or c for c, s, _ in _class_table()} | _CARRIED_AS
        table["class"] = [simulated.get(c, c) for c in table["class"]]
    return table


def _joined(left: pd.DataFrame, right: pd.DataFrame, level: str, matched: str):
    """Rows of both sides with the same kind and name, op or class."""
    how = {
        "class": ("class", "first"),
        "count": ("count", "sum"),
        "total": ("total_s", "sum"),
    }
    sides = [
        side.groupby(["kind", level]).agg(**how).add_suffix(f"_{label}")
        for side, label in ((left, "a"), (right, "b"))
    ]
    table = sides[0].join(sides[1], how="outer")
    table = table.reset_index(names=["kind", "name"]).assign(matched=matched)
    table["class"] = table.pop("class_a").fillna(table.pop("class_b"))
    table = table.rename(columns={"total_a": "total_a_s", "total_b": "total_b_s"})
    numbers = ["count_a", "count_b", "total_a_s", "total_b_s"]
    table[numbers] = table[numbers].astype(float).fillna(0.0)
    return table


def _status(table: pd.DataFrame, mixed: bool):
    a = table["count_a"].to_numpy()
    b = table["count_b"].to_numpy()
    # A simulated block stands for many kernels: its count says nothing.
    block = (
        mixed
        & (table["matched"] == "class").to_numpy()
        & (table["kind"] != "comm").to_numpy()
    )
    # Counts are means over steps: equal ones may differ in the last bits.
    cases = [b == 0, a == 0, np.isclose(a, b, rtol=1e-9) | block, b > a]
    return np.select(cases, ["missing", "extra", "both", "more"], "fewer")


def _with_origin(
    table: pd.DataFrame, a: Timeline, b: Timeline, labels: tuple[str, str] | None
):
    """Attributes for plots and figures. provenance["files"] lists the inputs of both
    sides, simulations too.
    """
    sources = (a.meta.source, b.meta.source)
    labels = tuple(
        labels
        or (f"{side} ({source})" for side, source in zip("ab", sources, strict=True))
    )
    inputs = {}
    for label, timeline in zip(labels, (a, b), strict=True):
        provenance = timeline.meta.provenance
        inputs[label] = provenance.get("files") or {timeline.meta.source: provenance}
    rules = a.meta.provenance.get("rules", "") or b.meta.provenance.get("rules", "")
    table.attrs.update(
        provenance={
            "files": inputs,
            "rules": rules,
            "a": a.meta.provenance,
            "b": b.meta.provenance,
        },
        source="simulated" if "simulated" in sources else "measured",
        sources=sources,
        labels=labels,
    )
    return table


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


def _op_name(name: str):
    """See op_names; no regular expression here goes back over a name, some have
    thousands of characters.
    """
    head = re.split(
        r"[<(]",
        name.removeprefix("void ").replace("(anonymous namespace)::", ""),
        maxsplit=1,
    )[0]
    outer = head.rpartition("::")[2] or head
    if "elementwise_kernel" in outer or outer in (
        "reduce_kernel",
        "multi_tensor_apply_kernel",
    ):
        # The function inside of the template tells elementwise kernels apart.
        inner = [
            word
            for word in _FUNCTION.findall(name[len(head) :])
            if not _FRAME.fullmatch(word)
        ]
        return " ".join(
            ["elementwise" if "elementwise" in outer else outer, *inner[:1]]
        )
    if outer in (
        "Kernel",
        "Kernel2",
        "device_kernel",
    ):  # CUTLASS: the kernel is the template's argument
        outer = re.split(r"[<(>]", name)[1].rpartition("::")[2]
    outer = re.sub(r"_MT\d.*", "", outer)  # Tensile: tile and everything after it
    # Tile sizes such as 128x64, and every other number.
    outer = re.sub(r"(?:\d+x)*\d+", "", _ARCHITECTURE.sub("", outer))
    return re.sub(r"([_ ])[_ ]+", r"\1", outer).strip("_ ") or name
