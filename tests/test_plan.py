import pytest
from hypothesis import given
from hypothesis import strategies as st

from madmax_lib.catalog import cluster, model
from madmax_lib.plan import Plan

DEGREE = st.integers(1, 64)


@given(
    st.builds(
        Plan, dp=DEGREE, tp=DEGREE, pp=st.integers(2, 64), cp=DEGREE, zero=st.integers(0, 3), micro_batch=DEGREE,
        interleave=st.integers(1, 8), recompute=st.sampled_from(["none", "selective", "full"]),
        sequence_parallel=st.sampled_from([True, False, None]),
        schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
        offload=st.sampled_from([None, "optimizer", "all", "chunks", "nvme"]),
    )
)  # fmt: skip
def test_text_form_round_trips(plan):
    assert Plan.parse(str(plan)) == plan


def test_text_form_of_the_design():
    plan = Plan.parse("dp2.tp2.pp2.cp1.ep1.z3")
    assert (plan.dp, plan.tp, plan.pp, plan.zero, plan.sequence_parallel) == (2, 2, 2, 3, True)
    assert plan.world_size == 8 and str(plan) == "dp2.tp2.pp2.z3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2.xx3", "'xx3' in plan 'dp2.xx3' is not one of dpN, tpN"),
        ("dp2.dp4", "dp is given twice"),
        ("dp0", "dp=0 must be a whole number of at least 1"),
        ("z4", "zero=4 is not one of 0, 1, 2, 3"),
        ("dp4.ep3", "ep=3 does not divide dp x cp = 4 x 1"),
        ("v2", "interleave=2 needs a pipeline, but pp=1"),
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
        (Plan(pp=8, interleave=8), "llama-7b", "pp x interleave = 8 x 8 exceeds 32 layers of llama-7b"),
        (Plan(tp=8), "qwen2.5-3b", None),
        (Plan(dp=8, ep=8), "mixtral-8x7b", None),
    ],
)
def test_plans_are_checked_against_model_and_cluster(plan, name, message):
    if message is None:
        plan.check(model(name), cluster("dgx-a100"))
    else:
        with pytest.raises(ValueError, match=message):
            plan.check(model(name), cluster("dgx-a100"))


def test_micro_batches():
    assert Plan(dp=4, micro_batch=2).micro_batches(64) == 8
    with pytest.raises(ValueError, match="global_batch=10 is not a multiple of dp x micro_batch = 4 x 2"):
        Plan(dp=4, micro_batch=2).micro_batches(10)
