"""Trials as jobs that people launch: a script for a launcher, and the step time read
back from what it prints.

A job is a folder: `job` the script, `config` the plan in its stack's words, `job.log`
what it printed. A folder with a log is never launched again, so that a tuning goes on
after a restart, and a trial that somebody else launched counts.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np

from madmax_lib.base import short_repr
from madmax_lib.base.atomic import write_text
from madmax_lib.plan import Case, Plan
from madmax_lib.traces import read_log

# of each launcher, what hands a job to it and returns when the job has ended; None: it
# is launched by hand
_SUBMIT = {
    "shell": "bash {job}",
    "torchrun": "bash {job}",
    "slurm": "sbatch --wait --output={log} {job}",
    "kubernetes": None,
}
_OUT_OF_MEMORY = re.compile(
    r".*(?:out of memory|OutOfMemoryError|oom.?kill|cannot allocate memory|bad_alloc).*",
    re.IGNORECASE,
)
_ERROR = re.compile(r".*(?:Error|error|Killed|failed).*")


class WaitingError(Exception):
    """A job is written, and somebody has to launch it."""


@dataclass(frozen=True)
class Jobs:
    """Trials of `mm.tune` that are jobs.

        command = "pretrain_gpt.py --data-path d {flags}"
        jobs = Jobs("trials", command, "slurm", software="megatron-core")
        mm.tune(model, cluster, global_batch=512, launch=jobs, trials=3, state="t.json")

    directory: of a folder per plan.
    command: what is run, in which {plan} is the plan's text, {flags} its flags and
        {config} the file of its configuration in the words of `software`, {folder} that
        of the job.
    launcher: torchrun, slurm, kubernetes (Indexed Job), or shell for a command that
        starts its own processes (default torchrun).
    submit: command that launches {job} and returns when it has ended, its output in
        {log} (default None: the launcher's own; "": jobs are only written, and `mm.tune`
        stops where one has no log yet).
    software: stack of {flags} and {config} (default None: the command has neither).
    options: further lines of a script, such as `#SBATCH --partition=gpu`.
    image: of a container (Kubernetes).
    pattern, column: of step times in the log, as `mm.traces.read_log` has them.
    case: of the step; `mm.tune` sets it.
    """

    directory: str | Path
    command: str
    launcher: str = "torchrun"
    submit: str | None = None
    software: str | None = None
    options: str = ""
    image: str = ""
    pattern: str | None = None
    column: str | None = None
    case: Case | None = None

    def __post_init__(self):
        if self.launcher not in _SUBMIT:
            choices = ", ".join(_SUBMIT)
            raise ValueError(
                f"launcher={short_repr(self.launcher)} is not one of {choices}"
            )

    def __call__(self, plan: Plan) -> float:
        """Seconds of a step of a plan, whose job is written and launched where it has no
        log yet.

        Raises MemoryError for a job that ran out of memory, RuntimeError for another
        that logged no step, `WaitingError` for one that is launched by hand.
        """
        folder = self.write(plan)
        log = folder / "job.log"
        if not log.exists():
            self._launch(folder / "job", log)
        return _step_s(folder, self.pattern, self.column)

    def write(self, plan: Plan) -> Path:
        """The folder of a plan's job, with its script. Raises ValueError for a plan that
        the software's configuration cannot say.
        """
        # names of Kubernetes have at most 63 letters, of which a pod's index takes some
        name = "trial-" + re.sub(r"[^a-z0-9]+", "-", str(plan))[:50].strip("-")
        folder = Path(self.directory).absolute() / name
        folder.mkdir(parents=True, exist_ok=True)
        words = {"plan": plan, "folder": folder, "flags": "", "config": ""}
        if self.software:
            words |= self._configuration(plan, folder)
        per_node = self.case.cluster.devices_per_node
        template = Path(__file__).parent / "data" / f"{self.launcher}.job"
        script = Template(template.read_text()).substitute(
            name=name,
            directory=Path.cwd(),
            nodes=-(-plan.world_size // per_node),
            gpus=min(plan.world_size, per_node),
            options=self.options,
            image=self.image,
            command=self.command.format(**words),
        )
        write_text(folder / "job", script)
        return folder

    def _configuration(self, plan, folder):
        from madmax_lib import plan_flags  # a wing

        text = plan_flags.write(
            plan,
            self.software,
            model=self.case.model,
            global_batch=self.case.global_batch,
            sequence=self.case.sequence,
            dtype=self.case.dtype,
            devices_per_node=self.case.cluster.devices_per_node,
        )
        write_text(folder / "config", text + "\n")
        # flags stand behind the program, which the command names
        _, _, flags = text.partition("\\\n")
        return {"config": folder / "config", "flags": re.sub(r"\\\n", "", flags)}

    def _launch(self, job, log):
        submit = _SUBMIT[self.launcher] if self.submit is None else self.submit
        if not submit:
            raise WaitingError(
                f"{job} is written: launch it with its output in {log}, and tune again"
            )
        # a log that is there is that of a job that has ended
        running = log.with_suffix(".running")
        running.unlink(missing_ok=True)
        submitted = log.with_suffix(".submitted")
        command = submit.format(
            job=shlex.quote(f"{job}"), log=shlex.quote(f"{running}")
        )
        with submitted.open("w") as output:
            subprocess.run(
                command,
                shell=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        # what runs the job itself says what the job says
        (running if running.exists() else submitted).replace(log)


def _step_s(folder, pattern, column):
    """Median of the steps that the logs of a folder have."""
    text = (folder / "job.log").read_text(errors="replace")
    if line := _OUT_OF_MEMORY.search(text):  # also after some steps
        raise MemoryError(line[0].strip())
    try:
        seconds = read_log(folder, pattern, column).step_s
    except ValueError:
        seconds = np.array([])
    if len(seconds):
        return float(np.median(seconds))
    errors = _ERROR.findall(text)
    raise RuntimeError(errors[-1].strip() if errors else "its log has no step time")
