"""Runs many plans in one start: imports once, forks one process per rank, writes what rank 0 saw as JSON.

    python runs_worker.py OUT CASES      CASES: JSON list of [name, model, plan text, options]

Every case trains three steps on the batches of a seed. Options are `Settings`, `sizes`, `first_scale` of an fp16 loss,
and `check`: "counts" records the collectives of the last step; any other text is the plan under which the last step is
taken, after a checkpoint.
"""

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from itertools import groupby
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._composable.replicate_with_fsdp  # these are imported when needed: better once than per rank
import torch.distributed.optim
from torch.utils._python_dispatch import TorchDispatchMode

from madmax_lib.plan import Plan
from madmax_lib.runs.parallel import trainer
from madmax_lib.runs.settings import Settings

BATCH, SEQUENCE, STEPS = 8, 16, 3
KINDS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "send", "recv")


class Collectives(TorchDispatchMode):
    """Counts collectives and the bytes of their larger side by kind."""

    def __init__(self):
        super().__init__()
        self.calls, self.sizes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in function.__name__:
            plain = function.__name__.replace("_", "")
            kind = next((kind for kind in KINDS if kind.replace("_", "") in plain), None)
            if kind:
                self.calls[kind] += 1
                self.sizes[kind] += max(_tensor_bytes(args), _tensor_bytes(result))
        return result


def _tensor_bytes(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return max((_tensor_bytes(part) for part in value), default=0)
    return 0


def batch(spec, step: int, samples: int = BATCH) -> dict[str, torch.Tensor]:
    """The global batch of a step: random tokens, a fifth of the targets masked; or random images."""
    generator = torch.Generator().manual_seed(100 + step)
    if spec.image:
        images = torch.randn(samples, 3, spec.image, spec.image, generator=generator)
        return {"images": images, "labels": torch.randint(0, spec.classes, (samples,), generator=generator)}
    tokens = torch.randint(0, spec.vocab, (samples, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def run(model: str, text: str, options: dict, directory: Path) -> dict:
    """Train three steps of a case; a row of what came out."""
    options = dict(options)
    check, first_scale, sizes = (options.pop(name, None) for name in ("check", "first_scale", "sizes"))
    arguments = {"global_batch": BATCH, "sequence": SEQUENCE, "learning_rate": 3e-3, "clip_norm": 0.5, **options}
    job = trainer.parallelize(model, Plan.parse(text), Settings(**arguments), sizes=sizes)
    job.scale.value = first_scale or job.scale.value
    steps, row = [], {}
    for step in range(STEPS):
        if check == "counts" and step == STEPS - 1:
            with Collectives() as seen:
                steps.append(job.step(batch(job.spec, step)))
            row = {"calls": dict(seen.calls), "sizes": dict(seen.sizes)}
        elif check and step == STEPS - 1:
            job.save(directory)
            job = trainer.parallelize(model, Plan.parse(check), Settings(**{**arguments, "seed": 7}), sizes=sizes)
            job.load(directory)
            steps.append(job.step(batch(job.spec, step)))
        else:
            steps.append(job.step(batch(job.spec, step)))
    columns = ("loss", "grad_norm", "accuracy", "overflow", "loss_scale")
    return row | {
        **{name: [step[name] for step in steps] for name in columns},
        "seconds": steps[-1]["seconds"],
        "tokens": steps[0]["tokens"],
        "evaluated": job.evaluate(batch(job.spec, STEPS))["loss"],
        "steps_done": job.steps_done,
        "describe": job.describe(),
    }


def work(rank: int, cases: list, out: Path, shared: Path) -> None:
    """One rank of a layout: all its cases in order."""
    ranks = Plan.parse(cases[0][2]).world_size
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(out.with_suffix(".store")), ranks), rank=rank, world_size=ranks
    )
    rows = {}
    for number, (name, model, text, options) in enumerate(cases):
        rows[name] = run(model, text, options, shared / f"{out.stem}-{number}")
        gc.collect()
        dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(rows))


def fork(cases: list, out: Path, shared: Path) -> bool:
    """Fork the ranks of a layout and wait for them; the first that fails ends the others. Whether all went well."""
    running, failed = set(), False
    for rank in range(Plan.parse(cases[0][2]).world_size):
        process = os.fork()
        if process == 0:
            try:
                work(rank, cases, out, shared)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        running.add(process)
    while running:
        process, status = os.wait()
        running.discard(process)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return not failed


def layout(case: list) -> tuple:
    """What decides the process groups of a case; these cost time even when idle, so each layout has its own ranks."""
    plan = Plan.parse(case[2])
    return plan.world_size, plan.pp, plan.dp, plan.cp, plan.tp


def main(out: Path, cases: list) -> int:
    """Run all cases, one layout after another."""
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        groups = groupby(sorted(cases, key=layout), key=layout)
        for number, (_, group) in enumerate(groups):
            part = Path(folder) / f"rows-{number}.json"
            if not fork(list(group), part, Path(folder)):
                return 1
            rows |= json.loads(part.read_text())
    out.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
