"""Which lever makes a step fit, and do the known facts come out? One change of a plan at a time, and facts of papers.

Facts are the rows of `data/scale_limits.csv` and of the ZeRO paper's table in `data/published_memory.csv`, and what
the sources say about single steps: sizes that ran, and sizes that ran out of memory.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from madmax_lib import catalog
from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.memory.memory import memory
from madmax_lib.simulator.offload.fits import fits, gpt_shape
from madmax_lib.simulator.offload.placement import PLACES, Policy
from madmax_lib.specs import Cluster, Transformer

__all__ = ["known_table", "lever_table"]

_STATES = ("weights", "gradients", "optimizer")
# fact, model, cluster (of so many devices), plan, samples per step, share off the device, whether it ran
_RAN = (
    ("ViT-Huge, DDP, 2 T4 [sidd1196]", "vit-huge", "kaggle-2xt4", 2, "dp2.mb16.full", 32, None, False),
    ("ViT-Huge, ZeRO-2, 2 T4 [sidd1196]", "vit-huge", "kaggle-2xt4", 2, "dp2.z2.mb16.full", 32, None, True),
    ("9.1B static, 4 V100, 192 GB", (4096, 44), "hetero-4xv100", 4, "dp4.mb4.full.offload-chunks", 16, 1.0, True),
    ("14B static, 4 V100, 192 GB", (4096, 70), "hetero-4xv100", 4, "dp4.mb4.full.offload-chunks", 16, 1.0, False),
    ("21B, H100, 2 TB", (8192, 25), "dgx-h100", 4, "dp4.mb8.full.offload-chunks", 32, 1.0, True),
    ("41B, H100, 2 TB", (8192, 50), "dgx-h100", 4, "dp4.mb8.full.offload-chunks", 32, 1.0, True),
    ("18B chunks, 8 V100, 240 GB", (6144, 39), "patrickstar-8xv100", 8, "dp8.mb4.full.offload-chunks", 32, None, True),
    ("18B, host alone", (6144, 39), "patrickstar-8xv100", 8, "dp8.mb4.full.offload-chunks", 32, 1.0, False),
    ("68B chunks, 8 A100, 1 TB", (8192, 84), "dgx-a100-40", 8, "dp8.mb4.full.offload-chunks", 32, None, True),
    ("13B ZeRO-Offload, 1 V100", (5120, 40), "dgx-2", 1, "z2.full.offload-optimizer", 1, None, True),
    ("13B without offload, 1 V100", (5120, 40), "dgx-2", 1, "full", 1, None, False),
    ("40B ZeRO-3 Offload, 1 V100, 1.5 TB", (8192, 50), "dgx-2", 1, "z3.full.offload-all", 1, None, True),
)


def lever_table(model: Transformer, cluster: Cluster, plan: Plan, *, global_batch: int) -> pd.DataFrame:
    """A plan and single changes of it: lever, plan, device_gb, host_gb and nvme_gb (of a node), fits, step_s.

    Levers: recompute, ZeRO stages, micro-batch 1, and with full recompute all that may leave the device on the host or
    on drives, where the cluster has them. step_s is NaN for what does not fit. Levers that change nothing, or that the
    plan's degrees exclude, are left out. Raises ValueError for a plan that already offloads.
    """
    if plan.offload is not None:
        raise ValueError(f"{plan} offloads already: the levers begin with a plan that does not")
    rows = [_lever("as given", model, cluster, plan, global_batch)]
    changes = {f"recompute {kind}": {"recompute": kind} for kind in ("none", "selective", "full")}
    changes |= {f"ZeRO-{stage}": {"zero": stage} for stage in range(4)} | {"micro-batch 1": {"micro_batch": 1}}
    changes |= {name: {"recompute": "full", "offload": offload, "zero": zero} for name, offload, zero in (
        ("optimizer to the host", "optimizer", max(plan.zero, 2)), ("all to the host", "all", 3),
        ("chunks to the host", "chunks", 3), ("all to drives", "nvme", 3))}  # fmt: skip
    for name, change in changes.items():
        changed = replace(plan, **change)
        if changed == plan or (changed.offload and cluster.host is None):
            continue
        if changed.offload == "nvme" and not cluster.host.nvme_bytes:
            continue
        rows.append(_lever(name, model, cluster, changed, global_batch))
    return pd.DataFrame(rows)


def known_table() -> pd.DataFrame:
    """Facts beside what the model says: fact, known, ours, agrees.

    Bytes of the ZeRO paper agree to the last digit that it prints, rounded or cut off; others are that a step fits.
    """
    rows = [_zero(row) for row in _zero_rows()]
    for fact, shape, name, devices, plan, batch, share, ran in _RAN:
        model = catalog.model(shape) if isinstance(shape, str) else gpt_shape(*shape)
        cluster = replace(catalog.cluster(name), devices_per_node=devices)
        found = fits(model, cluster, Plan.parse(plan), global_batch=batch, dtype="fp16", policy=Policy(share=share))
        rows.append((fact, *("fits" if yes else "does not fit" for yes in (ran, found.fits)), ran == found.fits))
    return pd.DataFrame(rows, columns=["fact", "known", "ours", "agrees"])


def _lever(name: str, model: Transformer, cluster: Cluster, plan: Plan, global_batch: int) -> dict:
    policy = Policy(share=1.0 if plan.offload else None)
    found = fits(model, cluster, plan, global_batch=global_batch, policy=policy)
    places = found.table.drop_duplicates("place").set_index("place")
    used = (places["usable_bytes"] - places["margin_bytes"]).reindex(list(PLACES), fill_value=0.0) / 1e9
    times = float("nan")
    if found.fits:
        times = estimate(model, cluster, plan, global_batch=global_batch, policy=policy)["step_s"].item()
    return {"lever": name, "plan": str(plan), **{f"{where}_gb": used[where] for where in PLACES}, "fits": found.fits,
            "step_s": times}  # fmt: skip


def _zero_rows() -> list[dict]:
    table = catalog.table("published_memory")
    table = table[(table["quantity"] == "model states") & table["plan"].str.match(r"dp64\.")]
    return table.to_dict("records")


def _zero(row: dict) -> tuple[str, str, str, bool]:
    """Model states of a row of the ZeRO paper."""
    model = gpt_shape(512, 8)
    table = memory(model, Plan.parse(row["plan"]), stack="deepspeed", dtype="fp16").set_index("component")["size_bytes"]
    size_gb = sum(table[name] for name in _STATES) / model.parameters * float(row["model"].split()[0]) / 1e9
    digits = len(row["value"].partition(".")[2])
    agrees = abs(size_gb - float(row["value"])) < 10.0**-digits
    fact = f"{float(row['model'].split()[0]) / 1e9:g}e9 parameters, {row['plan']} [ZeRO, Table 1]"
    return fact, f"{float(row['value']):g} GB", f"{size_gb:.{digits}f} GB", agrees
