"""Known facts about memory beside the model: bytes that papers print, and sizes that ran
or ran out of memory.

The ZeRO paper's table is in the library's `data/published_memory.csv`, sizes that were
tried in `data/sizes_tried.csv`.
"""

from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from madmax_lib import catalog
from madmax_lib.papers.origin import with_origin
from madmax_lib.plan import Plan
from madmax_lib.simulator import Policy, fits, memory
from madmax_lib.simulator.offload.fits import gpt_shape

# model states of the ZeRO paper [arXiv 1910.02054]: 16 bytes per parameter unsharded
_STATES = ["weights", "gradients", "optimizer"]


def memory_facts() -> pd.DataFrame:
    """Facts beside what the model says: fact, theirs, ours, agrees.

    Bytes of the ZeRO paper agree to the last digit that it prints, rounded or cut off;
    others are that a step fits.
    """
    published = catalog.table("published_memory")
    # table 1 of the ZeRO paper is that of 64 data-parallel ranks
    of_zero = published["plan"].str.match(r"dp64\.")
    states = published[of_zero & (published["quantity"] == "model states")]
    tried = catalog.table("papers/studies/sizes_tried")
    rows = [_model_states(row) for row in states.to_dict("records")]
    rows += [_size_tried(row) for row in tried.to_dict("records")]
    files = ("published_memory", "studies/sizes_tried")
    return with_origin(pd.DataFrame(rows), *files, rules="predicted by the simulator")


class _Fact(NamedTuple):
    """Row of `memory_facts`."""

    fact: str
    theirs: str
    ours: str
    agrees: bool


def _size_tried(row):
    """Fact of a size that somebody trained, or could not."""
    if row["model"]:
        model = catalog.model(row["model"])
    else:
        model = gpt_shape(int(row["hidden"]), int(row["layers"]))
    machine = catalog.cluster(row["cluster"])
    placement = fits(
        model,
        replace(machine, devices_per_node=int(row["devices"])),
        Plan.parse(row["plan"]),
        global_batch=int(row["global_batch"]),
        dtype="fp16",
        policy=Policy(share=float(row["share"]) if row["share"] else None),
    )
    ours = "fits" if placement.fits else "does not fit"
    theirs = "fits" if row["fits"] == "yes" else "does not fit"
    return _Fact(row["fact"], theirs, ours, theirs == ours)


def _model_states(row):
    """Fact of the ZeRO paper: bytes of weights, gradients and optimizer."""
    # bytes per parameter depend on the plan alone, so any shape gives them
    model = gpt_shape(512, 8)
    parameters = float(row["model"].split()[0])
    plan = Plan.parse(row["plan"])
    parts = memory(model, plan, software="deepspeed", dtype="fp16")
    states = parts.set_index("component").loc[_STATES, "size_bytes"].sum()
    size_gb = states / model.parameters * parameters / 1e9
    # as many digits as the paper prints, the last one rounded or cut off
    digits = len(row["value"].partition(".")[2])
    agrees = abs(size_gb - float(row["value"])) < 10.0**-digits
    fact = f"{parameters / 1e9:g}e9 parameters, {row['plan']} [ZeRO, Table 1]"
    theirs = f"{float(row['value']):g} GB"
    return _Fact(fact, theirs, f"{size_gb:.{digits}f} GB", agrees)
