"""A few plans side by side: their costs, and single changes of one."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import require_type
from madmax_lib.catalog import Cluster, Model, Software
from madmax_lib.plan import Case, Plan
from madmax_lib.simulator import Parameters, estimate
from madmax_lib.simulator.steady.step_time import COMMUNICATION

EXPOSED = list(COMMUNICATION)  # as an index of columns


def variants(
    model: Model | str,
    cluster: Cluster | str,
    plans: Iterable[Plan | str],
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    parameters: Parameters | None = None,
) -> pd.DataFrame:
    """Columns of `estimate`, exposed (share of the step), memory_gb and fits, indexed
    by the text of each plan.

    The other arguments are those of `estimate` and `fits`. Raises ValueError, as the
    plan does, for one that cannot be laid out.
    """
    from madmax_lib.simulator import fits  # late: a wing

    shape = {
        "global_batch": global_batch,
        "sequence": sequence,
        "dtype": dtype,
        "software": software,
    }
    if isinstance(plans, str | Plan):
        plans = [plans]
    rows = {}
    for plan in map(Plan.parse, require_type("plans", plans, Iterable)):
        row = estimate(model, cluster, plan, **shape, parameters=parameters).iloc[0]
        result = fits(model, cluster, plan, **shape)
        costs = {
            "exposed": row[EXPOSED].sum() / row["step_s"],
            "memory_gb": _used_gb(result)["device"],
        }
        rows[str(plan)] = row.to_dict() | costs | {"fits": result.fits}
    return pd.DataFrame.from_dict(rows, orient="index")


def lever_table(
    model: Model | str,
    cluster: Cluster | str,
    plan: Plan | str,
    *,
    global_batch: int,
) -> pd.DataFrame:
    """A plan and single changes of it: lever, plan, device_gb, host_gb and nvme_gb (of
    a node), fits, step_s.

    Levers: recompute, ZeRO stages, micro-batch 1, and with full recompute all that may
    leave the device on the host or on drives, where the cluster has them. step_s is NaN
    for what does not fit. Levers that change nothing, or that the plan's degrees
    exclude, are left out. Raises ValueError for a plan that already offloads.
    """
    cluster = catalog.cluster(cluster)
    plan = Plan.parse(plan)
    case = Case.of_step(
        model, cluster, plan, global_batch, None, cluster.device.nearest("bf16")
    )
    if plan.offload is not None:
        raise ValueError(f"{plan} already offloads: start from a plan that does not")
    changes = {"as given": {}}
    for kind in ("none", "selective", "full"):
        changes[f"recompute {kind}"] = {"recompute": kind}
    for stage in range(4):
        changes[f"ZeRO-{stage}"] = {"zero": stage}
    changes["micro-batch 1"] = {"micro_batch": 1}
    if cluster.host is not None:
        # states leave the device from the ZeRO stage on that shards them
        full = {"recompute": "full", "zero": 3}
        shards_optimizer = {"recompute": "full", "zero": max(plan.zero, 2)}
        changes["full, optimizer to the host"] = shards_optimizer | {
            "offload": "optimizer"
        }
        changes["full, all to the host"] = full | {"offload": "all"}
        changes["full, chunks to the host"] = full | {"offload": "chunks"}
        if cluster.host.nvme_bytes:
            changes["full, all to drives"] = full | {"offload": "nvme"}
    rows = []
    for lever, change in changes.items():
        changed = replace(plan, **change)
        if lever == "as given" or changed != plan:
            rows.append({"lever": lever, **_outcome(replace(case, plan=changed))})
    return pd.DataFrame(rows)


def _outcome(case):
    """Bytes that a device, the host of a node and its drives hold, and the step if that
    fits.
    """
    from madmax_lib.simulator import fits  # late: a wing
    from madmax_lib.simulator.offload.placement import PLACES, Policy

    policy = Policy(share=1.0 if case.plan.offload else None)
    placement = fits(
        case.model,
        case.cluster,
        case.plan,
        global_batch=case.global_batch,
        dtype=case.dtype,
        policy=policy,
    )
    used_gb = _used_gb(placement).reindex(list(PLACES), fill_value=0.0)
    step_s = np.nan
    if placement.fits:
        step_s = case.answer(estimate, policy=policy)["step_s"].item()
    return {
        "plan": str(case.plan),
        **used_gb.add_suffix("_gb"),
        "fits": placement.fits,
        "step_s": step_s,
    }


def _used_gb(result):
    """GB that a step takes of each place."""
    places = result.table.drop_duplicates("place").set_index("place")
    return (places["usable_bytes"] - places["margin_bytes"]) / 1e9
