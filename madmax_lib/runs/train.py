"""What does one rank of a run do? `torchrun -m madmax_lib.runs.train DIRECTORY ...`:
read spec.json, train, write.

Every rank draws its own share of the global batch, ahead of the step: its data phase is
waiting for it, and the copy to the device. Rank 0 appends a row to steps.csv after each
step; each rank writes its trace, labelled data, forward, backward and optimizer.
Nothing that is written adds a collective to a step. A rank that fails leaves
logs/failure_rank{r}.json; one that loses torchrun or the launcher ends itself.
"""

import csv
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.profiler import record_function

from madmax_lib.base.atomic import replacing, write_text
from madmax_lib.runs import read, testbed
from madmax_lib.runs.data.batches import Data, draw_ahead
from madmax_lib.runs.directory import last_checkpoint
from madmax_lib.runs.machine import begin_memory, environment, memory_bytes
from madmax_lib.runs.measure import meter
from madmax_lib.runs.measure.peak_rates import cores_per_rank, native_dtype
from madmax_lib.runs.measure.phases import profiler
from madmax_lib.runs.parallel import mesh, trainer as torch_trainer
from madmax_lib.runs.spec import RunSpec
from madmax_lib.runs.summary import PROFILED, flops_per_sample, write_summary
from madmax_lib.runs.watch import guard, write_to

__all__ = ["main"]

_MOST_DRAWERS = (
    8  # threads that draw data; each holds a batch, in pinned memory for a GPU
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")


def main(*directories: Path) -> None:
    """Train as one rank of the runs prepared in directories, one after another;
    torchrun's variables say which.
    """
    rank = int(os.environ["RANK"])
    guard()
    testbed.join(rank)
    for number, directory in enumerate(directories):
        write_to(directory / "logs" / f"rank{rank}.log")
        _train_in(directory, rank, number)


def _train_in(directory: Path, rank: int, number: int) -> None:
    """The run of a directory; what stops it is written there."""
    try:
        _train(directory, rank, number)
    except BaseException as error:
        failure = _failure(error, rank)
        with suppress(OSError):  # of a full disk: the error itself tells more
            read.write_json(directory / "logs" / f"failure_rank{rank}.json", failure)
            if (
                "MADMAX_LAUNCHER" not in os.environ
                and not (directory / "summary.json").exists()
            ):  # nobody else tells
                write_summary(directory, failure["status"], failure["error"])
        raise


def _train(directory: Path, rank: int, number: int) -> None:
    spec, resolved = read.read_spec(directory)
    spec = replace(spec, data=resolved.data, tokenizer=resolved.tokenizer)
    device = resolved.device
    first = rank == 0
    begin_memory()
    _join(device, spec.timeout_s, number)
    spec = replace(spec, dtype=native_dtype(spec.dtype, device))
    trainer = _trainer(spec, device)
    data = spec.get_data()
    if resolved.starts[-1]:
        _take_up(trainer, last_checkpoint(directory))
    env = environment(device, spec.dtype) | {"dtype": spec.dtype}
    env |= {"data": resolved.data, "data_note": resolved.data_note}
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    with meter.meter(spec.power if first else "none", device, devices) as power:
        if first:
            more = {
                "power_source": power.name,
                "power_cap_w": power.cap_w,
                "job": trainer.describe(),
            }
            read.write_json(directory / "env.json", env | more)
            before_s = read.read_steps(directory)[
                "total_s"
            ].sum()  # of steps that an earlier start made
        start_s = time.perf_counter()
        with _writer(spec, directory) if first else nullcontext() as write:
            _loop(spec, trainer, data, power, directory, write)
        loop_s = time.perf_counter() - start_s
    memory = memory_bytes(device)
    ranks = _gather(
        {"rank": rank}
        | {name: memory[name] for name in ("memory_peak_bytes", "host_rss_bytes")}
    )
    if first:
        _write_power(directory / "power.csv", power.rows(start_s - before_s))
        write_summary(directory, "completed", loop_s=loop_s, ranks=ranks)
    dist.destroy_process_group()


def _take_up(trainer, checkpoint: Path) -> None:
    try:
        trainer.load(checkpoint)
    except (Exception, CheckpointException) as error:  # each reader has its own
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{checkpoint}: cannot be read ({why}); delete {checkpoint.parent} to "
            "begin anew"
        ) from error


def _join(device: str, timeout_s: float, number: int) -> None:
    """Enter the process group, if there is more than one rank, and take a device and a
    share of the cores.

    number: of the run in these processes; groups of later ones meet under names of
    their own.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    if device == "cuda":
        os.environ.setdefault(
            "PYTORCH_ALLOC_CONF", "expandable_segments:True"
        )  # read at the first allocation
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")  # TF32
        if threads == 1:  # torchrun's; the CPU updates what is offloaded
            threads = max(int(cores_per_rank()), 1)
    torch.set_num_threads(threads)
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    options = {}
    if number:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        options = {
            "store": dist.PrefixStore(f"run {number}", store),
            "rank": rank,
            "world_size": world,
        }
    if world > 1:
        mesh.join(device, timeout=timedelta(seconds=timeout_s), **options)


def _trainer(spec: RunSpec, device: str):
    """The model split over the ranks, by torch or DeepSpeed."""
    if spec.engine == "deepspeed":
        from madmax_lib.runs.parallel import deepspeed as engine
    else:
        engine = torch_trainer
    return engine.parallelize(
        spec.model, spec.plan, spec, device=device, sizes=spec.sizes
    )


def _loop(
    spec: RunSpec,
    trainer,
    data: Data,
    power: meter.Meter,
    directory: Path,
    write: Callable | None,
) -> None:
    """All steps that are left; `write` takes a row of each, on rank 0. A run that was
    taken up is not traced again.
    """
    device = trainer.device.type
    steps = range(trainer.steps_done, spec.steps)
    trace = directory / f"trace_rank{os.environ['RANK']}.json.gz"
    draw = partial(_draw, data, spec, trainer)
    batches = draw_ahead(draw, steps, min(max(int(cores_per_rank()), 1), _MOST_DRAWERS))
    traced = spec.profile and not trainer.steps_done
    with (
        profiler(trace, device, spec.profile_memory)
        if traced
        else nullcontext() as recorder
    ):
        for step in steps:
            start_s = time.perf_counter()
            with record_function("data"):
                batch = next(batches)
            waited_s = time.perf_counter() - start_s
            result = trainer.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            end_s = time.perf_counter()
            # the same samples each time, so that their losses can be compared
            validation = (
                trainer.evaluate(draw(0, "validation"))
                if _is_due(step, spec.validate_every)
                else {}
            )
            if recorder:
                recorder.step()
                if step == PROFILED[-1]:
                    begin_memory()
                    # else the next step waits for the rank that takes longest to write
                    # its trace
                    dist.barrier()
            if write:
                result["seconds"]["data"] += waited_s
                times = {"step": step, "total_s": end_s - start_s}
                times |= {
                    f"validation_{name}": validation.get(name)
                    for name in ("loss", "accuracy")
                }
                used = memory_bytes(device) | power.window(start_s, end_s)
                write(times | _result_columns(result, spec) | used)
            if _is_due(step, spec.checkpoint_every):
                _save(trainer, directory / "checkpoints", replace_last=bool(write))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and (step + 1) % every == 0


def _save(trainer, folder: Path, replace_last: bool) -> None:
    """Save a checkpoint of all ranks; one of them puts it in place of the last."""
    name = str(trainer.steps_done)
    trainer.save(folder / name)  # returns on the first rank when all have written
    if replace_last:
        write_text(folder / "latest", name)
        for old in folder.iterdir():
            if old.is_dir() and old.name != name:
                shutil.rmtree(old)


def _result_columns(result: dict, spec: RunSpec) -> dict:
    """Columns of steps.csv that `Trainer.step` tells."""
    phases = {f"{name}_s": result["seconds"][name] for name in read.PHASES}
    same = {name: result[name] for name in ("samples", "loss", "accuracy")}
    tokens = result["samples"] * (spec.sequence or spec.shapes.sequence)
    return {**phases, **same, "tokens": tokens, "overflow": int(result["overflow"])}


def _draw(
    data: Data, spec: RunSpec, trainer, step: int, split: str = "train"
) -> dict[str, Tensor]:
    """This rank's share of a global batch, where a GPU copies it from while it
    computes.
    """
    batch = data.batch(step, spec.global_batch, spec.seed, split, trainer.share)
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    return {
        name: part.pin_memory() if trainer.device.type == "cuda" else part
        for name, part in tensors.items()
    }


@contextmanager
def _writer(spec: RunSpec, directory: Path) -> Iterator[Callable[[dict], None]]:
    """A function that appends a row to steps.csv, and sends it with rates of the step
    to Weights & Biases.
    """
    log = None
    if spec.wandb:
        import wandb

        peak = read.read_json(directory / "env.json").get("peak_flops") or math.nan
        flops = flops_per_sample(spec.shapes, spec.sequence, frozen=spec.lora_rank > 0)[
            "model"
        ]
        log = wandb.init(
            project="madmax-workbench",
            name=spec.name,
            dir=str(directory),
            config=asdict(spec),
        )
    with (directory / "steps.csv").open("a", newline="", buffering=1) as file:
        table = csv.writer(file, lineterminator="\n")
        if not file.tell():
            table.writerow(read.COLUMNS)

        def write(row: dict) -> None:
            values = [read.with_nulls(row[name]) for name in read.COLUMNS]
            table.writerow(values)
            if log:
                rates = {
                    f"{name}_per_s": row[name] / row["total_s"]
                    for name in ("samples", "tokens")
                }
                rates["mfu"] = read.with_nulls(
                    rates["samples_per_s"] * flops / (spec.plan.world_size * peak)
                )
                live = dict(zip(read.COLUMNS, values, strict=True)) | rates
                log.log(
                    {name: value for name, value in live.items() if value is not None}
                )

        yield write
    if log:
        log.finish()


def _gather(own: dict) -> list[dict]:
    """The entries of all ranks, on rank 0."""
    entries = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, entries)
    return entries or []


def _failure(error: BaseException, rank: int) -> dict:
    text = next(iter(str(error).strip().splitlines()), "")
    no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        sign in text for sign in _OUT_OF_MEMORY
    )
    status = "out-of-memory" if no_memory else "failed"
    return {
        "rank": rank,
        "status": status,
        "error": f"{type(error).__name__}: {text}",
        "time_s": time.time(),
    }


def _write_power(path: Path, rows: list[tuple]) -> None:
    """The readings of the meter, times from the first step on; no file where there is
    nothing to read.
    """
    if rows:
        with replacing(path) as temporary, temporary.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerows([meter.COLUMNS, *rows])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
        # all is written; threads that torch leaves behind have aborted processes that shut
        # down slowly
    )
