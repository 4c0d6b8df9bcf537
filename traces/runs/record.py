"""How were the run directories of this folder made? Every strategy below, run for real
and slimmed for the repository.

`python traces/runs/record.py` runs all of them, `python traces/runs/record.py llm` or a
run's name only some. Each is an ordinary `mm.launch`. Of its directory the logs are
dropped, and the traces but for the first rank of a few runs; breakdown.csv is what
`mm.breakdown` made of the traces of all ranks before.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from pathlib import Path

import madmax_lib as mm

HERE = Path(__file__).parent
STEPS = 12  # two to warm up, three traced in the middle
VIT = (
    "dp1",
    "dp2",
    "dp2.z2",
    "dp2.z3",
    "tp2.nosp",
    "pp2",
    "dp2.tp2.nosp",
    "dp2.tp2.pp2.nosp",
)
LLM = ("dp1", "dp2", "dp2.z3", "tp2", "pp2", "cp2", "dp2.ep2", "dp2.tp2")
LLM_3D_TO_5D = ("dp2.tp2.pp2", "dp2.tp2.pp2.ep2", "dp2.tp2.pp2.cp2.ep2")
FAST = {
    "learning_rate": 3e-3,
    "device": "cpu",
}  # the loss falls within the steps of a run
IMAGES = {"global_batch": 16, "sizes": {"classes": 10}, **FAST}
SETS = {
    "vit": [
        *(mm.RunSpec("vit-tiny", strategy, STEPS, **IMAGES) for strategy in VIT),
        mm.RunSpec("vit-tiny", "dp1", STEPS, lora_rank=8, **IMAGES),
    ],
    "llm": [
        mm.RunSpec("moe-tiny", strategy, STEPS, global_batch=8, **FAST)
        for strategy in (*LLM, *LLM_3D_TO_5D)
    ],
}
TRACED = (
    "vit-tiny_dp2",
    "vit-tiny_dp2.z3",
    "moe-tiny_dp2.z3",
    "moe-tiny_pp2",
    "moe-tiny_dp2.tp2",
)


def record(spec: mm.RunSpec, folder: Path) -> None:
    """Run a spec and keep what the repository needs of its directory."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = mm.launch(spec, Path(scratch) / spec.name)
        target = folder / spec.name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in ("spec.json", "env.json", "steps.csv", "summary.json"):
            shutil.copy(directory / name, target / name)
        mm.breakdown(mm.read_trace(directory)).to_csv(
            target / "breakdown.csv", index=False, float_format="%.9g"
        )
        if spec.name in TRACED:
            trace = gzip.decompress((directory / "trace_rank0.json.gz").read_bytes())
            (target / "trace_rank0.json.gz").write_bytes(
                gzip.compress(trace, compresslevel=9, mtime=0)
            )


def main(asked: list[str]) -> None:
    """Record the sets or runs asked for, all of them by default."""
    for name, specs in SETS.items():
        for spec in specs:
            if not asked or name in asked or spec.name in asked:
                record(spec, HERE / name)
                print(f"{name}/{spec.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
