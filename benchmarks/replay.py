"""How well does a trace tell a step on another network, or on more ranks? Replays
beside runs that are then made.

Runs are traced on hosts that are network namespaces, at 1 Gbit/s, and replayed with the
collectives that a bench measures on the network asked for; beside them stands a peer
that scales the communication that compute does not hide by the ratio of the rates.
`python benchmarks/replay.py FOLDER --record` makes what is missing in the folder, a
line per run, for as long as `--minutes`; then, and without `--record`, it prints the
table of what is there.

`python benchmarks/replay.py --as-measured` records nothing: it replays every trace of
three steps and more that `datasets` finds with nothing changed, beside its measured
period, and asks made jobs whose truth is known for twice the compute, twice the network
and none. `--unmarked` hides the marks of all steps and asks what the pattern of the
kernels tells of them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd

import madmax_lib as mm
from madmax_lib.catalog import datasets
from madmax_lib.runs import measure_links, testbed
from madmax_lib.traces import steps, what_if

NETWORKS = {
    "1gbit": 1e9,
    "300mbit": 3e8,
    "100mbit": 1e8,
}  # name: bits/s; the first one is traced
SIZES = {"hidden": 256, "heads": 8, "layers": 4}
MODELS = {  # name: model, changed sizes and samples per step
    "gpt": ("gpt-tiny", SIZES | {"kv_heads": 4, "ffn": 768}, 8),
    "vit": ("vit-tiny", SIZES | {"ffn": 1024}, 16),
}
STRATEGIES = ("tp2", "pp2", "dp2", "dp2.z2", "dp2.z3")
MORE_RANKS, GROWTH_NETWORK = (
    {"dp2": "dp4", "dp2.z2": "dp4.z2", "dp2.z3": "dp4.z3"},
    "300mbit",
)
# of a core that a rank has where two and four are compared: so many cores are
# everywhere
SPEED = 0.4
STEPS, UNTRACED = 9, slice(5, None)  # steps 2 to 4 are traced
AS_MEASURED = ["steps", "measured_s", "step_s", "low_s", "high_s", "replay_error"]
# labels that mark steps, of any program
MARK = (
    r"(?i)ProfilerStep|^execute_|bs="
    r"|^\W*(?:train(?:ing)?[_ ]?)?(?:step|iter|iteration|batch)[\W_]*\d+"
)
WITHIN = 0.03  # of the truth: what a replay should keep to
WIDTH, DEPTH, BATCH = 512, 8, 256  # of the module of one's own


def pairs() -> list[tuple[str, str]]:
    """(model, strategy) of what is replayed on other networks."""
    return [
        ("module", "dp2"),
        *((model, strategy) for strategy in STRATEGIES for model in MODELS),
    ]


def cases() -> list[tuple]:
    """(model, strategy, ranks, network, speed) of all runs: on each network, and with
    two and four slowed ranks.
    """
    networks = [(*pair, 2, network, 1.0) for pair in pairs() for network in NETWORKS]
    growth = [pair for pair in pairs() if pair[1] in MORE_RANKS]
    return networks + [
        (*pair, ranks, GROWTH_NETWORK, SPEED) for pair in growth for ranks in (2, 4)
    ]


def record(folder: Path, minutes: float) -> None:
    """Make the runs and the tables of links that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * minutes
    for ranks, network in [(2, network) for network in [*NETWORKS][1:]] + [
        (4, GROWTH_NETWORK)
    ]:
        if (
            not (path := links(folder, ranks, network)).exists()
            and time.monotonic() < until_s
        ):
            measure_links(path, "quick", ranks=ranks, hosts=2, network=network)
            print(path.name, flush=True)
    for case in cases():
        directory = place(folder, *case)
        if (directory / "steps.csv").exists() or time.monotonic() > until_s:
            continue
        model, strategy, ranks, network, speed = case
        spread = {
            "hosts": 2,
            "network": network,
            "speed": [speed] * ranks if speed < 1 else (),
        }
        if model == "module":
            directory.mkdir(parents=True)
            command = testbed.command(
                ranks, "benchmarks.replay", directory, "--rank", **spread
            )
            subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
                capture_output=True,
            )
        else:
            name, sizes, samples = MODELS[model]
            text = strategy if ranks == 2 else MORE_RANKS[strategy]
            text += ".nosp" * (
                (strategy, model) == ("tp2", "vit")
            )  # patches and class token are not split
            batch = samples * ranks // 2
            mm.launch(
                mm.RunSpec(
                    name,
                    text,
                    steps=STEPS,
                    sizes=sizes,
                    global_batch=batch,
                    device="cpu",
                    **spread,
                ),
                directory,
            )
        print(directory.name, flush=True)


def links(folder: Path, ranks: int, network: str) -> Path:
    return folder / f"links_{ranks}_{network}.csv"


def place(
    folder: Path, model: str, strategy: str, ranks: int, network: str, speed: float
) -> Path:
    return (
        folder / f"{model}_{strategy}_{ranks}_{network}{'_slow' if speed < 1 else ''}"
    )


def compare(folder: Path) -> pd.DataFrame:
    """Predicted and measured seconds of a step, a row per run that the folder has
    beside the run that was traced.
    """
    rows = []
    for model, strategy, ranks, network, speed in cases():
        source = (
            model,
            strategy,
            2,
            GROWTH_NETWORK if speed < 1 else next(iter(NETWORKS)),
            speed,
        )
        directory, traced = (
            place(folder, model, strategy, ranks, network, speed),
            place(folder, *source),
        )
        if directory == traced or not all(
            (path / "steps.csv").exists() for path in (directory, traced)
        ):
            continue
        timeline, table = (
            mm.read_trace(traced),
            pd.read_csv(links(folder, ranks, network)),
        )
        more = {"ranks": ranks, "devices_per_node": 2} if ranks > 2 else {}
        steps = [
            what_if(timeline, {}, step, collectives=table, **more)
            for step in timeline.steps
        ]
        traced_s = pd.concat(steps).eval("step_s + saved_s").median()
        exposed_s = mm.breakdown(timeline)["exposed_comm_s"].mean() / len(
            timeline.steps
        )
        slower = (
            NETWORKS[source[3]] / NETWORKS[network]
            if ranks == 2
            else 2 * (ranks - 1) / ranks
        )
        rows.append({
            "model": model, "strategy": strategy, "ranks": ranks, "network": network, "traced_s": traced_s,  # noqa: E501
            "measured_s": pd.read_csv(directory / "steps.csv")["total_s"].iloc[UNTRACED].median(),
            "predicted_s": pd.concat(steps)["step_s"].median(), "peer_s": traced_s + (slower - 1) * exposed_s,  # noqa: E501
        })  # fmt: skip
    result = pd.DataFrame(rows)
    for name in ("predicted", "peer"):
        result[f"{name}_error"] = result[f"{name}_s"] / result["measured_s"] - 1
    return result


def as_measured() -> pd.DataFrame:
    """Real traces of three steps and more with nothing changed: the measured period and
    what a replay gives over it, worst first.
    """
    rows = []
    for name, timeline in recordings():
        if len(timeline.steps) >= 3:
            row = what_if(timeline, {}).iloc[0]
            rows.append((name, len(timeline.ranks), *row[AS_MEASURED]))
    table = pd.DataFrame(rows, columns=["trace", "ranks", *AS_MEASURED])
    order = table["replay_error"].abs().sort_values(ascending=False).index
    return table.loc[order]


def recordings() -> Iterator[tuple[str, mm.Timeline]]:
    """Name and timeline of each trace that `datasets` finds."""
    paths = [mm.dataset(name) for name in datasets.names() if _is_here(name)]
    known = {path for path in paths if path.is_file()} | {
        file for path in paths if path.is_dir() for file in path.rglob("*.json.gz")
    }
    roots = [datasets.PROJECT, *datasets.places()]
    files = [file for root in roots for file in (root / "traces").rglob("*.json.gz")]
    for path in [*paths, *sorted(set(files) - known)]:
        try:
            yield path.name, mm.read_trace(path)
        except (OSError, ValueError):
            continue


def unmarked() -> pd.DataFrame:
    """Marked traces without their marks: how many steps the pattern of the kernels tells
    and its median period over that of the marks, - 1.

    Also of a part of one and of two steps each, where nothing should be found; without
    labels: the optimizer's are hidden too.
    """
    rows = []
    for name, timeline in recordings():
        if steps(timeline)["annotated"].any():
            numbers = timeline.steps
            parts = [numbers] * (len(numbers) > 2) + [numbers[:1], numbers[1:3][-2:]]
            for part in filter(None, parts):
                of_part = timeline.select(steps=part)
                rows.append((name, len(timeline.ranks), len(part), *_told(of_part)))
    told = ("found", "period_error", "without_labels")
    return pd.DataFrame(rows, columns=["trace", "ranks", "steps", *told])


def _told(timeline: mm.Timeline):
    names = timeline.spans["name"].astype(str)
    label = timeline.spans["kind"] == "annotation"
    hidden = label & names.str.contains(MARK)
    found = []
    for mask in (hidden, hidden | label & names.str.contains("(?i)optimi[sz]er")):
        bare = timeline.where(~mask.to_numpy())
        bare = replace(bare, spans=bare.spans.assign(step=0))
        with tempfile.TemporaryDirectory() as folder:
            mm.export_trace(bare, Path(folder))
            found.append(mm.read_trace(folder))
    period_s, marked_s = (
        steps(each)["period_s"].median() for each in (found[0], timeline)
    )
    return len(found[0].steps), period_s / marked_s - 1, len(found[1].steps)


def _is_here(name: str) -> bool:
    try:
        return datasets.dataset(name, download=False).exists()
    except (FileNotFoundError, ValueError):
        return False


def made() -> pd.DataFrame:
    """Made jobs: what a replay of their trace answers over what they then take, - 1."""
    sys.path.insert(0, str(datasets.PROJECT / "tests"))
    from oracles.made_jobs import JOBS, QUESTIONS, step_s, trace

    rows = {}
    for name, job in JOBS.items():
        table = what_if(trace(job), list(QUESTIONS.values()))
        truth_s = [
            step_s(job, asked.get("compute", 1), asked.get("comm", 1))
            for asked in QUESTIONS.values()
        ]
        rows[name] = (table["step_s"] / truth_s - 1).set_axis(list(QUESTIONS))
    return pd.DataFrame(rows).T


def train_module(directory: Path) -> None:
    """As one rank: a module that the library knows nothing of, under DDP, traced as any
    user would.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    testbed.join(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        for _ in range(DEPTH)
    ]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(WIDTH, 10)), bucket_cap_mb=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
    path, seconds = directory / f"trace_rank{dist.get_rank()}.json", []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        schedule=schedule,
        record_shapes=True,
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(STEPS):
            start_s = time.perf_counter()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
            seconds.append(time.perf_counter() - start_s)
    if dist.get_rank() == 0:
        pd.DataFrame({"step": range(STEPS), "total_s": seconds}).to_csv(
            directory / "steps.csv", index=False
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--as-measured", action="store_true", help="nothing changed, and made jobs"
    )
    parser.add_argument("--unmarked", action="store_true", help="hide marks of steps")
    parser.add_argument("--record", action="store_true", help="make what is missing")
    parser.add_argument(
        "--minutes", type=float, default=60, help="start no run later than this (60)"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.unmarked:
        warnings.simplefilter("ignore")
        table = unmarked()
        print(table.to_string(index=False, float_format="{:.4f}".format))
        whole = table["steps"] > 2
        same = (table["found"] == table["steps"]) & (
            table["period_error"].abs() <= WITHIN
        )
        print(f"{same[whole].mean():.0%} of {whole.sum()} within {WITHIN:.0%}")
        blind = table["without_labels"] == table["steps"]
        print(f"{blind[whole].mean():.0%} also without the labels of the optimizer")
        wrong = (table["found"] > 1)[~whole]
        print(f"{wrong.sum()} of {len(wrong)} of one or two steps were cut")
        return
    if options.as_measured:
        warnings.simplefilter("ignore")
        for table, errors in (
            (real := as_measured(), real["replay_error"]),
            (jobs := made(), jobs.stack()),
        ):
            print(table.to_string(float_format="{:.4f}".format))
            share = (errors.abs() <= WITHIN).mean()
            print(f"{share:.0%} of {len(errors)} within {WITHIN:.0%}")
        return
    if options.rank:
        train_module(options.folder)
        return
    if options.record:
        record(options.folder, options.minutes)
    table = compare(options.folder)
    print(table.to_string(index=False, float_format="{:.3f}".format))
    errors = table[["predicted_error", "peer_error"]].abs().groupby(table["ranks"])
    print(errors.agg(["median", "max"]).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
