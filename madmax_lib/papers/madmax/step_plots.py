"""What does a step look like in MAD-Max, and how far is the model from measurements?
Figures 7 to 9.
"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.timeline.timeline import Timeline
from madmax_lib.view import drawing as draw

__all__ = ["plot_prefetch", "plot_validation", "plot_vit"]

_REDUCE = "#b8561a"
_PIECES = {  # of figure 7: name and colour
    "gemm_ms": ("GEMM", "compute"),
    "emb_ms": ("lookup", "#9dbede"),
    "all2all_ms": ("All2All", "comm"),
    "allreduce_ms": ("AllReduce", _REDUCE),
    "compute": ("compute", "compute"),
    "exposed": ("exposed", "comm"),
}
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
_TEXT = {"ha": "center", "va": "center", "fontsize": 6.5, "bbox": _BOX}


def plot_validation(table: pd.DataFrame) -> Axes:
    """Figure 7: the pieces of a DLRM-A step one after another and overlapped, beside
    what was measured.
    """
    ax = draw.new_axes(height=3.3)
    names = {"measured": "measured", "paper": "paper's model", "ours": "ours"}
    groups = dict(iter(table.groupby(["gpus", "who", "bar"], sort=False)))
    order = sorted(groups, key=lambda key: (-key[0], list(names).index(key[1])))
    for place, (_, who, _) in enumerate(order):
        part = groups[order[place]]
        total = part["value_ms"].sum()
        theirs = part["published_ms"].sum(min_count=1)
        error = (
            f"; released {theirs:.2f}, error {total / theirs - 1:+.2%}"
            if theirs > 0
            else ""
        )
        draw.note(ax, total, place, f"{total:.2f} ms{error}")
        if who != "ours":
            draw.bars(
                ax,
                [total],
                draw.BarStyle(
                    draw.THEIRS if who == "paper" else draw.DARK, places=[place]
                ),
            )
            continue
        end = 0.0
        for piece, value in zip(part["piece"], part["value_ms"], strict=True):
            name, color = _PIECES[piece]
            draw.bars(
                ax,
                [value],
                draw.BarStyle(color, source="simulated", places=[place], left=end),
            )
            text = f"{name}\n{value:.2f}" if value > 8 else f"{value:.2f}"
            ax.text(end + value / 2, place, text, **_TEXT)
            end += value
    serial = (
        table[(table["gpus"] == 128) & (table["bar"] == "serialized")]
        .groupby("who")["value_ms"]
        .sum()
    )
    off = serial["ours"] / serial["measured"] - 1
    title = (
        f"DLRM-A on 128 GPUs: serialized {serial['ours']:.2f} ms, {off:+.1%} "
        "from measured"
    )
    rows = [f"{gpus} GPUs · {names[who]}\n{bar}" for gpus, who, bar in order]
    return draw.finish(
        ax,
        table,
        title,
        draw.Frame(
            x="time of one step [ms]", rows=rows, reach=1.5 * table["value_ms"].max()
        ),
    )


def plot_vit(table: pd.DataFrame) -> Axes:
    """Figure 8: MFU of ViT training measured, predicted by the paper, and ours.

    table: of `vit_mfu`, with ours for constant and fitted utilisation, or of
    `calibration.vision_errors`.
    """
    ax = draw.new_axes(height=0.9 + 0.42 * len(table))
    best = "fitted" if "fitted" in table else "ours"
    fills = {
        "measured": draw.fill_of(draw.DARK),
        "paper": draw.THEIRS,
        best: draw.fill_of("compute", "simulated"),
    }
    for slot, (who, fill) in enumerate(fills.items()):
        texts = (
            None if who == "measured" else table[f"{who}_error"].map("{:+.0%}".format)
        )
        draw.bars(
            ax, table[who] * 100, draw.BarStyle(fill, slot=(slot, 3), notes=texts)
        )
    errors = {
        who: table[f"{who}_error"].abs().mean() for who in ("paper", "ours", best)
    }
    key = [
        draw.patch_key("measured", fills["measured"]),
        draw.patch_key(
            f"paper's prediction, mean relative error {errors['paper']:.1%}",
            fills["paper"],
        ),
        draw.patch_key(
            f"ours, fitted to the other runs: {errors[best]:.1%}", fills[best]
        ),
    ]
    if best == "fitted":
        ax.plot(
            table["ours"] * 100,
            range(len(table)),
            "|",
            color=draw.COLORS["compute"],
            ms=14,
            mew=2,
        )
        constant = f"ours, constant utilisation of the release: {errors['ours']:.0%}"
        key.append(draw.mark_key(constant, "|", draw.COLORS["compute"], ms=12, mew=2))
    rows = [
        f"{row.model}, {row.gpus} GPUs, batch {row.global_batch}"
        for row in table.itertuples()
    ]
    title = (
        f"ViT: predictions miss the measured MFU by {errors['paper']:.1%} "
        f"(paper), {errors[best]:.1%} (ours)"
    )
    return draw.finish(
        ax,
        table,
        title,
        draw.Frame(x="MFU [% of 312 TFLOP/s]", rows=rows, reach=80, key=key, columns=2),
    )


def plot_prefetch(
    timelines: Mapping[str, Timeline],
    table: pd.DataFrame,
    model: str,
    *,
    width_s: float = 0.2,
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
    axes = draw.panels(texts, height=1.55 * len(texts) + 0.5, title=title, down=True)
    width_ms = width_s * 1e3
    for ax, timeline in zip(axes, timelines.values(), strict=True):
        spans = timeline.spans
        first_ns = (
            spans.loc[spans["name"].str.contains("backward"), "start_ns"].min()
            + 3 * int(width_s * 1e9) // 4
        )
        begin_ms = (spans["start_ns"] - first_ns) / 1e6
        end_ms = (begin_ms + spans["dur_ns"] / 1e6).clip(upper=width_ms)
        window = spans.assign(begin=begin_ms.clip(0), end=end_ms)[
            (end_ms > 0) & (begin_ms < width_ms)
        ]
        for span in window.itertuples():
            word, part, *_ = span.name.split()
            text, kind = short.get(word, ("", "compute"))
            fill = draw.fill_of(kind, "simulated") | {"linewidth": 0.3}
            ax.broken_barh(
                [(span.begin, span.end - span.begin)], (span.stream - 0.4, 0.8), **fill
            )
            if span.end - span.begin > 0.022 * width_ms:
                text = part.replace("attention", "att.") if word == "gemm" else text
                ax.text(
                    (span.begin + span.end) / 2,
                    span.stream,
                    text,
                    **_TEXT | {"fontsize": 6},
                )
        ax.set_yticks([0, 1], ["compute", "communication"])
        ax.set(ylim=(1.5, -0.5), xlim=(0, width_ms))
    axes[-1].set_xlabel("time in the backward pass [ms]")
    return draw.finish(axes[0], table, None)
