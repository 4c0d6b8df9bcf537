"""Steps that nothing marks are found by what recurs: the step, not a layer of it."""

from dataclasses import replace

import pytest
from support import make_timeline

import madmax_lib as mm
from madmax_lib.catalog import datasets
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.parts import breakdown
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.pattern import cut_by_pattern
from madmax_lib.traces.waits.step_times import step_note, steps

LAYER = ["gemm", "gelu", "gemm", "norm"]
BATCH = [
    "embed",
    *LAYER * 4,
    "loss",
    *["norm_grad", "gemm", "gemm_grad"] * 4,
    "embed_grad",
]
ADAM = ["clip", "multi_tensor_apply<adam>"]
STEP = [*BATCH, *ADAM]


def recording(names: list[str], rank: int = 0, host: bool = True) -> list[tuple]:
    """A kernel every 10 us, launched 100 us before by an operator of its own."""
    rows = []
    for number, name in enumerate(names):
        at = 10_000 * number
        if host:
            rows.append((rank, -1, "cpu", "aten::" + name, at, 9_000))
            rows.append(
                (rank, -1, "cpu", "cudaLaunchKernel", at + 2_000, 1_000, number)
            )
        rows.append(
            (rank, 7, "compute", name, at + 100_000, 9_000, number if host else -1)
        )
    return rows


def cut(*ranks: list[str], **more) -> Timeline:
    rows = [
        row
        for rank, names in enumerate(ranks)
        for row in recording(names, rank, **more)
    ]
    return cut_by_pattern(make_timeline(rows))


FOUND = [
    ("three steps", STEP * 3, 3),
    ("micro-batches recur more often", (BATCH * 4 + ADAM) * 3, 3),
    ("a loss is printed once", STEP * 2 + [*BATCH, "print", *ADAM] + STEP * 2, 5),
    ("a checkpoint every second", (STEP + STEP + ["copy"] * 3) * 3, 6),
    ("the last lacks its end", STEP * 4 + STEP[:20], 4),
    ("a first that allocates", ["fill"] * 30 + STEP * 4, 4),
]  # fmt: skip


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    ("names", "count"), [case[1:] for case in FOUND], ids=[case[0] for case in FOUND]
)
def test_the_step_recurs(names, count, host):
    with pytest.warns(TraceWarning, match=f"{count} steps found by the pattern"):
        timeline = cut(names, names, host=host)
    assert timeline.steps == list(range(count))
    table = steps(timeline)
    kernels = len(names) / count
    assert table["period_s"].median() == pytest.approx(kernels * 10e-6, rel=0.5)
    # each step begins with the same kernel, on every rank
    work = timeline.spans[
        (timeline.spans["stream"] >= 0) & (timeline.spans["step"] >= 0)
    ]
    assert work.groupby(["rank", "step"])["name"].first().nunique() == 1
    assert breakdown(timeline, steps=True)["steps"].max() == count
    assert "found by" in step_note(timeline)


ONE = {
    "one step of layers": STEP,
    "one step of micro-batches": BATCH * 8 + ADAM,
    "layers without an optimizer": LAYER * 12,
    "two steps": STEP * 2,
    "nothing recurs": [str(number) for number in range(60)] + ADAM,
}


@pytest.mark.parametrize("names", ONE.values(), ids=ONE)
def test_what_else_recurs_is_no_step(names):
    timeline = cut(names)
    assert timeline.steps == [0]
    assert "counts as one step" in step_note(timeline)


def test_ranks_that_differ_stay_one_step():
    assert cut(STEP * 3, STEP * 4).steps == [0]


def test_marks_are_kept():
    rows = [*recording(STEP * 3), (0, -1, "annotation", "ProfilerStep#0", 0, 10**9)]
    assert cut_by_pattern(make_timeline(rows)).steps == [0]


@pytest.mark.filterwarnings("ignore::madmax_lib.traces.read.events.TraceWarning")
def test_a_run_without_its_marks_has_the_same_steps():
    marked = mm.read_trace(datasets.PROJECT / "traces/testbed/runs/gpt_z3")
    is_mark = marked.spans["name"].astype(str).str.contains("ProfilerStep")
    bare = marked.where(~is_mark.to_numpy())
    found = cut_by_pattern(replace(bare, spans=bare.spans.assign(step=0)))
    expected = steps(marked)["period_s"].dropna()
    assert steps(found)["period_s"].dropna().to_numpy() == pytest.approx(
        expected, rel=0.01
    )
