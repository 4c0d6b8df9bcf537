"""Plans that people ran: in the space, near the winner of their software; what misses
is said.
"""

from dataclasses import replace

import pytest

import madmax_lib as mm
from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.plan import Plan
from madmax_lib.planner import Space

BLOOM = Transformer(
    "bloom", layers=70, hidden=14336, heads=112, ffn=57344, vocab=250880, sequence=2048
)
NEMOTRON = Transformer("nemotron-4-340b", layers=96, hidden=18432, heads=96, kv_heads=8, ffn=73728, vocab=256000,
                       sequence=4096, positions="rope", tied=False)  # fmt: skip
ENDS = "embedding-layer.head-layer"
# model, cluster, nodes, software, batch, sequence, plan, step over the winner's at
# most, whether it fits
RUNS = {
    "GPT-3, arXiv 2205.05198": ("gpt3-175b", "dgx-a100", 8, "megatron-2022", 64, 2048,
                                "dp1.tp8.pp8.v3.selective.unfused", 1.1, True),
    "530B, arXiv 2205.05198": ("megatron-530b", "dgx-a100", 35, "megatron-2022", 280, 2048,
                               "dp1.tp8.pp35.v3.selective.unfused", 1.01, True),
    "MT-NLG, arXiv 2201.11990": ("megatron-530b", "dgx-a100", 280, "deepspeed-2021", 1920, 2048,
                                 "dp8.tp8.pp35.full.nosp.unfused", 1.15, True),
    "BLOOM, arXiv 2211.05100": (BLOOM, "jean-zay", 48, "deepspeed-2021", 2048, 2048,
                                f"dp8.tp4.pp12.z1.mb2.full.nosp.unfused.{ENDS}.reduce-fp32", 1.1, True),
    "Nemotron-4 340B, arXiv 2406.11704": (NEMOTRON, "dgx-h100", 768, "megatron-core", 2304, 4096,
                                          "dp64.tp8.pp12.z1.v8.overlap-gather", 1.15, True),
    "Mixtral, Megatron-Bridge": ("mixtral-8x7b", "dgx-h100", 8, "megatron-bridge", 256, 4096,
                                 "dp16.pp4.ep8.z1.v8.overlap-gather", 1.05, True),
    # it repeats up-projections, norms and SwiGLU, for which a plan has no word: full is
    # the nearest that fits
    "DeepSeek-V3, arXiv 2412.19437": ("deepseek-v3", "hgx-h800", 256, "hai-llm", 15360, 4096,
                                      "dp128.pp16.ep64.z1.full.last1.overlap-gather", 1.05, True),
    # timed right, but memory is counted 1 and 10 % above what a device has: nothing is
    # freed early [3.3.2 of the paper]
    "Llama 3 405B, 16,384, arXiv 2407.21783": ("llama3-405b", "dgx-h100", 2048, None, 2048, 8192,
                                               f"dp128.tp8.pp16.z2.v8.{ENDS}.overlap-gather.reduce-fp32", 1.1, False),
    "Llama 3 405B, 8,192, arXiv 2407.21783": ("llama3-405b", "dgx-h100", 1024, None, 2048, 8192,
                                              f"dp64.tp8.pp16.z2.v8.{ENDS}.overlap-gather.reduce-fp32", 1.05, False),
}  # fmt: skip


# what is asked and not reached: a test that passes again fails here
MISSED = {"Mixtral, Megatron-Bridge": "5.1 % behind the winner, asked for are 5"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=MISSED[name], strict=True))
        if name in MISSED
        else name
        for name in RUNS
    ],
)
def test_a_plan_that_was_run_is_found(name):
    """Alone in its own choices, and not far behind the winner of those that its
    software offers.
    """
    model, cluster, nodes, software, batch, sequence, text, most, fits = RUNS[name]
    plan, where = Plan.parse(text), mm.cluster(cluster, nodes=nodes)
    run = {"software": software, "sequence": sequence, "progress": False}
    row = mm.estimate(
        model, where, plan, global_batch=batch, sequence=sequence, software=software
    ).iloc[0]
    assert row.fits == fits and row.memory_bytes < 1.2 * 80 * 2**30
    degrees = {name: getattr(plan, name) for name in ("tp", "cp", "ep")}
    alone = degrees | {
        "pp": plan.pp,
        "zero": plan.zero,
        "zero_under_pipeline": plan.zero,
    }
    alone |= {
        "interleave": plan.interleave,
        "micro_batch": plan.micro_batch,
        "recompute": plan.recompute,
        "reduce_fp32": plan.reduce_fp32,
    }
    space = replace(Space.quick(), **alone, usual_interleave=False)
    if fits:
        table = mm.search(model, where, batch, space=space, **run).table
        assert any(Plan.parse(found) == plan for found in table["plan"])
        assert {software} == set(table["stacks"])
    others = replace(
        Space.quick(),
        **degrees,
        hybrid=(),
        usual_interleave=False,
        reduce_fp32=plan.reduce_fp32,
    )
    winner = mm.search(model, where, batch, space=others, top=1, **run).table.iloc[0]
    assert row.step_s < most * winner.step_s
