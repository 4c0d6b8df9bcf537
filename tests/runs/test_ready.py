"""A line per rank, printed by other people's training loops, which nothing may end."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from madmax_lib import runs
from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import dataset
from madmax_lib.runs.ready import (
    after_trace,
    hf_callback,
    lightning_callback,
    on_trace_ready,
)

UNKNOWN = r"no communication, \d+% idle, MFU unknown \(.*\)"
LINE = rf"madmax: rank 0, 2 steps of [\d.]+ \S+: {UNKNOWN}\n"


def trained(steps, *, begin, step, end):
    """A loop of some steps of a small model, with hooks around them."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(64, 64)
    begin()
    for _ in range(steps):
        layer(torch.ones(8, 64)).sum().backward()
        step()
    end()


def test_a_real_profiler_prints_its_line(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    ready = runs.on_trace_ready(tmp_path / "out")
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=ready, record_shapes=True
    ) as prof:
        trained(4, begin=int, step=prof.step, end=int)
    assert re.fullmatch(LINE, capsys.readouterr().out)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank0_step4.json"]


def test_a_recording_without_step_marks_says_so(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(on_trace_ready=runs.on_trace_ready(tmp_path)):
        trained(3, begin=int, step=int, end=int)
    said = "no step marks: the whole recording counts as one step"
    assert said in capsys.readouterr().out
    for path, expected in ((tmp_path, True), (dataset("gpt-memory"), False)):
        assert main(["breakdown", str(path)]) == 0
        assert (said in capsys.readouterr().out) == expected


def test_overlap_and_exposed_time_of_a_recorded_rank(capsys):
    after_trace(dataset("gpt-ddp") / "rank1.json.gz")
    out = capsys.readouterr().out
    steps = r"madmax: rank 1, \d+ steps of [\d.]+ m?s: "
    assert re.match(steps + r"\d+% of [\d.]+ m?s communication under compute, ", out)


@pytest.mark.parametrize(
    "trainer", ["transformers", "lightning.pytorch", "pytorch_lightning"]
)
def test_trainers_call_the_hooks(trainer, tmp_path, capsys, monkeypatch):
    """Of trainers only the base class of callbacks and the names of hooks matter."""
    base = type("Base", (), {})
    name = "TrainerCallback" if trainer == "transformers" else "Callback"
    monkeypatch.setitem(sys.modules, trainer, SimpleNamespace(**{name: base}))
    make = hf_callback if trainer == "transformers" else lightning_callback
    callback = make(tmp_path, wait=1, warmup=1, active=2)
    hooks = ["on_train_start", "on_train_batch_end", "on_train_end"]
    if make is hf_callback:
        hooks = ["on_train_begin", "on_step_end", "on_train_end"]
    assert isinstance(callback, base)
    calls = [partial(getattr(callback, hook), 1, 2, more=3) for hook in hooks]
    begin, step, end = calls
    trained(5, begin=begin, step=step, end=end)
    assert re.fullmatch(LINE, capsys.readouterr().out)
    with pytest.raises(ValueError, match="actve is not one of wait, warmup, active"):
        make(tmp_path, actve=1)


class Broken:
    step_num = 3

    def export_chrome_trace(self, path):
        raise RuntimeError("no space\nleft")


@pytest.mark.parametrize("case", ["export", "file", "absent", "directory", "hook"])
def test_what_goes_wrong_is_one_line_and_the_loop_goes_on(
    case, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file.json").write_text('{"traceEvents": 5}')
    package = SimpleNamespace(TrainerCallback=object)
    monkeypatch.setitem(sys.modules, "transformers", package)
    {
        "export": lambda: on_trace_ready(tmp_path)(Broken()),
        "file": lambda: after_trace(tmp_path / "file.json"),
        "absent": lambda: after_trace(tmp_path / "absent.json"),
        "directory": lambda: on_trace_ready(tmp_path / "file.json")(Broken()),
        "hook": lambda: hf_callback(tmp_path, active=0).on_train_begin(),
    }[case]()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch("madmax: no summary of the trace: .+\n", captured.err)
