"""`check`, `doctor`, `train`, `record`, `bench` and `calibrate` of `python -m
madmax_lib`: lines or JSON about this machine and what it runs.
"""

import json
import re
import shlex
import sys
from argparse import ArgumentTypeError, BooleanOptionalAction
from dataclasses import asdict, fields
from pathlib import Path

from madmax_lib.view.commands.answers import COLUMNS, Answer, add_parser, envelope
from madmax_lib.view.commands.record import record

# others are given as JSON
_TYPES = {"int": int, "float": float, "str": str, "int | None": int}
# one machine has fewer; a slip such as 10000 would start as many processes
_MOST_RANKS = 1024


def add(commands, words: list[str]) -> None:
    """Add these commands. words: those of the command line; only where they ask for
    `train` its fields of a run are read.
    """

    def doctor(_options):
        from madmax_lib.view.notebooks.doctor import report

        text = report()
        print(text)
        return int("\n  fails " in text)  # as a line of `check` says it

    kinds = {"ranks": _ranks}
    for command in (doctor, _check, record, _bench, _calibrate):
        add_parser(commands, command.__name__.strip("_"), command, **kinds)
    train = add_parser(commands, "train", _train, **kinds)
    # reading them imports the runs, which other commands need not wait for
    if "train" in words:
        _add_fields(train)


def _add_fields(train):
    """An option for each field of a RunSpec, with its line of the docstring."""
    from madmax_lib.runs.data.batches import NAMES
    from madmax_lib.runs.model.models import MODELS
    from madmax_lib.runs.spec import RunSpec

    # bases first, so that a class's own line about a field is the one that counts
    text = "".join(kind.__doc__ or "" for kind in RunSpec.__mro__[-2::-1])
    # a field and its sentence, which may go on in the next lines
    sentence = r"^    (\w+): (.*?)(?=\.\s|\n\n|\n    \w+: |\Z)"
    lines = re.findall(sentence, text, re.MULTILINE | re.DOTALL)
    about = {name: " ".join(line.split()) for name, line in lines}
    about = {name: line.replace("%", "%%") for name, line in about.items()}
    about["model"] = f"one of {', '.join(MODELS)}"
    about["data"] = f"one of {', '.join(NAMES)}; generated if left out"
    for field in fields(RunSpec):
        name = field.name
        if name in ("model", "strategy"):
            train.add_argument(name, nargs="?", help=about.get(name))
            continue
        how = {"type": _TYPES.get(field.type, _json)}
        if field.type == "bool":
            how = {"action": BooleanOptionalAction}
        names = [f"--{name.replace('_', '-')}"]
        if name == "global_batch":
            names.append("--batch")
        train.add_argument(*names, dest=name, help=about.get(name), **how)


def _ranks(text):
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_RANKS):
        raise ArgumentTypeError(f"{text!r} is not a number of 1 to {_MOST_RANKS}")
    return int(text)


def _json(text):
    try:
        return json.loads(text)
    except ValueError:
        examples = "such as '{\"layers\": 2}' or '[0.5, 1]'"
        raise ArgumentTypeError(f"{text!r} is not JSON, {examples}") from None


def _check(options):
    from madmax_lib.view.notebooks.doctor import check

    rows = []
    for name, status, text in check():
        rows.append({"name": name, "status": status, "text": text})
        if not options.json:  # each line as soon as it is known
            print(f"{status:<8}{name}: {text}", flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(any(row["status"] == "fails" for row in rows))


def _train(options):
    from madmax_lib.runs.launch import resolve, train_command
    from madmax_lib.runs.spec import RunSpec

    if options.mode:
        _as_in_the_study(options)
    elif not options.strategy:
        raise ValueError(
            "give a model and a strategy, such as gpt-tiny dp2.z3, or --mode"
        )
    if options.offload:  # a word of the plan, which stands before its engine
        plan, at, engine = options.strategy.partition("@")
        options.strategy = f"{plan}.offload-{options.offload}{at}{engine}"
    values = {field.name: getattr(options, field.name) for field in fields(RunSpec)}
    # what is left out keeps the default of a RunSpec
    chosen = {name: value for name, value in values.items() if value is not None}
    spec = RunSpec(**chosen)
    directory = options.output or Path("runs") / spec.name
    about = asdict(resolve(spec, directory))
    about |= {"steps": spec.steps, "global_batch": spec.global_batch}
    about |= {"parameters": spec.shapes.parameters, "directory": str(directory)}
    if options.dry_run:
        about["command"] = shlex.join(train_command(spec, directory))
    else:
        _launch(spec, directory, about)
    status = int(about.get("status", "completed") != "completed")
    if options.json:
        print(json.dumps(about, indent=1))
        return status
    # a line for each number and text; of the times of steps the median
    about["median_step_s"] = (about.pop("step_s", None) or {}).get("median")
    for name, value in about.items():
        text = f"{value:,.6g}" if isinstance(value, float) else value
        if isinstance(text, str | int) and text != "":
            print(f"{name:<24}{text}")
    return status


def _as_in_the_study(options):
    """Fill in what the script of the GPT-2 study means by its options: DDP, or ZeRO-3
    over groups of tp, of so many samples a GPU and step.
    """
    from madmax_lib.runs.launch import gpu_count

    options.model = options.model or "gpt2-large"
    tp = options.tp_size if options.mode == "hybrid" else 1
    ranks = options.ranks or gpu_count() or tp
    if ranks % tp:
        raise ValueError(f"--tp-size {tp} does not divide {ranks} ranks")
    dp = ranks // tp
    options.strategy = f"dp{dp}.tp{tp}.z3" if options.mode == "hybrid" else f"dp{dp}"
    options.global_batch = options.global_batch or options.batch_size * dp
    if options.max_samples:
        options.steps = options.max_samples // options.global_batch or 1
    options.fused_gelu = options.fused or options.fused_gelu


def _launch(spec, directory, about):
    """Train; `about` gets the summary of the run."""
    from madmax_lib.runs.launch import RunError, launch
    from madmax_lib.runs.read import read_json, read_run

    text = f"{about['ranks']} rank(s), a row of {directory / 'steps.csv'} per step"
    before = read_json(directory / "summary.json").get("status")
    if before:
        goes_on = any(about["starts"])
        way = f"resumes at step {about['starts'][-1]}" if goes_on else "is replaced"
        text += f"; the {before} run there {way}"
    print(text, file=sys.stderr)
    try:
        launch(spec, directory)
    # a run that failed still has a summary, which is printed
    except RunError as error:
        print(f"madmax: {error}", file=sys.stderr)
        about["status"] = error.status
    about |= read_run(directory).summary  # which warns of a peak that is too low


def _records(table):
    return json.loads(table.to_json(orient="records"))  # what is not finite is null


def _bench(options):
    import pandas as pd

    from madmax_lib.runs.launch import measure_links
    from madmax_lib.runs.measure.bench import bench

    options.output.mkdir(parents=True, exist_ok=True)
    kernels = options.output / "kernels.csv"
    links = options.output / "collectives.csv"
    print(
        f"each row is added to {kernels} or {links} when it is timed", file=sys.stderr
    )
    sizes = {"quick": options.quick, "detailed": options.detailed}
    size = next((name for name, asked in sizes.items() if asked), "normal")
    tables = {"kernels": bench(size=size, path=kernels)}
    # a single rank has no collectives
    if measure_links(links, size, ranks=options.ranks or 0) > 1:
        tables["collectives"] = pd.read_csv(links)
    if options.json:
        print(json.dumps({name: _records(table) for name, table in tables.items()}))
        return 0
    for table in tables.values():
        columns = table.drop(columns=COLUMNS["benched"], errors="ignore")
        print(f"{columns.to_string(index=False)}\n")
    return 0


def _calibrate(options):
    import pandas as pd

    from madmax_lib.calibration.machine.calibrate import calibrate

    if options.output.is_file():
        raise ValueError(
            f"output={str(options.output)!r} is a file; a folder is needed"
        )
    if options.trace:
        return _calibrate_trace(options)
    if options.rows:
        from madmax_lib.calibration.verdict.row_machine import calibrate_rows

        machine = calibrate_rows(options.rows, options.output, options.like)
    else:
        asked = {
            name: getattr(options, name) for name in ("hosts", "minutes", "device")
        }
        asked |= {"network": options.network or "", "ranks": options.ranks or 0}
        machine = calibrate(options.output, **asked)
    results = pd.read_csv(options.output / "results.csv")
    if options.json:
        print(json.dumps(machine.provenance | {"results": _records(results)}, indent=1))
        return 0
    columns = [name for name in COLUMNS["calibrated"] if name in results]
    text = results[columns].to_string(index=False, float_format="{:.3f}".format)
    lines = [text, ""] if len(results) else []
    page = f"all of it: {options.output / 'page.html'}"
    print("\n".join([*lines, machine.verdict, *machine.provenance["notes"], page]))
    return 0


def _calibrate_trace(options):
    """The job of a trace, corrected by the options, and its machine."""
    from dataclasses import replace

    from madmax_lib import catalog
    from madmax_lib.calibration.job.another_plan import another_plan, case_of
    from madmax_lib.plan import Case, Plan
    from madmax_lib.view.commands.trace import read

    timeline = read(options.trace)
    job = case_of(timeline, options.cluster)
    run = (options.model, options.cluster, options.plan, options.global_batch)
    if job.case is None and all(run):
        model, cluster, plan, samples = run
        dtype = catalog.cluster(cluster).device.nearest("bf16")
        step = (Plan.parse(plan), samples, None, dtype)
        job = replace(job, case=Case.of_step(model, cluster, *step))
    if job.case is None:
        summary = {"verdict": "cannot tell", "note": str(job).splitlines()[0]}
        unknown = Answer(job.facts, summary, passed=None)
        print(envelope("calibrate", unknown) if options.json else job)
        return unknown.status
    if not options.json:
        print(f"{job}\n")
    plan = Plan.parse(options.plan or job.case.plan)
    case = replace(job.case, plan=plan, model=options.model or job.case.model)
    answer = another_plan(
        timeline, options.to or plan, case=case, global_batch=options.global_batch
    )
    options.output.mkdir(parents=True, exist_ok=True)
    answer.machine.save(options.output / "machine.json")
    print(json.dumps(_records(answer.kinds.reset_index())) if options.json else answer)
    return 0
