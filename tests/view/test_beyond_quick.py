"""What a reader is offered beyond the quick ways: every notebook with quick=False at its
defaults, each of its parameters at another value, commands of README and docs at theirs.

All are slow; `.ci/nightly` runs them, `.ci/run` a quarter by turns. With MADMAX_PASSED=FILE
a line is appended for what passes; `python tests/view/test_beyond_quick.py FILE` writes the
table of docs from such lines.
"""

import csv
import datetime
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.view.notebooks.runner import (
    _declared_parameters,
    notebooks,
    run_notebook,
)

pytestmark = [pytest.mark.slow, pytest.mark.apart]
NOTEBOOKS = notebooks()
TABLE = PROJECT / "docs" / "what-was-run.csv"

# each parameter of a notebook beside quick at a value that is not its default, in as
# many runs as it takes; "vit-ddp" and the like are sets that the project ships
SETS = PROJECT / "traces"
OTHERS = {
    "00_tour": [{"trace": f"{SETS}/gpt-fsdp"}],
    "01_explore": [
        {"model": "gpt2", "cluster": "dgx-h100", "nodes": 1, "plan": "dp4.tp2", "global_batch": 16, "sequence": 512, "trace": "gpt-ddp", "ranks": [1], "step": 10},
    ],
    "10_profile_vit": [
        {"strategy": "dp2.z3", "steps": 5, "global_batch": 8, "dtype": "fp32", "learning_rate": 1e-3, "classes": 100, "validate_every": 2, "power": "none"},
        {"quick": False, "strategies": "dp1.z3.offload-all tp2", "devices": "1", "sizes": {"layers": 2}, "device": "cpu", "profile_memory": True},
        {"quick": False, "strategies": "dp1 pp2", "lora_rank": 4, "compile": False, "download": True},
    ],
    "11_profile_llm": [
        {"model": "gpt-tiny", "strategy": "tp2", "steps": 5, "global_batch": 4, "sequence": 64, "dtype": "fp32", "learning_rate": 1e-3, "validate_every": 2, "power": "none"},
        {"quick": False, "model": "gpt-tiny", "devices": "1 2", "device": "cpu", "profile_memory": True, "sizes": {"layers": 2}},
        {"quick": False, "model": "gpt-tiny", "strategies": "dp1 dp2", "lora_rank": 4, "download": True},
    ],
    "20_overlap": [{"trace": f"{SETS}/gpt-fsdp", "step": 10}],
    "21_kernels_and_launch": [{"trace": f"{SETS}/gpt-ddp"}],
    "22_collectives_and_stragglers": [{"trace": f"{SETS}/vit-ddp", "model": "llama-7b", "plan": "dp4.tp2"}],
    "23_memory_timeline": [{"trace": f"{SETS}/gpt-memory", "device": "cpu", "model": "gpt2", "plan": "dp2", "global_batch": 8, "dtype": "bf16"}],
    "24_diff_and_critical_path": [{"first": "vit-ddp", "second": "vit-fsdp", "operations": 6, "step": 10}],
    "25_gate": [{"before": "gpt-after", "after": "gpt-before", "threshold": 0.1}],
    "30_calibrate": [{"left_out": "gpt-ddp", "trace": "gpt-ddp", "other_plan": "dp4", "stack": "pytorch/torchtitan", "shots": 3}, {"model": "vit-huge", "plan": "dp1.mb64"}],
    "31_validate": [{"worst": 3, "missed": 0.1}],
    "32_this_machine": [{"machine": str(PROJECT / "traces" / "testbed")}],
    "33_kernels": [{"devices": "h100-80 h200", "stranger": "b200", "dtype": "fp8", "width": 4096, "heads": 16, "kv_heads": 4, "ranks": 4, "kind": "all_gather", "tables": str(PROJECT / "traces" / "h100" / "kernels.csv")}],
    "40_simulate_step": [{"model": "llama-7b", "cluster": "dgx-h100", "nodes": 2, "plan": "dp4.tp2.pp2.z1", "software": "nemo", "global_batch": 64, "sequence": 2048},
        {"model": "gpt2-large", "nodes": 1, "devices": 1, "plan": "dp1.z3.full", "global_batch": 8}],
    "41_what_if": [
        {"model": "llama2-7b", "cluster": "dgx-a100", "nodes": 2, "plan": "dp4.tp2.pp2.z1", "software": "", "global_batch": 64, "sequence": 4096, "dtype": "fp16",
         "others": "dp8.tp2.z1 dp16.z3", "sharded": "", "mixture": "", "routed": "dp8.tp2.z1"},
        {"model": "gpt2-large", "nodes": 1, "devices": 1, "plan": "dp1.full", "global_batch": 8, "sequence": 0, "others": "", "sharded": "", "mixture": ""},
    ],
    "42_memory": [{"model": "gpt2-large", "cluster": "dgx-h100", "nodes": 2, "plan": "dp16.z1.mb4", "global_batch": 128, "offloaded": "dp16.z2.mb4.offload-optimizer", "share": 0.5},
        {"model": "gpt2-large", "nodes": 1, "devices": 4, "plan": "dp4.z1.mb4", "global_batch": 64, "offloaded": "dp4.z2.mb4.offload-optimizer"}],
    "43_flops": [{"model": "qwen3-30b-a3b", "sequence": 4096, "tokens_per_s": 8826.0, "device": "h200", "dtype": "bf16"}],
    "50_madmax": [{"samples": 1e8, "timeline_model": "DLRM-B", "timeline_strategy": "fsdp", "prefetch_model": "GPT-3"}],
    "51_vtrain": [{"days": 10.0, "split": 3}],
    "52_metis": [{"example_layers": 8, "example_gpus": 16}],
    "53_hybrid_parallelism": [{"threads": 2}],
    "54_vit_llm_study": [{"last": 100}],
    "55_heterogeneous_training": [{"small": "dgx-1-v100", "large": "dgx-a100", "small_batch": 8, "large_batch": 16, "model": "gpt2_5b"}],
    "60_design_space": [
        {"model": "llama-7b", "cluster": "dgx-h100", "nodes": 2, "global_batch": 128, "sequence": 2048, "dtype": "fp8", "objective": "cost", "top": 100,
         "software": "torchtitan", "shards": 2, "shard": 1, "tokens": 1e12, "days": 60.0, "usd_per_hour": 2.5},
        {"model": "gpt2-large", "nodes": 1, "devices": 4, "global_batch": 64},
    ],
    "61_heterogeneous_plan": [{"model": "gpt2-large", "first": "dgx-h100", "first_nodes": 2, "second": "dgx-a100", "second_nodes": 1, "global_batch": 32}],
    "62_tune": [{"nodes": 2, "seed": 3, "live_model": "moe-tiny", "live_batch": 8, "trials": 2, "hosts": 1, "network": ""}],
}  # fmt: skip
# what cannot have another value here: a path of one's own, minutes of a calibration
KEPT = {
    "23_memory_timeline": {"snapshot"},
    "31_validate": {"table"},
    "32_this_machine": {"run", "hosts", "network", "minutes"},
    "10_profile_vit": {
        "model",
        "data",
        "weights",
        "weights_16bit",
        "adam_8bit",
        "fused_gelu",
        "wandb",
    },
    "11_profile_llm": {
        "data",
        "weights",
        "compile",
        "weights_16bit",
        "adam_8bit",
        "fused_gelu",
        "wandb",
        "tokenizer",
    },
    "53_hybrid_parallelism": {"full"},
}


def headless(name, parameters, folder):
    """Run a notebook in a folder of its own."""
    where = {"build": folder / "build", "figures": folder / "figures"}
    result = run_notebook(NOTEBOOKS[name], parameters, **where)
    assert not result.error, result.error


@pytest.fixture(autouse=True)
def passed(request, tmp_path, monkeypatch):
    """Append what passes to the file of MADMAX_PASSED."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MADMAX_OFFLINE", "1")
    before = request.session.testsfailed
    yield
    if (
        path := os.environ.get("MADMAX_PASSED")
    ) and request.session.testsfailed == before:
        with Path(path).open("a") as file:
            print(request.node.name, datetime.date.today(), sep=",", file=file)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_beyond_quick(name, tmp_path):
    more = {"minutes": 1.0, "machine": "machine"} if name.startswith("32") else {}
    headless(name, {"quick": False} | more, tmp_path)


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name, sets in OTHERS.items() for number in range(len(sets))],
)
def test_a_notebook_with_other_parameters(name, number, tmp_path):
    headless(name, {"quick": True} | OTHERS[name][number], tmp_path)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_parameter_is_left_at_its_default(name):
    declared = _declared_parameters(NOTEBOOKS[name])
    changed = {word for values in OTHERS[name] for word in values}
    assert set(declared) - {"quick"} <= changed | KEPT.get(name, set())


# what stands for a reader's own traces, and lines that need more of theirs or a GPU
STANDS_FOR = {
    "DIR": "gpt-ddp",
    "path/to/traces": "vit-ddp",
    "A": "gpt-before",
    "B": "gpt-after",
    "recorded": "gpt-ddp",
}
OWN = re.compile(r"mine|my_|traces/ |snapshot|flight|site|--hosts")


def commands():
    """Lines of shell blocks of README and docs that need nothing of the reader's own."""
    lines = {}
    pages = {PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")}
    for page in sorted(pages - {PROJECT / "docs" / "first-gpu-hour.md"}):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["madmax"] and not OWN.search(line):
                    lines[shlex.join(words)] = None
    return [*lines]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_pages_at_its_defaults(line):
    words = []
    script = PROJECT / "tests" / "runs" / "record_scripts" / "plain.py"
    Path("train.py").write_text(script.read_text())
    line = line.replace("history DIR", f"history {SETS}/runs/llm")
    line = line.replace("--steps 3:5", "--steps 10:11")  # those of the stand-in
    for word in shlex.split(line)[1:]:
        name, equals, value = word.rpartition("=")
        if value in STANDS_FOR:
            value = str(PROJECT / "traces" / STANDS_FOR[value])
        words.append(name + equals + value)
    done = subprocess.run(
        [sys.executable, "-m", "madmax_lib", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1, 3) and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("options", [[], ["--detailed"]])
def test_the_whole_bench(options):
    done = subprocess.run(
        [sys.executable, "-m", "madmax_lib", "bench", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def main(path: Path) -> None:
    """Merge lines of `MADMAX_PASSED` into the table of docs."""
    rows = {}
    for source in (TABLE, path):
        if source.exists():
            rows |= {
                row[0]: row[1] for row in csv.reader(source.open()) if len(row) == 2
            }
    rows.pop("run", None)
    lines = ["run,passed", *(f"{name},{date}" for name, date in sorted(rows.items()))]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
