"""Pictures of a MAD-Max step and of its model beside measurements: figures 7 and 9."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.timeline import Timeline
from madmax_lib.view.drawing import (
    DARK,
    THEIRS,
    bars,
    fill_of,
    finish,
    new_axes,
    note,
    panels,
)

_REDUCE = "#b8561a"  # darker than other communication, which it stands beside
_PIECES = {  # of figure 7: name and colour
    "gemm_ms": ("GEMM", "compute"),
    "emb_ms": ("lookup", "#9dbede"),
    "all2all_ms": ("All2All", "comm"),
    "allreduce_ms": ("AllReduce", _REDUCE),
    "compute": ("compute", "compute"),
    "exposed": ("exposed", "comm"),
}
_WINDOW_MS = 200  # of a step that figure 9 shows
_TEXT = {"dx": 0, "ha": "center", "fontsize": 6.5}


def plot_validation(table: pd.DataFrame) -> Axes:
    """Figure 7: the pieces of a DLRM-A step one after another and overlapped, beside
    what was measured.
    """
    ax = new_axes(height=3.3)
    names = {"measured": "measured", "paper": "paper's model", "ours": "ours"}
    groups = dict(iter(table.groupby(["gpus", "who", "bar"], sort=False)))
    order = sorted(groups, key=lambda key: (-key[0], list(names).index(key[1])))
    for row, (_, who, _) in enumerate(order):
        part = groups[order[row]]
        total_ms = part["value_ms"].sum()
        theirs_ms = part["published_ms"].sum(min_count=1)  # NaN without any
        text = f"{total_ms:.2f} ms"
        if theirs_ms > 0:
            error = total_ms / theirs_ms - 1
            text += f"; released {theirs_ms:.2f}, error {error:+.2%}"
        note(ax, total_ms, row, text)
        if who != "ours":
            fill = THEIRS if who == "paper" else DARK
            bars(ax, [total_ms], fill=fill, places=[row])
            continue
        end = 0.0
        for piece, value in zip(part["piece"], part["value_ms"], strict=True):
            name, color = _PIECES[piece]
            at = {"source": "simulated", "places": [row], "left": end}
            bars(ax, [value], fill=color, **at)
            # below 8 ms there is no room for the name
            text = f"{name}\n{value:.2f}" if value > 8 else f"{value:.2f}"
            note(ax, end + value / 2, row, text, **_TEXT)
            end += value
    serialized = table[(table["gpus"] == 128) & (table["bar"] == "serialized")]
    serial = serialized.groupby("who")["value_ms"].sum()
    off = serial["ours"] / serial["measured"] - 1
    title = (
        f"DLRM-A on 128 GPUs: serialized {serial['ours']:.2f} ms, {off:+.1%} "
        "from measured"
    )
    rows = [f"{gpus} GPUs · {names[who]}\n{bar}" for gpus, who, bar in order]
    x = "time of one step [ms]"
    reach = 1.5 * table["value_ms"].max()
    return finish(ax, table, title, x=x, rows=rows, reach=reach)


def plot_prefetch(
    timelines: Mapping[str, Timeline], table: pd.DataFrame, model: str
) -> Axes:
    """Figure 9: a window in the backward pass without and with prefetching, a panel for
    each schedule.
    """
    names = {"pre-optimised": "just in time", "optimised": "prefetched"}
    short = {
        "gemm": ("GEMM", "compute"),
        "all_gather": ("AG", "comm"),
        "reduce_scatter": ("RS", _REDUCE),
    }
    rows = table[table["model"] == model].set_index("schedule").loc[list(timelines)]
    saved = 1 - rows["iteration_ms"].iloc[1] / rows["iteration_ms"].iloc[0]
    texts = [
        f"{names[row.Index]}: {row.overlapped_share:.1%} of communication hidden, "
        f"step {row.iteration_ms / 1e3:.2f} s"
        for row in rows.itertuples()
    ]
    title = (
        f"{model} under FSDP: prefetching takes {saved:.0%} off the step (AG "
        "AllGather, RS ReduceScatter)"
    )
    axes = panels(texts, height=1.55 * len(texts) + 0.5, title=title, down=True)
    for ax, timeline in zip(axes, timelines.values(), strict=True):
        spans = timeline.spans
        backward = spans["name"].str.contains("backward")
        backward_ns = spans.loc[backward, "start_ns"].min()
        # three quarters of a window later the first layers, which differ, are through
        first_ns = backward_ns + 3 * _WINDOW_MS * 1_000_000 // 4
        begin_ms = (spans["start_ns"] - first_ns) / 1e6
        end_ms = (begin_ms + spans["dur_ns"] / 1e6).clip(upper=_WINDOW_MS)
        window = spans.assign(begin=begin_ms.clip(0), end=end_ms)
        for span in window[(end_ms > 0) & (begin_ms < _WINDOW_MS)].itertuples():
            word, part, *_ = span.name.split()
            text, kind = short.get(word, ("", "compute"))
            fill = fill_of(kind, "simulated") | {"linewidth": 0.3}
            wide_ms = span.end - span.begin
            ax.broken_barh([(span.begin, wide_ms)], (span.stream - 0.4, 0.8), **fill)
            if wide_ms > 0.022 * _WINDOW_MS:  # wide enough for a word
                text = part.replace("attention", "att.") if word == "gemm" else text
                middle_ms = (span.begin + span.end) / 2
                note(ax, middle_ms, span.stream, text, **_TEXT | {"fontsize": 6})
        ax.set_yticks([0, 1], ["compute", "communication"])
        ax.set(ylim=(1.5, -0.5), xlim=(0, _WINDOW_MS))
    axes[-1].set_xlabel("time in the backward pass [ms]")
    return finish(axes[0], table, None)
