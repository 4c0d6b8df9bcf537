"""Traced and published facts about overlap beside the simulator's.

The facts are those of `data/overlap.csv`: how much communication a step hides and
shows, how much compute slows down beside it, and what switching an overlap or a
recomputation on brings. No fit sees them, but what `data/software.csv` says of the
defaults of two stacks was read off the same traces.
"""

import hashlib
from dataclasses import replace
from functools import lru_cache

import pandas as pd

from madmax_lib import catalog
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.stated import machine_of, model_of, number_of, software_of
from madmax_lib.simulator import simulate
from madmax_lib.timeline import breakdown, with_origin

_FAST = 1e6  # times the bandwidth of links beside which compute is alone


def overlap_facts() -> pd.DataFrame:
    """Measured facts about overlap, a row each, with predicted beside measured and
    error, their difference.

    what: overlap, hidden over all communication; exposed_share, communication that no
    compute hides over the step; comm_share, communication over the time of all kernels;
    compute_slowdown, compute beside communication over compute alone, minus 1;
    speed_ratio, the step of a reference plan over that of the plan, whose error is
    relative. run: what ran. notes: what its source leaves open, or how it was read.
    Predictions are those of the shipped constants.
    """
    table = catalog.table("overlap")
    rows = [_row(raw) for raw in table.to_dict("records")]
    result = table[["source", "case", "model", "gpu"]].join(pd.DataFrame(rows))
    result["notes"] = table["notes"]
    content = catalog.data_file("overlap.csv").read_bytes()
    files = {"overlap.csv": {"sha256": hashlib.sha256(content).hexdigest()}}
    return with_origin(result, {"files": files, "rules": "not fitted"})


def _row(raw):
    case = _case(raw, raw["plan"])
    measured = number_of(raw, "measured")
    predicted = _predicted(case, raw)
    error = predicted - measured
    if raw["what"] == "speed_ratio":
        error = error / measured
    return {
        "software": case.software.name,
        "devices": case.plan.world_size,
        "run": f"{case.model.name} {case.plan}, {case.dtype}, {case.software.name}",
        "what": raw["what"],
        "measured": measured,
        "predicted": predicted,
        "error": error,
    }


def _case(raw, plan):
    """The run of a row under a plan."""
    plan = Plan.parse(plan)
    device = catalog.device(raw["gpu"])
    cluster, dtype = machine_of(raw, device, plan.world_size)
    batch = int(raw["global_batch"])
    sequence = int(raw["seq_len"])
    software = software_of(raw, device)
    return Case(model_of(raw), cluster, plan, batch, sequence, dtype, software)


def _predicted(case, raw):
    """The quantity of a row, of the simulated step."""
    # some traces show a stage's layers alone
    parts = _means(case, raw["traced"] == "layers")
    exposed_s, comm_s = (parts[name] for name in ("exposed_comm_s", "comm_s"))
    match raw["what"]:
        case "overlap":
            return 1 - exposed_s / comm_s if comm_s else 0.0
        case "exposed_share":
            return exposed_s / parts["total_s"]
        case "comm_share":
            return comm_s / (comm_s + parts["compute_s"] + parts["memory_s"])
        case "compute_slowdown":
            # without communication beside it, compute is alone
            cluster = case.cluster
            links = {
                name: replace(
                    link, bandwidth_bytes_per_s=_FAST * link.bandwidth_bytes_per_s
                )
                for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
            }
            alone = _means(replace(case, cluster=replace(cluster, **links)))
            return parts["compute_s"] / alone["compute_s"] - 1
        case "speed_ratio":
            reference = _means(_case(raw, raw["reference_plan"]))
            return reference["total_s"] / parts["total_s"]
    raise ValueError(f"what={raw['what']!r} of data/overlap.csv is not known")


@lru_cache(maxsize=64)
def _means(case: Case, layers=False):
    """Mean over the ranks of the breakdown of a simulated step.

    layers: of its layers, without messages between stages, as some traces show them.
    """
    step = case.answer(simulate)
    if layers:
        step = step.where((step.spans["group"] != "pp").to_numpy())
    return breakdown(step).mean()
