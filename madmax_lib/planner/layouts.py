"""Which layouts does one try on the devices at hand? Every kind on 1, 2 and 8 of them,
else the planner's best.
"""

from dataclasses import replace

from madmax_lib import catalog
from madmax_lib.planner.evaluate import WAY
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space
from madmax_lib.runs.spec import RunSpec, check

__all__ = ["layouts", "runnable"]

# 2 and 8: one to five dimensions, as the study of notebook 54 meant to try them
_TRIED = {
    1: "dp1 dp1.full dp1.z3.offload-all",
    2: "dp1 dp2 dp2.z2 dp2.z3 tp2 pp2",
    8: "dp8 dp8.z2 dp8.z3 dp2.tp2.pp2 dp2.pp2.cp2 dp4.pp2.ep4 dp2.tp2.pp2.ep2",
}
_STAND_IN = "dgx-a100"  # of the catalog, whatever the devices are
# plans to choose from, and layouts to try
_TOP = 1000
_MOST = 8


def layouts(spec: RunSpec, devices: int) -> list[str]:
    """Strategies to try with a run on so many devices, without those that cannot run.

    Where the number of devices has no list, the best of each way to split the model.
    Raises ValueError for fewer than one device.
    """
    image = bool(
        spec.shapes.image
    )  # whose patches and class token are not split over ranks

    def runs(text: str) -> bool:
        return runnable(
            spec, f"{text}.nosp" if image and "tp" in text else text, devices
        )

    if devices in _TRIED:
        tried = [text for text in _TRIED[devices].split() if runs(text)]
    else:
        run = {
            "sequence": spec.sequence or None,
            "dtype": "bf16" if spec.dtype == "auto" else spec.dtype,
        }
        here = catalog.cluster(_STAND_IN, devices=devices)
        space = replace(Space.quick(), hybrid=(), overlap_gather=(False,))
        run |= {"software": "workbench", "space": space, "top": _TOP, "progress": False}
        found = search(spec.shapes, here, spec.global_batch, **run).table
        tried = (
            found[found["plan"].map(runs)]
            .drop_duplicates(list(WAY))["plan"]
            .head(_MOST)
        )
    tried = dict.fromkeys(
        ["dp1", *tried]
    )  # one device is what the others are measured against
    return [f"{text}.nosp" if image and "tp" in text else text for text in tried]


def runnable(spec: RunSpec, strategy: str, gpus: int) -> bool:
    """Whether a run of the spec can have this strategy on a machine with so many GPUs."""
    try:
        check(replace(spec, strategy=strategy), gpus)
    except ValueError:
        return False
    return True
