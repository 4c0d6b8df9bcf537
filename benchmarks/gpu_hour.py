"""What does a GPU do that the models of it expect? A first hour on one, in stages that
each have their own limit.

`python benchmarks/gpu_hour.py FOLDER` runs all of them, with names after the folder only
those. A stage that fails or runs out of time is a line of FOLDER/stages.csv, and the next
one goes on; a stage that is done there is not run again.
- check: `madmax check`.
- traces: `traces/record.py vit-gpu gpt-gpu`, the first own traces.
- bench: `madmax bench` at its default size.
- runs: GPT-2 Large, Qwen2.5-3B, ViT and a mixture on one GPU, in three precisions, with
  recompute, compiled, low-rank, and with states on the host.
- alone: the products and attentions of those runs' traces, each timed alone.
- tests: the tests of kernels, bench and meter on this device.
- calibrate: `madmax calibrate`, three minutes.
- notebooks: 10, 11, 32 and 53 with `quick=False`.
`python benchmarks/gpu_hour.py --predict FOLDER` then prints what the simulator says of the
runs beside what they took, and needs no GPU.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd

import madmax_lib as mm
from madmax_lib import view
from madmax_lib.runs import read_runs

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOKS = (
    "10_profile_vit",
    "11_profile_llm",
    "32_this_machine",
    "53_hybrid_parallelism",
)
STEPS = 16  # of a run: 4 for warm-up and the profiler, 12 counted
MIXTURE = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816}
MIXTURE |= {"experts": 8, "expert_ffn": 2816, "sequence": 1024}
GPT = {"model": "gpt2-large", "global_batch": 32}
QWEN = {"model": "qwen2.5-3b", "global_batch": 4, "sequence": 1024}
RUNS = {
    "gpt mb8": GPT | {"strategy": "dp1.mb8"},
    "gpt mb16": GPT | {"strategy": "dp1.mb16", "profile": False},
    "gpt mb32": GPT | {"strategy": "dp1.mb32", "profile": False},
    "gpt mb8 full": GPT | {"strategy": "dp1.mb8.full"},
    "gpt mb8 fp16": GPT | {"strategy": "dp1.mb8", "dtype": "fp16", "profile": False},
    "gpt mb4 fp32": GPT | {"strategy": "dp1.mb4", "dtype": "fp32", "profile": False},
    "gpt mb8 compiled": GPT | {"strategy": "dp1.mb8", "compile": True},
    "qwen 1024": QWEN | {"strategy": "dp1.mb1", "profile": False},
    "qwen 4096 full": QWEN | {"strategy": "dp1.mb1.full", "sequence": 4096},
    "qwen 16-bit": QWEN | {"strategy": "dp1.mb4", "weights_16bit": True},
    "qwen lora": QWEN | {"strategy": "dp1.mb4", "lora_rank": 16, "profile": False},
    "vit-huge": {"model": "vit-huge", "strategy": "dp1.mb64", "global_batch": 64},
    "vit-base": {"model": "vit-base", "strategy": "dp1.mb256", "global_batch": 256},
    "mixture": {
        "model": "moe-tiny",
        "strategy": "dp1.mb16",
        "global_batch": 32,
        "sizes": MIXTURE,
    },
    "gpt offload": {
        "model": "gpt2-large",
        "strategy": "dp1.z3.offload-all.mb8",
        "global_batch": 8,
        "steps": 8,
        "profile": False,
    },
}


def specs() -> dict[str, mm.RunSpec]:
    """The runs by name."""
    common = {"steps": STEPS, "warmup": 4, "dtype": "bf16", "timeout_s": 120.0}
    return {name: mm.RunSpec(**common | fields) for name, fields in RUNS.items()}


def run_all(folder: Path) -> None:
    """Each run in its directory; one that cannot work is told and left out."""
    for name, spec in specs().items():
        directory = folder / name.replace(" ", "_")
        begun_s = time.monotonic()
        try:
            mm.launch(spec, directory, check=False)
            summary = json.loads((directory / "summary.json").read_text())
            told = [summary.get(key) for key in ("status", "error", "mfu")]
            told.append(summary.get("step_s", {}).get("median"))
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            told = [error]
        print(name, f"{time.monotonic() - begun_s:.0f} s", *told, flush=True)


def products(directory: Path) -> set[tuple]:
    """Matrix products of a run's trace: sizes and strides of the two operands."""
    found = set()
    for path in directory.glob("trace_rank0.json.gz"):
        with gzip.open(path) as text:
            events = json.load(text)["traceEvents"]
        for event in events:
            # addmm has its bias first
            first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1}.get(
                event.get("name")
            )
            about = event.get("args", {})
            if first is not None and "Input Strides" in about:
                both = [
                    about[key][first : first + 2]
                    for key in ("Input Dims", "Input Strides")
                ]
                found.add(tuple(tuple(map(tuple, pair)) for pair in both))
    return found


def time_alone(folder: Path, runs: Path) -> None:
    """Products of the runs' traces, each timed alone with operands from memory (cold) and
    as the last run left them (warm), and one product for six seconds: alone.csv.
    """
    import torch

    from madmax_lib.runs import timing

    flush = torch.empty(64 * 2**20, device="cuda")
    rows = []

    def timed(about, run, buffer=None, size="normal"):
        rows.append(about | timing(run, size, True, buffer))

    path = folder / "products.json"
    if not path.exists():
        found = set().union(*map(products, sorted(runs.iterdir())))
        path.write_text(json.dumps(sorted(found)))
    for sizes, strides in json.loads(path.read_text()):
        a, b = (
            torch.empty_strided(
                size, stride, device="cuda", dtype=torch.bfloat16
            ).normal_()
            for size, stride in zip(sizes, strides, strict=True)
        )
        about = {"kernel": "mm", "sizes": sizes, "strides": strides}
        for how, buffer in {"cold": flush, "warm": None}.items():
            timed(about | {"how": how}, partial(torch.matmul, a, b), buffer, "quick")
    for batch, heads, width, tokens in (
        (8, 20, 64, 1024),
        (1, 16, 128, 4096),
        (64, 16, 80, 257),
    ):
        shape = (batch, heads, tokens, width)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        for causal in (True, False):
            attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
            about = {
                "kernel": "attention",
                "left": shape,
                "how": "causal" if causal else "whole",
            }
            timed(about, partial(attend, is_causal=causal), flush, "quick")
    # clocks fall where power is capped
    a, b = (
        torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    begun_s = time.monotonic()
    while (now_s := time.monotonic() - begun_s) < 6:
        about = {"kernel": "mm", "sizes": [a.shape, b.shape]}
        timed(
            about | {"how": f"after {now_s:.1f} s"},
            partial(torch.matmul, a, b),
            size="quick",
        )
    table = pd.DataFrame(rows)
    table.to_csv(folder / "alone.csv", index=False)
    print(table.to_string())


def predict(folder: Path) -> pd.DataFrame:
    """Measured and predicted steps and peaks of memory of the runs in a folder, one row
    each: seconds, GB, and predicted over measured minus one.
    """
    runs = read_runs(folder)
    memory = view.memory_table(runs).set_index("run")
    rows = {}
    for name, run in runs.items():
        spec = run.spec
        device = mm.catalog.device_named(run.env["device"])
        case = {
            "global_batch": spec.global_batch,
            "sequence": spec.sequence or None,
            "dtype": run.env["dtype"],
            "software": "fsdp2-compiled" if spec.compile else "workbench",
        }
        cluster = mm.cluster(f"dgx-{device.name.split('-')[0]}", devices=1)
        row = mm.estimate(spec.shapes, cluster, spec.plan, **case).iloc[0]
        rows[name] = {
            "measured_s": run.summary.get("step_s", {}).get("median"),
            **row[["step_s", "low_s", "high_s"]],
            "mfu": run.summary.get("mfu"),
            "measured_gb": memory.loc[name, "measured_bytes"] / 1e9,
            "predicted_gb": memory.loc[name, "predicted_bytes"] / 1e9,
        }
    table = pd.DataFrame(rows).T.astype(float)
    table["error"] = table["step_s"] / table["measured_s"] - 1
    table["memory_error"] = table["predicted_gb"] / table["measured_gb"] - 1
    return table


def commands(folder: Path) -> dict[str, tuple[float, list[list[str]]]]:
    """Seconds that a stage may take, and its commands, by name."""
    python, tool = sys.executable, [sys.executable, "-m", "madmax_lib"]
    this = [python, __file__, str(folder), "--inside"]
    run = [*tool, "run", "-o", str(folder / "notebooks"), "-p", "quick=False"]
    notebooks = [[*run, name] for name in NOTEBOOKS]
    # the calibration of the stage before, which is done
    notebooks[2] += ["-p", f"machine={folder / 'machine'}", "-p", "run=gpt dp"]
    tests = ["test_kernels.py", "test_bench.py", "test_meter.py", "test_models.py"]
    paths = [str(PROJECT / "tests" / "runs" / name) for name in tests]
    return {
        "check": (60, [["nvidia-smi"], ["nvidia-smi", "topo", "-m"], [*tool, "check"]]),
        "traces": (
            60,
            [[python, str(PROJECT / "traces/record.py"), "vit-gpu", "gpt-gpu"]],
        ),
        "bench": (200, [[*tool, "bench", "-o", str(folder / "bench")]]),
        "runs": (300, [[*this, "runs"]]),
        "alone": (60, [[*this, "alone"]]),
        "tests": (90, [[python, "-m", "pytest", "-q", "-x", "-n", "4", *paths]]),
        "calibrate": (
            260,
            [[*tool, "calibrate", "-o", str(folder / "machine"), "--minutes", "3"]],
        ),
        "notebooks": (300, notebooks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--inside", choices=("runs", "alone"), help=argparse.SUPPRESS)
    parser.add_argument("--predict", action="store_true")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if asked.predict:
        print(predict(folder).to_string(float_format="{:.4g}".format))
        return
    if asked.inside == "runs":
        run_all(folder / "runs")
        return
    if asked.inside == "alone":
        time_alone(folder, folder / "runs")
        return
    path = folder / "stages.csv"
    done = (
        set(pd.read_csv(path).query("status == 0")["stage"]) if path.exists() else set()
    )
    for stage, (limit_s, lines) in commands(folder).items():
        if (asked.stages and stage not in asked.stages) or stage in done:
            continue
        # notebooks are tried, not timed, so they may share the device
        with ThreadPoolExecutor(len(lines) if stage == "notebooks" else 1) as pool:
            logs = [folder / f"{stage}{number}.log" for number in range(len(lines))]
            results = pool.map(run_stage, logs, lines, [limit_s] * len(lines))
            for line, (status, seconds) in zip(lines, results, strict=True):
                told = " ".join(line[1:]).replace(f"{PROJECT}/", "")
                row = {
                    "stage": stage,
                    "command": told,
                    "status": status,
                    "s": round(seconds, 1),
                }
                pd.DataFrame([row]).to_csv(
                    path, mode="a", header=not path.exists(), index=False
                )
                print(stage, status, f"{seconds:.0f} s", flush=True)


def run_stage(log: Path, line: list[str], limit_s: float) -> tuple[int, float]:
    """Exit status (124 when its time was over) and seconds of a command."""
    begun_s = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    with log.open("w") as text:
        print("$", *line, file=text, flush=True)
        try:
            options = {"stdout": text, "stderr": subprocess.STDOUT, "env": environment}
            status = subprocess.run(
                line, timeout=limit_s, cwd=PROJECT, **options
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
        except OSError as error:
            print(error, file=text)
            status = 127
    return status, time.monotonic() - begun_s


if __name__ == "__main__":
    main()
