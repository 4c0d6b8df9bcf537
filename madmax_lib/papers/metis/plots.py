"""How do Metis' results look: costs by enumeration order, defects of its plans, search times, training curves?

Pictures of `52_metis`. What a defect costs compares Metis' own plans (`papers.metis`) with the correct cost of
`planner.hetero`, which only this room may look at together.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from madmax_lib.datasets import local_data
from madmax_lib.papers.metis.generate import generate_profiles
from madmax_lib.papers.metis.studies import nodes_of, origin
from madmax_lib.papers.style import HATCH, PAPER, bars, done, legend, note, paper_marks
from madmax_lib.planner import hetero
from madmax_lib.planner.hetero import costs
from madmax_lib.view.drawing import COLORS, new_axes

__all__ = ["defect_choices", "plot_defects", "plot_orders", "plot_profile_choice", "plot_search_time", "plot_training",
           "training_logs"]  # fmt: skip

_ORDER_COLORS = {"A100 first": COLORS["compute"], "V100 first": COLORS["comm"]}
_ORDER_MARKS = {"A100 first": "o", "V100 first": "s"}
_RUN_COLORS = {"DP": COLORS["compute"], "TP": COLORS["comm"]}
_FILES = ("metis_profiles.csv", "metis_published.csv")


def plot_orders(runs: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best cost of each row of table 1 in both orders of the GPU types, beside the two published columns."""
    table = runs[["row", "layers", "gpus", "mode", "node_order", "our_cost_ms", "cost_ms"]].reset_index(drop=True)
    rows = list(dict.fromkeys(zip(table["row"], table["mode"], strict=True)))
    ax = ax or new_axes(height=0.9 + 0.42 * len(rows))
    for place, key in enumerate(rows):
        both = table[(table["row"] == key[0]) & (table["mode"] == key[1])]
        for shift, row in zip((-0.2, 0.2), both.itertuples(), strict=True):
            bars(ax, place + shift, row.our_cost_ms, color=_ORDER_COLORS[row.node_order], height=0.36)
            note(ax, row.our_cost_ms, place + shift, f"{row.our_cost_ms:,.2f}", dx=9)
        near = (both["our_cost_ms"] - both["cost_ms"]).abs().to_numpy().argmin()
        paper_marks(ax, [both["cost_ms"].iloc[0]], [place + (-0.2, 0.2)[near]])
    first = table.drop_duplicates(["row", "mode"])
    names = {"base": "Metis", "strategy": "Ours"}
    ax.set_yticks(
        range(len(rows)), [f"{r.layers} layers, {r.gpus} GPUs, “{names[r.mode]}”" for r in first.itertuples()]
    )
    ax.set(
        ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.16 * table["our_cost_ms"].max()), xlabel="cost of the best plan [ms]"
    )
    ax.set_title("The cost column follows the order of GPU types, not the method")
    handles = [
        Patch(facecolor=color, hatch=HATCH, edgecolor="white", label=name) for name, color in _ORDER_COLORS.items()
    ]
    below = -0.5 / ax.figure.get_figheight()
    published = Line2D([], [], marker="D", mfc="none", mec=PAPER, ls="none", label="published")
    legend(ax, [*handles, published], loc="upper left", bbox_to_anchor=(0, below), ncols=3)
    table.attrs.update(origin(*_FILES))
    return done(ax, table)


def plot_profile_choice(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best cost against the optimizer time of the profile listed first: `model_profiles`, in both orders."""
    ax = ax or new_axes(height=2.8)
    for name, part in table.groupby("node_order", sort=False):
        ax.plot(part["optimizer_ms"], part["cost_ms"], _ORDER_MARKS[name], color=_ORDER_COLORS[name], mec="white", ms=6)
        low, high = part["cost_ms"].agg(["min", "max"])
        note(ax, part["optimizer_ms"].max(), high, f"{name}: {low:.0f} to {high:.0f} ms", dx=-6, dy=9, ha="right",
             color=_ORDER_COLORS[name], fontsize=8)  # fmt: skip
    ax.set(xlabel="optimizer time in the profile listed first [ms]", ylabel="best cost [ms]")
    ax.margins(y=0.18)
    ax.set_title("The file that happens to be listed first moves the best cost too")
    table.attrs.update(origin(*_FILES))
    return done(ax, table)


def plot_defects(shares: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of costed plans with each defect: a row per (case, defect, share)."""
    cases = list(dict.fromkeys(shares["case"]))
    defects = list(dict.fromkeys(shares["defect"]))
    ax = ax or new_axes(height=0.8 + 0.55 * len(defects))
    colors = [COLORS["compute"], COLORS["comm"], COLORS["memcpy"], COLORS["other"]]
    height = 0.8 / len(cases)
    for number, case in enumerate(cases):
        part = shares[shares["case"] == case].set_index("defect").loc[defects]
        places = [place - 0.4 + (number + 0.5) * height for place in range(len(defects))]
        bars(ax, places, 100 * part["share"], color=colors[number % 4], height=0.92 * height)
        for place, share in zip(places, part["share"], strict=True):
            note(ax, 100 * share, place, f"{share:.0%}")
    ax.set_yticks(range(len(defects)), defects)
    ax.set(ylim=(len(defects) - 0.45, -0.55), xlim=(0, 112), xlabel="share of the costed plans [%]")
    ax.set_title("Most plans that Metis costs have stages without layers")
    handles = [
        Patch(facecolor=colors[n % 4], hatch=HATCH, edgecolor="white", label=case) for n, case in enumerate(cases)
    ]
    legend(ax, handles, loc="upper left", bbox_to_anchor=(0, -0.5 / ax.figure.get_figheight()), ncols=2)
    shares.attrs.update(origin(*_FILES))
    return done(ax, shares)


def defect_choices(plans: pd.DataFrame, layers: int, gpus: int) -> pd.DataFrame:
    """Which of Metis' plans looks best with one defect alone, and what it really costs.

    Columns: defect, what, chosen (text), believed_ms (with the defect), correct_ms (without; infinite where a GPU lacks
    memory) and best_correct_ms (of the best plan in the list). Memory counts for E6 only, by the profiles' own table.
    """
    profiles, nodes = generate_profiles(layers), nodes_of(gpus)
    first = next(iter(profiles.table.values()))
    model = {"model_profile": (first.optimizer_ms, first.batch_generator_ms)}
    common = {"profiles": profiles, "cluster": nodes, "layers": layers, "global_batch": 128}
    listed = plans.to_dict("records")
    rows = []
    for defect, what in hetero.DEFECTS.items():
        factor = 1.0 if defect == "E6" else 0.0
        correct = hetero.problem(**common, memory_factor=factor)
        wrong = hetero.problem(**common, memory_factor=factor, defect=defect, **model)
        believed = [_believed(plan, correct if _not_concerned(plan, defect) else wrong) for plan in listed]
        chosen = min(range(len(listed)), key=believed.__getitem__)
        really = [hetero.cost_of(plan, correct) for plan in listed]
        rows.append({"defect": defect, "what": what, "chosen": _text(listed[chosen]), "believed_ms": believed[chosen],
                     "correct_ms": really[chosen], "best_correct_ms": min(really)})  # fmt: skip
    return pd.DataFrame(rows)


def plot_search_time(published: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Figure 1: search time against layers on 8 x 4 GPUs, as published."""
    ax = ax or new_axes(height=3.0)
    ax.plot(published["layers"], published["search_s"], "D--", color=PAPER, mfc="none", lw=1)
    for row in published.itertuples():
        note(ax, row.layers, row.search_s, f"{row.search_s:,.0f} s", dx=7, dy=-8)
    ax.set_yscale("log")
    ax.set(xlabel="layers", ylabel="published search time [s]", xlim=(5, 90))
    ax.margins(y=0.15)
    ax.set_title("Published search times, settings unknown: hours from 24 layers on")
    published.attrs.update(origin("metis_search_time.csv"))
    return done(ax, published)


def training_logs() -> pd.DataFrame | None:
    """The two logs of figure 3: run (DP or TP), elapsed_s, loss; None after saying that they were not found."""
    runs = []
    for run, name in (("DP", "fig3_tp1_dp2.csv"), ("TP", "fig3_tp2_dp1.csv")):
        try:
            log = pd.read_csv(local_data(f"metis/{name}"))
        except FileNotFoundError as reason:
            print(f"skipped the training curves of figure 3: {reason}")
            return None
        runs.append(pd.DataFrame({"run": run, "elapsed_s": log["elapsed_ms"].cumsum() / 1e3, "loss": log["lm_loss"]}))
    return pd.concat(runs, ignore_index=True)


def plot_training(summary: pd.DataFrame, logs: pd.DataFrame | None = None) -> Axes:
    """Figure 3: time of an iteration as a bar, or with `logs` the smoothed loss against elapsed time."""
    ax = new_axes(height=2.9 if logs is not None else 1.7)
    if logs is None:
        for place, row in enumerate(summary.itertuples()):
            ax.barh(place, row.median_ms / 1e3, height=0.6, color=_RUN_COLORS[row.strategy])
            note(ax, row.median_ms / 1e3, place, f"{row.median_ms / 1e3:.1f} s")
        ax.set_yticks(range(len(summary)), [f"{row.strategy} on {row.gpus} GPUs" for row in summary.itertuples()])
        ratio = summary["median_ms"].iloc[1] / summary["median_ms"].iloc[0]
        ax.set(ylim=(len(summary) - 0.5, -0.5), xlim=(0, 1.15e-3 * summary["median_ms"].max()))
        ax.set_xlabel("measured time of an iteration, median [s]")
        ax.set_title(f"Two P100: tensor parallelism takes {ratio:.2f}x as long as data parallelism")
        summary.attrs.update(origin("metis_dp_tp.csv"))
        return done(ax, summary)
    for run, part in logs.groupby("run", sort=False):
        smooth = part["loss"].ewm(alpha=0.1).mean()
        ax.plot(part["elapsed_s"], smooth, "--", lw=1.5, color=_RUN_COLORS[run])
        note(ax, part["elapsed_s"].iloc[-1], smooth.iloc[-1], run, color=_RUN_COLORS[run], fontsize=8)
    ax.set(xlabel="elapsed time [s]", ylabel="loss, smoothed", xlim=(0, 1.06 * logs["elapsed_s"].max()))
    ax.set_title("Only the time axis compares: the two learning-rate schedules differ")
    return done(ax, logs)


def _believed(plan: dict, given: hetero.Problem) -> float:
    """Cost by the rules given: of the plan as it is where they allow it, else with all layers."""
    known, fleet = hetero.HeteroPlan.read(plan), given.fleet(plan["node_sequence"])
    try:
        costs.check(known, given.prices, fleet, given.rules)
    except ValueError:
        known = known.repaired(given.prices.layers)
    if not costs.fits(known, given.prices, fleet, given.rules):
        return float("inf")
    return float(sum(costs.cost_terms(known, given.prices, fleet, given.rules).values()))


def _not_concerned(plan: dict, defect: str) -> bool:
    return defect == "E1" and plan["num_stage_used_for_cost"] == len(plan["device_groups"])


def _text(plan: dict) -> str:
    stages = zip(plan["device_groups"], plan["strategies"], strict=True)
    degrees = ", ".join(f"{gpus}: dp {dp} tp {tp}" for gpus, (dp, tp) in stages)
    types = " then ".join(plan["node_sequence"])
    return f"{types}; {degrees}; layers {plan['layer_partition']}; {_batches(plan['batches'])}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"
