"""The room's face: every call that the design promises works, also where a module has
the same name.
"""

import subprocess
import sys
from contextlib import nullcontext

import pandas as pd
import pytest
from support import make_timeline

import madmax_lib as mm
from madmax_lib.traces.read.events import TraceWarning

CALLS = ["advise", "operators", "kernels", "modules", "roofline", "mfu", "calls", "by_group", "launches", "idle",
         "launch_bound", "memory_timeline", "peak", "steps", "critical_path", "what_if", "stragglers"]  # fmt: skip
STEP = [
    (rank, *row)
    for rank in (0, 1)
    for row in [(7, "compute", "gemm", 0, 9), (20, "comm", "gloo:all_reduce", 9, 5)]
]


@pytest.mark.filterwarnings("ignore:no modules are recorded")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_makes_a_table_that_knows_its_origin(name):
    more = [{"compute": 2.0}] if name == "what_if" else []
    with (
        pytest.warns(TraceWarning, match="mm.estimate gives the MFU")
        if name == "mfu"
        else nullcontext()
    ):
        table = getattr(mm.traces, name)(make_timeline(STEP, source="simulated"), *more)
    assert isinstance(table, pd.DataFrame) and table.attrs["source"] == "simulated"


@pytest.mark.parametrize(
    ("name", "inside"), [("critical_path", "what_if"), ("stragglers", "skew")]
)
@pytest.mark.parametrize("call_first", [True, False])
def test_a_call_and_the_module_of_its_name_live_together(name, inside, call_first):
    called = f"assert mm.traces.{name}.__code__.co_argcount and mm.traces.{inside}"
    imported = (
        f"from madmax_lib.traces.{name} import {inside}\nimport "
        f"madmax_lib.traces.{name} as m\nassert m.{inside}"
    )
    order = [called, imported] if call_first else [imported, called]
    subprocess.run(
        [sys.executable, "-c", "\n".join(["import madmax_lib as mm", *order, called])],
        check=True,
    )
