"""What every step obeys, on plans that nobody chose: conservation, no gain from less,
limits of degree and network.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from oracles.random_cases import STACKS, drawn_cases

import madmax_lib as mm
from madmax_lib.plan.case import Case
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.step_time import (
    COMMUNICATION,
    PARTS,
    step_s,
    step_time,
)

KINDS = ["ordinary", "random", "software"]
COUNT = 2600


@pytest.fixture(scope="module", params=KINDS, name="drawn")
def drawn_steps(request):
    """(cases, their steps, seconds by part)."""
    cases = drawn_cases(request.param, COUNT, seed=1, most_passes=10**9)
    steps = Steps.stack(cases)
    return cases, steps, step_time(steps, shipped())


def seconds(steps, **changes):
    """Of the steps with other fields of the machine, the plan, the work, or a batch."""
    machine, work, plan = steps.machine, steps.work, steps.work.plan
    for name, value in changes.items():
        if hasattr(machine, name):
            machine = replace(machine, **{name: value})
        elif hasattr(plan, name):
            plan = replace(plan, **{name: value})
        elif hasattr(work, name):
            work = replace(work, **{name: value})
        else:
            steps = replace(steps, **{name: value})
    steps = replace(steps, machine=machine, work=replace(work, plan=plan))
    return step_s(steps, shipped())


def check_never(broken, cases, ratio):
    """No case is broken; else it names the worst."""
    order = np.argsort(np.where(broken, -np.abs(np.log(ratio)), 0))
    worst = [(ratio[i], cases[i]) for i in order[: min(broken.sum(), 5)]]
    named = [
        f"{value:.4f} {case.model.name}, {case.cluster.name} x{case.cluster.nodes}, "
        f"{case.plan}, {case.global_batch}, {case.software.name}"
        for value, case in worst
    ]
    assert not broken.any(), "\n".join([f"{broken.sum()} of {len(cases)}:", *named])


def check_parts(times, cases):
    whole = times["step_s"]
    assert np.isfinite(whole).all() and (whole > 0).all()
    np.testing.assert_allclose(sum(times[part] for part in PARTS), whole, rtol=1e-9)
    for part in PARTS:
        check_never(times[part] < -1e-9 * whole, cases, 1 - times[part] / whole)


def test_parts_add_up_and_none_is_negative(drawn):
    cases, _, times = drawn
    check_parts(times, cases)


@pytest.mark.parametrize("factor", [1.05, 2.0, 50.0])
@pytest.mark.parametrize("rates", ["link", "nic", "memory", "peak_gemm peak_wide"])
def test_faster_parts_never_make_a_slower_step(drawn, rates, factor):
    cases, steps, times = drawn
    faster = {name: factor * getattr(steps.machine, name) for name in rates.split()}
    ratio = seconds(steps, **faster) / times["step_s"]
    check_never(ratio > 1 + 1e-9, cases, ratio)


@pytest.mark.parametrize("hop", ["near_hop", "far_hop"])
def test_more_latency_never_makes_a_faster_step(drawn, hop):
    cases, steps, _ = drawn
    times = [seconds(steps, **{hop: latency_s}) for latency_s in (1e-7, 1e-5, 1e-3)]
    for less, more in pairwise(times):
        check_never(more < less * (1 - 1e-9), cases, more / less)
    assert (times[-1] > 1.01 * times[0]).mean() > 0.3  # it counts


@pytest.mark.parametrize("part", ["tp_s", "cp_s", "ep_s", "pp_s", "dp_s", "bubble_s"])
def test_one_device_of_a_kind_does_not_communicate(drawn, part):
    cases, steps, times = drawn
    plan = steps.work.plan
    degrees = {"dp_s": plan.dp * plan.cp, "bubble_s": plan.pp}
    degree = degrees.get(part, getattr(plan, part.removesuffix("_s"), None))
    shown = (degree == 1) & (times[part] > 0)
    check_never(shown, cases, 1 + times[part] / times["step_s"])


def test_weights_that_a_device_holds_are_not_gathered(drawn):
    cases, steps, times = drawn
    plan = steps.work.plan
    held = (plan.dp * plan.cp == 1) | (plan.zero < 3)
    shown = held & (times["fsdp_s"] > 1e-9 * times["step_s"])
    check_never(shown, cases, 1 + times["fsdp_s"])


def test_twice_the_batch_takes_once_to_twice_as_long(drawn):
    """Where micro-batches are equal: weights are gathered for a short one too."""
    cases, steps, times = drawn
    equal = steps.global_batch % (steps.work.plan.dp * steps.work.plan.micro_batch) == 0
    ratio = seconds(steps, global_batch=2 * steps.global_batch) / times["step_s"]
    check_never(equal & ((ratio > 2 + 1e-9) | (ratio < 1 - 1e-9)), cases, ratio)


@pytest.mark.parametrize("factor", [1.5, 2])
@pytest.mark.parametrize("more", ["sequence", "micro_batch", "imbalance"])
def test_more_work_never_takes_less_time(drawn, more, factor):
    cases, steps, times = drawn
    work, plan = steps.work, steps.work.plan
    larger = {
        "sequence": {"sequence": factor * work.sequence},
        "micro_batch": {
            "micro_batch": factor * plan.micro_batch,
            "global_batch": factor * steps.global_batch,
        },
        "imbalance": {"imbalance": np.full(len(cases), factor)},
    }
    ratio = seconds(steps, **larger[more]) / times["step_s"]
    check_never(ratio < 1 - 1e-9, cases, ratio)


def test_who_waits_longer_takes_longer(drawn):
    cases, steps, times = drawn
    for jitter in (1e-6, 0.003, 0.01, 0.03, 0.1):
        waiting = replace(steps, jitter=np.full(len(cases), jitter))
        delayed = step_time(waiting, shipped())
        ratio = delayed["step_s"] / times["step_s"]
        check_never(ratio < 1 - 1e-9, cases, ratio)
        check_parts(delayed, cases)
        times = delayed


def test_who_recomputes_more_takes_longer(drawn):
    cases, steps, _ = drawn
    none, selective, full = (
        seconds(steps, recompute=np.full(len(cases), kind))
        for kind in ("none", "selective", "full")
    )
    check_never(none > selective * (1 + 1e-9), cases, none / selective)
    check_never(selective > full * (1 + 1e-9), cases, selective / full)


def test_an_infinite_network_without_latency_shows_no_communication(drawn):
    cases, steps, _ = drawn
    latencies = ("collective_s", "hop_s", "network_s", "network_hop_s", "send_stop_s")
    constants = {
        name: 0.0 if name.partition(":")[0] in latencies else value
        for name, value in shipped().constants.items()
    }
    fast = {name: 1e30 * getattr(steps.machine, name) for name in ("link", "nic")}
    machine = replace(steps.machine, **fast)
    times = step_time(replace(steps, machine=machine), Parameters(constants=constants))
    largest = np.maximum.reduce([np.abs(times[part]) for part in COMMUNICATION])
    shown = largest / times["step_s"]
    check_never(shown > 1e-9, cases, 1 + shown)


def least_s(case):
    """Of the model's FLOPs at the peak of all devices."""
    flops = 3 * case.model.forward_flops(case.global_batch, case.sequence)
    return flops / case.cluster.world_size / case.cluster.device.peak(case.dtype)


def test_the_flops_of_a_model_do_not_exceed_the_peak(drawn):
    cases, _, times = drawn
    mfu = np.array([least_s(case) for case in cases]) / times["step_s"]
    check_never(mfu > 1, cases, mfu)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_several_kinds_obey_too(kind):
    """Parts add up and none is negative; MFU is at most 1; faster parts and less work
    never take longer.
    """
    for case in drawn_cases(kind, 60, seed=5, most_passes=10**9, models=STACKS):
        steps = Steps.of(case)
        times = step_time(steps, shipped())
        check_parts(times, [case])
        most_s = times["step_s"] * (1 + 1e-9)
        assert least_s(case) <= most_s, case
        less = replace(case, sequence=case.sequence // 2)
        assert step_s(Steps.of(less), shipped()) <= most_s, case
        for rate in ("link", "nic", "memory", "peak_gemm"):
            faster = {rate: 2 * getattr(steps.machine, rate)}
            assert seconds(steps, **faster) <= most_s, (rate, case)


# (model, cluster, nodes, plan, batch) of seeds 5 and 6 that were slower with more
FASTER_WAS_SLOWER = [
    ("deepseek-v3", "dgx-2", 32, "dp512.ep4.z3.mb2.bucket100000000.full.reduce-fp32", 8192),
    ("megatron-310b", "dgx-a100", 8, "dp16.tp4.z3.hs4.bucket1073741824.nosp.reduce-fp32", 80),
]  # fmt: skip


@pytest.mark.parametrize("case", FASTER_WAS_SLOWER, ids=lambda case: case[0])
@pytest.mark.parametrize("links", [{"link": 1000}, {"link": 2}, {"nic": 2}])
def test_buckets_of_zero_3_gain_from_faster_links(case, links):
    """Dense layers of a mixture wait for no exchange, and copies are reduced beside what
    the layers wait for.
    """
    model, cluster, nodes, plan, batch = case
    cluster = mm.cluster(cluster, nodes=nodes)
    dtype = cluster.device.nearest("bf16")
    plan = mm.Plan.parse(plan)
    case = Case(model, cluster, plan, batch, None, dtype, "deepspeed")
    steps = Steps.stack([case])
    faster = {name: by * getattr(steps.machine, name) for name, by in links.items()}
    ratio = seconds(steps, **faster) / seconds(steps)
    check_never(ratio > 1 + 1e-9, [case], ratio)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6])
def test_faster_links_of_other_draws(seed):
    cases = drawn_cases("software", COUNT, seed=seed, most_passes=10**9)
    steps = Steps.stack(cases)
    for links in ({"link": 1000}, {"nic": 2}, {"link": 1000, "nic": 1000}):
        faster = {name: by * getattr(steps.machine, name) for name, by in links.items()}
        ratio = seconds(steps, **faster) / seconds(steps)
        check_never(ratio > 1 + 1e-9, cases, ratio)
