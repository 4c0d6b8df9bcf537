"""Traces that nobody here made: every analysis runs on them, and no number is
impossible.
"""

import numpy as np
import pytest
from support import local_or_skip

from madmax_lib import catalog, read_trace, traces

FILES = """
ao/ref_ep_moe_fwd ao/syncless_ep_moe_fwd aorta/mi350.pt.trace ascend/trace_view dtu/trace flowmatch/pytorch_trace
hta/cupti kineto/gpu_metrics_input kineto/nw0_1623143566756 torchrec-a2a5/45920.pt.trace
tracelens/sglang_decode_capture tracelens/sglang_prefilldecode tracelens/vllm_decode_exec
"""
ANALYSES = (
    "breakdown",
    "advise",
    "operators",
    "mfu",
    "roofline",
    "by_group",
    "steps",
    "modules",
    "kernels",
    "peak",
)
SHARES = ("share", "overlap", "mfu", "coverage")


@pytest.mark.filterwarnings("ignore::madmax_lib.traces.read.kineto.TraceWarning")
@pytest.mark.parametrize("name", FILES.split())
def test_no_number_is_impossible(name):
    timeline = read_trace(local_or_skip(f"traces/more/{name}.json.gz"))
    tables = {analysis: getattr(traces, analysis)(timeline) for analysis in ANALYSES}
    for analysis, table in tables.items():
        for column in table.select_dtypes("number"):
            values = table[column].dropna()
            assert np.isfinite(values).all(), (analysis, column)
            assert (
                column == "rank" or (values >= (-1 if column == "step" else 0)).all()
            ), (analysis, column)
            assert column not in SHARES or (values <= 1 + 1e-9).all(), (
                analysis,
                column,
            )
    device = catalog.device_named(timeline.meta.device)
    on_device = tables["peak"][tables["peak"]["device"] != "cpu"]
    # data sheets say GB for GiB
    limit_bytes = 1.08 * device.memory_bytes if device else np.inf
    assert (on_device["peak_bytes"] <= limit_bytes).all()
