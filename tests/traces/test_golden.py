"""Reference numbers of real traces: HTA 0.5.0's own, and decimal-exact ones of an
independent implementation.
"""

import csv

import pytest

from madmax_lib import breakdown, read_trace
from madmax_lib.catalog.datasets import local_data

try:
    FOLDER, WHY = local_data("traces/golden.csv").parent, ""
except FileNotFoundError as reason:
    FOLDER, WHY = None, str(reason)
ROWS = (
    list(csv.DictReader((FOLDER / "golden.csv").read_text().splitlines()))
    if FOLDER
    else []
)
ABSENT = pytest.param(None, marks=pytest.mark.skip(reason=WHY))
NAMES = {
    "total": "kernel",
    "compute": "compute",
    "non_compute": "non_compute",
    "idle": "idle",
}
# where golden.csv differs from HTA
HTA_PRINTS = {("tracelens-samples/resnet_act_checkpoint.json.gz", "hta"): 22.45}


@pytest.mark.filterwarnings("ignore:.*no (rank in distributedInfo|step marks)")
@pytest.mark.parametrize(
    "row", ROWS or [ABSENT], ids=lambda row: row and f"{row['file'][:-8]}-{row['mode']}"
)
def test_breakdown_of_real_traces(row):
    timeline = read_trace(FOLDER / row["file"], hta_compatible=row["mode"] == "hta")
    ours = breakdown(timeline).iloc[0]
    if row["rank"]:
        assert timeline.ranks == [int(row["rank"])]
    if row["world_size"]:
        assert timeline.meta.world_size == int(row["world_size"])
    for name, theirs in NAMES.items():
        assert ours[f"{name}_s"] * 1e6 == pytest.approx(
            float(row[f"{theirs}_time_us"]), abs=1.0
        ), name
    if printed := HTA_PRINTS.get((row["file"], row["mode"])):
        assert round(ours["overlap"] * 100, 2) == printed
    else:
        assert ours["overlap"] * 100 == pytest.approx(
            float(row["comm_comp_overlap_pct"]), abs=0.01, nan_ok=True
        )
