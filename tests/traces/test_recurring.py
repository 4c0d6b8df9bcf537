"""A step that recurs, replayed: made jobs whose time is known, and traces as they are."""

import numpy as np
import pytest
from oracles.made_jobs import JOBS, QUESTIONS, step_s, trace
from support import dataset_or_skip, lanes, local_or_skip, make_timeline, with_columns

from madmax_lib.traces.critical_path import critical_path, path_share, what_if
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.kineto import read_trace

INF = float("inf")


@pytest.mark.parametrize("name", JOBS)
def test_a_made_job_is_foretold(name):
    """Within 3 % of the same job made anew with other durations."""
    job = JOBS[name]
    table = what_if(trace(job), list(QUESTIONS.values()))
    truth = [step_s(job, q.get("compute", 1), q.get("comm", 1)) for q in QUESTIONS.values()]  # fmt: skip
    errors = table["step_s"].to_numpy() / truth - 1
    assert np.abs(errors).max() < 0.03, dict(
        zip(QUESTIONS, errors.round(3), strict=True)
    )
    assert (table["low_s"] <= table["step_s"]).all()
    assert (table["step_s"] <= table["high_s"]).all()
    assert abs(table["replay_error"].iloc[0]) < 0.03 and table["steps"].iloc[0] == 3
    # in this order each is faster than the one before, the last slower than the first
    assert table["step_s"].iloc[[4, 0, 2, 3]].is_monotonic_decreasing


def test_what_a_job_gains_moves_to_what_decides_next():
    """Long buckets decide; without them compute does, and nothing is exposed."""
    table = what_if(trace(JOBS["buckets longer than backward"]), [{}, {"comm": INF}])
    assert table["decided_by"].tolist() == ["comm", "compute"]
    exposed, gone = table["exposed_share"]
    assert 0.4 < exposed < 0.7 and gone < 0.01
    behind = trace(JOBS["host behind"])
    share = path_share(critical_path(behind)).set_index("kind")["share"]
    assert share.drop(["host", "launch delay"]).sum() < 0.2


def launched(steps, host_us, first_us):
    """Steps of a host call and the kernel of 10 ms that it launches, back to back from
    first_us on.
    """
    drawn = "".join(
        f"-1 cpu: cudaLaunchKernel {host_us * n}000+{host_us}000 #{n + 1}\n"
        f"7 compute: k {first_us + 10_000 * n}000+10000000 #{n + 1}\n"
        for n in range(steps)
    )
    timeline = make_timeline(lanes(drawn))
    return with_columns(timeline, step=[n for n in range(steps) for _ in range(2)])


def test_a_host_ahead_is_not_in_the_step():
    """Five steps whose host takes 1 ms and whose kernel 10 ms, back to back."""
    timeline = launched(steps=5, host_us=1000, first_us=100)
    table = what_if(timeline, [{}, {"compute": 2}, {"compute": 20}])
    # at last the host decides
    assert (table["step_s"] * 1e3).round(2).tolist() == [10, 5, 1]
    assert table["decided_by"].tolist() == ["compute", "compute", "host"]
    for step in (1, 2, 3, 4):
        assert critical_path(timeline, step).attrs["step_s"] == pytest.approx(10e-3)


SHARED = ("hta-samples/rank0", "hta-samples/nccl_data", "hta-samples/df_index_resolver",
          "hta-samples/rank-0.Apr_03_18_51_38.1102.pt.trace", "more/kineto/nw0_1623143566756",
          "tracelens-samples/resnet_act_checkpoint")  # fmt: skip
REAL = [*(f"traces/{name}.json.gz" for name in SHARED), "traces/more/torchrec-a2a5"]


@pytest.mark.filterwarnings(
    "ignore:.*(have no trace|no rank in|no operators around):UserWarning"
)
@pytest.mark.parametrize("name", [*REAL, "gpt-after", "gpt-before"])
def test_nothing_changed_gives_the_measured_period(name):
    path = dataset_or_skip(name) if name.startswith("gpt") else local_or_skip(name)
    scenarios = [{}, {"compute": 2}, {"compute": 2, "comm": 2}, {"host": 2}]
    table = what_if(read_trace(path), scenarios)
    assert abs(table["replay_error"].iloc[0]) < 0.03
    step_s = table["step_s"].to_numpy()
    # faster work never makes a step longer
    assert (step_s <= step_s[0] * (1 + 1e-9)).all() and step_s[2] <= step_s[1] + 1e-9


def test_marks_that_hide_kernels_are_said_where_kernels_are_asked_for():
    timeline = read_trace(dataset_or_skip("gpt-before"))
    with pytest.warns(TraceWarning, match="no operators around the kernels"):
        what_if(timeline, {"compute": 2})
    assert not what_if(timeline, {"comm": 2}).attrs["limits"]


def test_a_replay_says_what_it_cannot_know():
    one = make_timeline(lanes("7 compute: k 0+9\n20 comm: AllReduce 9+5"), world_size=8)
    with pytest.warns(TraceWarning) as told:
        table = what_if(one, {})
    texts = [str(warning.message) for warning in told]
    assert texts == table.attrs["limits"]
    assert "one step is recorded" in texts[0] and "7 of 8 ranks" in texts[1]


def test_a_queue_that_is_worked_off_is_told():
    """The host takes twice as long as the device, which has six steps of work waiting."""
    timeline = launched(steps=4, host_us=20_000, first_us=60_000)
    with pytest.warns(TraceWarning, match="using up a lead"):
        table = what_if(timeline, {})
    assert table["step_s"].item() == pytest.approx(10e-3, rel=0.01)
