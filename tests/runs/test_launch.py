"""A real run of two processes, and what is left when a rank or the launcher is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import madmax_lib as mm
from madmax_lib import Plan, RunSpec, launch
from madmax_lib.runs import (
    RunError,
    launch_all,
    prepare,
    read_run,
    read_runs,
    runs_table,
    sweep,
    train,
)
from madmax_lib.runs.launch import _failure
from madmax_lib.runs.measure import meter
from madmax_lib.runs.parallel import trainer
from madmax_lib.runs.read import COLUMNS, PHASES, last_checkpoint, owned, read_steps
from madmax_lib.runs.watch import end

launching = sys.modules[launch.__module__]  # the room has the call under this name
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
ON_CPU = {"device": "cpu", "timeout_s": 60.0}
SHORT = {"sizes": SMALL, "sequence": 32, "steps": 2, "profile": False, **ON_CPU}
LONG = {"sizes": SMALL, "steps": 1_000_000, "profile": False, **ON_CPU}


def alone(spec):
    """What one process, this one, sees of each step."""
    threads = torch.get_num_threads()
    job = trainer.parallelize(spec.model, Plan(micro_batch=8), spec, sizes=spec.sizes)
    data = spec.get_data()
    rows = [job.step(train._draw(data, spec, job, step)) for step in range(spec.steps)]
    torch.set_num_threads(threads)
    return {name: [row[name] for row in rows] for name in ("loss", "accuracy")}


def starts_of(directory):
    return json.loads((directory / "spec.json").read_text())["resolved"]["starts"]


def test_another_run_is_not_overwritten(tmp_path):
    def refused(kind, spec, path, says):
        with pytest.raises(kind, match=says):
            prepare(spec, path)

    spec = RunSpec(device="cpu")
    prepare(spec, tmp_path)
    (tmp_path / "steps.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    assert prepare(spec, tmp_path) == tmp_path.resolve()
    assert not (tmp_path / "steps.csv").exists() and (tmp_path / "notes.txt").exists()
    other = RunSpec(device="cpu", steps=7)
    refused(FileExistsError, other, tmp_path, "holds another run; give a new directory")
    refused(NotADirectoryError, spec, tmp_path / "notes.txt", "this is a file")
    (tmp_path / "steps.csv").write_text("old")
    (tmp_path / "spec.json").unlink()
    says = r"holds steps.csv of a run that has no spec.json"
    refused(FileExistsError, spec, tmp_path, says)


def test_one_launcher_at_a_time(tmp_path):
    spec = RunSpec(device="cpu")
    with (
        owned(tmp_path),
        pytest.raises(FileExistsError, match="a run is in progress there"),
    ):
        launch(spec, tmp_path)
    # which was left alone, and is free again
    assert not list(tmp_path.iterdir()) and prepare(spec, tmp_path)


def test_neither_specs_and_checks_nor_the_launcher_import_torch():
    code = """
import sys, madmax_lib.runs.launch, madmax_lib.runs.read
from madmax_lib.runs import checks, spec
run = spec.RunSpec("gpt2_large")
checks.check(run.plan, run.shapes, run)
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps on two processes, with a checkpoint after four."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"sizes": SMALL, "sequence": 96}
    options |= {"validate_every": 3, "checkpoint_every": 4, "profile_memory": True}
    spec = RunSpec("gpt_tiny", "dp2.z3", learning_rate=3e-3, **options, **ON_CPU)
    return read_run(launch(spec, folder / "run"))


def test_a_run_writes_all_its_files(run):
    def names(*parts):
        return {path.name for path in run.directory.joinpath(*parts).iterdir()}

    files = {"spec.json", "env.json", "steps.csv", "summary.json"}
    traces = {f"trace_rank{rank}.json.gz" for rank in (0, 1)}
    assert names() == files | traces | {"logs", "checkpoints"}
    assert last_checkpoint(run.directory) == run.directory / "checkpoints" / "4"
    assert names("checkpoints") == {"4", "latest"}
    assert names("logs") == {"launcher.log", "rank0.log", "rank1.log"}
    about = {"backend": "gloo", "ranks": 2, "threads_per_rank": 1, "data": "arithmetic"}
    assert about.items() <= run.env.items()
    assert run.env["job"]["data_parallel"] == "fsdp2"
    assert str(Path.home()) not in json.dumps(run.env) + json.dumps(run.summary)
    assert list(read_runs(run.directory.parent)) == ["run"]


def test_the_loss_is_that_of_one_process(run):
    expected = alone(run.spec)
    loss = run.steps["loss"]
    assert loss.tolist() == pytest.approx(expected["loss"], abs=1e-4)
    accuracy = run.steps["accuracy"].tolist()
    assert accuracy == pytest.approx(expected["accuracy"], abs=1e-6)
    assert loss.iloc[-1] < loss.iloc[0]


def test_no_rank_waits_in_a_step_for_one_that_still_writes_its_trace(
    monkeypatch, tmp_path
):
    """All meet once theirs is written, after the step that ends it and before the clock
    of the next.
    """
    spec = RunSpec(sizes=SMALL, sequence=96, device="cpu")
    events = []
    job = trainer.parallelize(spec.model, spec.plan, spec, sizes=SMALL)
    recorder = SimpleNamespace(step=lambda: events.append("trace"))
    monkeypatch.setattr(train, "profiler", lambda *_: nullcontext(recorder))
    monkeypatch.setattr(train.dist, "barrier", lambda: events.append("met"))
    monkeypatch.setenv("RANK", "0")
    power = meter.Meter(lambda: meter.Reading(0.0, power_w=50.0), "50 W")
    rows = lambda row: events.append((row["step"], row["power_w"]))  # noqa: E731
    with power:
        train._loop(spec, job, spec.get_data(), power, tmp_path, rows)
    steps = [("trace", (step, pytest.approx(50.0))) for step in range(6)]
    steps[4] = ("trace", "met", *steps[4][1:])
    assert events == [event for step in steps for event in step]


def test_rows_of_steps(run):
    steps = run.steps
    assert tuple(steps.columns) == COLUMNS
    assert steps["step"].tolist() == list(range(6))
    assert (steps[["samples", "tokens"]] == [8, 8 * 96]).all(axis=None)
    # of 50,000 generated samples
    assert steps["epoch"].tolist() == pytest.approx([1.6e-4 * n for n in range(1, 7)])
    assert not steps["overflow"].any()
    phases = steps[[f"{name}_s" for name in PHASES]]
    assert (phases > 0).all(axis=None)
    assert (phases.sum(axis=1) <= steps["total_s"] * 1.001).all()
    for name in ("validation_loss", "validation_accuracy"):
        assert steps[name].notna().tolist() == [False, False, True] * 2
    last = steps["validation_accuracy"].iloc[-1]
    assert run.summary["validation_accuracy_last"] == pytest.approx(last)
    assert steps["memory_peak_bytes"].isna().all()
    assert (steps["host_rss_bytes"] > 1e7).all()
    assert steps[["power_w", "energy_j"]].isna().all(axis=None)  # a CPU has no meter


def test_summary_of_a_run(run):
    summary = run.summary
    counted = run.steps.iloc[2:]
    assert summary["status"] == "completed" and summary["includes_profiled"]
    assert summary["steps_dropped"]["warm-up"] == 2
    wall_s = counted["total_s"].sum()
    rate = counted["samples"].sum() / wall_s
    mfu = rate * 3 * run.spec.shapes.forward_flops(1, 96) / (2 * run.env["peak_flops"])
    expected = {"samples_per_s": rate, "mfu": mfu, "hfu": mfu}
    expected["data_share"] = counted["data_s"].sum() / wall_s
    expected |= {"epochs": 6 * 8 / 50_000, "epoch_s": 50_000 / rate}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert 0 < mfu < 1
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]


def test_a_run_that_was_cut_short_goes_on_at_its_checkpoint(run, tmp_path):
    directory = shutil.copytree(run.directory, tmp_path / "run")
    table = directory / "steps.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:6]) + lines[6][:20])  # killed while writing step 5
    (directory / "summary.json").unlink()
    (directory / "logs" / "failure_rank0.json").write_text("{}")
    again = read_run(launch(run.spec, directory))
    assert again.steps["step"].tolist() == list(range(6))
    assert again.summary["status"] == "completed"
    loss = run.steps["loss"].tolist()
    assert again.steps["loss"].tolist() == pytest.approx(loss, abs=1e-5)
    after = table.read_text().splitlines(keepends=True)
    assert lines[:5] == after[:5] and lines[5] != after[5]
    assert starts_of(directory) == [0, 4]
    assert again.summary["steps_dropped"]["warm-up"] == 4
    assert len(list(directory.glob("trace_*"))) == 2


def test_states_are_taken_up_in_the_form_that_the_optimizer_gives_them(tmp_path):
    """torchao's are in 8 bits: plain tensors would be four times as large, and the
    losses others.
    """
    spec = RunSpec(**SHORT)
    asked = []

    def new_buffer(part, signed):
        asked.append(signed)
        return torch.zeros_like(part)

    first, again = (
        trainer.parallelize(spec.model, spec.plan, spec, sizes=SMALL) for _ in range(2)
    )
    first.step(train._draw(spec.get_data(), spec, first, 0))
    first.save(tmp_path / "1")
    again.optimizers.adam._new_buffer = new_buffer
    again.load(tmp_path / "1")
    assert again.steps_done == 1
    assert asked == [True, False] * len(list(again.optimizers.states()))


def test_where_a_run_starts(tmp_path):
    spec = RunSpec(device="cpu", checkpoint_every=2)
    checkpoints = tmp_path / "checkpoints"
    table = tmp_path / "steps.csv"

    def starts_after(status):
        (checkpoints / "2").mkdir(parents=True, exist_ok=True)
        (checkpoints / "latest").write_text("2")
        table.write_text("header\n0\n1\n2\n")
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        prepare(spec, tmp_path)
        return starts_of(tmp_path)

    def refused(says):
        with pytest.raises(ValueError, match=says):
            prepare(spec, tmp_path)

    prepare(spec, tmp_path)
    assert starts_after("interrupted") == [0, 2]
    assert table.read_text() == "header\n0\n1\n"
    assert starts_after("failed") == [0, 2]
    assert not (tmp_path / "summary.json").exists()
    assert starts_after("completed") == [0] and not checkpoints.exists()
    starts_after("failed")
    content = json.loads((tmp_path / "spec.json").read_text())
    content["resolved"]["data"] = "wikitext-103"
    (tmp_path / "spec.json").write_text(json.dumps(content))
    refused("its run began with data wikitext-103, now it is arithmetic")
    for latest in ("", "foo", "4"):
        (checkpoints / "latest").write_text(latest)
        refused(r"latest: names .*not a checkpoint here; delete")
    assert table.read_text() == "header\n0\n1\n"  # what was refused is as it was


def test_a_sweep_keeps_what_is_complete(run, monkeypatch):
    target = run.directory.with_name(run.spec.name)
    target.symlink_to(run.directory)
    monkeypatch.setattr(subprocess, "Popen", None)
    kept = sweep([run.spec], run.directory.parent)
    assert list(kept) == [run.spec.name] and kept[run.spec.name].steps.equals(run.steps)
    with pytest.raises(FileExistsError, match="holds another run"):
        sweep([replace(run.spec, steps=7)], run.directory.parent)
    target.unlink()


def test_a_sweep_goes_on_after_what_fails_and_what_is_refused(tmp_path, monkeypatch):
    def end(spec, *_):
        failed = spec.strategy == "dp2"
        return ("out-of-memory", "CUDA out of memory") if failed else ("completed", "")

    monkeypatch.setattr(launching, "_run", end)
    specs = [RunSpec(strategy=text, device="cpu") for text in ("dp3", "dp2", "dp1")]
    for _ in range(2):  # what was refused or failed is tried again
        runs = sweep(specs, tmp_path)
        statuses = {r.spec.strategy: r.summary.get("status") for r in runs.values()}
        assert statuses == {"dp3": "refused", "dp2": "out-of-memory", "dp1": None}
    table = runs_table(runs).set_index("strategy")
    says = "global_batch=8 is not a multiple of dp x micro_batch = 3"
    assert table.loc["dp3", "reason"].startswith(says)
    assert table.loc["dp2", "reason"] == "CUDA out of memory"
    assert table["scaling"].isna().all()
    (tmp_path / "gpt-tiny_dp3" / "spec.json").write_text(json.dumps({"steps": 7}))
    with pytest.raises(FileExistsError, match="holds another run"):
        sweep(specs, tmp_path)


@pytest.mark.slow
def test_runs_in_one_start_are_those_of_their_own(tmp_path):
    """Two layouts in one start, whose losses are those of one process; a run that fails
    does not take others along.
    """
    broken = SHORT | {"sizes": SMALL | {"vocab": 10**12}}
    specs = {
        "z3": RunSpec(strategy="dp2.z3", **SHORT),
        "broken": RunSpec(strategy="dp2", **broken),
        "tp": RunSpec(strategy="tp2", **SHORT),
    }
    launch_all({tmp_path / name: spec for name, spec in specs.items()})
    runs = {name: read_run(tmp_path / name) for name in specs}
    statuses = {name: run.summary["status"] for name, run in runs.items()}
    assert statuses == dict.fromkeys(specs, "completed") | {"broken": "out-of-memory"}
    expected = alone(RunSpec(**SHORT))["loss"]
    for name in ("z3", "tp"):
        assert runs[name].steps["loss"].tolist() == pytest.approx(expected, rel=1e-4)


def test_a_sweep_keeps_what_a_run_did_that_is_refused_now(tmp_path, monkeypatch):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").touch()
    spec = RunSpec(weights=str(weights), device="cpu")
    started = []
    directory = prepare(spec, tmp_path / spec.name)
    (directory / "checkpoints" / "2").mkdir(parents=True)
    (directory / "checkpoints" / "latest").write_text("2")

    def complete(spec, directories, *_):
        started.extend(directories)
        return "completed", ""

    monkeypatch.setattr(launching, "_run", complete)
    weights.rename(tmp_path / "away")
    assert sweep([spec], tmp_path)[spec.name].summary["status"] == "refused"
    assert not started
    (tmp_path / "away").rename(weights)
    assert sweep([spec], tmp_path)[spec.name].resolved.starts == (0, 2)
    assert started == [directory]


def test_a_full_disk_does_not_hide_why_a_run_failed(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError("No space left on device")

    error = ("failed", "dp1 failed on rank 0: why\nend of its log")
    monkeypatch.setattr(launching, "_run", lambda *_: error)
    monkeypatch.setattr(launching, "write_summary", no_space)
    spec = RunSpec(device="cpu")
    says = r"failed on rank 0: why\n(.*\n)*it left no summary: No space"
    with pytest.raises(RunError, match=says):
        launch(spec, tmp_path / "run", check=False)
    with pytest.raises(RunError, match=says):
        sweep([spec], tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (tmp_path / "run" / "logs" / "launcher.log").touch()
    _, text = _failure(RunSpec(), [tmp_path / "run"])
    assert "no space is left on the disk of" in text


def test_ranks_do_not_inherit_what_is_meant_for_another_launcher(monkeypatch, tmp_path):
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE", "MADMAX_TESTBED_HOSTS"):
        monkeypatch.setenv(name, "2")
    environment = launching._environment("cpu", tmp_path)
    assert not [n for n in environment if n.startswith(("PET_", "MADMAX_TESTBED_"))]


def test_weights_and_biases_has_the_rates_of_a_step(tmp_path, monkeypatch):
    logged = []
    log = SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **about: log))
    spec = RunSpec(strategy="dp2", wandb=True)
    (tmp_path / "env.json").write_text(json.dumps({"peak_flops": 1e9}))
    written = dict.fromkeys(COLUMNS, 1.0) | {"power_w": float("nan")}
    with train._writer(spec, tmp_path) as write:
        write(written | {"total_s": 0.5, "samples": 8, "tokens": 1024})
    row, end = logged
    assert end == "finished" and "power_w" not in row
    mfu = 16 * 3 * spec.shapes.forward_flops(1) / 2e9
    rates = {"samples_per_s": 16.0, "tokens_per_s": 2048.0, "mfu": mfu}
    assert {name: row[name] for name in rates} == pytest.approx(rates)
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 2


def test_traces_of_a_run_are_readable(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timeline = mm.read_trace(run.directory)
    assert (timeline.ranks, timeline.steps) == ([0, 1], [2, 3, 4])
    assert timeline.meta.world_size == 2
    labels = timeline.spans[timeline.spans["kind"] == "annotation"]
    for name in PHASES:
        assert set(labels.loc[labels["name"] == name, "step"]) >= {2, 3, 4}
    assert (mm.breakdown(timeline)[["compute_s", "comm_s"]] > 0).all(axis=None)
    assert set(timeline.side_tables["memory"]["device"]) == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "ended"), [(264, "completed"), (10**12, "out-of-memory")]
)
def test_two_machines_run_together(tmp_path, vocab, ended):
    """Two agents of torchrun that know each other by address; the ranks alone can say
    how it ended.
    """
    spec = RunSpec(strategy="dp2", **SHORT | {"sizes": SMALL | {"vocab": vocab}})
    directory = prepare(spec, tmp_path, nodes=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for number in (0, 1):
        options = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
        options += (f"--node-rank={number}", f"--local-addr=127.0.0.{number + 1}")
        module = ("-m", "madmax_lib.runs.train", str(directory))
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *module]
        agents.append(subprocess.Popen(torchrun, stderr=subprocess.DEVNULL))
    for agent in agents:
        agent.wait()
    assert read_run(directory).summary["status"] == ended


def processes_of(directory: Path) -> list[psutil.Process]:
    """The processes of a run."""
    words = {"madmax_lib.runs.train", str(directory)}
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if words <= set(one.info["cmdline"] or ())]


def wait_for(condition, limit_s: float = 300.0):
    """The first true value of a condition that other processes make true."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.1)
    return value


def test_a_rank_that_dies_ends_the_others_and_shows_its_log(tmp_path):
    directory = tmp_path / "run"

    def kill_rank_1():
        wait_for(lambda: len(read_steps(directory)) > 2)
        for process in processes_of(directory):
            if process.environ().get("RANK") == "1":
                process.kill()

    killer = threading.Thread(target=kill_rank_1)
    killer.start()
    says = r"plan dp2.mb4, failed on rank 1: ended by signal 9 \(SIGKILL\)"
    with pytest.raises(RunError, match=says) as error:
        launch(RunSpec(strategy="dp2", **LONG), directory)
    killer.join()
    assert not processes_of(directory)
    assert error.value.directory == directory and "rank1.log" in str(error.value)
    left = read_run(directory)
    assert left.summary["status"] == "failed"
    assert left.summary["steps"] == len(left.steps) > 2


def test_a_killed_launcher_leaves_a_readable_run_and_no_process(tmp_path):
    directory = tmp_path / "run"
    code = f"import sys, madmax_lib as mm; mm.launch(mm.RunSpec(**{LONG}), sys.argv[1])"
    launcher = subprocess.Popen([sys.executable, "-c", code, str(directory)])
    wait_for(lambda: len(read_steps(directory)) > 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == -signal.SIGTERM
    assert not processes_of(directory)
    left = read_run(directory)
    assert left.summary["status"] == "interrupted"
    assert len(left.steps) > 2 and left.steps["loss"].notna().all()


GUARD = "from madmax_lib.runs.watch import guard; import time; guard(); "


def test_a_rank_without_its_launcher_ends_itself():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    code = GUARD + "time.sleep(60)"
    environment = os.environ | {"MADMAX_LAUNCHER": str(ended.pid)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, timeout=30)
    assert run.returncode == 75


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_rank_that_is_stopped_ends_with_torchrun():
    rank = GUARD + "print(flush=True); time.sleep(60)"
    start = f"print(subprocess.Popen([sys.executable, '-c', {rank!r}]).pid)"
    code = f"import subprocess, sys; {start}; sys.stdout.flush(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    torchrun = subprocess.Popen([sys.executable, "-c", code], **pipes)
    stopped = psutil.Process(int(torchrun.stdout.readline()))
    torchrun.stdout.readline()  # of the rank
    stopped.suspend()
    torchrun.kill()
    torchrun.communicate()
    zombie = psutil.STATUS_ZOMBIE
    wait_for(lambda: not stopped.is_running() or stopped.status() == zombie, 20)


def test_a_run_without_progress_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_GRACE_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert launching._wait(process, [tmp_path / "steps.csv"], timeout_s=0.1)
    end([process], 20.0)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2.35 GiB"), "out-of-memory"),
        (MemoryError(), "out-of-memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out-of-memory"),
        (RuntimeError("Connection closed by peer\nmore"), "failed"),
    ],
)
def test_failures_are_told_apart(error, status):
    entry = train._failure(error, rank=3)
    assert (entry["status"], entry["rank"]) == (status, 3)
    assert "\n" not in entry["error"]


R0 = {"rank": 0, "status": "failed", "error": "RuntimeError: by peer", "time_s": 2.0}
R1 = {"rank": 1, "status": "out-of-memory", "error": "CUDA out of", "time_s": 1.0}
TORCHRUN = "  rank      : {} (local_rank: 1)\n  exitcode  : {} (pid: 7)\n"
IMPORT = "ImportError: no module\nE1121 19:02:00.1 7 agent.py] failed\n"
PLAN = ", plan dp2.mb4, "
ON_RANK_1 = " on rank 1: "


@pytest.mark.parametrize(
    ("launcher", "failures", "status", "begin", "end"),
    [
        pytest.param(
            "",
            [R0, R1],
            "out-of-memory",
            f"{PLAN}out-of-memory{ON_RANK_1}CUDA out",
            "log of 1",
            id="the first rank that failed is the cause",
        ),
        pytest.param(
            TORCHRUN.format(0, -15) + TORCHRUN.format(1, -9),
            [R0],
            "failed",
            f"{PLAN}failed{ON_RANK_1}ended by signal 9 (SIGKILL), perhaps by the system",
            "",
            id="a rank ended by a signal comes before those that complain",
        ),
        pytest.param(
            IMPORT + TORCHRUN.format(0, 1),
            [],
            "failed",
            " failed before its ranks began: ImportError: no module\n",
            "no module",
            id="a run that never began shows the log of torchrun",
        ),
    ],
)
def test_the_cause_of_a_failure(tmp_path, launcher, failures, status, begin, end):
    directory = prepare(RunSpec(strategy="dp2", device="cpu"), tmp_path)
    logs = directory / "logs"
    (logs / "launcher.log").write_text(launcher)
    for entry in failures:
        rank = entry["rank"]
        (logs / f"failure_rank{rank}.json").write_text(json.dumps(entry))
        (logs / f"rank{rank}.log").write_text(f"log of {rank}\n")
    result, text = _failure(RunSpec(strategy="dp2"), [directory])
    assert result == status
    assert text.startswith(f"gpt-tiny_dp2{begin}") and text.endswith(end)


def test_the_peak_of_a_gpu_is_counted_anew_for_each_run_of_a_start(monkeypatch):
    calls = []
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    for name, value in {"LOCAL_RANK": 0, "WORLD_SIZE": 1, "OMP_NUM_THREADS": 2}.items():
        monkeypatch.setenv(name, str(value))
    precision = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    for _ in range(2):
        train._join("cuda", 60.0, 0)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    assert calls == ["set_device", "empty_cache", "reset_peak_memory_stats"] * 2
