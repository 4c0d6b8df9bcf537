import pytest
from hypothesis import given, strategies as st

from madmax_lib.catalog import cluster, model
from madmax_lib.plan import Plan

DEGREE = st.integers(1, 64)
FLAG = st.booleans()


@given(
    st.builds(
        Plan, dp=DEGREE, tp=DEGREE, pp=st.integers(2, 64), cp=DEGREE, zero=st.integers(0, 3), micro_batch=DEGREE,
        interleave=st.integers(1, 8), recompute=st.sampled_from(["none", "selective", "full"]),
        sequence_parallel=st.sampled_from([True, False, None]),
        schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
        offload=st.sampled_from([None, "optimizer", "all", "chunks", "nvme"]),
        context=st.sampled_from(["ring", "ulysses"]), attention=st.sampled_from(["flash", "unfused"]),
        embedding_as_layer=FLAG, head_as_layer=FLAG, reduce_fp32=FLAG, prefetch=st.integers(0, 3),
        capacity=st.integers(0, 300).map(lambda percent: percent / 100),
    )
)  # fmt: skip
def test_text_form_round_trips(plan):
    assert Plan.parse(str(plan)) == plan


def test_text_form_of_the_design():
    plan = Plan.parse("dp2.tp2.pp2.cp1.ep1.z3")
    assert (plan.dp, plan.tp, plan.pp, plan.zero, plan.sequence_parallel) == (2, 2, 2, 3, True)
    assert plan.world_size == 8 and str(plan) == "dp2.tp2.pp2.z3"

    assert Plan.parse("dp8.z3.zpp") == Plan(dp=8, zero=3, qwz=True, hpz=True, qgz=True)
    texts = "dp16.z3.hs8 dp16.z3.qwz.hpz dp8.z1.overlap-gather dp1.pp4.first3.last2 dp8.ep4.cap125 dp1.pp2.v2.last4"
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
        ("dp8.z3.overlap-gather", "overlap_gather is for zero=1 and zero=2, but zero=3"),
        ("first3", "first_layers=3 needs a pipeline"),
        ("pp2.v2.last3", "interleave=2 does not divide last_layers=3"),
        ("pp2.first3.embedding-layer", "embedding_as_layer and first_layers.* exclude each other"),
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
        (Plan(cp=8, context="ulysses"), "gpt2-large", "cp=8 does not divide 20 attention heads of a tp rank"),
        (Plan(dp=4, tp=2, ep=2, sequence_parallel=False), "mixtral-8x7b", "ep=2 with tp=2 needs sequence_parallel"),
    ],
)
def test_plans_are_checked_against_model_and_cluster(plan, name, message):
    with pytest.raises(ValueError, match=message):
        plan.check(model(name), cluster("dgx-a100"))


def test_plans_that_fit_model_and_cluster():
    for plan, name in ((Plan(tp=8), "qwen2.5-3b"), (Plan(dp=8, ep=8), "mixtral-8x7b"), (Plan(cp=8), "gpt2-large")):
        plan.check(model(name), cluster("dgx-a100"))


def test_micro_batches():
    assert Plan(dp=4, micro_batch=2).micro_batches(64) == 8
    short = Plan(dp=4, micro_batch=3)
    assert (short.micro_batches(40), short.last_micro_batch(40)) == (4, 1)
    with pytest.raises(ValueError, match="global_batch=10 is not a multiple of dp x micro_batch = 4 x 2"):
        Plan(dp=4, micro_batch=2).micro_batches(10)
