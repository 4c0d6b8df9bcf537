"""`madmax record` of scripts as their authors wrote them: the same numbers, one step a
call of the first optimizer, and traces, a page and a baseline beside.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.runs.record import Recorder

SCRIPTS = Path(__file__).parent / "record_scripts"
# calls within a step, by a part of their name
CALLS = {
    "plain": {"cross_entropy": 1, "Optimizer.step#AdamW": 1},
    "accumulate": {"aten::tanh": 4, "Optimizer.step#Adam": 1},
    "gan": {"cross_entropy": 3, "Optimizer.step#Adam": 2},
    "functional": {"Optimizer.step#SGD": 1},
    "ddp": {"cross_entropy": 1, "Optimizer.step#SGD": 1},
    "fsdp2": {"Optimizer.step#AdamW": 1},
    "hf_trainer": {"cross_entropy": 2, "Optimizer.step#AdamW": 1},
    "lightning_fit": {"aten::mse_loss": 1, "Optimizer.step#Adam": 1},
    "accelerate_loop": {"aten::mse_loss": 2, "Optimizer.step#AdamW": 1},
}
NEEDS = {"hf_trainer": "transformers", "lightning_fit": "lightning"}
NEEDS |= {"accelerate_loop": "accelerate"}
QUICK = ("plain",)


def run(folder, *words, check=True):
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def record(folder, *words, check=True):
    return run(folder, "-m", "madmax_lib", "record", *words, check=check)


def losses(text):
    """Lines with losses, whose digits are all of them."""
    return [line for line in text.splitlines() if re.search(r"\d\.\d{9,}", line)]


def calls_of_steps(path):
    """Names of the operators in each step of a trace, counted."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    marks = [span for span in spans if span["name"].startswith("ProfilerStep#")]
    for mark in marks:
        ends = mark["ts"] + mark["dur"]
        inside = [span for span in spans if mark["ts"] <= span["ts"] < ends]
        yield Counter(span["name"] for span in inside)


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CALLS],
)
def test_a_script_trains_as_without_and_leaves_its_traces(name, tmp_path, capsys):
    if name in NEEDS and not find_spec(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed")
    script = SCRIPTS / f"{name}.py"
    ranks = 2 if name in ("ddp", "fsdp2") else 1
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    alone = run(tmp_path, *(torchrun if ranks > 1 else []), script)
    options = ["--ranks", 2] if ranks > 1 else []
    out = record(tmp_path, *options, "--steps", 4, script).stdout
    assert losses(out) == losses(alone.stdout) != []
    folder = tmp_path / "recorded"
    traces = [f"trace_rank{rank}.json.gz" for rank in range(ranks)]
    files = ["baseline.parquet", "report.html", *traces]
    assert sorted(path.name for path in folder.iterdir()) == files
    who = "2 ranks" if ranks > 1 else "rank 0"
    assert re.search(rf"^overlap: {who}, 4 steps of [\d.]+ \w+: ", out, re.MULTILINE)
    steps = list(calls_of_steps(folder / traces[-1]))
    assert len(steps) == 4
    for part, count in CALLS[name].items():
        for calls in steps:
            outer = [n for n in calls if part in n and not n.endswith("backward")]
            assert min(calls[n] for n in outer) == count, (part, calls)
    baseline = str(folder / "baseline.parquet")
    assert main(["compare", baseline, str(folder), "--gate", "3%", "--json"]) in (0, 3)
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["ratio"] == 1


SHOWS = """
import sys, inspect
def here(): pass
print(sys.argv, __name__, __file__, sys.path[0], __spec__ and __spec__.name)
print(inspect.getsource(here), sys.modules["__main__"].here is here)
import gc, warnings; print(gc.get_threshold()); warnings.warn("mine")
"""


@pytest.mark.parametrize("how", [["shows.py"], ["-m", "package.shows"]])
def test_a_script_sees_what_python_shows_it(how, tmp_path):
    for path in (tmp_path / "shows.py", tmp_path / "package" / "shows.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(SHOWS)
    words = [*how, "--steps", "3", "--json", "-o", "x"]
    expected = run(tmp_path, *words)
    done = record(tmp_path, *words)
    assert done.stdout == expected.stdout
    shown, _, said = done.stderr.partition("madmax: ")
    assert shown == expected.stderr
    assert said.startswith("steps 6 to 10 were to be recorded, but the script ended")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no luck')", 1),
        ("raise ValueError('no luck')", 1),
        ("raise SystemExit", 0),
        ("f(", 1),
    ],
)
def test_exceptions_and_exit_codes_pass_through(code, status, tmp_path):
    (tmp_path / "ends.py").write_text(code)
    expected = run(tmp_path, "ends.py", check=False)
    done = record(tmp_path, "ends.py", check=False)
    assert done.returncode == expected.returncode == status
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected.stderr.splitlines()) + 1
    assert expected.stderr.splitlines() == [
        line for line in lines if not line.startswith("madmax: ")
    ]


def test_an_interrupt_ends_the_script_and_its_recording(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import time; print(1, flush=True)\ntime.sleep(60)"
    )
    words = [sys.executable, "-m", "madmax_lib", "record", "waits.py"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        _, error = process.communicate()
    assert process.returncode == 130 and time.monotonic() - began_s < 30
    assert "KeyboardInterrupt" in error and "nothing recorded" in error


@pytest.mark.slow
def test_a_script_that_profiles_itself_is_left_alone(tmp_path):
    done = record(tmp_path, SCRIPTS / "profiles_itself.py")
    assert done.stdout == "True\n" and not list(tmp_path.rglob("trace*"))
    said = "madmax: the script profiles itself and is left alone: nothing recorded\n"
    assert done.stderr == said


@pytest.mark.slow
def test_long_runs_are_recorded_again(tmp_path):
    words = ["--warmup", 2, "--steps", 2, "--every", 6, "--json", SCRIPTS / "plain.py"]
    out = record(tmp_path, *words, "--epochs", "2").stdout
    folders = sorted(path.name for path in (tmp_path / "recorded").iterdir())
    assert folders == ["iteration_15", "iteration_3", "iteration_9"]
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [answer["summary"]["steps"] for answer in answers] == [2, 2, 2]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["absent.py"], "absent.py: no such script"),
        (
            ["--every", "6", __file__],
            "--every 6: a recording and its warm-up take 6 steps",
        ),
    ],
)
def test_what_cannot_be_recorded_is_one_line(words, reason, capsys):
    assert main(["record", *words]) == 2
    assert reason in capsys.readouterr().err


def test_steps_are_counted_by_the_outer_call_of_the_first_optimizer(tmp_path):
    """Of optimizers that hold others, and where the first one is gone."""

    class Optimizer:
        profile_hook_step = staticmethod(lambda function: function)

    recorder = Recorder(tmp_path, print, warmup=100)
    module = type("module", (), {"Optimizer": Optimizer})
    recorder._wrap(module)
    inner, second = Optimizer(), Optimizer()
    step = Optimizer.profile_hook_step(lambda optimizer: 7)
    outer_step = Optimizer.profile_hook_step(
        lambda optimizer: step(inner) + step(second)
    )
    outer = Optimizer()
    assert outer_step(outer) == 14 and step(inner) == 7
    assert recorder.steps_done == 1
    del outer
    step(second), step(inner), step(second)
    assert recorder.steps_done == 3


@pytest.mark.slow
def test_a_recording_on_one_rank_leads_to_more(tmp_path, capsys):
    record(tmp_path, "--ranks", 1, "--steps", 3, SCRIPTS / "ddp.py")
    traces = str(tmp_path / "recorded")
    # a group of one rank calls collectives too
    assert len(mm.traces.calls(mm.read_trace(traces)))
    words = ["--to", "dp4.z3", "--global-batch", "16", "--json"]
    mine = str(tmp_path / "mine")
    assert main(["calibrate", "--trace", traces, *words, "-o", mine]) == 0
    *_, answer = capsys.readouterr().out.splitlines()
    parts = {row["index"]: row for row in json.loads(answer)}
    assert parts["fsdp_s"]["new_s"] > 0 == parts["fsdp_s"]["measured_s"]
