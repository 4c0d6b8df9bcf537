"""One rank of a run, `torchrun -m madmax_lib.runs.train DIRECTORY ...`: read spec.json,
train, write what it did and on which machine.

Every rank draws its own share of the global batch, ahead of the step: its data phase is
waiting for it, and the copy to the device. Rank 0 appends a row to steps.csv after each
step; each rank writes its trace, labelled data, forward, backward and optimizer.
Nothing that is written adds a collective to a step. A rank that fails leaves
logs/failure_rank{r}.json; one that loses torchrun or the launcher ends itself.
"""

import csv
import ctypes
import gc
import math
import os
import platform
import re
import resource
import shutil
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.profiler import record_function

from madmax_lib.base.atomic import write_text
from madmax_lib.runs import read, testbed
from madmax_lib.runs.data.batches import draw_ahead
from madmax_lib.runs.measure import meter
from madmax_lib.runs.measure.peak_rates import (
    cores_per_rank,
    device_name,
    native_dtype,
    peak_flops,
    product_dtype,
)
from madmax_lib.runs.measure.profiler import profiler
from madmax_lib.runs.parallel import mesh, trainer as torch_trainer
from madmax_lib.runs.read import last_checkpoint
from madmax_lib.runs.summary import PROFILED, flops_per_sample, write_summary
from madmax_lib.runs.watch import guard, write_to

_PACKAGES = (
    "madmax-workbench",
    "torch",
    "numpy",
    "deepspeed",
    "transformers",
    "datasets",
    "nvidia-ml-py",
)
_STATUS = Path("/proc/self/status")


# threads that draw data; each holds a batch, in pinned memory for a GPU
_MOST_DRAWERS = 8
# in the texts of CUDA, of torch's allocator for CPUs and of the system
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")


def main(*directories: Path) -> None:
    """Train on one rank of the runs prepared in directories, one after another;
    torchrun's variables say which.
    """
    rank = int(os.environ["RANK"])
    guard()
    testbed.join(rank)
    for number, directory in enumerate(directories):
        write_to(directory / "logs" / f"rank{rank}.log")
        _train_in(directory, rank, number)


def _train_in(directory, rank, number):
    """The run of a directory; what stops it is written there."""
    try:
        _train(directory, rank, number)
    except BaseException as error:
        failure = _failure(error, rank)
        with suppress(OSError):  # of a full disk: the error itself tells more
            read.write_json(directory / "logs" / f"failure_rank{rank}.json", failure)
            summary = directory / "summary.json"
            if "MADMAX_LAUNCHER" not in os.environ and not summary.exists():
                # started by hand, nobody else writes it
                write_summary(directory, failure["status"], failure["error"])
        raise


def _train(directory, rank, number):
    spec, resolved = read.read_spec(directory)
    device = resolved.device
    _begin_memory()
    _join(device, spec.timeout_s, number)
    spec = replace(
        spec,
        data=resolved.data,
        tokenizer=resolved.tokenizer,
        dtype=native_dtype(spec.dtype, device),
    )
    trainer = _trainer(spec, device)
    data = spec.get_data()
    if resolved.starts[-1]:
        _take_up(trainer, last_checkpoint(directory))
    env = _environment(device, spec.dtype) | {
        "dtype": product_dtype(spec.dtype, device),
        "data": resolved.data,
        "data_note": resolved.data_note,
        "epoch_samples": data.sizes["train"],
    }
    first = rank == 0
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    with meter.meter(spec.power if first else "none", device, devices) as power:
        if first:
            env |= {"power_source": power.name, "power_cap_w": power.cap_w}
            env["job"] = trainer.describe()
            read.write_json(directory / "env.json", env)
            if spec.engine == "deepspeed":
                read.write_json(directory / "ds_config.json", trainer.config)
            # time of steps that an earlier start made
            before_s = read.read_steps(directory)["total_s"].sum()
        start_s = time.perf_counter()
        with _writer(spec, directory) if first else nullcontext() as write:
            _loop(spec, trainer, data, power, directory, write)
        loop_s = time.perf_counter() - start_s
    memory = _memory_bytes(device)
    entry = {"rank": rank}
    for name in ("memory_peak_bytes", "host_rss_bytes"):
        entry[name] = memory[name]
    entries = [None] * dist.get_world_size() if first else None
    dist.gather_object(entry, entries)
    if first:
        # times count from the first step on
        if rows := power.rows(start_s - before_s):
            table = pd.DataFrame(rows, columns=meter.COLUMNS)
            table.to_csv(directory / "power.csv", index=False, na_rep="nan")
        write_summary(directory, "completed", loop_s=loop_s, ranks=entries)
    dist.destroy_process_group()


def _take_up(trainer, checkpoint):
    try:
        trainer.load(checkpoint)
    except (Exception, CheckpointException) as error:  # each reader has its own
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{checkpoint}: cannot be read ({why}); delete {checkpoint.parent} to "
            "begin anew"
        ) from error


def _join(device, timeout_s, number):
    """Enter the process group, if there is more than one rank, and take a device and a
    share of the cores.

    number: of the run in these processes; groups of later ones meet under names of
    their own.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    if device == "cuda":
        # read at the first allocation
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # a peak is of one run, not of those before it in these processes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.set_float32_matmul_precision("high")  # TF32
        if threads == 1:  # torchrun's; the CPU updates what is offloaded
            threads = max(int(cores_per_rank()), 1)
    torch.set_num_threads(threads)
    world = int(os.environ["WORLD_SIZE"])
    options = {}
    if number:
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False)
        options["store"] = dist.PrefixStore(f"run {number}", store)
        options |= {"rank": int(os.environ["RANK"]), "world_size": world}
    if world > 1:
        mesh.join(device, timeout=timedelta(seconds=timeout_s), **options)


def _trainer(spec, device):
    """The model split over the ranks, by torch or DeepSpeed."""
    if spec.engine == "deepspeed":
        from madmax_lib.runs.parallel import deepspeed as engine
    else:
        engine = torch_trainer
    return engine.parallelize(
        spec.model, spec.plan, spec, device=device, sizes=spec.sizes
    )


def _loop(spec, trainer, data, power, directory, write):
    """All steps that are left; `write` takes a row of each, on rank 0. A run that was
    taken up is not traced again.
    """
    device = trainer.device.type
    steps = range(trainer.steps_done, spec.steps)
    draw = partial(_draw, data, spec, trainer)
    batches = draw_ahead(draw, steps, min(max(int(cores_per_rank()), 1), _MOST_DRAWERS))
    recording = nullcontext()
    if spec.profile and not trainer.steps_done:
        trace = directory / f"trace_rank{os.environ['RANK']}.json.gz"
        recording = profiler(trace, device, spec.profile_memory)
    with recording as recorder:
        for step in steps:
            start_s = time.perf_counter()
            with record_function("data"):
                batch = next(batches)
            waited_s = time.perf_counter() - start_s
            result = trainer.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            end_s = time.perf_counter()
            validation = {}
            if _is_due(step, spec.validate_every):
                # the same samples each time, so that their losses can be compared
                validation = trainer.evaluate(draw(0, "validation"))
            if recorder:
                recorder.step()
                if step == PROFILED[-1]:
                    _begin_memory()
                    # else the next step waits for the rank that takes longest to write
                    # its trace
                    dist.barrier()
            if write:
                result["seconds"]["data"] += waited_s
                row = {"step": step, "total_s": end_s - start_s}
                drawn = (step + 1) * spec.global_batch
                row["epoch"] = drawn / data.sizes["train"]
                row |= _result_columns(result, validation, spec)
                write(row | _memory_bytes(device) | power.window(start_s, end_s))
            if _is_due(step, spec.checkpoint_every):
                _save(trainer, directory / "checkpoints", replace_last=bool(write))


def _is_due(step, every):
    return every > 0 and (step + 1) % every == 0


def _save(trainer, folder, replace_last):
    """Save a checkpoint of all ranks; one of them puts it in the place of the last."""
    name = str(trainer.steps_done)
    trainer.save(folder / name)  # returns on the first rank when all have written
    if replace_last:
        # only now: whatever ends the run meanwhile, `latest` names a complete one
        write_text(folder / "latest", name)
        for old in folder.iterdir():
            if old.is_dir() and old.name != name:
                shutil.rmtree(old)


def _result_columns(result, validation, spec):
    """Columns of steps.csv of what `Trainer.step` and `Trainer.evaluate` return."""
    columns = {name: result[name] for name in ("samples", "loss", "accuracy")}
    for name in read.PHASES:
        columns[f"{name}_s"] = result["seconds"][name]
    for name in ("loss", "accuracy"):
        columns[f"validation_{name}"] = validation.get(name)
    # positions, not targets that count: padding is computed too
    columns["tokens"] = result["samples"] * (spec.sequence or spec.shapes.sequence)
    columns["overflow"] = int(result["overflow"])
    return columns


def _draw(data, spec, trainer, step, split="train"):
    """This rank's share of a global batch, where a GPU copies it from while it
    computes.
    """
    batch = data.batch(step, spec.global_batch, spec.seed, split, trainer.share)
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if trainer.device.type == "cuda":
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return tensors


@contextmanager
def _writer(spec, directory):
    """A function that appends a row to steps.csv, and sends it with rates of the step
    to Weights & Biases.
    """
    log = _wandb_log(spec, directory) if spec.wandb else None
    # a line is written when it is complete
    with (directory / "steps.csv").open("a", newline="", buffering=1) as file:
        table = csv.writer(file, lineterminator="\n")
        if not file.tell():
            table.writerow(read.COLUMNS)

        def write(row):
            values = {name: read.with_nulls(row[name]) for name in read.COLUMNS}
            table.writerow(values.values())
            if log:
                log(values)

        yield write
    if log:
        log(None)


def _wandb_log(spec, directory):
    """A function that sends a row, or, for None, ends."""
    import wandb

    peak = read.read_json(directory / "env.json").get("peak_flops") or math.nan
    flops = flops_per_sample(spec.shapes, spec.sequence, frozen=spec.lora_rank > 0)
    run = wandb.init(
        project="madmax-workbench",
        name=spec.name,
        dir=str(directory),
        config=asdict(spec),
    )

    def send(row):
        if row is None:
            run.finish()
            return
        rates = {
            f"{name}_per_s": row[name] / row["total_s"]
            for name in ("samples", "tokens")
        }
        done = rates["samples_per_s"] * flops["model"]
        rates["mfu"] = read.with_nulls(done / (spec.plan.world_size * peak))
        live = row | rates
        run.log({name: value for name, value in live.items() if value is not None})

    return send


def _failure(error, rank):
    text = next(iter(str(error).strip().splitlines()), "")
    no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    no_memory = no_memory or any(sign in text for sign in _OUT_OF_MEMORY)
    return {
        "rank": rank,
        "status": "out-of-memory" if no_memory else "failed",
        "error": f"{type(error).__name__}: {text}",
        "time_s": time.time(),
    }


def _environment(device, dtype):
    """Content of env.json; collective over the process group. device: cpu or cuda."""
    peak, source = peak_flops(device, dtype)
    versions = {package.name: package.version for package in distributions()}
    content = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: versions[name] for name in _PACKAGES if name in versions},
        "cuda": torch.version.cuda,
        "nccl": None,
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "device_memory_bytes": None,
        "peak_flops": peak,
        "peak_source": source,
    }
    if device == "cuda":
        content["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        memory_bytes = torch.cuda.get_device_properties().total_memory
        content["device_memory_bytes"] = memory_bytes
    return content


def _memory_bytes(device):
    """Bytes of this rank by column of steps.csv: of its device (None on a CPU) and of
    its process.
    """
    cuda = torch.cuda
    calls = {
        "memory_allocated_bytes": cuda.memory_allocated,
        "memory_reserved_bytes": cuda.memory_reserved,
        "memory_peak_bytes": cuda.max_memory_allocated,
    }
    used = {name: call() if device == "cuda" else None for name, call in calls.items()}
    # the most that was resident at once since `_begin_memory`, or, beyond Linux, ever
    try:
        resident_kib = int(re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text())[1])
        resident_bytes = 1024 * resident_kib
    except (OSError, TypeError):
        unit = (
            1 if sys.platform == "darwin" else 1024
        )  # bytes, or KiB [man 2 getrusage]
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return used | {"host_rss_bytes": resident_bytes}


def _begin_memory():
    """Give what earlier runs or a trace have left back to the system, and count the
    process's memory anew (Linux).
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's; others lack it
        # 5 resets the high-water mark of the resident set [man 5 proc]
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    # all is written; threads that torch leaves behind have aborted processes that shut
    # down slowly
    os._exit(0)
