"""What every step obeys, on plans that nobody chose: conservation, no gain from less,
limits of degree and network.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from oracles.random_cases import STACKS, drawn_cases

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
    machine, plan, work = steps.machine, steps.work.plan, steps.work
    for name, value in changes.items():
        if hasattr(machine, name):
            machine = replace(machine, **{name: value})
        elif hasattr(plan, name):
            plan = replace(plan, **{name: value})
        elif hasattr(work, name):
            work = replace(work, **{name: value})
        else:
            steps = replace(steps, **{name: value})
    batch = changes.get("global_batch", steps.global_batch)
    return step_s(
        replace(
            steps, machine=machine, work=replace(work, plan=plan), global_batch=batch
        ),
        shipped(),
    )


def assert_never(broken, cases, ratio):
    """No case is broken; else it names the worst."""
    worst = np.argsort(np.where(broken, -np.abs(np.log(ratio)), 0))[
        : min(broken.sum(), 5)
    ]
    named = [f"{ratio[i]:.4f} {cases[i].model.name}, {cases[i].cluster.name} x{cases[i].cluster.nodes}, "
             f"{cases[i].plan}, {cases[i].global_batch}, {cases[i].software.name}" for i in worst]  # fmt: skip
    assert not broken.any(), "\n".join([f"{broken.sum()} of {len(cases)}:", *named])


def test_parts_add_up_and_none_is_negative(drawn):
    cases, _, times = drawn
    whole = times["step_s"]
    assert np.isfinite(whole).all() and (whole > 0).all()
    np.testing.assert_allclose(sum(times[part] for part in PARTS), whole, rtol=1e-9)
    for part in PARTS:
        assert_never(times[part] < -1e-9 * whole, cases, 1 - times[part] / whole)


@pytest.mark.parametrize("factor", [1.05, 2.0, 50.0])
@pytest.mark.parametrize("rates", ["link", "nic", "memory", "peak_gemm peak_wide"])
def test_faster_parts_never_make_a_slower_step(drawn, rates, factor):
    cases, steps, times = drawn
    faster = {name: factor * getattr(steps.machine, name) for name in rates.split()}
    ratio = seconds(steps, **faster) / times["step_s"]
    assert_never(ratio > 1 + 1e-9, cases, ratio)


@pytest.mark.parametrize("hop", ["near_hop", "far_hop"])
def test_more_latency_never_makes_a_faster_step(drawn, hop):
    cases, steps, _ = drawn
    times = [seconds(steps, **{hop: latency_s}) for latency_s in (1e-7, 1e-5, 1e-3)]
    for less, more in pairwise(times):
        assert_never(more < less * (1 - 1e-9), cases, more / less)
    assert (times[-1] > 1.01 * times[0]).mean() > 0.3  # it counts


def test_one_device_of_a_kind_does_not_communicate(drawn):
    cases, steps, times = drawn
    plan = steps.work.plan
    alone = {"tp_s": plan.tp, "cp_s": plan.cp, "ep_s": plan.ep, "pp_s": plan.pp, "bubble_s": plan.pp,
             "dp_s": plan.dp * plan.cp}  # fmt: skip
    for part, degree in alone.items():
        assert_never(
            (degree == 1) & (times[part] > 0), cases, 1 + times[part] / times["step_s"]
        )
    held = (plan.dp * plan.cp == 1) | (plan.zero < 3)
    assert_never(
        held & (times["fsdp_s"] > 1e-9 * times["step_s"]), cases, 1 + times["fsdp_s"]
    )


def test_twice_the_batch_takes_once_to_twice_as_long(drawn):
    """Where micro-batches are equal: weights are gathered for a short one too."""
    cases, steps, times = drawn
    equal = steps.global_batch % (steps.work.plan.dp * steps.work.plan.micro_batch) == 0
    ratio = seconds(steps, global_batch=2 * steps.global_batch) / times["step_s"]
    assert_never(equal & ((ratio > 2 + 1e-9) | (ratio < 1 - 1e-9)), cases, ratio)


@pytest.mark.parametrize("factor", [1.5, 2])
def test_more_work_never_takes_less_time(drawn, factor):
    cases, steps, times = drawn
    ratio = seconds(steps, sequence=factor * steps.work.sequence) / times["step_s"]
    assert_never(ratio < 1 - 1e-9, cases, ratio)
    larger, batch = factor * steps.work.plan.micro_batch, factor * steps.global_batch
    for more in (
        {"micro_batch": larger, "global_batch": batch},
        {"imbalance": np.full(len(cases), factor)},
    ):
        ratio = seconds(steps, **more) / times["step_s"]
        assert_never(ratio < 1 - 1e-9, cases, ratio)


def test_who_waits_longer_takes_longer(drawn):
    cases, steps, times = drawn
    before = times["step_s"]
    for jitter in (1e-6, 0.003, 0.01, 0.03, 0.1):
        delayed = step_time(
            replace(steps, jitter=np.full(len(cases), jitter)), shipped()
        )
        assert_never(
            delayed["step_s"] < before * (1 - 1e-9), cases, delayed["step_s"] / before
        )
        assert all((delayed[part] >= -1e-9 * before).all() for part in PARTS)
        np.testing.assert_allclose(
            sum(delayed[part] for part in PARTS), delayed["step_s"], rtol=1e-9
        )
        before = delayed["step_s"]


def test_who_recomputes_more_takes_longer(drawn):
    cases, steps, _ = drawn
    none, selective, full = (
        seconds(steps, recompute=np.full(len(cases), kind))
        for kind in ("none", "selective", "full")
    )
    assert_never(none > selective * (1 + 1e-9), cases, none / selective)
    assert_never(selective > full * (1 + 1e-9), cases, selective / full)


def test_an_infinite_network_without_latency_shows_no_communication(drawn):
    cases, steps, _ = drawn
    latencies = ("collective_s", "hop_s", "network_s", "network_hop_s", "send_stop_s")
    constants = {
        name: 0.0 if name.partition(":")[0] in latencies else v
        for name, v in shipped().constants.items()
    }
    machine = replace(
        steps.machine, link=1e30 * steps.machine.link, nic=1e30 * steps.machine.nic
    )
    times = step_time(replace(steps, machine=machine), Parameters(constants=constants))
    shown = (
        np.maximum.reduce([np.abs(times[part]) for part in COMMUNICATION])
        / times["step_s"]
    )
    assert_never(shown > 1e-9, cases, 1 + shown)


def test_the_flops_of_a_model_do_not_exceed_the_peak(drawn):
    cases, _, times = drawn
    flops = np.array(
        [
            3 * case.model.forward_flops(case.global_batch, case.sequence)
            for case in cases
        ]
    )
    peaks = np.array(
        [
            case.cluster.world_size * case.cluster.device.peak(case.dtype)
            for case in cases
        ]
    )
    mfu = flops / times["step_s"] / peaks
    assert_never(mfu > 1, cases, mfu)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_several_kinds_obey_too(kind):
    """Parts add up and none is negative; MFU is at most 1; faster parts and less work
    never take longer.
    """
    for case in drawn_cases(kind, 60, seed=5, most_passes=10**9, models=STACKS):
        steps = Steps.of(case)
        times = {
            name: float(values[0])
            for name, values in step_time(steps, shipped()).items()
        }
        whole_s = times.pop("step_s")
        assert (
            sum(times.values()) == pytest.approx(whole_s)
            and min(times.values()) >= -1e-9 * whole_s
        ), case
        flops = 3 * case.model.forward_flops(case.global_batch, case.sequence)
        assert flops <= whole_s * case.cluster.world_size * case.cluster.device.peak(
            case.dtype
        ), case
        less = replace(
            case, sequence=case.sequence // 2, global_batch=case.global_batch
        )
        assert step_s(Steps.of(less), shipped())[0] <= whole_s * (1 + 1e-9), case
        for rate in ("link", "nic", "memory", "peak_gemm"):
            faster = replace(
                steps,
                machine=replace(
                    steps.machine, **{rate: 2 * getattr(steps.machine, rate)}
                ),
            )
            assert step_s(faster, shipped())[0] <= whole_s * (1 + 1e-9), (rate, case)
