"""Which strategy, system or scaling is best in MAD-Max? Figures 1 and 10 to 20;
published values are hollow.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view import drawing as draw

__all__ = [
    "plot_best",
    "plot_classes",
    "plot_cloud",
    "plot_context",
    "plot_hardware",
    "plot_scaling",
]
__all__ += ["plot_strategies"]

_STRATEGY_COLORS = {
    "fsdp": "#6b6b6b",
    "ddp": "#b5485d",
    "tp,ddp": "#2a9d8f",
    "ddp,tp": "#7a5195",
    "fsdp,tp": "#c9a227",
    "fsdp,ddp": "#5a9bd4",
    "tp": "#a0785a",
    "tp,fsdp": "#1d3557",
}
_MARKS = {"fsdp": "o", "ddp": "s", "tp,ddp": "D"}
_AXES = {
    "a100_hours": "A100-equivalent GPU-hours per 1B samples (by FP16 peak)",
    "mqps": "throughput [MQPS]",
    "hours": "time for 1B samples [h]",
    "cost_usd": "cost of 1B samples [USD]",
    "energy_mwh": "energy for 1B samples [MWh]",
}
_OURS = draw.patch_key("ours", "#9a9a9a", "simulated")
_RECORDED = draw.mark_key("recorded with the release")


def _label(strategy: str) -> str:
    """How the paper writes a strategy: "tp,ddp" is (TP, DDP)."""
    return "(" + ", ".join(part.upper() for part in strategy.split(",")) + ")"


def _memory(size_gb: float) -> str:
    return (
        f"{size_gb:.1f} GB"
        if size_gb < 100
        else f"{size_gb:.0f} GB"
        if size_gb < 1e3
        else f"{size_gb / 1e3:.1f} TB"
    )


def plot_cloud(table: pd.DataFrame, x: str, y: str) -> Axes:
    """Figures 1 and 16: cloud instances as points, the Pareto line of all FSDP points
    and of the free choice.

    x, y: columns of `cloud_comparison`; less is better, except for mqps.
    """
    ax = draw.new_axes(height=4.2)
    for (fits, strategy), part in table.groupby(["fits", "dense_strategy"]):
        style = (
            {"color": _STRATEGY_COLORS[strategy], "mew": 0}
            if fits
            else {"mfc": "none", "mec": draw.GREY, "mew": 0.7}
        )
        ax.plot(part[x], part[y], _MARKS[strategy], ms=4, **style)
    good = table[table["fits"]]
    sign = 1 if y != "mqps" else -1
    fsdp, free = (
        _pareto(rows, x, y, sign)
        for rows in (good[good["dense_strategy"] == "fsdp"], good)
    )
    for front, color, name in (
        (fsdp, _STRATEGY_COLORS["fsdp"], "FSDP"),
        (free, draw.PAPER, "best strategy"),
    ):
        last = front.iloc[-1]
        draw.lines(
            ax, front, x, y, color=color, lw=1.2, drawstyle="steps-post", zorder=1
        )
        draw.note(
            ax,
            last[x],
            last[y],
            f"{name}, {last['num_devices']} GPUs of {last['instance']}",
            dx=12,
            color=color,
        )
    key = [
        draw.mark_key(_label(name), mark, _STRATEGY_COLORS[name], hollow=False, ms=5)
        for name, mark in _MARKS.items()
    ]
    key.append(draw.mark_key("does not fit in memory", "o", draw.GREY, ms=5))
    if y == "mqps":
        ax.plot(
            table[x],
            table["published_mqps"],
            "o",
            mfc="none",
            mec=draw.PAPER,
            ms=8,
            mew=0.7,
        )
        key.append(draw.mark_key("artifact sheet", "o", ms=8))
        gain = free["mqps"].max() / fsdp["mqps"].max()
        title = (
            f"The right strategy moves the front: {gain:.2f}x the fastest FSDP point"
        )
    else:
        faster, less = (
            1 - free[column].min() / fsdp[column].min() for column in (y, x)
        )
        saved = "cost" if x == "cost_usd" else "energy"
        title = f"At best {less:.0%} less {saved} and {faster:.0%} less time than FSDP"
    ax.grid(True, which="major", axis="both")
    axes = {"x": _AXES[x], "y": _AXES[y], "xscale": "log", "yscale": "log"}
    return draw.finish(ax, table, title, draw.Frame(**axes, key=key, where="beside"))


def _pareto(rows: pd.DataFrame, x: str, y: str, sign: int) -> pd.DataFrame:
    """Rows that no other row beats in both x (less) and y (less, or more for sign -1)."""
    rows = rows.sort_values([x, y], ascending=[True, sign > 0])
    reach = (sign * rows[y]).cummin()
    return rows[(sign * rows[y] <= reach) & ~reach.duplicated()]


def plot_best(
    table: pd.DataFrame, *, by: str = "model", most: float, title: str
) -> Axes:
    """Figures 10 and 14: throughput over FSDP of the best strategy, within memory
    (hatched) and without (dotted).

    table: every strategy (of `strategies_over_fsdp` or `task_dependence`). by: the
    column of a group. most: the largest gain within memory that the paper publishes.
    """
    groups = list(dict.fromkeys(table[by]))
    ax = draw.new_axes(height=0.9 + 0.42 * len(groups))
    ranked = table.sort_values("gain")
    free, fits = (
        rows.groupby(by).tail(1).set_index(by).loc[groups]
        for rows in (ranked, ranked[ranked["fits"]])
    )
    beyond = (free["gain"] > fits["gain"] * 1.0005).to_numpy()
    draw.bars(
        ax,
        free.loc[beyond, "gain"],
        draw.BarStyle(draw.UNFIT, places=np.flatnonzero(beyond)),
    )
    draw.bars(
        ax,
        fits["gain"],
        draw.BarStyle(
            [_STRATEGY_COLORS[name] for name in fits["dense_strategy"]],
            source="simulated",
        ),
    )
    draw.published(ax, table["published_gain"], table[by].map(groups.index))
    for place, group in enumerate(groups):
        text = _gain(fits.loc[group])
        if beyond[place]:
            text += (
                f"; with {_memory(free.at[group, 'memory_needed_gb'])}: "
                f"{_gain(free.loc[group])}"
            )
        draw.note(
            ax,
            max(fits.at[group, "gain"], free.at[group, "gain"]),
            place,
            text,
            dx=7,
            bbox=draw.WHITE,
        )
    ax.axvline(most, color=draw.PAPER, lw=0.8, ls="--")
    draw.note(ax, most, -0.6, f"paper: up to {most:.2f}x", dx=2, dy=5)
    ax.axvline(1, color=_STRATEGY_COLORS["fsdp"], lw=1)
    ax.title.set_position((0, 1.02))
    key = [
        _OURS,
        _RECORDED,
        *(
            [draw.patch_key("does not fit in memory", draw.UNFIT)]
            if beyond.any()
            else []
        ),
    ]
    reach = 1.3 * table["gain"].max() + 0.3
    return draw.finish(
        ax,
        table,
        title,
        draw.Frame(x="throughput over FSDP [x]", rows=groups, reach=reach, key=key),
    )


def _gain(row: pd.Series) -> str:
    error = (
        f", error {row['gain'] / row['published_gain'] - 1:+.2%}"
        if row["published_gain"] > 0
        else ""
    )
    return f"{row['gain']:.2f}x {_label(row['dense_strategy'])}{error}"


def plot_strategies(table: pd.DataFrame, *, title: str) -> Axes:
    """Figures 11 to 13 and the study of TP inside, FSDP across: per model the step
    under each strategy.

    A panel per model: compute and exposed communication in units of the FSDP step,
    memory as text.
    """
    limit = 2.0
    strategies = list(dict.fromkeys(table["dense_strategy"]))
    models = table.groupby("model", sort=False)
    names = [
        f"{model}, {size_gb:.0f} GB per GPU"
        for model, size_gb in models["memory_gb"].first().items()
    ]
    axes = draw.panels(
        names,
        width=max(2.55 * len(names), 4.2),
        height=0.9 + 0.3 * len(strategies),
        title=title,
    )
    for ax, (_, rows) in zip(axes, models, strict=True):
        rows = rows.set_index("dense_strategy").loc[strategies]
        step, comm = (
            rows[f"{name}_ms"] / rows.at["fsdp", "iteration_ms"]
            for name in ("iteration", "exposed_comm")
        )
        parts = pd.DataFrame(
            {"compute": step - comm, "comm": step.clip(upper=limit) - (step - comm)}
        )
        pale = [1 if fits else 0.3 for fits in rows["fits"]]
        fills = {
            kind: [draw.faded(kind, "simulated", alpha=alpha) for alpha in pale]
            for kind in parts
        }
        ends = draw.bars(ax, parts, draw.BarStyle(fills))
        for place, (row, size, end) in enumerate(
            zip(rows.itertuples(), step, ends, strict=True)
        ):
            text = f"{size:.2f}{' ▸' if size > limit else ''}\n{_memory(row.memory_needed_gb)}"
            ink, more = ("black", "") if row.fits else ("#8a8a8a", ", too much")
            draw.note(ax, end, place, text + more, fontsize=6, color=ink)
        labels = [_label(name) for name in strategies]
        draw.finish(
            ax,
            table,
            None,
            draw.Frame(x="step over FSDP step [1]", rows=labels, reach=1.42 * limit),
        )
    key = [
        draw.patch_key("compute", "compute", "simulated"),
        draw.patch_key("exposed communication", "comm", "simulated"),
        draw.patch_key(
            "pale: does not fit in memory", draw.faded("compute", alpha=0.3)
        ),
    ]
    axes[0].figure.legend(
        handles=key, ncols=3, loc="outside lower center", frameon=False, fontsize=8
    )
    return axes[0]


def plot_classes(table: pd.DataFrame) -> Axes:
    """Gain over FSDP for each pair of strategies of two layer classes; what does not
    fit is grey, with its bytes.
    """
    ax = draw.new_axes(height=3.2, width=5.6)
    table = table.assign(
        text=table["gain"].map("{:.2f}x".format),
        fitting=table["gain"].where(table["fits"]),
    )
    table["text"] += ("\n" + table["memory_needed_gb"].map(_memory)).where(
        ~table["fits"], ""
    )
    order = list(dict.fromkeys(table["mlp"]))
    cells = table.pivot(index="mlp", columns="transformer").loc[order]
    values, texts = (
        cells[name][order].rename(index=_label, columns=_label)
        for name in ("fitting", "text")
    )
    draw.grid(ax, values, texts=texts, colors="Greens", limits=(0.5, None))
    most = table[table["fits"]].nlargest(1, "gain").iloc[0]
    split = f"MLP {_label(most['mlp'])}, transformer {_label(most['transformer'])}"
    title = f"{split}: {most['gain']:.2f}x FSDP (trend only)"
    return draw.finish(
        ax,
        table.drop(columns=["text", "fitting"]),
        title,
        draw.Frame(x="transformer blocks", y="MLPs"),
    )


def plot_context(table: pd.DataFrame) -> Axes:
    """Figure 15: throughput over FSDP against the context length, a line per strategy;
    hollow where it does not fit.
    """
    ax = draw.new_axes(height=3.2)
    seen = table[(table["gain"] > 0.5) & (table["dense_strategy"] != "fsdp")]
    for strategy, part in seen.groupby("dense_strategy", sort=False):
        text = _label(strategy)
        style = {"color": _STRATEGY_COLORS[strategy], "marker": "o", "ms": 5}
        if not part["fits"].all():
            last = part.iloc[-1]
            style = style | {"mfc": "white", "ls": ":"}
            text += (
                f", needs {last['memory_needed_gb']:.0f} of {last['memory_gb']:.0f} GB"
            )
        draw.lines(
            ax,
            part,
            "context",
            "gain",
            draw.Curves(ends=lambda _, text=text: text),
            **style,
        )
    recorded = seen.dropna(subset="published_gain")
    draw.published(ax, recorded["context"], recorded["published_gain"])
    for row in recorded.itertuples():
        text = f"{row.gain:.3f} ({row.gain / row.published_gain - 1:+.2%})"
        draw.note(ax, row.context, row.gain, text, dy=10, fontsize=6.5, color="#444444")
    ax.axhline(1, color=_STRATEGY_COLORS["fsdp"], lw=1)
    draw.note(
        ax,
        table["context"].min(),
        1.0,
        "FSDP",
        dx=8,
        dy=7,
        color=_STRATEGY_COLORS["fsdp"],
    )
    lengths = sorted(table["context"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    ax.minorticks_off()
    ax.grid(True, axis="y")
    key = [
        draw.mark_key("ours", "o", "#555555", hollow=False),
        draw.mark_key("ours, does not fit in memory", "o", "#555555"),
    ]
    limits = {
        "xlim": (lengths[0] * 0.8, lengths[-1] * 2.0),
        "ylim": (0.86, seen["gain"].max() * 1.06),
    }
    title = "LLaMA2-70B: at 32K tokens no strategy gains much over FSDP"
    axes = {"x": "context length [tokens]", "y": "throughput over FSDP [x]"}
    return draw.finish(
        ax,
        table,
        title,
        draw.Frame(**axes, key=[*key, _RECORDED], where="upper right", **limits),
    )


def plot_scaling(table: pd.DataFrame, *, title: str) -> Axes:
    """Figures 18 to 20: speedup against the factor by which compute, memory and links
    grow, alone and together.
    """
    table = table[table["limit"] == "memory"]
    models = table.groupby("model", sort=False)
    factors = sorted(table["factor"].unique())
    fills = (
        draw.COLORS["compute"],
        draw.COLORS["memcpy"],
        draw.COLORS["comm"],
        draw.PAPER,
    )
    colors = dict(zip(dict.fromkeys(table["part"]), fills, strict=True))
    axes = draw.panels(list(models.groups), height=3.2, title=title)
    for ax, (_, rows) in zip(axes, models, strict=True):
        draw.lines(
            ax,
            rows,
            "factor",
            "speedup",
            draw.Curves(by="part", styles=colors),
            marker="o",
            ms=4,
        )
        ends = rows[rows["factor"] == factors[-1]].sort_values("speedup")
        top = -np.inf
        for (
            row
        ) in ends.itertuples():  # 40 points per factor 2 of the axis, 17 points a label
            place = 40 * np.log2(row.speedup)
            top = max(place, top + 17)
            text = f"{row.part}\n{row.speedup:.1f}x {_label(row.dense_strategy)}"
            draw.note(
                ax,
                row.factor,
                row.speedup,
                text,
                dx=6,
                dy=top - place,
                fontsize=6.5,
                color=colors[row.part],
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(factors, [f"{factor:g}x" for factor in factors])
        ax.set_yticks([1, 2, 4, 8, 16], ["1x", "2x", "4x", "8x", "16x"])
        ax.minorticks_off()
        ax.set(
            xlabel="faster by",
            xlim=(factors[0] * 0.9, factors[-1] * 2.6),
            ylim=(0.9, 16),
        )
        ax.grid(True, axis="both")
    return draw.finish(axes[0], table, None, draw.Frame(y="throughput over today [x]"))


def plot_hardware(table: pd.DataFrame, *, title: str) -> Axes:
    """Figures 17 to 20: throughput of one device on each cluster, under FSDP and the
    best strategy that fits.
    """
    systems = list(dict.fromkeys(table["system"]))
    models = table.groupby("model", sort=False)
    devices = models["devices"].unique().map(sorted)
    names = [
        f"{model}, {' or '.join(f'{d:,.0f}' for d in counts)} devices"
        for model, counts in devices.items()
    ]
    axes = draw.panels(names, height=0.8 + 0.4 * len(systems), title=title)
    for ax, (_, rows) in zip(axes, models, strict=True):
        for slot, choice in enumerate(("fsdp", "best that fits")):
            part = rows[rows["choice"] == choice]
            texts = part["per_gpu"].map("{:.2f}".format)
            texts += (
                "" if choice == "fsdp" else " " + part["dense_strategy"].map(_label)
            )
            texts += (
                ", needs " + part["memory_needed_gb"].map("{:.0f} GB".format)
            ).where(~part["fits"], "")
            fills = [
                _STRATEGY_COLORS[row.dense_strategy] if row.fits else draw.UNFIT
                for row in part.itertuples()
            ]
            places = part["system"].map(systems.index)
            draw.bars(
                ax,
                part["per_gpu"],
                draw.BarStyle(
                    fills,
                    source="simulated",
                    places=places,
                    slot=(slot, 2),
                    notes=texts,
                ),
            )
        for system in set(systems) - set(rows["system"]):
            text = "no FP32 or TF32 peak published"
            ax.text(
                0.02,
                systems.index(system),
                text,
                fontsize=6.5,
                va="center",
                color="#777777",
            )
        reach = rows["per_gpu"].max() * 1.4
        draw.finish(
            ax,
            table,
            None,
            draw.Frame(
                x="samples/s per device, A100 FSDP = 1", rows=systems, reach=reach
            ),
        )
    return axes[0]
