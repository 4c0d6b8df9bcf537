"""How far is `another_plan` from the run it foretells? A row for each plan that was run.

    python benchmarks/another_plan.py -o build/another_plan --network 300mbit

Each model is trained on two hosts as dp2, and its traces alone price tp2, pp2, ZeRO-3 and
dp4 of twice the batch; then these run. Needs Linux and root, as all of the testbed does.
What is there is kept, so that the same command goes on.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
from testbed import MODELS, specs

import madmax_lib as mm
from madmax_lib import calibration
from madmax_lib.runs import launch_all, read_run

LAYOUTS = {2: ("dp", "tp", "pp", "z3"), 4: ("dp",)}  # of as many ranks
DENSE = [name for name in MODELS if name != "moe"]


def wanted(network: str) -> dict[str, object]:
    """Specifications of all runs by the name of their folder."""
    result = {}
    for ranks, layouts in LAYOUTS.items():
        runs = specs(network, ranks)
        for layout in layouts:
            for model in DENSE:
                spec = runs[f"{model} {layout}"]
                if not network:
                    spec = replace(spec, hosts=1)
                result[f"{model}_{layout}_{ranks}"] = spec
    return result


def foretold(name: str, folder: Path) -> dict[str, object]:
    """The measured and the foretold step of a run, the latter from its model's dp2."""
    model = name.split("_")[0]
    run = read_run(folder / name)
    timeline = mm.read_trace(folder / f"{model}_dp_2")
    answer = calibration.another_plan(
        timeline,
        run.spec.strategy,
        global_batch=run.spec.global_batch,
    )
    # a profiled step is longer than others, by up to 12 % here
    traced_s = float(mm.traces.steps(mm.read_trace(folder / name))["total_s"].median())
    return {
        "run": name,
        "plan": str(answer.case.plan),
        "measured_s": run.summary["step_s"]["median"],
        "traced_s": traced_s,
        "foretold_s": answer.step_s,
        "error": answer.step_s / traced_s - 1,
        "inside": answer.low_s <= traced_s <= answer.high_s,
    }


def main() -> None:
    """Run what is missing, foretell, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("build/another_plan"))
    parser.add_argument("--network", default="300mbit")
    options = parser.parse_args()
    runs = wanted(options.network)
    for name, spec in runs.items():
        if not (options.output / name / "summary.json").exists():
            launch_all({options.output / name: spec})
    targets = [name for name in runs if not name.endswith("_dp_2")]
    table = pd.DataFrame([foretold(name, options.output) for name in targets])
    print(table.to_string(index=False, float_format="{:.3f}".format))
    error = table["error"].abs()
    print(
        f"{len(table)} runs: median {error.median():.1%}, worst {error.max():.1%}, "
        f"{table['inside'].mean():.0%} inside"
    )


if __name__ == "__main__":
    main()
