"""Spans find their step by time on the host and by launch on the device."""

import pandas as pd
import pytest

from madmax_lib.timeline.timeline import KINDS, Meta, Timeline
from madmax_lib.traces.read.steps import assign_steps, hta_rows

HOST, GPU = -1, 7


def spans(rows: list[tuple]) -> pd.DataFrame:
    """Spans of (stream, kind, name, start_ns, dur_ns, correlation) rows."""
    table = pd.DataFrame(
        rows, columns=["stream", "kind", "name", "start_ns", "dur_ns", "correlation"]
    )
    return table.assign(
        kind=pd.Categorical(table["kind"], KINDS), name=table["name"].astype("category")
    )


def step(name: str, start: int, dur: int, stream: int = HOST) -> tuple:
    return (stream, "annotation", name, start, dur, -1)


def launch(start: int, correlation: int) -> tuple:
    return (HOST, "cpu", "cudaLaunchKernel", start, 1, correlation)


def kernel(start: int, correlation: int, stream: int = GPU) -> tuple:
    return (stream, "compute", "sgemm", start, 10, correlation)


TWO = [step("ProfilerStep#3", 0, 100), step("ProfilerStep#4", 100, 100)]
BY_STEP = [
    ("host spans by their start", [*TWO, launch(-1, -1), launch(0, -1), launch(99, -1), launch(200, -1)],
     [-1, 3, 3, -1]),
    ("a kernel that runs late keeps the step of its launch", [*TWO, launch(90, 5), kernel(150, 5)], [3, 3]),
    ("launched before, run inside", [*TWO, launch(-5, 5), kernel(50, 5)], [-1, -1]),
    ("default stream of AMD", [*TWO, launch(90, 5), kernel(150, 5, stream=0)], [3, 3]),
    ("correlation 0 is one", [*TWO, launch(90, 0), kernel(150, 0)], [3, 3]),
    ("no launch: by time", [*TWO, kernel(150, -1), kernel(20, 77), launch(0, 5)], [4, 3, 3]),
    ("rows in any order", [kernel(150, 6), kernel(160, 5), launch(120, 6), launch(90, 5), *TWO[::-1]], [4, 3, 4, 3]),
    ("the device's own annotations do not count", [*TWO, step("ProfilerStep#4", 20, 60, GPU), launch(50, -1)], [3, 3]),
    ("gap between two steps", [step("ProfilerStep#1", 0, 10), step("ProfilerStep#2", 20, 10), launch(15, -1)], [-1]),
    ("ProfilerStep goes before others", [step("iteration 9", 0, 100), *TWO[1:], launch(50, -1), launch(150, -1)],
     [-1, 4]),
    ("kernels launched before the trace are outside of its steps",
     [step("ProfilerStep#1", 0, 100), launch(50, 5), kernel(10, 3), kernel(60, 5), kernel(90, 6)], [1, -1, 1, 1]),
    (("stream 7 drains what was left over; on stream 9, which launches nothing "
        "before, the correlation tells"),
     [step("ProfilerStep#1", 0, 100), launch(5, 50), launch(6, 51), kernel(10, 50, 27), kernel(20, 60), kernel(60, 51),
      kernel(70, 3, 9), kernel(80, 61, 9)], [1, 1, 1, -1, 1, -1, 1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "expected"),
    [case[1:] for case in BY_STEP],
    ids=[case[0] for case in BY_STEP],
)
def test_step_of_spans(rows, expected):
    table = spans(rows)
    found = assign_steps(table)
    assert found.dtype == "int32"
    others = ~((table["kind"] == "annotation") & (table["stream"] == HOST)).to_numpy()
    assert found[others].tolist() == expected


ITERATIONS = (
    "iteration 12",
    "Iteration#12",
    "iter: 12",
    "step_12",
    "train_step_12",
    "## batch 12 ##",
)


@pytest.mark.parametrize("name", [*ITERATIONS, "training step 12"])
def test_annotations_that_look_like_an_iteration(name):
    assert assign_steps(
        spans([step(name, 0, 10), launch(5, -1), launch(50, -1)])
    ).tolist() == [12, 12, -1]


@pytest.mark.parametrize(
    "name",
    [
        "execute_32_context_0(sq0sk0)_generation_32(sq32sk55086)",
        "execute_context_1(256)_generation_4(4)",
        "execute_new_3_cached_29",
        "step[DECODE bs=32]",
        "step[EXTEND bs=15 toks=15360]",
        "decode[bs=117/128 tok=117 d=117]",
    ],
)
def test_batches_of_a_server_are_steps_in_their_order(name):
    rows = [
        step(name, 100, 50),
        step(name, 0, 50),
        launch(10, 5),
        kernel(160, 5),
        launch(120, 6),
        launch(70, 7),
    ]
    assert assign_steps(spans(rows)).tolist() == [1, 0, 0, 0, 1, -1]
    inside = spans(
        [
            step("execute_2_context_1(sq9)_generation_1(sq1)", 0, 50),
            step("step[EXTEND bs=2 toks=10]", 5, 30),
        ]
    )
    assert assign_steps(inside).tolist() == [0, 0]


@pytest.mark.parametrize(
    "name",
    [
        "forward 12",
        "FSDP::pre_forward (12)",
        "Optimizer.step#Adam.step",
        "steps",
        "batch",
    ],
)
def test_without_steps_all_is_step_0(name):
    assert assign_steps(
        spans([step(name, 0, 10), launch(5, 1), kernel(50, 1)])
    ).tolist() == [0, 0, 0]
    assert assign_steps(spans([step(name, 0, 10)])[:0]).tolist() == []


def hta_kept(rows: list[tuple]) -> list[int]:
    """Starts of the spans that HTA's selection keeps."""
    table = spans(rows).assign(
        rank=0, step=-1, op=-1, group=None, size_bytes=float("nan")
    )
    kept = hta_rows({0: Timeline(table, Meta(provenance={"rules": "hta"}))})[0]
    return kept.spans["start_ns"].tolist()


@pytest.mark.parametrize(
    ("rows", "dropped"),
    [
        # one step: all stays
        ([*TWO[:1], launch(1, 5), kernel(250, 5), kernel(300, 9)], []),
        # the last step goes, but not what was launched before it
        ([*TWO, launch(1, 5), kernel(150, 5)], [100]),
        ([*TWO, launch(120, 5), kernel(150, 5), kernel(50, 6)], [100, 120, 150, 50]),
        # without correlation: by time
        ([*TWO, kernel(50, -1), kernel(150, -1)], [100, 150]),
    ],
)
def test_hta_drops_the_last_of_several_steps(rows, dropped):
    assert sorted(hta_kept(rows)) == sorted({row[3] for row in rows} - set(dropped))
