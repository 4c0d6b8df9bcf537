"""Which lever makes a step fit? One change of a plan at a time: recompute, ZeRO, micro-batch, host and drives."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.offload.fits import fits
from madmax_lib.simulator.offload.placement import PLACES, Policy
from madmax_lib.specs import Cluster, Transformer

__all__ = ["lever_table"]


def lever_table(model: Transformer, cluster: Cluster, plan: Plan, *, global_batch: int) -> pd.DataFrame:
    """A plan and single changes of it: lever, plan, device_gb, host_gb and nvme_gb (of a node), fits, step_s.

    Levers: recompute, ZeRO stages, micro-batch 1, and with full recompute all that may leave the device on the host or
    on drives, where the cluster has them. step_s is NaN for what does not fit. Levers that change nothing, or that the
    plan's degrees exclude, are left out. Raises ValueError for a plan that already offloads.
    """
    if plan.offload is not None:
        raise ValueError(f"{plan} offloads already: the levers begin with a plan that does not")
    changes = {"as given": {}} | {f"recompute {kind}": {"recompute": kind} for kind in ("none", "selective", "full")}
    changes |= {f"ZeRO-{stage}": {"zero": stage} for stage in range(4)} | {"micro-batch 1": {"micro_batch": 1}}
    if cluster.host is not None:
        away = {"recompute": "full", "zero": 3}
        changes["optimizer to the host"] = away | {"offload": "optimizer", "zero": max(plan.zero, 2)}
        changes |= {f"{what} to the host": away | {"offload": what} for what in ("all", "chunks")}
        changes |= {"all to drives": away | {"offload": "nvme"}} if cluster.host.nvme_bytes else {}
    plans = {lever: replace(plan, **change) for lever, change in changes.items()}
    levers = [lever for lever in plans if lever == "as given" or plans[lever] != plan]
    return pd.DataFrame([{"lever": lever, **_outcome(model, cluster, plans[lever], global_batch)} for lever in levers])


def _outcome(model: Transformer, cluster: Cluster, plan: Plan, global_batch: int) -> dict:
    """What a device, the host of a node and its drives hold, and the step if that fits."""
    policy = Policy(share=1.0 if plan.offload else None)
    placement = fits(model, cluster, plan, global_batch=global_batch, policy=policy)
    places = placement.table.drop_duplicates("place").set_index("place")
    used_gb = (places["usable_bytes"] - places["margin_bytes"]).reindex(list(PLACES), fill_value=0.0) / 1e9
    step_s = float("nan")
    if placement.fits:
        step_s = estimate(model, cluster, plan, global_batch=global_batch, policy=policy)["step_s"].item()
    sizes = {f"{place}_gb": used_gb[place] for place in PLACES}
    return {"plan": str(plan), **sizes, "fits": placement.fits, "step_s": step_s}
