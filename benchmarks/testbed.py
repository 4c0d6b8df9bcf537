"""How far are predictions of a calibrated testbed from runs that its fit has not seen?
A row of a CSV per run.

    python benchmarks/testbed.py -o build/testbed --network 300mbit --minutes 5

Calibrates two hosts joined at a rate (`mm.calibrate`), predicts four models in seven
layouts, and then runs them. What is there is kept, so that the same command goes on; it
begins no further start after the minutes.
"""

import argparse
import time
from pathlib import Path

import pandas as pd

import madmax_lib as mm
from madmax_lib.calibration import compared, predicted
from madmax_lib.runs import RunSpec, launch_all, read_run

MODELS = {
    "gpt-a": (
        "gpt-tiny",
        {"layers": 4, "hidden": 192, "heads": 8, "kv_heads": 4, "ffn": 576},
        8,
    ),
    "gpt-b": (
        "gpt2-large",
        {
            "layers": 3,
            "hidden": 160,
            "heads": 8,
            "ffn": 640,
            "vocab": 768,
            "sequence": 192,
        },
        8,
    ),
    "vit": ("vit-tiny", {"layers": 6, "hidden": 160, "heads": 8, "ffn": 480}, 16),
    "moe": ("moe-tiny", {"layers": 4, "hidden": 96, "heads": 8, "expert_ffn": 256}, 8),
}
LAYOUTS = ("dp", "z3", "tp", "pp", "cp", "ep", "z2")
TOGETHER = 4  # runs in one start
CALIBRATION = 2.0  # minutes, within which a calibration begins runs of its own


def strategy(layout: str, model: str, ranks: int) -> str:
    """Text of a layout; on four ranks the other two are data parallel. Empty where the
    model has no such layout.
    """
    if (layout == "ep") > (model == "moe") or (layout, model) == ("cp", "vit"):
        return ""
    zero = {"dp": "", "z2": ".z2", "z3": ".z3", "ep": ".ep2"}
    if layout in zero:
        return f"dp{ranks}{zero[layout]}"
    return (
        f"{layout}2"
        + f".dp{ranks // 2}" * (ranks > 2)
        + ".nosp" * ((layout, model) == ("tp", "vit"))
    )


def specs(network: str, ranks: int) -> dict[str, RunSpec]:
    """All runs of a network by name, layout by layout."""
    result, how = (
        {},
        {"steps": 11, "warmup": 1, "device": "cpu", "hosts": 2, "timeout_s": 120.0},
    )
    for layout in LAYOUTS:
        for name, (model, sizes, batch) in MODELS.items():
            if text := strategy(layout, name, ranks):
                more = {
                    "sizes": sizes,
                    "global_batch": batch * ranks // 2,
                    "network": network,
                }
                result[f"{name} {layout}"] = RunSpec(model, text, **more, **how)
    return result


def main() -> None:
    """Calibrate, predict, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("build/testbed"))
    parser.add_argument("--network", default="300mbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0)
    options = parser.parse_args()
    until_s, folder = (
        time.monotonic() + 60 * options.minutes,
        options.output / f"{options.network}-{options.ranks}",
    )
    machine_at = folder / "machine"
    if not (machine_at / "machine.json").exists():
        mm.calibrate(
            machine_at,
            hosts=2,
            network=options.network,
            minutes=CALIBRATION,
            ranks=options.ranks,
        )
    machine, runs = mm.machine(machine_at), specs(options.network, options.ranks)
    predictions = {name: predicted(machine, spec) for name, spec in runs.items()}
    left = [
        name
        for name in runs
        if not (folder / name.replace(" ", "_") / "summary.json").exists()
    ]
    while left and time.monotonic() < until_s:
        some, left = left[:TOGETHER], left[TOGETHER:]
        launch_all({folder / name.replace(" ", "_"): runs[name] for name in some})
    rows = []
    for name, prediction in predictions.items():
        if (folder / name.replace(" ", "_") / "summary.json").exists():
            run = read_run(folder / name.replace(" ", "_"))
            if run.summary["status"] == "completed":
                about = {
                    "network": options.network,
                    "ranks": options.ranks,
                    "run": name,
                }
                rows.append(about | compared(pd.Series(prediction), run))
    table = pd.DataFrame(rows)
    table.to_csv(folder / "testbed.csv", index=False, float_format="%.4g")
    columns = ["run", "predicted_s", "measured_s", "error"]
    columns += [
        f"{which}_{of}"
        for of in ("exposed_comm", "overlap")
        for which in ("predicted", "measured")
    ]
    print(table[columns].to_string(index=False, float_format="{:.3f}".format))
    errors = table["error"].abs()
    print(
        f"{len(table)} runs, {len(left)} left; steps: median {errors.median():.1%}, "
        f"worst {errors.max():.1%}"
    )
    for of in ("exposed_comm", "overlap"):
        print(
            f"{of}: off by "
            f"{(table[f'predicted_{of}'] - table[f'measured_{of}']).abs().mean():.3f} "
            "on average"
        )


if __name__ == "__main__":
    main()
