"""What do `check`, `doctor`, `train` and `bench` of `python -m madmax_lib` say? Results of runs as lines or JSON."""

import json
import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import asdict, fields
from pathlib import Path

__all__ = ["add"]

_TYPES = {"int": int, "float": float, "str": str, "int | None": int}  # others are given as JSON
_ASIDE = ["machine", "threads", "low_s", "high_s", "backend"]  # columns of a bench that only its files have


def add(commands, named: list[str]) -> None:
    """Add these commands. named: the one that is asked for; only then `train` reads the fields of a run."""
    doctor = commands.add_parser("doctor", help="what works here, and which notebooks run at full size")
    doctor.set_defaults(command=_doctor)
    check = commands.add_parser("check", help="does this machine work: a line each, status 1 if a thing does not")
    train = commands.add_parser("train", help="train a model in a layout: train gpt-tiny dp2.z3 --steps 20")
    bench = commands.add_parser("bench", help="time kernels, copies, launches and collectives of this machine")
    for parser, command in ((check, _check), (train, _train), (bench, _bench)):
        parser.set_defaults(command=command)
        parser.add_argument("--json", action="store_true", help="print JSON")
    if "train" in named:
        _add_fields(train)
    train.add_argument("--offload", choices=("optimizer", "all"), help="what the host holds; added to the strategy")
    train.add_argument("--dry-run", action="store_true", help="check everything and start nothing")
    train.add_argument("-o", "--output", type=Path, help="run directory (default: runs/NAME)")
    size = {"action": "store_const", "dest": "size", "default": "normal"}
    bench.add_argument("--quick", const="quick", help="less than a minute", **size)
    bench.add_argument("--detailed", const="detailed", help="more and larger sizes", **size)
    bench.add_argument("--ranks", type=int, default=0, help="of the collectives (default: all GPUs, or 2 processes)")
    bench.add_argument("-o", "--output", type=Path, default=Path("bench"), help="folder of two CSVs (default: bench)")


def _add_fields(train: ArgumentParser) -> None:
    """An option for each field of a RunSpec, with its line of the docstring."""
    from madmax_lib.runs.spec import RunSpec

    text = "".join(kind.__doc__ or "" for kind in RunSpec.__mro__[:-1])
    about = dict(re.findall(r"^    (\w+): (.*)$", text.replace("%", "%%"), re.MULTILINE))
    for name in ("model", "strategy"):
        train.add_argument(name, help=about.get(name))
    for field in [field for field in fields(RunSpec) if field.name not in ("model", "strategy")]:
        how = (
            {"action": BooleanOptionalAction} if field.type == "bool" else {"type": _TYPES.get(field.type, json.loads)}
        )
        names = [f"--{field.name.replace('_', '-')}", *(["--batch"] if field.name == "global_batch" else [])]
        train.add_argument(*names, dest=field.name, help=about.get(field.name), **how)


def _doctor(options: Namespace) -> int:
    from madmax_lib.view.notebooks.doctor import report

    print(text := report())
    return int("\n  fails " in text)


def _check(options: Namespace) -> int:
    from madmax_lib.view.notebooks.doctor import check

    found = []
    for answer in check():
        found.append(dict(zip(("name", "status", "text"), answer, strict=True)))
        print("" if options.json else "{status:<8}{name}: {text}\n".format(**found[-1]), end="", flush=True)
    print(json.dumps(found, indent=1) + "\n" if options.json else "", end="")
    return int(any(answer["status"] == "fails" for answer in found))


def _train(options: Namespace) -> int:
    from madmax_lib.runs.launch import launch, resolve, train_command
    from madmax_lib.runs.read import read_json
    from madmax_lib.runs.spec import RunSpec

    plan, at, engine = options.strategy.partition("@")
    options.strategy = f"{plan}.offload-{options.offload}{at}{engine}" if options.offload else options.strategy
    given = {field.name: getattr(options, field.name) for field in fields(RunSpec)}
    spec = RunSpec(**{name: value for name, value in given.items() if value is not None})
    directory = options.output or Path("runs") / spec.name
    about = asdict(resolve(spec)) | {"parameters": spec.shapes.parameters, "directory": str(directory)}
    if options.dry_run:
        about["command"] = " ".join(train_command(spec, directory)[1:])
    else:
        print(f"{about['ranks']} rank(s), a row of {directory / 'steps.csv'} per step", file=sys.stderr)
        about |= read_json(launch(spec, directory, check=False) / "summary.json")
    texts = {name: f"{value:,.6g}" if isinstance(value, float) else value for name, value in about.items()}
    lines = [f"{name:<24}{text}" for name, text in texts.items() if isinstance(text, (str, int)) and text != ""]
    print(json.dumps(about, indent=1) if options.json else "\n".join(lines))
    return int(about.get("status", "completed") != "completed")


def _bench(options: Namespace) -> int:
    import pandas as pd

    from madmax_lib.runs.launch import measure_links
    from madmax_lib.runs.measure.bench import bench

    options.output.mkdir(parents=True, exist_ok=True)
    paths = {name: options.output / f"{name}.csv" for name in ("kernels", "collectives")}
    print(f"each row is added to {' or '.join(map(str, paths.values()))} when it is timed", file=sys.stderr)
    tables = {"kernels": bench(size=options.size, path=paths["kernels"])}
    if measure_links(paths["collectives"], options.size, ranks=options.ranks) > 1:
        tables["collectives"] = pd.read_csv(paths["collectives"])
    texts = [table.drop(columns=_ASIDE, errors="ignore").to_string(index=False) for table in tables.values()]
    rows = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
    print(json.dumps(rows) if options.json else "\n\n".join(texts))
    return 0
