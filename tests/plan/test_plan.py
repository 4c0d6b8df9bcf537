import math
import random

import pytest

from madmax_lib.catalog.tables import cluster, model
from madmax_lib.plan.plan import DEFAULTS, Plan

VALUES = {
    "dp": range(1, 65), "tp": (1, 2, 4, 8, 16), "pp": range(2, 17), "cp": (1, 2, 8), "ep": (1, 2, 4), "etp": (0, 1, 2),
    "zero": (0, 1, 2, 3), "micro_batch": range(1, 9), "interleave": range(1, 9), "prefetch": (0, 1, 3),
    "recompute": ("none", "selective", "full"), "sequence_parallel": (True, False, None), "shard": (0, 2, 4),
    "schedule": ("gpipe", "1f1b", "zero-bubble"), "offload": (None, "optimizer", "all", "chunks", "nvme"),
    "context": ("ring", "ulysses"), "attention": ("flash", "unfused"), "embedding_as_layer": (True, False),
    "head_as_layer": (True, False), "first_layers": (0, 3, 7), "last_layers": (0, 2), "reduce_fp32": (True, False),
    "overlap_gather": (True, False), "qwz": (True, False), "hpz": (True, False), "qgz": (True, False),
    "capacity": (0.0, 1.25, 0.07, 2), "bucket_bytes": (25 * 2**20, 160e6, 1, math.inf, 838861.0),
    "lora_rank": (0, 1, 16), "overlap_tp": (None, True, False), "overlap_ep": (None, True, False),
    "overlap_dp": (None, True, False),
}  # fmt: skip


def test_text_form_round_trips():
    """2,000 random legal plans; every field takes every value."""
    assert set(VALUES) == set(DEFAULTS)
    draw, seen, plans = random.Random(0), set(), 0
    while plans < 2000:
        values = {name: draw.choice(known) for name, known in VALUES.items()}
        for name in draw.sample(sorted(VALUES), draw.randint(0, len(VALUES))):
            del values[name]
        try:
            plan = Plan(**values)
        except ValueError:
            continue
        plans += 1
        seen |= set(values.items())
        assert Plan.parse(str(plan)) == plan, str(plan)
    assert {(name, value) for name, known in VALUES.items() for value in known} <= seen


def test_text_form_of_the_design():
    plan = Plan.parse("dp2.tp2.pp2.cp1.ep1.z3")
    assert (plan.dp, plan.tp, plan.pp, plan.zero, plan.sequence_parallel) == (
        2,
        2,
        2,
        3,
        True,
    )
    assert plan.world_size == 8 and str(plan) == "dp2.tp2.pp2.z3"

    assert Plan.parse("dp8.z3.zpp") == Plan(dp=8, zero=3, qwz=True, hpz=True, qgz=True)
    texts = (
        "dp16.z3.hs8 dp16.z3.qwz.hpz dp8.z1.overlap-gather dp1.pp4.first3.last2 "
        "dp8.ep4.cap125 dp1.pp2.v2.last4 "
    )
    texts += (
        "dp4.tp8.ep16.etp1 dp8.lora16 dp8.no-overlap-dp dp2.tp8.overlap-tp "
        "dp8.one-bucket dp8.bucket160000000"
    )
    assert [str(Plan.parse(text)) for text in texts.split()] == texts.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2.xx3", "'xx3' in plan 'dp2.xx3' is not one of dpN, tpN"),
        ("dp2.dp4", "dp is given twice"),
        ("dp0", "dp=0 must be a whole number of at least 1"),
        ("z4", "zero=4 is not one of 0, 1, 2, 3"),
        ("dp4.ep3", "ep=3 does not divide dp x cp = 4 x 1"),
        ("v2", "interleave=2 needs a pipeline, but pp=1"),
        ("dp8.z3.hs3", "shard=3 does not divide dp x cp = 8 x 1"),
        ("dp8.hs4", "shard=4 needs zero of at least 1"),
        ("dp12.ep4.z3.hs6", "shard=6 and ep=4: one must divide the other"),
        ("dp8.z2.qwz", r"qwz .ZeRO... needs zero=3, but zero=2"),
        ("dp8.z3.hs4.hpz", r"hpz .* and shard=4 .* exclude each other"),
        (
            "dp8.z3.overlap-gather",
            "overlap_gather is for zero=1 and zero=2, but zero=3",
        ),
        ("first3", "first_layers=3 needs a pipeline"),
        ("tp8.etp3", "etp=3 does not divide tp=8"),
        (
            "dp4.tp4.etp2.ep16",
            "ep=16 does not divide dp x cp x tp / etp = 4 x 1 x 4 / 2",
        ),
        (
            "dp8.z3.hs4.tp4.etp1.ep12",
            "ep=12 does not divide dp x cp x tp / etp = 8 x 1 x 4 / 1",
        ),
        ("dp6.tp2.z1.hs2.etp1.ep3", "shard=2 and ep=3: one must divide the other"),
        ("dp2.no-overlap-tp.overlap-tp", "overlap_tp is given twice"),
        (
            "pp2.first3.embedding-layer",
            "embedding_as_layer and first_layers.* exclude each other",
        ),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("plan", "name", "message"),
    [
        (Plan(tp=6), "llama-7b", "= 6, but dgx-a100 has 8 devices"),
        (Plan(tp=8), "gpt2-xl", "tp=8 does not divide 25 attention heads of gpt2-xl"),
        (Plan(dp=8, ep=8), "llama-7b", "ep=8, but llama-7b has no experts"),
        (
            Plan(dp=2, tp=4, etp=1),
            "llama-7b",
            "ep=1 and etp=1, but llama-7b has no experts",
        ),
        (
            Plan(dp=4, tp=2, etp=1, sequence_parallel=False),
            "mixtral-8x7b",
            "ep=1 with tp=2 needs sequence_parallel",
        ),
        (
            Plan(pp=8, interleave=8),
            "llama-7b",
            "pp x interleave = 8 x 8 exceeds 32 layers of llama-7b",
        ),
        (
            Plan(pp=8, interleave=4, first_layers=2),
            "llama-7b",
            "30 layers do not divide evenly over 28 stages",
        ),
        (
            Plan(pp=8, interleave=5, first_layers=4, last_layers=4),
            "llama-7b",
            "24 layers .* do not leave|exceeds 32",
        ),
        (
            Plan(cp=8, context="ulysses"),
            "gpt2-large",
            "cp=8 does not divide 20 attention heads of a tp rank",
        ),
        (
            Plan(dp=4, tp=2, ep=2, sequence_parallel=False),
            "mixtral-8x7b",
            "ep=2 with tp=2 needs sequence_parallel",
        ),
    ],
)
def test_plans_are_checked_against_model_and_cluster(plan, name, message):
    with pytest.raises(ValueError, match=message):
        plan.check(model(name), cluster("dgx-a100"))


def test_plans_that_fit_model_and_cluster():
    for plan, name in (
        (Plan(tp=8), "qwen2.5-3b"),
        (Plan(dp=8, ep=8), "mixtral-8x7b"),
        (Plan(cp=8), "gpt2-large"),
    ):
        plan.check(model(name), cluster("dgx-a100"))


def test_micro_batches():
    assert Plan(dp=4, micro_batch=2).micro_batches(64) == 8
    short = Plan(dp=4, micro_batch=3)
    assert (short.micro_batches(40), short.last_micro_batch(40)) == (4, 1)
    with pytest.raises(
        ValueError,
        match="global_batch=10 is not a multiple of dp x micro_batch = 4 x 2",
    ):
        Plan(dp=4, micro_batch=2).micro_batches(10)
