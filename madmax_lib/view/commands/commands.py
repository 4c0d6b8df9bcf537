"""What do `check`, `doctor`, `train`, `bench` and `calibrate` of `python -m madmax_lib`
say? Lines or JSON.
"""

import json
import re
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from dataclasses import asdict, fields
from pathlib import Path

__all__ = ["add"]

_TYPES = {
    "int": int,
    "float": float,
    "str": str,
    "int | None": int,
}  # others are given as JSON
_BESIDE = ("predicted", "measured")
_ASIDE = [
    "machine",
    "threads",
    "low_s",
    "high_s",
    "backend",
]  # columns of a bench that only its files have


def add(commands, named: list[str]) -> None:
    """Add these commands. named: the one that is asked for; only then `train` reads the
    fields of a run.
    """
    doctor = commands.add_parser(
        "doctor", help="what works here, and which notebooks run at full size"
    )
    doctor.set_defaults(command=_doctor)
    check = commands.add_parser(
        "check", help="does this machine work? a line per item, status 1 if one fails"
    )
    train = commands.add_parser(
        "train", help="train a model in a layout: train gpt-tiny dp2.z3 --steps 20"
    )
    bench = commands.add_parser(
        "bench", help="time kernels, copies, launches and collectives of this machine"
    )
    calibrate = commands.add_parser(
        "calibrate",
        help="fit the simulator to this machine, and test it on further runs",
    )
    calibrate.add_argument(
        "--hosts", type=int, default=1, help="namespaces of a testbed (default: 1)"
    )
    calibrate.add_argument(
        "--network", default="", help="rate of their uplinks, such as 300mbit"
    )
    calibrate.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="after which no further run starts (default: 5)",
    )
    calibrate.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto (default)"
    )
    calibrate.add_argument(
        "--ranks",
        type=int,
        default=0,
        help="default: all GPUs, or two processes and one a host",
    )
    calibrate.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("machine"),
        help="directory (default: machine)",
    )
    for parser, command in (
        (check, _check),
        (train, _train),
        (bench, _bench),
        (calibrate, _calibrate),
    ):
        parser.set_defaults(command=command)
        parser.add_argument("--json", action="store_true", help="print JSON")
    if "train" in named:
        _add_fields(train)
    train.add_argument(
        "--offload",
        choices=("optimizer", "all"),
        help="what the host holds (optimizer: on @deepspeed)",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="check everything and start nothing"
    )
    train.add_argument(
        "-o", "--output", type=Path, help="run directory (default: runs/NAME)"
    )
    size = {"action": "store_const", "dest": "size", "default": "normal"}
    sizes = bench.add_mutually_exclusive_group()
    sizes.add_argument("--quick", const="quick", help="less than a minute", **size)
    sizes.add_argument(
        "--detailed", const="detailed", help="more and larger sizes", **size
    )
    ranks = {"type": _ranks, "default": 0, "metavar": "N"}
    bench.add_argument(
        "--ranks",
        help="of the collectives (default: all GPUs, or 2 processes)",
        **ranks,
    )
    bench.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("bench"),
        help="folder of two CSVs (default: bench)",
    )


def _add_fields(train: ArgumentParser) -> None:
    """An option for each field of a RunSpec, with its line of the docstring."""
    from madmax_lib.runs.data.batches import NAMES
    from madmax_lib.runs.model.models import MODELS
    from madmax_lib.runs.spec import RunSpec

    text = "".join(
        kind.__doc__ or "" for kind in RunSpec.__mro__[-2::-1]
    )  # its own lines stand before those of a base
    about = dict(
        re.findall(r"^    (\w+): (.*)$", text.replace("%", "%%"), re.MULTILINE)
    )
    about |= {
        "model": f"one of {', '.join(MODELS)}",
        "data": f"one of {', '.join(NAMES)}; generated if left out",
    }
    for name in ("model", "strategy"):
        train.add_argument(name, help=about.get(name))
    for field in [
        field for field in fields(RunSpec) if field.name not in ("model", "strategy")
    ]:
        how = (
            {"action": BooleanOptionalAction}
            if field.type == "bool"
            else {"type": _TYPES.get(field.type, _json)}
        )
        names = [
            f"--{field.name.replace('_', '-')}",
            *(["--batch"] if field.name == "global_batch" else []),
        ]
        train.add_argument(*names, dest=field.name, help=about.get(field.name), **how)


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1024):
        raise ArgumentTypeError(f"{text!r} is not a number of 1 to 1024")
    return int(text)


def _json(text: str):
    try:
        return json.loads(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not JSON, such as '{{\"layers\": 2}}' or '[0.5, 1]'"
        ) from None


def _doctor(options: Namespace) -> int:
    from madmax_lib.view.notebooks.doctor import report

    print(text := report())
    return int("\n  fails " in text)


def _check(options: Namespace) -> int:
    from madmax_lib.view.notebooks.doctor import check

    found = []
    for answer in check():
        found.append(dict(zip(("name", "status", "text"), answer, strict=True)))
        print(
            "" if options.json else "{status:<8}{name}: {text}\n".format(**found[-1]),
            end="",
            flush=True,
        )
    print(json.dumps(found, indent=1) + "\n" if options.json else "", end="")
    return int(any(answer["status"] == "fails" for answer in found))


def _train(options: Namespace) -> int:
    from madmax_lib.runs.launch import RunError, launch, resolve, train_command
    from madmax_lib.runs.read import read_json, read_run
    from madmax_lib.runs.spec import RunSpec

    plan, at, engine = options.strategy.partition("@")
    options.strategy = (
        f"{plan}.offload-{options.offload}{at}{engine}"
        if options.offload
        else options.strategy
    )
    given = {field.name: getattr(options, field.name) for field in fields(RunSpec)}
    spec = RunSpec(
        **{name: value for name, value in given.items() if value is not None}
    )
    directory = options.output or Path("runs") / spec.name
    about = asdict(resolve(spec, directory)) | {
        "parameters": spec.shapes.parameters,
        "directory": str(directory),
    }
    if options.dry_run:
        about["command"] = shlex.join(train_command(spec, directory))
    else:
        before = read_json(directory / "summary.json").get("status")
        way = (
            f"goes on at step {about['starts'][-1]}"
            if any(about["starts"])
            else "is replaced"
        )
        told = f"; the {before} run there {way}" if before else ""
        print(
            f"{about['ranks']} rank(s), a row of {directory / 'steps.csv'} per "
            f"step{told}",
            file=sys.stderr,
        )
        try:
            launch(spec, directory)
        except RunError as error:
            print(f"madmax: {error}", file=sys.stderr)
            about["status"] = error.status
        about |= read_run(directory).summary  # which warns of a peak that is too low
    shown = about | {"step_s": (about.get("step_s") or {}).get("median")}
    texts = {
        name: f"{value:,.6g}" if isinstance(value, float) else value
        for name, value in shown.items()
    }
    lines = [
        f"{name:<24}{text}"
        for name, text in texts.items()
        if isinstance(text, (str, int)) and text != ""
    ]
    print(json.dumps(about, indent=1) if options.json else "\n".join(lines))
    return int(about.get("status", "completed") != "completed")


def _bench(options: Namespace) -> int:
    import pandas as pd

    from madmax_lib.runs.launch import measure_links
    from madmax_lib.runs.measure.bench import bench

    options.output.mkdir(parents=True, exist_ok=True)
    paths = {
        name: options.output / f"{name}.csv" for name in ("kernels", "collectives")
    }
    print(
        f"each row is added to {' or '.join(map(str, paths.values()))} when it is timed",
        file=sys.stderr,
    )
    tables = {"kernels": bench(size=options.size, path=paths["kernels"])}
    if measure_links(paths["collectives"], options.size, ranks=options.ranks) > 1:
        tables["collectives"] = pd.read_csv(paths["collectives"])
    texts = [
        table.drop(columns=_ASIDE, errors="ignore").to_string(index=False)
        for table in tables.values()
    ]
    rows = {
        name: json.loads(table.to_json(orient="records"))
        for name, table in tables.items()
    }
    print(json.dumps(rows) if options.json else "\n\n".join(texts))
    return 0


def _calibrate(options: Namespace) -> int:
    import pandas as pd

    from madmax_lib.calibration.machine.calibrate import calibrate

    names = ("hosts", "network", "minutes", "device", "ranks")
    machine = calibrate(
        options.output, **{name: getattr(options, name) for name in names}
    )
    results = pd.read_csv(options.output / "results.csv")
    if options.json:
        print(
            json.dumps(
                {
                    **machine.provenance,
                    "results": json.loads(results.to_json(orient="records")),
                },
                indent=1,
            )
        )
        return 0
    columns = [
        "run",
        "strategy",
        "predicted_s",
        "measured_s",
        "error",
        "predicted_exposed_comm",
        "measured_exposed_comm",
    ]
    print(
        results[columns].to_string(index=False, float_format="{:.3f}".format)
        if len(results)
        else "no further run"
    )
    print(
        "\n".join(
            [
                "",
                *machine.provenance["notes"],
                f"all of it: {options.output / 'page.html'}",
            ]
        )
    )
    return 0
