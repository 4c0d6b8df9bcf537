"""Layouts to try on the devices at hand: every kind on 1, 2, 4 and 8 of them, else the
planner's best.
"""

from dataclasses import replace

from madmax_lib import catalog
from madmax_lib.planner.evaluate import LAYOUT_KEY
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space
from madmax_lib.runs.spec import RunSpec, check

# 2 to 8: one to five dimensions, as the study of notebook 54 meant to try them
_TRIED = catalog.table("layouts_tried").groupby("devices")["plan"].agg(list)
# A cluster of the catalog, whatever the devices are: layouts are ranked, not timed.
_STAND_IN = "dgx-a100"
_TOP = 1000  # plans of a search to choose from
_MOST = 8  # layouts to try: each is a run


def layouts(spec: RunSpec, devices: int) -> list[str]:
    """Strategies to try with a run on so many devices, without those that cannot run.

    Where the number of devices has no list, the best of each way to split the model.
    Raises ValueError for fewer than one device.
    """
    image = bool(spec.shapes.image)

    def named(text):
        # patches and class token of an image are not split over ranks
        return f"{text}.nosp" if image and "tp" in text else text

    def is_runnable(text):
        return runnable(spec, named(text), devices)

    if str(devices) in _TRIED:
        tried = _TRIED[str(devices)]
    else:
        table = search(
            spec.shapes,
            catalog.cluster(_STAND_IN, devices=devices),
            spec.global_batch,
            sequence=spec.sequence or None,
            dtype="bf16" if spec.dtype == "auto" else spec.dtype,
            software="workbench",
            space=replace(Space.quick(), hybrid=(), overlap_gather=(False,)),
            top=_TOP,
            progress=False,
        ).table
        # the first of each layout is its best
        tried = (
            table[table["plan"].map(is_runnable)]
            .drop_duplicates(list(LAYOUT_KEY))["plan"]
            .head(_MOST)
        )
    names = map(named, filter(is_runnable, tried))
    # one device is what the others are measured against
    return list(dict.fromkeys(["dp1", *names]))


def runnable(spec: RunSpec, strategy: str, gpus: int) -> bool:
    """Whether a run of the spec can have this strategy on a machine with so many GPUs."""
    try:
        check(replace(spec, strategy=strategy), gpus)
    except ValueError:
        return False
    return True
