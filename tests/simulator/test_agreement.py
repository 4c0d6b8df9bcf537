"""The closed form beside steps laid out event by event, on plans that nobody chose."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from oracles.random_cases import MODELS, STACKS, drawn_cases
from scipy.stats import binom
from support import cells

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Link
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import MODULES
from madmax_lib.plan.layout import Chunk, layout_text
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import enforce, lacking, rules_of
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.events.engine import run
from madmax_lib.simulator.memory.memory import held_layers
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.simulate import _lay_out
from madmax_lib.simulator.steady.step_time import step_s


def on_a_cpu(case):
    whole = case.cluster
    peaks = {dtype: peak / 1000 for dtype, peak in whole.device.peak_flops.items()}
    slow = {"peak_flops": peaks, "memory_bandwidth_bytes_per_s": 2e10}
    device = replace(whole.device, family="cpu", **slow)
    links = {"intra": Link("l", 5e9), "inter": Link("n", 1e8)}
    return replace(case, cluster=replace(whole, device=device, **links))


def with_mixers(case):
    """Mamba-1, or another mixer of enough groups for tp, among attention, feed-forward
    parts and experts, in four layers.
    """
    draw = np.random.default_rng(case.global_batch + case.model.layers)
    letter = str(draw.choice(["m", "M", "G", "K", "L"]))
    choices = [f"{letter}-", f"{letter}E", "*-", "*E", letter, "-"]
    words = [str(draw.choice(choices)) for _ in range(4)]
    words[int(draw.integers(4))] = f"{letter}E"
    hidden, heads = case.model.hidden, case.model.heads
    sizes = {"mixer_channels": 2 * hidden, "mixer_conv": 4}
    if letter != "m":
        sizes |= {"mixer_state": 128, "mixer_heads": heads, "mixer_groups": heads}
    else:
        sizes |= {"mixer_state": 16, "mixer_rank": hidden // 16}
    plain = dict.fromkeys(("dense_layers", "moe_every", "window", "full_every"), 0)
    model = replace(case.model, blocks=" ".join(words), **plain, **sizes)
    cp = case.plan.cp
    plan = replace(case.plan, cp=1, dp=case.plan.dp * cp, lora_rank=0)
    return replace(case, model=model, plan=plan, global_batch=case.global_batch * cp)


def deferred(case):
    """The same under a schedule of two chunks that defers gradients of weights."""
    schedule = ("zero-bubble", "zbv", "dualpipev")[case.global_batch // 2 % 3]
    if case.plan.pp == 1:
        return case
    plan = replace(case.plan, schedule=schedule, interleave=2)
    return replace(case, plan=plan)


def laid_out(case):
    """The same with a layout of chunks of any length, some with an MTP layer."""
    draw = np.random.default_rng(case.global_batch + case.model.layers + case.plan.dp)
    plan = case.plan
    if plan.pp == 1 or plan.folds:
        return case
    chunks = plan.pp * plan.interleave
    ends = np.cumsum(draw.dirichlet(np.full(chunks, 60.0))) * case.model.layers
    sizes = [Chunk(int(n), 0) for n in np.diff(np.round(ends), prepend=0)]
    sizes[-1] = sizes[-1]._replace(predictions=int(draw.integers(2)))
    others = ("first_layers", "last_layers", "embedding_as_layer", "head_as_layer")
    alone = dict.fromkeys(others, 0) | {"layout": layout_text(tuple(sizes))}
    return replace(case, plan=replace(plan, **alone))


def by_modules(case):
    """The same where the backward pass repeats modules, some or all that there are."""
    draw = np.random.default_rng(case.global_batch + case.model.layers + case.plan.dp)
    names = sorted({*MODULES.index} - {*lacking(case.model)})
    some = draw.choice(names, int(draw.integers(1, len(names) + 1)), replace=False)
    return replace(case, plan=replace(case.plan, recompute="+".join(some)))


def within_budget(case):
    """The same of dense layers that keep no more than a memory budget."""
    percent = (case.global_batch + case.model.layers + case.plan.dp) % 100
    return replace(case, plan=replace(case.plan, recompute=f"budget{percent}"))


def laid_out_s(case):
    return max(run(_lay_out(case, shipped())[1])[1])


def closed_s(case):
    return float(step_s(Steps.of(case), shipped())[0])


class Agreement(NamedTuple):
    """How often both forms agree on plans that nobody chose."""

    kind: str  # of plans, see `drawn_cases`
    count: int  # of cases that the shares below were counted in, by night
    within: float  # share of them within 3 %
    median: float  # of the differences
    changed: Callable = replace  # what else the cases have


AGREEMENT = [
    Agreement("ordinary", 300, 0.995, 0.001),
    Agreement("random", 300, 0.97, 0.001),
    Agreement("software", 300, 0.96, 0.0015),
    Agreement("ordinary", 100, 0.99, 0.001, partial(replace, imbalance=3.0)),
    Agreement(
        "ordinary", 100, 0.985, 0.001, partial(replace, software="megatron-core")
    ),
    Agreement("ordinary", 200, 0.95, 0.003, deferred),
    Agreement("random", 200, 0.88, 0.006, deferred),
    Agreement("ordinary", 200, 0.98, 0.003, laid_out),
    Agreement("random", 200, 0.94, 0.006, laid_out),
    Agreement("random", 200, 0.97, 0.001, by_modules),
    Agreement("random", 200, 0.97, 0.001, within_budget),
    Agreement("ordinary", 60, 0.96, 0.001, on_a_cpu),
    Agreement("random", 60, 0.94, 0.001, on_a_cpu),
]
NIGHTLY = bool(os.environ.get("MADMAX_NIGHTLY"))


def seed_of_commit():
    """A number that each change draws other cases with; 0 by night, and without git."""
    if NIGHTLY:
        return 0
    command = ["git", "-C", str(PROJECT), "rev-parse", "--short=6", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(result.stdout.strip()[:6] or "0", 16)


def is_legal(case):
    try:
        enforce(rules_of(case), case.plan, case)
    except ValueError:
        return False
    return True


def differences(kind, count, seed=0, changed=replace, models=MODELS):
    """Table of cases with (laid out / closed form - 1), the largest first."""
    rows = []
    for case in map(changed, drawn_cases(kind, count, seed, models=models)):
        if not is_legal(case):  # as changed
            continue
        difference = laid_out_s(case) / closed_s(case) - 1
        where = f"{case.cluster.name} x{case.cluster.nodes} {case.software.name}"
        run = str(case.plan), case.global_batch, where
        rows.append((difference, case.model.name, *run))
    columns = ["difference", "model", "plan", "global_batch", "where"]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values("difference", key=np.abs, ascending=False)


def check_agreement(one, models=MODELS, seed=None):
    """By night all cases have to agree as often as said; a change is judged on a fifth
    of them, drawn anew, of which no more may differ than one in a thousand such draws
    has.
    """
    count = one.count if NIGHTLY else max(one.count // 5, 20)
    seed = seed_of_commit() if seed is None or not NIGHTLY else seed
    table = differences(one.kind, count, seed, one.changed, models)
    apart = table["difference"].abs()
    worst = table.head(20).to_string()
    most = (1 - one.within) * count
    if not NIGHTLY:
        most = binom.ppf(0.999, count, 1 - one.within)
    assert (apart > 0.03).sum() <= most, worst
    assert apart.median() <= one.median * (1 if NIGHTLY else 3), worst


@pytest.mark.parametrize("one", AGREEMENT)
def test_laid_out_steps_take_as_long_as_the_closed_form_says(one):
    check_agreement(one)


def test_the_page_about_accuracy_says_how_often_they_agree():
    page = " ".join((PROJECT / "docs" / "how-accurate-is-it.md").read_text().split())
    texts = (
        "% of 300 random ordinary plans",
        "% of 300 plans of any kind",
        "% of 300 under a named software",
    )
    for text, one in zip(texts, AGREEMENT, strict=False):
        assert one.count == 300 and f"on {100 * one.within:g} {text}" in page


# stages of stacks whose kinds of layers take turns differ more than those of others
@pytest.mark.parametrize(
    ("models", "changed", "kind", "within"),
    [
        (STACKS, replace, "ordinary", 0.99),
        (STACKS, replace, "random", 0.9),
        (STACKS, replace, "software", 0.9),
        (["mixtral-8x7b"], with_mixers, "ordinary", 0.99),
        (["mixtral-8x7b"], with_mixers, "random", 0.95),
        (["mixtral-8x7b"], with_mixers, "software", 0.95),
    ],
)
def test_stacks_of_several_kinds_of_layers_too(models, changed, kind, within):
    check_agreement(Agreement(kind, 100, within, 0.004, changed), models, 3)


def test_every_second_layer_is_a_mixture():
    """As in Llama 4 Maverick: both forms agree, and memory counts the experts of each
    stage.
    """
    drawn = drawn_cases("random", 60, seed=9, most_passes=300)
    drawn = [case for case in drawn if case.model.experts]
    assert len(drawn) >= 5
    for case in drawn:
        even = case.model.layers // 2 * 2
        model = replace(case.model, moe_every=2, layers=even, dense_layers=0)
        case = replace(case, model=model)
        assert laid_out_s(case) == pytest.approx(closed_s(case), rel=0.05), case.plan
        held = held_layers(model, case.plan)
        assert sum(held.values()).sum() == even
        assert held["*E"].sum() == model.moe_layers


@pytest.mark.parametrize("bucket", [1e8, 4e8, 1e9, np.inf])
@pytest.mark.parametrize("plan", ["dp8.z3.full", "dp8.z3.mb2", "dp8.z3.pf2"])
def test_deepspeed_reduces_sharded_gradients_in_buckets(plan, bucket):
    """Gathers queue behind a bucket of several layers: the larger it is, the longer the
    step, in both forms alike.
    """
    plan = Plan.parse(plan)
    asked = "llama3-8b", "dgx-a100"
    small, large = (
        Case(*asked, sized, 16, 2048, software="deepspeed")
        for sized in (plan, replace(plan, bucket_bytes=bucket))
    )
    longer = laid_out_s(large) / laid_out_s(small)
    assert longer == pytest.approx(closed_s(large) / closed_s(small), abs=0.01)
    assert longer >= (1.03 if bucket == np.inf else 1 - 1e-9)


@pytest.mark.parametrize("seconds", [laid_out_s, closed_s])
def test_copies_of_hsdp_reduce_only_their_shards(seconds):
    """On a network so slow that it sets the pace, an eighth of the gradients crosses
    it, 2 (n - 1) / n times, in both forms.
    """
    model = mm.model("llama3-8b")
    machine = mm.cluster("dgx-h100", nodes=16)
    slow, slower = (
        replace(machine, inter=replace(machine.inter, bandwidth_bytes_per_s=rate))
        for rate in (1e8, 5e7)
    )
    plan = Plan.parse("dp128.z3.hs8")
    longer_s = seconds(Case(model, slower, plan, 128))
    longer_s -= seconds(Case(model, slow, plan, 128))
    share = shipped().constants["network_share:ib"]
    shard_bytes = 2 * model.parameters / 8
    assert longer_s == pytest.approx(1.875 * shard_bytes / 1e8 / share, rel=0.01)


@pytest.mark.parametrize(
    ("part", "rate"),
    cells("""
    intra | bandwidth_bytes_per_s
    inter | bandwidth_bytes_per_s
    device | memory_bandwidth_bytes_per_s
    device | peak_flops
    """),
)
def test_faster_parts_never_lay_out_a_slower_step(part, rate):
    for case in drawn_cases("random", 60, seed=4, most_passes=300):
        item = getattr(case.cluster, part)
        fast = getattr(item, rate)
        if isinstance(fast, dict):
            fast = {name: 3 * peak for name, peak in fast.items()}
        else:
            fast = 3 * fast
        cluster = replace(case.cluster, **{part: replace(item, **{rate: fast})})
        fast_s = laid_out_s(replace(case, cluster=cluster))
        assert fast_s <= laid_out_s(case) * (1 + 1e-9), case


def test_a_stage_without_layers_passes_messages_on():
    """nanotron cuts at equal FLOPs: the head of a small model leaves a stage with none."""
    plan = "tp2.pp8.mb4.gpipe"
    how = {"global_batch": 24, "dtype": "fp16", "software": "nanotron"}
    step = mm.simulate("gpt2", "dgx-2", plan, **how)
    by_rank = mm.breakdown(step).set_index("rank")
    assert (by_rank["compute_s"] == 0).sum() == 2
    # the stage behind begins, and so ends, after all before it
    closed_s = mm.estimate("gpt2", "dgx-2", plan, **how)["step_s"].item()
    assert by_rank["total_s"].max() == pytest.approx(closed_s, rel=0.25)
