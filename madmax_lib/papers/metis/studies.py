"""Tables of the Metis fork's paper beside what follows from its public code and data.

Table 1 and figure 1 of the report in github.com/livingshade/Metis (Shong, Liu, Yu),
typed in `data/`, beside our own runs of the search. Base is Metis, strategy is the
fork's order of moves.
"""

from collections.abc import Iterable
from functools import lru_cache

import pandas as pd

from madmax_lib.papers.metis.generate import generate_profiles
from madmax_lib.papers.metis.walk import MetisResult, search
from madmax_lib.papers.origin import read_table, with_origin
from madmax_lib.planner.hetero import Node

# The release leaves the order of GPU types undefined; the best cost follows from it.
NODE_ORDERS = (("A100", "V100"), ("V100", "A100"))
_BATCH = 128
_LIMIT = 128  # of permuted groups, tp and batch: never reached in the table
# Likewise the profile listed first: the report's numbers are those of any A100 with
# tp and batch of 4 and more.
_MODEL_PROFILE = "A100_tp4_bs4"
_RULES = "Metis as released"
_INPUTS = ("metis/profiles", "metis/table1")


def published(name: str) -> pd.DataFrame:
    """A table of the report, with its source: "table1", "search_time" (figure 1),
    "dp_tp" or "training" (figure 3, in short and by iteration).
    """
    file = f"metis/{name}"
    return with_origin(read_table(file), file, rules=_RULES)


def nodes_of(gpus: int) -> list[Node]:
    """The table's cluster: half V100, half A100 in nodes of four, the V100 first in the
    host file.
    """
    # address, type, GPUs, memory GB, GB/s inside a node and between nodes
    v100 = Node.of_file("0.0.0.1", "V100", 4, 16, 50, 10)
    a100 = Node.of_file("0.0.0.4", "A100", 4, 80, 46, 10)
    return [v100] * (gpus // 8) + [a100] * (gpus // 8)


def run_row(
    layers: int,
    gpus: int,
    node_order: tuple[str, ...],
    mode: str,
    model_profile: str = _MODEL_PROFILE,
    global_batch: int = _BATCH,
    **sizes: int,
) -> MetisResult:
    """One search of the table. mode: "base" or "strategy". sizes: hidden, sequence and
    vocab of `search`.
    """
    return search(
        _profiles(layers),
        nodes_of(gpus),
        layers=layers,
        global_batch=global_batch,
        node_order=node_order,
        model_profile=model_profile,
        strategy=mode == "strategy",
        max_permute_len=_LIMIT,
        max_tp=_LIMIT,
        max_bs=_LIMIT,
        **sizes,
    )


def run_rows(rows: Iterable[int]) -> pd.DataFrame:
    """Each row of table 1 in both orders of the GPU types: the published columns,
    node_order and ours.

    Ours: our_steps, our_cost_ms, our_plans, best (text of the best plan), stages,
    counted (stages in its cost), our_search_ms.
    """
    table = published("table1")
    runs = []
    for row in table[table["row"].isin(list(rows))].to_dict("records"):
        for order in NODE_ORDERS:
            result = run_row(row["layers"], row["gpus"], order, row["mode"])
            best = result.plans.iloc[0]
            stages = zip(best["device_groups"], best["strategies"], strict=True)
            degrees = ", ".join(f"{gpus}: dp {dp} tp {tp}" for gpus, (dp, tp) in stages)
            types = " then ".join(best["node_sequence"])
            count = best["batches"]
            batches = "1 batch" if count == 1 else f"{count} batches"
            layers = best["layer_partition"]
            ours = {
                "node_order": f"{order[0]} first",
                "our_steps": result.count,
                "our_cost_ms": result.best_cost_ms,
                "our_plans": result.costed_plans,
                "best": f"{types}; {degrees}; layers {layers}; {batches}",
                "stages": len(best["device_groups"]),
                "counted": best["num_stage_used_for_cost"],
                "our_search_ms": 1e3 * result.seconds,
            }
            runs.append(row | ours)
    return with_origin(pd.DataFrame(runs), *_INPUTS, rules=_RULES)


def table1_errors(runs: pd.DataFrame) -> pd.DataFrame:
    """Table 1 beside ours: steps and cost, in the order of GPU types whose cost is
    nearer, and ratio of search times.

    The errors are relative; node_order is the order that gives the published cost.
    """
    error = runs.eval("our_cost_ms / cost_ms - 1").abs()
    near = runs.loc[error.groupby([runs["row"], runs["mode"]]).idxmin()]
    near = near.reset_index(drop=True)
    near = near.eval("steps_error = our_steps / steps - 1")
    near = near.eval("cost_error = our_cost_ms / cost_ms - 1")
    # times are of different machines, so only base over strategy can be compared
    for who in ("", "our_"):
        times_ms = near.pivot(index="row", columns="mode", values=f"{who}search_ms")
        ratio = times_ms.eval("base / strategy")
        near[f"{who}time_ratio"] = near["row"].map(ratio)
    case = ["row", "layers", "gpus", "mode"]
    steps = ["steps", "our_steps", "steps_error"]
    costs = ["cost_ms", "our_cost_ms", "cost_error"]
    return near[[*case, *steps, *costs, "node_order", "time_ratio", "our_time_ratio"]]


@lru_cache
def _profiles(layers):
    return generate_profiles(layers)
