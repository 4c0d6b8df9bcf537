"""Trials that are jobs: scripts that their launchers read, times from their logs."""

import math
import shlex
import subprocess
import sys

import pytest
import yaml
from support import needs_namespaces

import madmax_lib as mm
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.planner.tuner.jobs import Jobs, WaitingError

CLUSTER = mm.cluster("dgx-h100", nodes=2)
CASE = Case.of_step("llama3-8b", CLUSTER, Plan(), 64)
PLAN = Plan.parse("dp8.tp2.z1.mb2")
MEGATRON = {"software": "megatron-core", "case": CASE}
FLAGS = "pretrain_gpt.py --data-path my/data {flags}"


def script_of(folder, launcher, command=FLAGS, **more):
    written = Jobs(folder, command, launcher, **{**MEGATRON, **more}).write(PLAN)
    return (written / "job").read_text()


def torchrun_of(line):
    """Options and script arguments, as torchrun itself parses them."""
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    return parser.parse_args(shlex.split(line))


def test_slurm(tmp_path):
    text = script_of(tmp_path, "slurm", options="#SBATCH --partition=gpu")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    headers = dict(line[8:].lstrip("-").partition("=")[::2]
                   for line in text.splitlines() if line.startswith("#SBATCH"))  # fmt: skip
    assert headers["nodes"] == "2" and headers["gpus-per-node"] == "8"
    assert headers["partition"] == "gpu" and headers["ntasks-per-node"] == "1"
    line = text.split("srun torchrun ")[1].replace("\\\n", "")
    options = torchrun_of(line)
    assert (options.nnodes, options.nproc_per_node) == ("2", "8")
    stated = mm.plan_flags.read(
        options.training_script_args, "megatron-lm", world_size=16
    )
    assert stated.plan.tp == 2 and stated.plan.micro_batch == 2
    assert stated.global_batch == 64


def test_torchrun(tmp_path):
    text = script_of(tmp_path, "torchrun", "train.py --plan {plan}", software=None)
    options = torchrun_of(text.split("torchrun ")[1])
    assert options.standalone and options.nproc_per_node == "8"
    assert options.training_script_args == ["--plan", str(PLAN)]


def test_kubernetes(tmp_path):
    text = script_of(tmp_path, "kubernetes", image="nvcr.io/nvidia/pytorch:26.01-py3")
    job, service = yaml.safe_load_all(text)
    name = job["metadata"]["name"]
    assert name == service["metadata"]["name"] and len(name) <= 57
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    line = container["args"][0].removeprefix("torchrun ")
    assert torchrun_of(line).rdzv_endpoint == f"{name}-0.{name}:29500"


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("for i in 1 2 3 4; do echo step $i took 0.$i s; done", 0.3),
        ("echo torch.OutOfMemoryError: CUDA out of memory; exit 1", MemoryError),
        ("echo step 1 took 1 s; echo oom-kill event", MemoryError),
        ("echo RuntimeError: NCCL error; exit 1", RuntimeError),
        ("true", RuntimeError),
    ],
)
def test_outcomes(tmp_path, command, outcome):
    jobs = Jobs(tmp_path, command, "shell", case=CASE, pattern=r"step (?P<step>\d+) took (?P<s>[\d.]+) s")  # fmt: skip
    if isinstance(outcome, float):
        assert jobs(PLAN) == pytest.approx(outcome, abs=0.1)
    else:
        with pytest.raises(outcome):
            jobs(PLAN)


def test_a_launcher_that_logs_elsewhere(tmp_path):
    """As Slurm's: what it says itself is the log only where the job has said nothing."""
    submit = "echo Submitted batch job 7; echo step 1 took 9 s; cp {job} {log}"
    folder = tmp_path / "a folder with blanks"
    command = "step 1 took 0.2 s, step 2 took 0.4 s"
    pattern = r"step (?P<step>\d+) took (?P<s>[\d.]+) s"
    jobs = Jobs(folder, command, "shell", submit, case=CASE, pattern=pattern)
    assert jobs(PLAN) == pytest.approx(0.4, abs=0.2)
    failed = Jobs(
        tmp_path, command, "shell", "echo sbatch: error: no partition", case=CASE
    )
    with pytest.raises(RuntimeError, match="sbatch: error: no partition"):
        failed(PLAN)


def test_a_tuning_of_jobs_goes_on_after_a_restart(tmp_path):
    """Each plan is launched once; what somebody else launched is read."""
    command = "echo {plan} >> {folder}/../launched; echo step 1 took 0 s; echo step 2 took 0.{plan} s"
    command = command.replace("0.{plan}", "$(echo {plan} | tr -dc 1-9 | cut -c1)")
    pattern = r"step (?P<step>\d+) took (?P<s>[\d.]+) s"
    jobs = Jobs(tmp_path / "jobs", command, "shell", pattern=pattern)
    asked = {
        "global_batch": 64,
        "plans": ["dp16.z1", "dp8.tp2", "dp4.tp4"],
        "progress": False,
    }
    state = tmp_path / "state.json"
    first = mm.tune("llama3-8b", CLUSTER, launch=jobs, trials=1, state=state, **asked)
    again = mm.tune("llama3-8b", CLUSTER, launch=jobs, trials=3, state=state, **asked)
    assert len(first.trials) == 1 and len(again.trials) == 3
    launched = (tmp_path / "jobs" / "launched").read_text().split()
    assert sorted(launched) == sorted(asked["plans"])
    state.unlink()
    third = mm.tune("llama3-8b", CLUSTER, launch=jobs, trials=3, **asked)
    assert third.best == again.best
    assert (tmp_path / "jobs" / "launched").read_text().split() == launched


def test_jobs_that_are_launched_by_hand(tmp_path):
    jobs = Jobs(tmp_path, FLAGS, "slurm", submit="", **MEGATRON)
    with pytest.raises(WaitingError, match="launch it"):
        jobs(PLAN)
    with pytest.warns(UserWarning, match="launch it"):
        tuner = mm.tune("llama3-8b", CLUSTER, global_batch=64, launch=jobs, trials=2, plans=[PLAN], progress=False)  # fmt: skip
    assert not len(tuner.trials)


def test_reasons_teach_what_fits():
    """Out of memory lowers the chance of what needs more; a crash of another kind
    does not.
    """
    asked = {"global_batch": 64, "plans": ["dp16.z1", "dp16.z1.mb2", "dp16.z1.mb4"]}
    chances = {}
    for reason in ("", "out of memory", "NCCL error"):
        tuner = mm.planner.Tuner("llama3-8b", CLUSTER, **asked)
        tuner.tell("dp16.z1.mb2", None, reason)
        chances[reason] = tuner.table.set_index("plan")["fits"]["dp16.z1.mb4"]
        assert tuner.trials["reason"].iloc[0] == reason
        assert math.isnan(tuner.trials["step_s"].iloc[0])
    assert chances["out of memory"] < chances["NCCL error"]


def test_wrong_launcher():
    with pytest.raises(ValueError, match="torchrun, slurm, kubernetes"):
        Jobs("trials", "train.py", "lsf")


@pytest.mark.slow
@needs_namespaces
def test_the_loop_for_real(tmp_path):
    """Eight plans on the testbed: the best of them in three trials that are jobs of
    `madmax train`, each measured for real, after what its calibration knows.
    """
    machine = mm.machine(mm.dataset("testbed"))
    model = mm.RunSpec("gpt-tiny", strategy="dp2", ranks=2, device="cpu").shapes
    words = "--steps 6 --global-batch 8 --dtype fp32 --device cpu --hosts 2 --network 300mbit"
    command = f"{sys.executable} -m madmax_lib train gpt-tiny {{plan}} {words}"
    jobs = Jobs(tmp_path, f"{command} --no-profile -o {{folder}}/run", "shell")
    asked = {"global_batch": 8, "dtype": "fp32", "progress": False}
    asked["plans"] = [
        "dp2",
        "dp2.z1",
        "dp2.z2",
        "dp2.z3",
        "tp2",
        "pp2.mb4",
        "pp2.mb2",
        "cp2",
    ]
    asked["parameters"] = machine.parameters
    every = mm.tune(model, machine.cluster, launch=jobs, trials=8, **asked)
    best_s = every.trials["step_s"].min()
    # the logs are there: three trials of a new tuning read them
    three = mm.tune(model, machine.cluster, launch=jobs, trials=3, **asked)
    assert every.trials["step_s"].notna().sum() >= 6
    assert three.trials["step_s"].min() <= 1.1 * best_s, every.trials
