"""Specs and their refusals, one real run of two processes, and what is left when a rank or the launcher is killed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import madmax_lib as mm
from madmax_lib.plan import Plan
from madmax_lib.runs import launch as launching
from madmax_lib.runs.data.batches import DataWarning, get_data
from madmax_lib.runs.launch import RunError, launch, prepare, sweep
from madmax_lib.runs.measure import meter, peaks
from madmax_lib.runs.read import COLUMNS, last_checkpoint, read_run, read_runs, read_steps, runs_table
from madmax_lib.runs.spec import RunSpec, check
from madmax_lib.runs.summary import write_summary
from madmax_lib.simulator.memory.memory import peak_bytes
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots import runs as run_plots

with warnings.catch_warnings():  # torch's own, when torch.distributed.optim is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from madmax_lib.runs import train
    from madmax_lib.runs.parallel import parallel

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
linux_only = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are listed in /proc")


def test_json_round_trip():
    spec = RunSpec(model="ViT_tiny", strategy="dp2.z3@deepspeed", steps=9, sizes={"layers": 2}, wandb=True)
    assert RunSpec.from_json(spec.to_json()) == spec
    told = {**json.loads(spec.to_json()), "resolved": {"device": "cpu"}}
    assert RunSpec.from_json(json.dumps(told)) == spec
    assert (spec.model, spec.kind, spec.data, spec.engine) == ("vit-tiny", "images", "synthetic-images", "deepspeed")
    assert spec.name == "vit-tiny_dp2.z3_deepspeed" and hash(spec)
    assert spec.digest == RunSpec.from_json(spec.to_json()).digest != replace(spec, steps=8).digest


@pytest.mark.parametrize(
    ("strategy", "batch", "plan"),
    [
        ("dp1", 8, "dp1.mb8"),
        ("dp2.z3", 8, "dp2.z3.mb4"),
        ("dp2.tp2.pp2", 8, "dp2.tp2.pp2.mb2"),
        ("dp2.mb1", 8, "dp2"),
        ("pp2.gpipe", 1, "dp1.pp2.gpipe"),
        ("pp2", 9, "pp2.mb3"),
        ("dp2.pp4", 14, "dp2.pp4"),
    ],
)
def test_a_rank_takes_its_share_at_once_unless_mb_says_otherwise(strategy, batch, plan):
    assert RunSpec(strategy=strategy, global_batch=batch).plan == Plan.parse(plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt-tiney"}, "no model 'gpt-tiney' to run; nearest: gpt-tiny"),
        ({"data": "wikitext103x"}, "unknown data 'wikitext103x'; nearest: wikitext-103"),
        ({"strategy": "dp2.q3"}, "'q3' in plan 'dp2.q3' is not one of"),
        ({"strategy": "dp2@megatron"}, "engine 'megatron' in strategy 'dp2@megatron' is not one of torch, deepspeed"),
        ({"strategy": "dp2.tp2", "ranks": 8}, "dp x tp x pp x cp = 2 x 2 x 1 x 1 = 4, but ranks=8"),
        ({"strategy": "dp2.ep4"}, "ep=4 does not divide dp x cp = 2 x 1"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"global_batch": 2.0}, "global_batch=2.0 must be a whole number"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a positive number"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 must be a non-negative number"),
        ({"checkpoint_every": True}, "checkpoint_every=True must be a whole number of at least 0"),
        ({"timeout_s": "60"}, "timeout_s='60' must be a positive number"),
        ({"dtype": "fp8"}, "dtype='fp8' is not one of fp32, bf16, fp16"),
        ({"device": "tpu"}, "device='tpu' is not one of auto, cpu, cuda"),
        ({"sizes": {"depth": 2}}, "'depth' is not a size of gpt-tiny"),
    ],
)
def test_bad_fields_are_refused_in_one_line(fields, message):
    with pytest.raises(ValueError) as error:
        RunSpec(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "gpus", "message"),
    [
        ({"strategy": "tp3", "global_batch": 8}, 0, "tp=3 does not divide 8 attention heads of gpt-tiny"),
        ({"strategy": "dp3"}, 0, "dp=3 does not divide global_batch=8"),
        ({"strategy": "dp2.ep2"}, 0, "ep=2, but gpt-tiny has no experts"),
        ({"model": "moe-tiny", "strategy": "dp8.ep8"}, 0, "ep=8 does not divide 4 experts"),
        ({"strategy": "pp8"}, 0, "8 x 1 exceeds 4 layers of gpt-tiny"),
        ({"strategy": "dp2.z3.qwz"}, 0, "qwz (8-bit gathers) is ZeRO++, which only DeepSpeed runs"),
        ({"strategy": "dp4"}, 2, "dp4 needs 4 GPUs, 2 present"),
        ({"device": "cuda"}, 0, "dp1 needs 1 GPUs, 0 present"),
        ({"data": "cifar-100"}, 0, "data cifar-100 is images, but gpt-tiny is trained on text"),
        ({"model": "vit-tiny", "sequence": 64}, 0, "sequence=64 is for text; vit-tiny has 65 tokens per image"),
    ],
)
def test_what_cannot_run_here_is_refused_before_a_process_starts(fields, gpus, message, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "gpu_count", lambda: gpus)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError) as error:
        launch(RunSpec(**fields), tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "vit-tiny", "data": "cifar-100", "sizes": {"classes": 10}}, None),
        ({"sizes": {"vocab": 128}}, "data arithmetic has 259 tokens, gpt-tiny knows 128"),
        ({"power": "nowhere.csv"}, "power='nowhere.csv' is neither auto, none nor a CSV file"),
        ({"weights": "nowhere"}, r"weights='nowhere' has no \.safetensors file with weights of gpt-tiny"),
    ],
)
def test_data_that_does_not_fit_the_model(fields, message, tmp_path):
    spec = RunSpec(device="cpu", **fields)
    if message is None:  # the data is not here: the one in its place has as many classes as the model
        with pytest.warns(DataWarning, match="synthetic-images in place of cifar-100"):
            prepare(spec, tmp_path)
        resolved = json.loads((tmp_path / "spec.json").read_text())["resolved"]
        assert resolved["data"] == "synthetic-images" and "cifar-100" in resolved["data_note"]
        return
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(spec, tmp_path)


@pytest.mark.parametrize("package", ["torch", "wandb"])
def test_a_missing_package_is_one_line(package, monkeypatch):
    monkeypatch.setattr("madmax_lib.runs.spec.find_spec", lambda name: name != package)
    with pytest.raises(ModuleNotFoundError, match=f"this run needs the package {package}, which is not installed"):
        check(RunSpec(wandb=True), gpus=0)


def test_another_run_is_not_overwritten(tmp_path):
    spec = RunSpec(device="cpu")
    prepare(spec, tmp_path)
    (tmp_path / "steps.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    assert prepare(spec, tmp_path) == tmp_path.resolve()
    assert not (tmp_path / "steps.csv").exists() and (tmp_path / "notes.txt").exists()
    with pytest.raises(FileExistsError, match="holds another run; give a new directory"):
        prepare(RunSpec(device="cpu", steps=7), tmp_path)
    with pytest.raises(NotADirectoryError, match="this is a file"):
        prepare(spec, tmp_path / "notes.txt")


def test_the_launcher_does_not_import_torch():
    code = "import sys, madmax_lib.runs.launch, madmax_lib.runs.read; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps on two processes, with a power log to replay and a checkpoint after four."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "power.csv").write_text("t_s,power_w,cap_w\n0,50,70\n1000,50,70\n")
    spec = RunSpec(
        "gpt_tiny", "dp2.z3", sizes=SMALL, sequence=96, power=str(folder / "power.csv"), validate_every=3,
        checkpoint_every=4, device="cpu", learning_rate=3e-3, timeout_s=60.0,
    )  # fmt: skip
    return read_run(launch(spec, folder / "run"))


def test_a_run_writes_all_its_files(run):
    names = {path.name for path in run.directory.iterdir()}
    assert names == {"spec.json", "env.json", "steps.csv", "summary.json", "power.csv", "trace_rank0.json.gz",
                     "trace_rank1.json.gz", "logs", "checkpoints"}  # fmt: skip
    assert last_checkpoint(run.directory) == run.directory / "checkpoints" / "4"
    assert {path.name for path in (run.directory / "checkpoints").iterdir()} == {"4", "latest"}
    assert {path.name for path in (run.directory / "logs").iterdir()} == {"launcher.log", "rank0.log", "rank1.log"}
    assert run.env["backend"] == "gloo" and run.env["ranks"] == 2 and run.env["threads_per_rank"] == 1
    assert run.env["data"] == "arithmetic" and run.env["job"]["data_parallel"] == "fsdp2"
    assert str(Path.home()) not in json.dumps(run.env) + json.dumps(run.summary)
    assert list(read_runs(run.directory.parent)) == ["run"]


def test_the_loss_is_that_of_one_process(run):
    spec, data = run.spec, get_data("arithmetic", sequence=96)
    threads = torch.get_num_threads()
    job = parallel.parallelize("gpt-tiny", Plan(micro_batch=8), spec, sizes=SMALL)
    told = [job.step(train._tensors(data.batch(step, spec.global_batch))) for step in range(spec.steps)]
    torch.set_num_threads(threads)
    assert run.steps["loss"].tolist() == pytest.approx([row["loss"] for row in told], abs=1e-4)
    assert run.steps["accuracy"].tolist() == pytest.approx([row["accuracy"] for row in told], abs=1e-6)
    assert run.steps["loss"].iloc[-1] < run.steps["loss"].iloc[0]


def test_rows_of_steps(run):
    steps = run.steps
    assert tuple(steps.columns) == COLUMNS and steps["step"].tolist() == list(range(6))
    assert (steps["samples"] == 8).all() and (steps["tokens"] == 8 * 96).all() and not steps["overflow"].any()
    phases = steps[["data_s", "forward_s", "backward_s", "optimizer_s"]]
    assert (phases > 0).all(axis=None) and (phases.sum(axis=1) <= steps["total_s"] * 1.001).all()
    assert steps["validation_loss"].notna().tolist() == [False, False, True] * 2
    assert steps["memory_peak_bytes"].isna().all() and (steps["host_rss_bytes"] > 1e7).all()
    assert steps["power_w"].to_numpy() == pytest.approx(50, rel=1e-6)
    assert steps["energy_j"].to_numpy() == pytest.approx(50 * steps["total_s"].to_numpy(), rel=1e-6)


def test_summary_of_a_run(run):
    found, counted = run.summary, run.steps.iloc[2:]
    assert found["status"] == "completed" and found["steps_dropped"]["warm-up"] == 2 and found["includes_profiled"]
    rate = counted["samples"].sum() / counted["total_s"].sum()
    assert found["samples_per_s"] == pytest.approx(rate)
    model_flops = 3 * run.spec.shapes.forward_flops(1, 96)
    assert found["mfu"] == pytest.approx(rate * model_flops / (2 * run.env["peak_flops"])) == found["hfu"]
    assert 0 < found["mfu"] < 1 and found["power_share"] == pytest.approx(50 / 70)
    assert found["energy_per_sample_j"] == pytest.approx(50 / rate, rel=1e-6)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    with (run.directory / "power.csv").open() as file:
        assert tuple(next(csv.reader(file))) == meter.COLUMNS


def test_a_run_that_was_cut_short_goes_on_at_its_checkpoint(run, tmp_path):
    directory = shutil.copytree(run.directory, tmp_path / "run")
    lines = (directory / "steps.csv").read_text().splitlines(keepends=True)
    (directory / "steps.csv").write_text("".join(lines[:6]) + lines[6][:20])  # killed while it wrote step 5
    (directory / "summary.json").unlink()
    (directory / "logs" / "failure_rank0.json").write_text("{}")
    again = read_run(launch(run.spec, directory))
    assert again.steps["step"].tolist() == list(range(6)) and again.summary["status"] == "completed"
    assert again.steps["loss"].tolist() == pytest.approx(run.steps["loss"].tolist(), abs=1e-5)
    before, after = ((one / "steps.csv").read_text().splitlines() for one in (run.directory, directory))
    assert before[:5] == after[:5] and before[5] != after[5]
    assert json.loads((directory / "spec.json").read_text())["resolved"]["starts"] == [0, 4]
    assert again.summary["steps_dropped"]["warm-up"] == 4 and len(list(directory.glob("trace_*"))) == 2


def test_where_a_run_starts(tmp_path):
    spec = RunSpec(device="cpu", checkpoint_every=2)

    def left_by_a_run(status):
        (tmp_path / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoints" / "latest").write_text("2")
        (tmp_path / "steps.csv").write_text("header\n0\n1\n2\n")
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        prepare(spec, tmp_path)
        return json.loads((tmp_path / "spec.json").read_text())["resolved"]["starts"]

    prepare(spec, tmp_path)
    assert left_by_a_run("interrupted") == [0, 2] and (tmp_path / "steps.csv").read_text() == "header\n0\n1\n"
    assert left_by_a_run("failed") == [0, 2] and not (tmp_path / "summary.json").exists()
    assert left_by_a_run("completed") == [0] and not (tmp_path / "checkpoints").exists()


def test_a_sweep_keeps_what_is_complete(run, monkeypatch):
    target = run.directory.with_name(run.spec.name)
    target.symlink_to(run.directory)
    monkeypatch.setattr(subprocess, "Popen", None)
    kept = sweep([run.spec], run.directory.parent)
    assert list(kept) == [run.spec.name] and kept[run.spec.name].steps.equals(run.steps)
    with pytest.raises(FileExistsError, match="holds another run"):
        sweep([replace(run.spec, steps=7)], run.directory.parent)
    target.unlink()


def test_one_row_per_run_by_dimensions(run):
    other = replace(run, spec=replace(run.spec, strategy="dp1"), summary={})
    table = runs_table({"gpt-tiny_dp2.z3": run, "gpt-tiny_dp1": other})
    assert table["strategy"].tolist() == ["dp1", "dp2.z3"] and table["dimensions"].tolist() == [0, 1]
    assert table["status"].tolist() == ["unfinished", "completed"]
    assert table["samples_per_s"].isna().tolist() == [True, False]
    assert table["step_s"].iloc[1] == run.summary["step_s"]["median"]


def test_traces_of_a_run_are_readable(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timeline = mm.read_trace(run.directory)
    assert timeline.ranks == [0, 1] and timeline.steps == [2, 3, 4] and timeline.meta.world_size == 2
    labels = timeline.spans[timeline.spans["kind"] == "annotation"]
    for name in ("data", "forward", "backward", "optimizer"):
        assert set(labels.loc[labels["name"] == name, "step"]) >= {2, 3, 4}
    table = mm.breakdown(timeline)
    assert (table["compute_s"] > 0).all() and (table["comm_s"] > 0).all()


def test_pictures_of_runs_keep_their_numbers(run):
    other = replace(run, spec=replace(run.spec, strategy="dp1"))
    runs = {"gpt-tiny_dp1": other, "gpt-tiny_dp2.z3": run}
    alone = run_plots.plot_run(run)
    assert figure_data(alone)["loss"].tolist() == run.steps["loss"].tolist()
    parts = figure_data(alone)[["data", "forward", "backward", "optimizer", "other"]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(run.steps["total_s"].to_numpy(), rel=1e-3)
    losses = run_plots.plot_losses(runs)
    assert figure_data(losses)["difference"].max() == 0 and "1 way to split gpt-tiny" in losses.get_title()
    with pytest.raises(ValueError, match=r"none of the runs gpt-tiny_dp2\.z3 is on one process"):
        run_plots.plot_losses({"gpt-tiny_dp2.z3": run})
    assert figure_data(run_plots.plot_speed(runs))["step_s"].tolist() == [run.summary["step_s"]["median"]] * 2
    assert len(figure_data(run_plots.plot_run_phases(runs))) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = run_plots.trace_breakdowns(runs)
    assert (shares[["compute", "exposed_comm", "idle"]].sum(axis=1) <= 1.0 + 1e-9).all()
    assert set(shares.attrs["provenance"]["files"]) == {
        f"{name}/trace_rank{rank}.json.gz" for name in runs for rank in (0, 1)
    }
    assert figure_data(run_plots.plot_shares(shares)) is shares


def test_predicted_memory_stands_beside_the_measured(run):
    shards = run.env["job"]["local_parameters"] * 4
    cpu = run_plots.memory_table({"gpt-tiny_dp2.z3": run})
    assert cpu["measured_bytes"].isna().all() and cpu["predicted_bytes"].iloc[0] > 4 * shards  # and activations
    peaks = [{"rank": rank, "memory_peak_bytes": size} for rank, size in enumerate((3e6, 4e6))]
    gpu = replace(run, spec=replace(run.spec, strategy="dp1"), summary={**run.summary, "ranks": peaks})
    full = replace(run, spec=replace(run.spec, strategy="dp2"), steps=run.steps[:0],
                   summary={"status": "out-of-memory", "error": "CUDA out of memory"})  # fmt: skip
    runs = {"gpt-tiny_dp1": gpu, "gpt-tiny_dp2": full, "gpt-tiny_dp2.z3": run}
    table = run_plots.memory_table(runs).set_index("strategy")
    assert table["measured_bytes"].dropna().to_dict() == {"dp1": 4e6}
    assert table.loc["dp2", ["plan", "status"]].tolist() == ["dp2.mb4", "out-of-memory"]
    alone = mm.memory(run.spec.shapes, Plan(micro_batch=8), sequence=96, dtype="fp32", stack="torch")
    assert table.loc["dp1", "predicted_bytes"] == peak_bytes(alone, allocated=True)
    assert table.loc["dp1", "predicted_bytes"] > table.loc["dp2", "predicted_bytes"]
    assert figure_data(run_plots.plot_run_memory(runs))["predicted_bytes"].gt(0).all()
    assert "a CPU measures none" in run_plots.plot_run_memory({"gpt-tiny_dp2.z3": run}).get_xlabel()
    with pytest.raises(ValueError, match="gpt-tiny_dp2 made no step: out-of-memory CUDA out of memory"):
        run_plots.plot_run(full)


def processes_of(directory: Path) -> dict[int, list[str]]:
    """Command lines of the processes of a run, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "madmax_lib.runs.train" in words and str(directory) in words:
            found[int(path.name)] = words
    return found


def wait_for(condition, limit_s: float = 300.0):
    """The first true value of a condition that other processes make true."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.1)
    return value


LONG = {"sizes": SMALL, "steps": 1_000_000, "profile": False, "device": "cpu", "timeout_s": 60.0}


@linux_only
def test_a_rank_that_dies_ends_the_others_and_shows_its_log(tmp_path):
    directory = tmp_path / "run"

    def kill_rank_1():
        wait_for(lambda: len(read_steps(directory)) > 2)
        ranks = [pid for pid, words in processes_of(directory).items() if "torch.distributed.run" not in words]
        number = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0RANK=")[1][:1] for pid in ranks}
        os.kill(next(pid for pid, rank in number.items() if rank == b"1"), signal.SIGKILL)

    killer = threading.Thread(target=kill_rank_1)
    killer.start()
    with pytest.raises(RunError, match=r"plan dp2.mb4, failed on rank 1: ended by signal 9 \(SIGKILL\)") as error:
        launch(RunSpec(strategy="dp2", **LONG), directory)
    killer.join()
    assert not processes_of(directory) and error.value.directory == directory and "rank1.log" in str(error.value)
    left = read_run(directory)
    assert left.summary["status"] == "failed" and left.summary["steps"] == len(left.steps) > 2


@linux_only
def test_a_killed_launcher_leaves_a_readable_run_and_no_process(tmp_path):
    directory = tmp_path / "run"
    code = "import sys, madmax_lib as mm; mm.launch(mm.RunSpec.from_json(sys.argv[1]), sys.argv[2])"
    spec = RunSpec(**LONG)
    launcher = subprocess.Popen([sys.executable, "-c", code, spec.to_json(), str(directory)])
    wait_for(lambda: len(read_steps(directory)) > 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == -signal.SIGTERM
    assert not processes_of(directory)
    left = read_run(directory)
    assert left.summary["status"] == "interrupted" and len(left.steps) > 2 and left.steps["loss"].notna().all()


def test_a_rank_without_its_launcher_ends_itself():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    code = "from madmax_lib.runs.watch import guard; import time; guard(); time.sleep(60)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "MADMAX_LAUNCHER": str(ended.pid)}, timeout=30
    )
    assert run.returncode == 75


def test_a_run_without_progress_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_GRACE_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert launching._wait(process, tmp_path / "steps.csv", timeout_s=0.1)
    launching._end(process)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.35 GiB"), "out-of-memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 B"), "out-of-memory"),
        (MemoryError(), "out-of-memory"),
        (RuntimeError("Connection closed by peer\nmore"), "failed"),
    ],
)
def test_failures_are_told_apart(error, status):
    told = train._failure(error, rank=3)
    assert told["status"] == status and told["rank"] == 3 and "\n" not in told["error"]


def failed(tmp_path, launcher="", **failures) -> tuple[str, str]:
    directory = prepare(RunSpec(strategy="dp2", device="cpu"), tmp_path)
    (directory / "logs" / "launcher.log").write_text(launcher)
    for rank, (status, error, time_s) in failures.items():
        told = {"rank": int(rank[1:]), "status": status, "error": error, "time_s": time_s}
        (directory / "logs" / f"failure_rank{rank[1:]}.json").write_text(json.dumps(told))
        (directory / "logs" / f"rank{rank[1:]}.log").write_text(f"log of {rank}\n")
    return launching._failure(RunSpec(strategy="dp2"), directory)


def test_the_first_rank_that_failed_is_the_cause(tmp_path):
    told = {"r0": ("failed", "RuntimeError: closed by peer", 2.0), "r1": ("out-of-memory", "CUDA out of memory", 1.0)}
    status, text = failed(tmp_path, **told)
    assert status == "out-of-memory" and text.startswith(
        "gpt-tiny_dp2, plan dp2.mb4, out-of-memory on rank 1: CUDA out"
    )
    assert text.endswith("log of r1")


def test_a_rank_ended_by_a_signal_comes_before_those_that_complain(tmp_path):
    table = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
    told = table.replace("1", "0").replace("-9", "-15") + table
    status, text = failed(tmp_path, told, r0=("failed", "closed by peer", 2.0))
    assert status == "failed" and "on rank 1: ended by signal 9 (SIGKILL), perhaps by the system" in text


def test_a_run_that_never_began_shows_the_log_of_torchrun(tmp_path):
    logged = "ImportError: no module\nE1121 19:02:00.1 7 agent.py] failed\n  exitcode  : 1 (pid: 7)\n"
    assert failed(tmp_path, logged) == ("failed", "gpt-tiny_dp2 failed before its ranks began\nImportError: no module")


HEADER = ",".join(COLUMNS) + "\n"
ROW = "0,0.1,0.1,0.2,0.1,0.5,8,1024,5.5,0.1,,0,,,,1e8,,\n"


@pytest.mark.parametrize(
    ("content", "rows"), [(HEADER, 0), (HEADER + ROW, 1), (HEADER + ROW + ROW.replace("0,", "1,", 1)[:20], 1)]
)
def test_a_table_that_was_cut_short_is_readable(tmp_path, content, rows):
    (tmp_path / "steps.csv").write_text(content)
    assert len(read_steps(tmp_path)) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,loss\n0,1\n", "not a table of steps"),
        ("", "not a table of steps"),
        (HEADER + "0,1\n", "line 2 has not 18 values"),
        (HEADER + ROW.replace("5.5", "high"), "could not convert string to float: 'high'"),
    ],
)
def test_bad_tables_of_steps_name_the_file(tmp_path, content, message):
    (tmp_path / "steps.csv").write_text(content)
    with pytest.raises(ValueError, match=f"steps.csv: .*{message}"):
        read_steps(tmp_path)


def test_a_run_that_never_made_a_step_has_a_summary(tmp_path):
    prepare(RunSpec(device="cpu"), tmp_path)
    write_summary(tmp_path, "failed", "reason")
    left = read_run(tmp_path)
    assert left.summary["status"] == "failed" and left.summary["samples_per_s"] is None and not len(left.steps)


@pytest.mark.parametrize("text", ["[", "[1]", '{"modle": "gpt-tiny"}'])
def test_bad_specs_are_one_line(tmp_path, text):
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(ValueError, match=r"spec\.json"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no run directories here"):
        read_runs(tmp_path / "nowhere")


def test_the_peak_of_a_known_device_is_the_data_sheets(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert peaks.peak_flops("cuda", "bf16") == (989.4e12, "data sheet of h100-80, dense bf16")
    assert peaks.peak_flops("cuda", "fp32")[0] == 67e12


def test_ranks_that_outnumber_the_cores_share_their_peak(monkeypatch):
    monkeypatch.setattr(peaks, "_product_rate", lambda *_: 8e9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = {}
    for ranks in (1, 2, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found[ranks], source = peaks.peak_flops("cpu", "fp32")
        assert source.startswith("measured: best 512 x 512 matrix product in fp32")
    assert found == {1: 8e9, 2: 8e9, 8: 2e9}
