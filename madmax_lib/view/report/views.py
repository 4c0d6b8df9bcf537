"""What does each view of the report show? Tables of `traces` as HTML, a view that has
nothing to say as an empty text.

The views are those of PyTorch's TensorBoard plugin (overview, operators, kernels,
trace, memory, modules, distributed), and steps, stragglers and a comparison with
another run. Times are those of the steps.
"""

import warnings

import numpy as np
import pandas as pd

from madmax_lib.base.units import format_bytes, format_s
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.advise import advise
from madmax_lib.traces.comm.collectives import by_group, waiting
from madmax_lib.traces.comm.exchanges import exchanges
from madmax_lib.traces.diff import compare, compare_ops
from madmax_lib.traces.operators.memory import held_at_peak, memory_timeline, peak
from madmax_lib.traces.operators.ops import kernels, modules, operators
from madmax_lib.traces.operators.roofline import mfu
from madmax_lib.traces.stragglers import skew, stragglers
from madmax_lib.traces.waits.batches import batches
from madmax_lib.traces.waits.step_times import input_wait, steady_state, steps
from madmax_lib.view.commands.words import percent, plural
from madmax_lib.view.report.marks import bars, cards, heat, line, section, table, text

__all__ = [
    "advice",
    "comparison",
    "detail_ranks",
    "distributed",
    "kernel_view",
    "memory",
    "module_view",
]
__all__ += ["operator_view", "overview", "step_view", "told"]

_FEW = 16  # rows that are all shown; of more, some along the order of what they lose
_QUANTILES = {
    0.0: "least",
    0.1: "10 %",
    0.25: "25 %",
    0.5: "median",
    0.75: "75 %",
    0.9: "90 %",
    1.0: "most",
}
_UNMARKED = "no step marks: the whole recording counts as one step"
_WIDEST = 60  # steps of a heat map


def told(timeline: Timeline, whole: Timeline) -> str:
    """What was recorded: ranks, steps, spans, device, and what is missing."""
    steps_text = plural(len(whole.steps), "step") if whole.steps != [0] else _UNMARKED
    missing = timeline.meta.world_size - sum(
        map(len, timeline.meta.represents.values())
    )
    absent = (
        f" ({missing} of {timeline.meta.world_size} ranks have no trace here)"
        if missing > 0
        else ""
    )
    device = timeline.meta.device or "no device named"
    busy_s = [
        (table["total_s"] - table["idle_s"]).mean()
        for table in map(breakdown, (whole, timeline))
    ]
    outside_s = busy_s[0] - busy_s[1] if whole is not timeline else 0.0
    left_out = ", ".join(
        str(step) for step in whole.steps if step not in timeline.steps
    )
    where = (
        f"in steps that are warm-up or cut ({left_out}) or outside all"
        if left_out
        else "outside all steps"
    )
    left = (
        f". {format_s(outside_s)} of work per rank lie {where} and are not in the "
        "numbers"
        if outside_s
        else ""
    )
    return (
        f"{plural(len(timeline.ranks), 'rank')}{absent}, {steps_text}, "
        f"{len(whole):,} spans, {device}{left}."
    )


def overview(timeline: Timeline, detail: Timeline, peaks: pd.DataFrame) -> str:
    """The numbers to see first, and where the time goes on each rank."""
    each = breakdown(timeline)
    total_s = max(each["total_s"].sum(), 1e-12)
    worst = each.loc[each["exposed_comm_s"].idxmax()]
    said = (
        f"{percent(each['exposed_comm_s'].sum() / total_s)} of the device time is "
        "exposed communication, "
        f"{percent(each['idle_s'].sum() / total_s)} is idle; rank "
        f"{int(worst['rank'])} exposes most "
        f"({format_s(worst['exposed_comm_s'])} of {format_s(worst['total_s'])})."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown device: then there is no card
        used = mfu(detail)["mfu"].median()
    hidden_s = each["comm_s"].sum() - each["exposed_comm_s"].sum()
    numbers = [
        ("computing", percent(each["compute_s"].sum() / total_s)),
        (
            "of communication under compute",
            percent(hidden_s / comm_s) if (comm_s := each["comm_s"].sum()) > 0 else "",
        ),
        ("MFU of the recorded shapes", "" if np.isnan(used) else percent(used)),
        (
            "memory at the peak",
            format_bytes(peaks["peak_bytes"].max()) if len(peaks) else "",
        ),
    ]
    wall_s = steps(timeline)["wall_s"].median()
    numbers.insert(0, ("a step, median", "" if np.isnan(wall_s) else format_s(wall_s)))
    chosen, note = _some(
        each.assign(lost_s=each["exposed_comm_s"] + each["idle_s"]), "rank", "lost_s"
    )
    rows = [(label, _parts(row), _busy(row)) for label, row in chosen]
    return section("Overview", text(said), cards(numbers), text(note), bars(rows))


def _parts(row: dict) -> dict[str, float]:
    """Total time of a row of `breakdown` in parts: what is busy and neither computes
    nor communicates is other.
    """
    other_s = row["total_s"] - row["compute_s"] - row["exposed_comm_s"] - row["idle_s"]
    copies_s = min(row["memory_s"], other_s)
    times = {
        "compute": row["compute_s"],
        "comm": row["exposed_comm_s"],
        "memcpy": copies_s,
    }
    return times | {"other": max(other_s - copies_s, 0.0), "idle": row["idle_s"]}


def _busy(row: dict) -> str:
    shares = (
        (row[f"{name}_s"] / max(row["total_s"], 1e-12), word) for name, word in _WORDS
    )
    return f"{format_s(row['total_s'])}: " + ", ".join(
        f"{percent(share)} {word}" for share, word in shares if share
    )


_WORDS = (("compute", "compute"), ("exposed_comm", "exposed"), ("idle", "idle"))


def _some(frame: pd.DataFrame, key: str, by: str) -> tuple[list[tuple[str, dict]], str]:
    """Rows with their labels: all of a few, else those at quantiles of `by`, named by
    them, and a line that says so.
    """
    if len(frame) <= _FEW:
        return [(f"{key} {row[key]}", row) for row in frame.to_dict("records")], ""
    order = frame.sort_values([by, key]).reset_index(drop=True)
    at = {round(q * (len(order) - 1)): name for q, name in _QUANTILES.items()}
    rows = [
        (f"{key} {order[key][row]} · {name}", order.iloc[row].to_dict())
        for row, name in at.items()
    ]
    what = by.removesuffix("_s").replace("_", " ")
    return (
        rows,
        f"{len(rows)} of {len(frame):,} {key}s, in order of the time {what}, at "
        "quantiles of it.",
    )


def advice(timeline: Timeline) -> str:
    """Causes of lost time, largest gain first."""
    about = (
        "What each fix would gain at most, per step and mean over the ranks; "
        "causes overlap. "
    )
    about += "The evidence counts all ranks and steps together."
    found = advise(timeline).head(12)
    return section("What to fix first", text(about), table(found)) if len(found) else ""


def step_view(timeline: Timeline) -> str:
    """Every step with its parts, the wait for input, and their spread."""
    every = steps(timeline)
    if not len(every) or timeline.steps == [0]:
        return ""
    waits = (
        input_wait(timeline)
        .groupby(["rank", "step"])["wait_s"]
        .sum()
        .rename("input_wait_s")
    )
    every = every.join(waits, on=["rank", "step"]).fillna({"input_wait_s": 0.0})
    quantities = [
        "total_s",
        "compute_s",
        "memory_s",
        "exposed_comm_s",
        "idle_s",
        "input_wait_s",
    ]
    by_step = every.groupby("step")[quantities].mean()
    wall = every.groupby("step")["wall_s"]
    by_step = by_step.assign(wall_s=wall.median(), slowest_s=wall.max())
    by_step["slowest_rank"] = every.loc[wall.idxmax(), "rank"].to_numpy()
    by_step["note"] = (
        every.groupby("step")[["cut", "warmup"]].any().apply(_note, axis=1)
    )
    by_step = by_step.reset_index()
    chosen, note = _some(by_step, "step", "wall_s")
    columns = ["step", "wall_s", "slowest_s", "slowest_rank", *quantities[1:], "note"]
    shown = by_step[
        columns
        if by_step["input_wait_s"].any()
        else [c for c in columns if c != "input_wait_s"]
    ]
    about = (
        "Means over the ranks; wall is the median of the ranks on the host. The "
        "bars run from the first to the last "
    )
    about += (
        "work of a step: where steps overlap, idle here is another step's work, "
        "which the overview counts as busy."
    )
    fed = by_step["input_wait_s"].sum() / max(by_step["wall_s"].sum(), 1e-12)
    waited = (
        f"The host waits for input in {percent(fed)} of the steps' time."
        if fed > 0
        else ""
    )
    rows = [(label, _parts(row), format_s(row["total_s"])) for label, row in chosen]
    parts = [
        text(about),
        text(waited),
        text(note),
        bars(rows),
        table(_phases(timeline)),
        table(shown, most=100),
    ]
    return section("Steps", *parts)


def _phases(timeline: Timeline) -> pd.DataFrame:
    """The batches of an engine that serves, by phase."""
    every = batches(timeline)
    every = every.assign(period_s=every["period_s"].fillna(every["wall_s"])).groupby(
        "phase", as_index=False
    )
    quantities = ["requests", "tokens", "period_s", "device_s", "tokens_per_s"]
    return every.agg(
        batches=("step", "size"), **{name: (name, "median") for name in quantities}
    )


def _note(row: pd.Series) -> str:
    return "cut off" if row["cut"] else "warm-up" if row["warmup"] else ""


def distributed(timeline: Timeline, whole: Timeline) -> str:
    """Each group's collectives, who waits for whom, and which rank is late in which
    step.
    """
    groups = by_group(timeline)
    if not len(groups):
        return ""
    columns = [
        "collective",
        "group",
        "group_size",
        "calls",
        "size_bytes",
        "total_s",
        "exposed_s",
        "transfer_s",
    ]
    groups = groups[[*columns, "wait_s", "skew_max_s", "bus_bytes_per_s"]]
    waits = waiting(timeline)
    late = stragglers(timeline)
    lines = list(map(text, _about_waiting(waits, late)))
    late = late[(late["cost_s"] > 0) | (late["waited_s"] > 0)]
    worst = late.head(_FEW)
    note = ""
    if len(late) > _FEW:
        note = f"The {_FEW} of {len(late):,} ranks that cost the others most."
    parts = [
        table(groups, most=50),
        *lines,
        text(note),
        table(worst),
        _late_heat(whole),
        *_exchanged(timeline),
    ]
    return section("Distributed", *parts)


def _late_heat(timeline: Timeline) -> str:
    """What others waited for each rank in each step."""
    each = skew(timeline)
    lost = each.pivot_table(
        index="last_rank", columns="step", values="wait_s", aggfunc="sum"
    )
    if lost.shape[0] < 2 or lost.shape[1] < 2:
        return ""
    worst = lost.sum(axis=1).nlargest(_FEW).index.sort_values()
    lost = lost.loc[worst].iloc[:, :_WIDEST]
    lost.index = [f"rank {rank}" for rank in lost.index]
    return heat(
        lost,
        what="Who is waited for, by step: time that the others wait in collectives",
    )


def _exchanged(timeline: Timeline) -> list[str]:
    """Who sends how much to whom, of groups whose all-to-alls are uneven."""
    pairs = exchanges(timeline)
    parts = []
    for group, about in pairs.attrs["imbalance"].items():
        if about["worst"] > 1:
            sent = pairs[pairs["group"] == group].pivot(
                index="source_rank", columns="target_rank", values="size_bytes"
            )
            sent.index = [f"from rank {rank}" for rank in sent.index]
            uneven = (
                f"the rank that gets most gets {about['mean']:.3g} times the "
                f"mean, {about['worst']:.3g} at worst"
            )
            parts += [text(f"All-to-all in {group}: {uneven}.")]
            parts += [
                heat(
                    sent.iloc[:_FEW, :_WIDEST],
                    what="Bytes from each rank to each",
                    say=format_bytes,
                )
            ]
    return parts


def _about_waiting(waits: pd.DataFrame, late: pd.DataFrame) -> list[str]:
    lines = []
    all_s = late["cost_s"].sum()
    often = late[late["rank"].isin(late.attrs["often_last"])]
    if len(often):
        row = next(often.itertuples())
        wait = (
            f"the others wait {format_s(row.cost_s)} for it, of {format_s(all_s)} "
            "in all"
        )
        lines.append(
            f"Rank {row.rank} arrives last in {row.last} of {row.calls} calls: {wait}."
        )
    elif all_s > 0:
        lines.append(
            "No rank arrives last more often than by chance; the ranks wait "
            f"{format_s(all_s)} in all."
        )
    if waits.attrs["one_group_assumed"]:
        lines.append(
            "The traces name no process groups: all ranks are taken as one group."
        )
    for name, count in waits.attrs["unmatched"].items():
        lines.append(
            f"{count} calls of {name[:80]} are left out: the ranks made different "
            "numbers of them in a step."
        )
    return lines


def detail_ranks(timeline: Timeline) -> list[int]:
    """Ranks whose calls are looked at one by one: all of two, else the one that loses
    most and the median one.
    """
    each = breakdown(timeline)
    order = each.assign(lost_s=each["exposed_comm_s"] + each["idle_s"]).sort_values(
        "lost_s", kind="stable"
    )["rank"]
    return (
        sorted({int(order.iloc[-1]), int(order.iloc[len(order) // 2])})
        if len(order) > 2
        else timeline.ranks
    )


def _of(timeline: Timeline, whole: Timeline) -> str:
    """Which ranks a table is about, if it is not about all."""
    if len(timeline.ranks) == len(whole.ranks):
        return ""
    ranks = " and ".join(map(str, timeline.ranks))
    return (
        f"Of {'ranks' if len(timeline.ranks) > 1 else 'rank'} {ranks}: the one "
        "that loses most, and the median one."
    )


def operator_view(detail: Timeline, whole: Timeline) -> str:
    """Operators by the shapes of their inputs, as torch.profiler's
    key_averages(group_by_input_shape=True).
    """
    if not len(detail.side_tables["operators"]):
        return ""
    columns = [
        "name",
        "shapes",
        "dtype",
        "count",
        "self_device_s",
        "device_s",
        "self_host_s",
        "host_s",
        "share",
    ]
    found = operators(detail, by_shape=True)
    found = found[
        [
            *(["rank"] if len(detail.ranks) > 1 else []),
            *columns,
            "flops_per_s",
            "bytes_per_s",
        ]
    ]
    found = (
        found.drop(columns="shapes")
        if not found["shapes"].astype(str).str.contains(r"\d").any()
        else found
    )
    return section("Operators", text(_of(detail, whole)), table(found, search=True))


def kernel_view(timeline: Timeline) -> str:
    """Kernels over all ranks, with the spread of their times."""
    found = kernels(timeline)
    how = {"count": "sum", "total_s": "sum", "min_s": "min", "max_s": "max"}
    found = found.groupby(["name", "kind"], observed=True).agg(how).reset_index()
    found.insert(4, "mean_s", found["total_s"] / found["count"])
    found["share"] = found["total_s"] / max(found["total_s"].sum(), 1e-12)
    found = found.sort_values(["total_s", "name"], ascending=[False, True])
    on_device = (timeline.spans["stream"] >= 0).any()
    return section(
        "Kernels" if on_device else "Work on the host", table(found, search=True)
    )


def memory(detail: Timeline, timeline: Timeline) -> str:
    """Memory over time, its peak on each rank, and who holds it there."""
    peaks = peak(timeline)
    if not len(peaks):
        return ""
    devices = peaks[peaks["device"].astype(str) != "cpu"]
    devices = devices if len(devices) else peaks
    held = held_at_peak(detail)
    held = held[held["device"].isin(devices["device"].unique())]
    over = memory_timeline(detail)
    lines = [
        line(
            part["time_s"].to_numpy(),
            part["allocated_bytes"].to_numpy(float),
            title=f"rank {rank}, {device}",
        )
        for (rank, device), part in over[
            over["device"].isin(held["device"].unique())
        ].groupby(["rank", "device"], observed=True)
    ]
    shown = peaks.nlargest(_FEW, "peak_bytes")
    return section(
        "Memory", *lines, table(shown), text("Held at the peak:"), table(held)
    )


def module_view(detail: Timeline, whole: Timeline) -> str:
    """Modules as the model names them; they need with_stack or with_modules."""
    found = modules(detail)
    columns = [
        "module",
        "type",
        "inside",
        "count",
        "device_s",
        "self_device_s",
        "backward_s",
        "host_s",
    ]
    found = found[
        [*(["rank"] if len(detail.ranks) > 1 else []), *columns, "share", "flops_per_s"]
    ]
    return (
        section("Modules", text(_of(detail, whole)), table(found, search=True))
        if len(found)
        else ""
    )


def _times(ratio: float) -> str:
    return f"{ratio - 1:+.1%}" if ratio < 2 else f"{ratio:.3g} times as long"


def comparison(timeline: Timeline, beside: Timeline, labels: tuple[str, str]) -> str:
    """This run beside another: the parts of a step, and the operations that differ
    most.
    """
    parts = compare(beside, timeline)
    moved = compare_ops(beside, timeline).head(30)
    names = {"a": f"{labels[1]}_s", "b": f"{labels[0]}_s", "difference": "difference_s"}
    overlap = parts[parts["quantity"] == "overlap"]
    shown = parts[parts["quantity"] != "overlap"].rename(columns=names)[
        ["quantity", *names.values(), "ratio"]
    ]
    shown["quantity"] = [
        name.removesuffix("_s").replace("_", " ") for name in shown["quantity"]
    ]
    wall_s, other_s = (
        steps(steady_state(one)[0])["wall_s"].median() for one in (timeline, beside)
    )
    said = (
        f"A step takes {format_s(wall_s)}, in {labels[1]} {format_s(other_s)}, "
        f"medians: {_times(wall_s / other_s)}."
    )
    if overlap["a"].notna().any():
        said += (
            f" Of the communication {percent(overlap['b'].iloc[0])} is under "
            "compute, there "
        )
        said += f"{percent(overlap['a'].iloc[0])}."
    columns = [
        "name",
        "kind",
        "count_a",
        "count_b",
        "total_a_s",
        "total_b_s",
        "difference_s",
        "status",
    ]
    moved = moved[columns].rename(
        columns={"total_a_s": f"{labels[1]}_s", "total_b_s": f"{labels[0]}_s"}
    )
    about = (
        "Means of the ranks and steps that both have, each from the first to the "
        "last work of its step:"
    )
    return section(
        f"Beside {labels[1]}", text(said), text(about), table(shown), table(moved)
    )
