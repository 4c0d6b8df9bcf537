"""Views of the report: tables of `traces` as HTML, a view that has nothing to say as an
empty text.

The views are those of PyTorch's TensorBoard plugin (overview, operators, kernels,
trace, memory, modules, distributed), and steps, stragglers and a comparison with
another run. Times are those of the steps.
"""

import warnings

import numpy as np
import pandas as pd

from madmax_lib import traces
from madmax_lib.base import format_s
from madmax_lib.timeline import Timeline, breakdown
from madmax_lib.view.notebooks.page import paragraph
from madmax_lib.view.report.marks import bars, cards, line, section, size_text, table
from madmax_lib.view.words import percent, plural

_MOST_CAUSES = 12
_MOST_DIFFERENCES = 30
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


def recording_summary(timeline: Timeline, recording: Timeline) -> str:
    """One sentence about a recording: ranks, steps, spans, device, and what is missing.

    timeline: the part of it that is steady.
    """
    # ranks that a simulation did not draw are not missing
    ranks = plural(len(timeline.ranks), "rank")
    world_size = timeline.meta.world_size
    missing = world_size - sum(map(len, timeline.meta.represents.values()))
    if missing > 0:
        ranks += f" ({missing} of {world_size} ranks have no trace here)"
    steps_text = traces.step_note(recording) or plural(len(recording.steps), "step")
    device = timeline.meta.device or "no device named"
    summary = f"{ranks}, {steps_text}, {len(recording):,} spans, {device}."
    whole_s, steady_s = (
        breakdown(each).eval("total_s - idle_s").mean()
        for each in (recording, timeline)
    )
    if whole_s == steady_s:
        return summary
    where = "outside all steps"
    others = [str(step) for step in recording.steps if step not in timeline.steps]
    if others:
        where = f"in steps that are warm-up or cut ({', '.join(others)}) or outside all"
    work = f"{format_s(whole_s - steady_s)} of work per rank"
    return f"{summary[:-1]}. {work} is {where} and is not counted."


def overview(timeline: Timeline, detail: Timeline, peaks: pd.DataFrame) -> str:
    """The numbers to see first, and where the time goes on each rank."""
    ranks = breakdown(timeline)
    sums_s = ranks[["compute_s", "comm_s", "exposed_comm_s", "idle_s"]].sum()
    total_s = max(ranks["total_s"].sum(), 1e-12)
    worst = ranks.loc[ranks["exposed_comm_s"].idxmax()]
    # of an unknown device: then there is no card
    with warnings.catch_warnings(action="ignore"):
        median_mfu = traces.mfu(detail)["mfu"].median()
    # NaN where nothing communicates
    hidden = 1 - sums_s["exposed_comm_s"] / (sums_s["comm_s"] or np.nan)
    numbers = {
        "a step, median": (format_s, traces.step_s(timeline)),
        "computing": (percent, sums_s["compute_s"] / total_s),
        "of communication hidden": (percent, hidden),
        "MFU of the recorded shapes": (percent, median_mfu),
        "memory at the peak": (size_text, peaks["peak_bytes"].max()),
    }
    # a number that is not known has no card
    texts = {
        label: say(value) for label, (say, value) in numbers.items() if value == value
    }
    # time in which the device neither computes nor copies
    lost_s = ranks["exposed_comm_s"] + ranks["idle_s"]
    chosen, note = _some(ranks.assign(lost_s=lost_s), "rank", "lost_s")
    exposed = percent(sums_s["exposed_comm_s"] / total_s)
    idle = percent(sums_s["idle_s"] / total_s)
    most = ""
    if worst["exposed_comm_s"] > 0:
        part = f"{format_s(worst['exposed_comm_s'])} of {format_s(worst['total_s'])}"
        most = f"; rank {int(worst['rank'])} exposes most ({part})"
    return section(
        "Overview",
        paragraph(
            f"{exposed} of the device time is exposed communication, {idle} is idle{most}."
        ),
        cards(texts),
        paragraph(note),
        bars([(label, _parts(row), _busy(row)) for label, row in chosen]),
    )


def _parts(row):
    """Total time of a row of `breakdown` in parts: what is busy and neither computes
    nor communicates is other.
    """
    # total = compute + exposed communication + idle + other, copies among the last
    other_s = row["total_s"] - row["compute_s"] - row["exposed_comm_s"] - row["idle_s"]
    copies_s = min(row["memory_s"], other_s)
    return {
        "compute": row["compute_s"],
        "comm": row["exposed_comm_s"],
        "memcpy": copies_s,
        "other": max(other_s - copies_s, 0.0),
        "idle": row["idle_s"],
    }


def _busy(row):
    """Total time of a row of `breakdown`, and what it consists of."""
    words = {"compute_s": "compute", "exposed_comm_s": "exposed", "idle_s": "idle"}
    texts = [
        f"{percent(row[name] / row['total_s'])} {word}"
        for name, word in words.items()
        if row[name]
    ]
    return f"{format_s(row['total_s'])}: {', '.join(texts)}"


def _some(frame, key, by):
    """Rows with their labels: all of a few, else those at quantiles of `by`, named by
    them, and a line that says so.
    """
    if len(frame) <= _FEW:
        return [(f"{key} {row[key]}", row) for row in frame.to_dict("records")], ""
    order = frame.sort_values([by, key], ignore_index=True)
    # rows that lie nearest to the quantiles; two of these may be one row
    names = {round(q * (len(order) - 1)): name for q, name in _QUANTILES.items()}
    rows = [
        (f"{key} {order[key][row]} · {name}", order.iloc[row].to_dict())
        for row, name in names.items()
    ]
    what = by.removesuffix("_s").replace("_", " ")
    note = f"in order of the time {what}, at quantiles of it."
    return rows, f"{len(rows)} of {len(frame):,} {key}s, {note}"


def advice(timeline: Timeline) -> str:
    """Causes of lost time, largest gain first."""
    causes = traces.advise(timeline).head(_MOST_CAUSES)
    if causes.empty:
        return ""
    return section(
        "What to fix first",
        paragraph(
            "The most each fix could gain per step, averaged over the ranks; causes "
            "overlap. The evidence covers all ranks and steps."
        ),
        table(causes),
    )


def step_view(timeline: Timeline) -> str:
    """Every step with its parts, the wait for input, and their spread."""
    every = traces.steps(timeline)
    if every.empty or timeline.steps == [0]:
        return ""
    waits_s = traces.input_wait(timeline).groupby(["rank", "step"])["wait_s"].sum()
    every = every.join(waits_s.rename("input_wait_s"), on=["rank", "step"])
    # a wait that nobody has is a column without a value, which tables leave out
    if waits_s.sum() > 0:
        every = every.fillna({"input_wait_s": 0.0})
    quantities = ["total_s", "compute_s", "memory_s", "exposed_comm_s", "idle_s"]
    quantities.append("input_wait_s")
    # ranks of a step together
    by_step = every.groupby("step")[quantities].mean()
    # a step is over when its slowest rank is
    wall = every.groupby("step")["wall_s"]
    by_step = by_step.assign(wall_s=wall.median(), slowest_s=wall.max())
    by_step["slowest_rank"] = every.loc[wall.idxmax(), "rank"].to_numpy()
    flags = every.groupby("step")[["cut", "warmup"]].any()
    by_step["note"] = np.where(flags["warmup"], "warm-up", "")
    by_step.loc[flags["cut"], "note"] = "cut off"
    by_step = by_step.reset_index()
    chosen, note = _some(by_step, "step", "wall_s")
    columns = ["step", "wall_s", "slowest_s", "slowest_rank", *quantities[1:], "note"]
    waiting_share = by_step["input_wait_s"].sum() / max(by_step["wall_s"].sum(), 1e-12)
    input_text = (
        f"The host waits for input in {percent(waiting_share)} of the steps' time."
    )
    parts = [
        paragraph(
            "Means over the ranks; wall is the host time of the median rank. Bars run "
            "from the first to the last work of a step: if steps overlap, idle time "
            "here may be another step's work, which the overview counts as busy."
        ),
        paragraph(input_text if waiting_share > 0 else ""),
        paragraph(note),
        bars([(label, _parts(row), format_s(row["total_s"])) for label, row in chosen]),
        table(by_step[columns], most=100),
    ]
    return section("Steps", *parts)


def distributed(timeline: Timeline) -> str:
    """Each group's collectives, who waits for whom, and which ranks are late."""
    groups = traces.by_group(timeline)
    if groups.empty:
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
        "wait_s",
        "skew_max_s",
        "bus_bytes_per_s",
    ]
    waits = traces.waiting(timeline)
    late = traces.stragglers(timeline)
    lines = list(map(paragraph, _about_waiting(waits, late)))
    # ranks that neither wait nor are waited for have no row
    late = late[(late["cost_s"] > 0) | (late["waited_s"] > 0)]
    note = ""
    if len(late) > _FEW:
        note = f"The {_FEW} of {len(late):,} ranks that cost the others most."
    return section(
        "Distributed",
        # of messages, which are counted in other units than memory
        table(groups[columns].rename(columns={"size_bytes": "message_bytes"}), most=50),
        *lines,
        paragraph(note),
        table(late.head(_FEW)),
    )


def _about_waiting(waits, late):
    lines = []
    # a wait is counted once: for the rank that came last
    all_s = late["cost_s"].sum()
    often = late[late["rank"].isin(late.attrs["often_last"])]
    if len(often):
        row = next(often.itertuples())  # the table is in order of the cost
        calls = f"Rank {row.rank} arrives last in {row.last} of {row.calls} calls"
        cost = f"the others wait {format_s(row.cost_s)} for it"
        lines.append(f"{calls}; {cost}, out of {format_s(all_s)} in total.")
    elif all_s > 0:
        lines.append(
            "No rank arrives last more often than by chance; the ranks wait "
            f"{format_s(all_s)} in total."
        )
    if waits.attrs["one_group_assumed"]:
        lines.append(
            "The traces name no process groups: all ranks are taken as one group."
        )
    for name, count in waits.attrs["unmatched"].items():
        lines.append(
            f"{count} calls of {name[:80]} are left out: ranks made different numbers of "
            "them in a step."
        )
    return lines


def detail_ranks(timeline: Timeline) -> list[int]:
    """Ranks whose calls are looked at one by one: all of two, else the one that loses
    most and the median one.
    """
    ranks = breakdown(timeline)
    if len(ranks) <= 2:
        return timeline.ranks
    lost_s = ranks["exposed_comm_s"] + ranks["idle_s"]
    # the extreme, and one that is like most
    by_loss = ranks["rank"].iloc[lost_s.argsort(kind="stable")]
    return sorted({int(by_loss.iloc[-1]), int(by_loss.iloc[len(ranks) // 2])})


def _ranks_text(detail, timeline):
    """Ranks that a table is about, if it is not about all."""
    if len(detail.ranks) == len(timeline.ranks):
        return ""
    noun = "ranks" if len(detail.ranks) > 1 else "rank"
    ranks = " and ".join(map(str, detail.ranks))
    return f"Only {noun} {ranks}: the one that loses most time, and the median one."


def operator_view(detail: Timeline, timeline: Timeline) -> str:
    """Operators by the shapes of their inputs, as torch.profiler's
    key_averages(group_by_input_shape=True).
    """
    if detail.side_tables["operators"].empty:
        return ""
    ops = traces.operators(detail, by_shape=True)
    columns = ["rank"] if len(detail.ranks) > 1 else []
    columns += ["name", "shapes", "dtype", "count", "self_device_s", "device_s"]
    columns += ["self_host_s", "host_s", "share", "flops_per_s", "bytes_per_s"]
    # a recording without record_shapes has "[]" everywhere
    if not ops["shapes"].astype(str).str.contains(r"\d").any():
        columns.remove("shapes")
    return section(
        "Operators",
        paragraph(_ranks_text(detail, timeline)),
        table(ops[columns], search=True),
    )


def kernel_view(timeline: Timeline) -> str:
    """Kernels over all ranks, with the spread of their times."""
    by_kernel = traces.kernels(timeline).groupby(["name", "kind"], observed=True)
    rows = by_kernel.agg(
        {"count": "sum", "total_s": "sum", "min_s": "min", "max_s": "max"}
    ).reset_index()
    rows.insert(4, "mean_s", rows["total_s"] / rows["count"])
    rows["share"] = rows["total_s"] / max(rows["total_s"].sum(), 1e-12)
    rows = rows.sort_values(["total_s", "name"], ascending=[False, True])
    # a run on CPUs has threads in place of streams, with negative numbers
    on_device = (timeline.spans["stream"] >= 0).any()
    title = "Kernels" if on_device else "Work on the host"
    return section(title, table(rows, search=True))


def memory(detail: Timeline, timeline: Timeline) -> str:
    """Memory over time, its peak on each rank, and who holds it there."""
    peaks = traces.peak(timeline)
    if peaks.empty:
        return ""
    # memory of the host is of interest only where there is no device
    devices = set(peaks["device"][peaks["device"].astype(str) != "cpu"])
    devices = devices or set(peaks["device"])
    holders = traces.held_at_peak(detail)
    holders = holders[holders["device"].isin(devices)]
    series = traces.memory_timeline(detail)
    series = series[series["device"].isin(set(holders["device"]))]
    lines = []
    by_device = series.groupby(["rank", "device"], observed=True)
    for (rank, device), part in by_device:
        lines.append(
            line(
                part["time_s"].to_numpy(),
                part["allocated_bytes"].to_numpy(float),
                f"rank {rank}, {device}",
            )
        )
    return section(
        "Memory",
        *lines,
        table(peaks.nlargest(_FEW, "peak_bytes")),
        paragraph("Held at the peak:"),
        table(holders),
    )


def module_view(detail: Timeline, timeline: Timeline) -> str:
    """Modules as the model names them; they need with_stack or with_modules."""
    with warnings.catch_warnings(action="ignore"):
        rows = traces.modules(detail)
    if rows.empty:
        return ""
    columns = ["rank"] if len(detail.ranks) > 1 else []
    columns += ["module", "type", "inside", "count", "device_s", "self_device_s"]
    columns += ["backward_s", "host_s", "share", "flops_per_s"]
    return section(
        "Modules",
        paragraph(_ranks_text(detail, timeline)),
        table(rows[columns], search=True),
    )


def comparison(timeline: Timeline, other_run: Timeline, labels: tuple[str, str]) -> str:
    """This run beside another: the parts of a step, and the operations that differ
    most.
    """
    here, there = labels
    parts = traces.compare(other_run, timeline).set_index("quantity")
    overlap = parts.loc["overlap"]  # a share; the others are seconds
    names = {"a": f"{there}_s", "b": f"{here}_s", "difference": "difference_s"}
    quantities = parts.drop("overlap").rename(columns=names)
    quantities.index = quantities.index.str.removesuffix("_s").str.replace("_", " ")
    quantities = quantities[[*names.values(), "ratio"]].reset_index()
    here_s, there_s = map(traces.step_s, (timeline, other_run))
    ratio = here_s / there_s
    # beyond twice, a percentage is hard to read
    longer = f"{ratio - 1:+.1%}" if ratio < 2 else f"{ratio:.3g} times as long"
    summary = (
        f"The median step takes {format_s(here_s)}, and {format_s(there_s)} in "
        f"{there}: {longer}."
    )
    if not np.isnan(overlap["a"]):
        summary += (
            f" Compute hides {percent(overlap['b'])} of the communication, there "
            f"{percent(overlap['a'])}."
        )
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
    ops = traces.compare_ops(other_run, timeline).head(_MOST_DIFFERENCES)[columns]
    ops = ops.rename(columns={"total_a_s": f"{there}_s", "total_b_s": f"{here}_s"})
    tables = [table(quantities), table(ops)]
    return section(
        f"Compared with {there}",
        paragraph(summary),
        paragraph(
            "Means over the ranks and steps that both runs have, from the first to "
            "the last work of each step:"
        ),
        *tables,
    )
