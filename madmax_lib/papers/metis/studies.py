"""What of the Metis fork's paper follows from its public code and data?

Table 1 and figure 1 of the report in github.com/livingshade/Metis (Shong, Liu, Yu), typed in `data/metis_*.csv`, beside
our own runs of the search. Base is Metis, strategy is the fork's order of moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import pandas as pd

from madmax_lib.papers.metis.generate import generate_profiles
from madmax_lib.papers.metis.uniform import uniform_plans
from madmax_lib.papers.metis.walk import SearchResult, search
from madmax_lib.papers.origin import provenance, read_table
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.profiles import Profiles

__all__ = [
    "NODE_ORDERS", "data_and_tensor", "defect_shares", "model_profiles", "nodes_of", "origin", "run_row", "run_rows",
    "search_times", "table1", "table1_errors", "uniform",
]  # fmt: skip

NODE_ORDERS = (("A100", "V100"), ("V100", "A100"))
_BATCH, _MODEL_PROFILE = 128, "A100_tp4_bs4"


def table1() -> pd.DataFrame:
    """Table 1: row, layers, gpus, mode, steps, search_ms, cost_ms; original_cpu_s of the unmodified fork; source."""
    return read_table("metis_published.csv").copy()


def search_times() -> pd.DataFrame:
    """Figure 1 as published: layers, gpus, search_s."""
    return read_table("metis_search_time.csv").copy()


def data_and_tensor() -> pd.DataFrame:
    """Two training runs on two P100, summarised: median_ms of an iteration, losses and learning-rate schedules."""
    return read_table("metis_dp_tp.csv").copy()


def nodes_of(gpus: int) -> list[Node]:
    """The table's cluster: half V100, half A100 in nodes of four, the V100 first in the host file."""
    v100, a100 = Node("0.0.0.1", "V100", 4, 16, 50, 10), Node("0.0.0.4", "A100", 4, 80, 46, 10)
    return [v100] * (gpus // 8) + [a100] * (gpus // 8)


def run_row(
    layers: int, gpus: int, node_order: tuple[str, ...], mode: str, model_profile: str = _MODEL_PROFILE
) -> SearchResult:
    """One search of the table. mode: "base" or "strategy"."""
    return search(_profiles(layers), nodes_of(gpus), layers=layers, global_batch=_BATCH, node_order=node_order,
                  model_profile=model_profile, strategy=mode == "strategy", max_permute_len=128, max_tp=128,
                  max_bs=128)  # fmt: skip


def run_rows(rows: Iterable[int]) -> pd.DataFrame:
    """Each row of table 1 in both orders of the GPU types: the published columns, node_order and ours.

    Ours: our_steps, our_cost_ms, our_plans, best (text of the best plan), counted (stages in its cost), our_search_ms.
    """
    found = []
    for row in table1()[lambda table: table["row"].isin(list(rows))].to_dict("records"):
        for order in NODE_ORDERS:
            result = run_row(row["layers"], row["gpus"], order, row["mode"])
            best = result.plans.iloc[0]
            stages = zip(best["device_groups"], best["strategies"], strict=True)
            text = ", ".join(f"{gpus} GPUs dp {dp} tp {tp}" for gpus, (dp, tp) in stages)
            found.append({**row, "node_order": f"{order[0]} first", "our_steps": result.count,
                          "our_cost_ms": result.best_cost_ms, "our_plans": result.costed_plans, "best": text,
                          "stages": len(best["device_groups"]), "counted": best["num_stage_used_for_cost"],
                          "our_search_ms": 1e3 * result.seconds_mean})  # fmt: skip
    return pd.DataFrame(found)


def table1_errors(runs: pd.DataFrame) -> pd.DataFrame:
    """Table 1 beside ours: steps and cost, in the order of GPU types whose cost is nearer, and ratio of search times.

    The errors are relative; node_order is the order that gives the published cost.
    """
    error = (runs["our_cost_ms"] / runs["cost_ms"] - 1).abs()
    near = runs.loc[error.groupby([runs["row"], runs["mode"]]).idxmin()].reset_index(drop=True)
    times = near.pivot(index="row", columns="mode", values=["search_ms", "our_search_ms"])
    ratios = pd.DataFrame({
        "time_ratio": times["search_ms"]["base"] / times["search_ms"]["strategy"],
        "our_time_ratio": times["our_search_ms"]["base"] / times["our_search_ms"]["strategy"],
    })  # fmt: skip
    near["steps_error"] = near["our_steps"] / near["steps"] - 1
    near["cost_error"] = near["our_cost_ms"] / near["cost_ms"] - 1
    columns = ["row", "layers", "gpus", "mode", "steps", "our_steps", "steps_error", "cost_ms", "our_cost_ms",
               "cost_error", "node_order"]  # fmt: skip
    return near[columns].merge(ratios, left_on="row", right_index=True)


def defect_shares(result: SearchResult, layers: int) -> pd.DataFrame:
    """Share of the costed plans of a search with each defect: defect, plans, share."""
    plans = result.plans
    cuts, stages = plans["layer_partition"], plans["device_groups"].map(len)
    flags = {
        "stages left out of the cost (E1)": plans["num_stage_used_for_cost"] < stages,
        "layers in no stage (E2)": cuts.map(lambda cuts: cuts[-1] < layers),
        "stages without layers (E3)": cuts.map(lambda cuts: any(x == y for x, y in pairwise(cuts))),
    }
    rows = [{"defect": name, "plans": int(flag.sum()), "share": flag.mean()} for name, flag in flags.items()]
    return pd.DataFrame(rows)


def model_profiles(layers: int, gpus: int, node_order: tuple[str, ...]) -> pd.DataFrame:
    """Best cost by the profile that happens to be listed first: model_profile, optimizer_ms, cost_ms, node_order.

    One profile stands for all with the same optimizer and batch generator times, of which the rest follows.
    """
    profiles = _profiles(layers)
    distinct = {(p.optimizer_ms, p.batch_generator_ms): p for p in reversed(list(profiles.table.values()))}
    rows = []
    for profile in distinct.values():
        name = profile.name.removeprefix("DeviceType.")
        best = run_row(layers, gpus, node_order, "base", name).best_cost_ms
        rows.append({"model_profile": name, "optimizer_ms": profile.optimizer_ms, "cost_ms": best,
                     "node_order": f"{node_order[0]} first"})  # fmt: skip
    return pd.DataFrame(rows).sort_values("cost_ms", ignore_index=True)


def uniform(layers: int, gpus: int) -> pd.DataFrame:
    """Uniform plans (`metis.uniform`) on A100 in nodes of four, with the memory table that falls with tp."""
    profiles, nodes = generate_profiles(layers, memory="upstream"), nodes_of(2 * gpus)[gpus // 4 :]
    return uniform_plans(profiles, nodes, layers=layers, global_batch=_BATCH, model_profile=_MODEL_PROFILE, max_tp=8,
                         max_bs=16)  # fmt: skip


def origin(*names: str) -> dict:
    """Attributes of a table made from these files of the data folder: their names and sha256."""
    return {"provenance": provenance(*names, rules="Metis as released")}


@lru_cache
def _profiles(layers: int) -> Profiles:
    return generate_profiles(layers)
