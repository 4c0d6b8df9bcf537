"""Runs many plans in one start: imports once, forks one process per rank, writes what
rank 0 saw as JSON.

    python runs_worker.py OUT CASES DEVICE      CASES: JSON list of [name, model, plan text, options]

Every case trains three steps on the batches of a seed. Options are `Settings`, `sizes`,
`first_scale` of an fp16 loss, and `check`: "counts" records the collectives of the last
step; any other text is the plan under which the last step is taken, after a checkpoint.
"""

import gc
import json
import sys
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

# these are imported when needed: better once than per rank
import torch.distributed._composable.replicate_with_fsdp
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from madmax_lib.plan.plan import Plan
from madmax_lib.runs.parallel import mesh, trainer
from madmax_lib.runs.settings import Settings

BATCH, SEQUENCE, STEPS = 8, 16, 3
KINDS = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
)


class Collectives(TorchDispatchMode):
    """Counts collectives and the bytes of their larger side by kind."""

    def __init__(self):
        super().__init__()
        self.calls, self.sizes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            function.namespace in ("c10d", "_c10d_functional")
            and "wait" not in function.__name__
        ):
            plain = function.__name__.replace("_", "")
            kind = next(
                (kind for kind in KINDS if kind.replace("_", "") in plain), None
            )
            if kind:
                self.calls[kind] += 1
                self.sizes[kind] += max(_tensor_bytes(args), _tensor_bytes(result))
        return result


def _tensor_bytes(value) -> int:
    return max(
        (part.nbytes for part in tree_leaves(value) if isinstance(part, torch.Tensor)),
        default=0,
    )


def batch(job, step: int) -> dict[str, torch.Tensor]:
    """A rank's share of the global batch of a step: random tokens, a fifth of the
    targets masked; or random images.
    """
    spec, generator = job.spec, torch.Generator().manual_seed(100 + step)
    if spec.image:
        images = torch.randn(BATCH, 3, spec.image, spec.image, generator=generator)
        whole = {
            "images": images,
            "labels": torch.randint(0, spec.classes, (BATCH,), generator=generator),
        }
    else:
        tokens = torch.randint(
            0, spec.vocab, (BATCH, SEQUENCE + 1), generator=generator
        )
        masked = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.2
        whole = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:].masked_fill(masked, -100),
        }
    number, count = job.share
    return {name: part.chunk(count)[number] for name, part in whole.items()}


def run(model: str, text: str, options: dict, directory: Path, device: str) -> dict:
    """Train three steps of a case; a row of what came out."""
    options = dict(options)
    check, first_scale, sizes = (
        options.pop(name, None) for name in ("check", "first_scale", "sizes")
    )
    arguments = {
        "global_batch": BATCH,
        "sequence": SEQUENCE,
        "learning_rate": 3e-3,
        "clip_norm": 0.5,
        **options,
    }
    place = {"sizes": sizes, "device": device}
    job = trainer.parallelize(model, Plan.parse(text), Settings(**arguments), **place)
    job.scale.value = first_scale or job.scale.value
    steps, row = [], {}
    for step in range(STEPS):
        if check == "counts" and step == STEPS - 1:
            with Collectives() as seen:
                steps.append(job.step(batch(job, step)))
            row = {"calls": dict(seen.calls), "sizes": dict(seen.sizes)}
        elif check and step == STEPS - 1:
            job.save(directory)
            job = trainer.parallelize(
                model, Plan.parse(check), Settings(**{**arguments, "seed": 7}), **place
            )
            job.load(directory)
            steps.append(job.step(batch(job, step)))
        else:
            steps.append(job.step(batch(job, step)))
    columns = ("loss", "grad_norm", "accuracy", "overflow", "loss_scale")
    return row | {
        **{name: [step[name] for step in steps] for name in columns},
        "tokens": steps[0]["tokens"],
        "evaluated": job.evaluate(batch(job, STEPS))["loss"],
        "steps_done": job.steps_done,
        "describe": job.describe(),
    }


def work(rank: int, cases: list, out: Path, shared: Path, device: str) -> None:
    """One rank of a layout: all its cases in order."""
    ranks = Plan.parse(cases[0][2]).world_size
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = (
            False  # as products are, which keep fp32 by default
        )
    mesh.join(
        device,
        store=dist.FileStore(str(out.with_suffix(".store")), ranks),
        rank=rank,
        world_size=ranks,
    )
    rows = {}
    for number, (name, model, text, options) in enumerate(cases):
        rows[name] = run(model, text, options, shared / f"{out.stem}-{number}", device)
        gc.collect()
        dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(rows))


def layout(case: list) -> tuple:
    """What decides the process groups of a case; these cost time even when idle, so
    each layout has its own ranks.
    """
    plan = Plan.parse(case[2])
    return plan.world_size, plan.pp, plan.dp, plan.cp, plan.tp


def main(out: Path, cases: list, device: str) -> None:
    """Run all cases, one layout after another; the first rank that fails ends the
    others and raises.
    """
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        groups = groupby(sorted(cases, key=layout), key=layout)
        for number, ((ranks, *_), group) in enumerate(groups):
            part = Path(folder) / f"rows-{number}.json"
            start_processes(
                work,
                (list(group), part, Path(folder), device),
                nprocs=ranks,
                start_method="fork",
            )
            rows |= json.loads(part.read_text())
    out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
