import math
import random

import pytest
from support import refused, rows_beside

from madmax_lib.catalog.tables import cluster, model
from madmax_lib.plan.plan import DEFAULTS, Plan

VALUES = {
    "dp": range(1, 65), "tp": (1, 2, 4, 8, 16), "pp": range(2, 17), "cp": (1, 2, 8), "ep": (1, 2, 4), "etp": (0, 1, 2),
    "zero": (0, 1, 2, 3), "micro_batch": range(1, 9), "interleave": range(1, 9), "prefetch": (0, 1, 3),
    "recompute": ("none", "selective", "full", "mlp", "layernorm+moe_act", "budget0", "budget55"), "sequence_parallel": (True, False, None), "shard": (0, 2, 4),
    "schedule": ("gpipe", "1f1b", "zero-bubble"), "offload": (None, "optimizer", "all", "chunks", "nvme"),
    "context": ("ring", "ulysses"), "attention": ("flash", "unfused"), "embedding_as_layer": (True, False),
    "head_as_layer": (True, False), "first_layers": (0, 3, 7), "last_layers": (0, 2), "reduce_fp32": (True, False),
    "overlap_gather": (True, False), "qwz": (True, False), "hpz": (True, False), "qgz": (True, False),
    "capacity": (0.0, 1.25, 0.07, 2), "bucket_bytes": (25 * 2**20, 160e6, 1, math.inf, 838861.0),
    "layout": ("", "1x4", "3+2x2+0m"), "lora_rank": (0, 1, 16), "overlap_tp": (None, True, False), "overlap_ep": (None, True, False),
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
    assert plan == Plan(dp=2, tp=2, pp=2, zero=3, sequence_parallel=True)
    assert plan.world_size == 8 and str(plan) == "dp2.tp2.pp2.z3"
    assert Plan.parse("dp8.z3.zpp") == Plan(dp=8, zero=3, qwz=True, hpz=True, qgz=True)


TEXTS = """
    dp16.z3.hs8 dp16.z3.qwz.hpz dp8.z1.overlap-gather dp1.pp4.first3.last2
    dp8.ep4.cap125 dp1.pp2.v2.last4 dp4.tp8.ep16.etp1 dp8.lora16 dp8.no-overlap-dp
    dp2.tp8.overlap-tp dp8.one-bucket dp8.bucket160000000
    dp8.tp2.recompute-layernorm+moe_act
"""


@pytest.mark.parametrize("text", TEXTS.split())
def test_a_shortest_text_is_shown_again(text):
    assert str(Plan.parse(text)) == text


@pytest.mark.parametrize(("text", "rule"), rows_beside(__file__, "refused_texts"))
def test_bad_text_is_refused(text, rule):
    with refused(rule):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("plan", "name", "rule"), rows_beside(__file__, "refused_by_model")
)
def test_plans_are_checked_against_model_and_cluster(plan, name, rule):
    with refused(rule):
        Plan.parse(plan).check(model(name), cluster("dgx-a100"))


@pytest.mark.parametrize(
    ("plan", "name"),
    [("tp8", "qwen2.5-3b"), ("dp8.ep8", "mixtral-8x7b"), ("cp8", "gpt2-large")],
)
def test_plans_that_fit_model_and_cluster(plan, name):
    Plan.parse(plan).check(model(name), cluster("dgx-a100"))


def test_micro_batches():
    plan = Plan(dp=4, micro_batch=2)
    assert plan.micro_batches(64) == 8
    short = Plan(dp=4, micro_batch=3)
    assert (short.micro_batches(40), short.last_micro_batch(40)) == (4, 1)
    with refused("global_batch=10 & not a multiple of dp x micro_batch = 4 x 2"):
        plan.micro_batches(10)
