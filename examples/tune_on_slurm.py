"""Find the fastest plan of a training on Slurm in ten short jobs. `measure` is the only part to change.

It submits a job with your own script, waits for its end, and reads the seconds of a step that the script left.
"""

import subprocess
from pathlib import Path

import madmax_lib as mm

NODES = 2


def measure(plan: mm.Plan) -> float | None:
    """Seconds of a step under a plan; None if the job failed, such as for want of memory."""
    result = Path(f"tuning/{plan}.txt")
    script = f"mkdir -p tuning && srun python train.py --dp {plan.dp} --tp {plan.tp} --pp {plan.pp} --out {result}"
    job = ["sbatch", "--wait", f"--nodes={NODES}", "--gpus-per-node=8", "--time=00:15:00", f"--wrap={script}"]
    done = subprocess.run(job, check=False)
    return float(result.read_text()) if done.returncode == 0 else None


def main(launch=measure, trials: int = 10):
    """Tune, and print what was tried; `tuning.json` lets a stopped tuning resume."""
    cluster = mm.cluster("dgx-h100", nodes=NODES)
    plans = ["dp16.z3", "dp8.tp2.z2", "dp4.tp4.z1", "dp2.tp8.z1", "dp2.tp4.pp2", "dp4.tp2.pp2", "tp8.pp2", "dp16.z2"]
    case = {"global_batch": 64, "plans": plans, "software": "megatron-core", "state": "tuning.json", "progress": False}
    tuner = mm.tune("llama3-8b", cluster, launch=launch, trials=trials, **case)
    print(tuner.table.to_string(index=False))
    print(f"fastest: {tuner.best}")
    return tuner


if __name__ == "__main__":
    main()
