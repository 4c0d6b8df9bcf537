"""Do the known facts about memory come out? Bytes that papers print, and sizes that ran
or ran out of memory.

The ZeRO paper's table is in the library's `data/published_memory.csv`, sizes that were
tried in `data/sizes_tried.csv`.
"""

from dataclasses import replace

import pandas as pd

from madmax_lib import catalog
from madmax_lib.papers.origin import with_origin
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.memory.memory import memory
from madmax_lib.simulator.offload.fits import fits, gpt_shape
from madmax_lib.simulator.offload.placement import Policy

__all__ = ["memory_facts"]

_STATES = ["weights", "gradients", "optimizer"]


def memory_facts() -> pd.DataFrame:
    """Facts beside what the model says: fact, theirs, ours, agrees.

    Bytes of the ZeRO paper agree to the last digit that it prints, rounded or cut off;
    others are that a step fits.
    """
    published = catalog.table("published_memory")
    states = (published["quantity"] == "model states") & published["plan"].str.match(
        r"dp64\."
    )
    rows = [_model_states(row) for row in published[states].to_dict("records")]
    rows += [
        _size_tried(row)
        for row in catalog.table("papers/studies/sizes_tried").to_dict("records")
    ]
    table = pd.DataFrame(rows, columns=["fact", "theirs", "ours", "agrees"])
    return with_origin(
        table,
        "published_memory",
        "studies/sizes_tried",
        rules="predicted by the simulator",
    )


def _size_tried(row: dict[str, str]) -> tuple[str, str, str, bool]:
    model = (
        catalog.model(row["model"])
        if row["model"]
        else gpt_shape(int(row["hidden"]), int(row["layers"]))
    )
    cluster = replace(
        catalog.cluster(row["cluster"]), devices_per_node=int(row["devices"])
    )
    plan = Plan.parse(row["plan"])
    policy = Policy(share=float(row["share"]) if row["share"] else None)
    ours = fits(
        model,
        cluster,
        plan,
        global_batch=int(row["global_batch"]),
        dtype="fp16",
        policy=policy,
    ).fits
    theirs = row["fits"] == "yes"
    return (
        row["fact"],
        *("fits" if yes else "does not fit" for yes in (theirs, ours)),
        theirs == ours,
    )


def _model_states(row: dict[str, str]) -> tuple[str, str, str, bool]:
    """A row of the ZeRO paper. Bytes per parameter depend on the plan alone: any shape
    gives them.
    """
    model = gpt_shape(512, 8)
    parameters = float(row["model"].split()[0])
    parts = memory(
        model, Plan.parse(row["plan"]), software="deepspeed", dtype="fp16"
    ).set_index("component")
    size_gb = (
        parts.loc[_STATES, "size_bytes"].sum() / model.parameters * parameters / 1e9
    )
    digits = len(row["value"].partition(".")[2])
    agrees = abs(size_gb - float(row["value"])) < 10.0**-digits
    fact = f"{parameters / 1e9:g}e9 parameters, {row['plan']} [ZeRO, Table 1]"
    return fact, f"{float(row['value']):g} GB", f"{size_gb:.{digits}f} GB", agrees
