"""`estimate`, `search` and `fits` of `python -m madmax_lib`: questions about a step
that nobody has run.
"""

from argparse import Namespace
from dataclasses import replace

from madmax_lib import catalog, planner, simulator
from madmax_lib.base.atomic import write_text
from madmax_lib.catalog import Model
from madmax_lib.catalog.hardware import Cluster, Link, node_extent
from madmax_lib.catalog.software import Software
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.rules import STATED
from madmax_lib.runs.testbed import bits_per_s
from madmax_lib.view.commands.answers import COLUMNS, Answer, add_command

# options of every training, by the names that estimates take
_RUN = ("global_batch", "sequence", "dtype", "software")
_COLUMNS = (
    "low_s and high_s: 90 % interval of step_s; probability: of being the fastest way to "
    "split; why: compared with the median way; "
    "limit: largest parts of the step besides compute, counting only exposed "
    "communication"
)
_OF_RECIPE = (
    "saves: share of the recipe's step, saves_low and saves_high hold 90 %; "
    "probability: to be faster than the recipe; why: the part that saves most"
)


def add(commands) -> None:
    """Add these commands."""
    for answer in (_estimate, _search, _fits):
        add_command(commands, answer)


def _fits(options):
    result = simulator.fits(**_step(options), plan=options.plan)
    summary = {"fits": result.fits, "bound": result.bound}
    summary |= {"fits_under": result.stacks} if result.stacks else {}
    # parts of a place do not all exist at one moment
    summary["peak_bytes"] = {
        row.place: row.usable_bytes - row.margin_bytes
        for row in result.table.drop_duplicates("place").itertuples()
    }
    summary |= {"margin_bytes": result.margins_bytes, "share": result.share}
    # a step that does not fit is a failed gate: status 1
    return Answer(result.table, summary, inputs(options), result.fits)


def run_of(options: Namespace) -> dict:
    """Values of the options that every training has, by name."""
    run = {name: getattr(options, name) for name in _RUN}
    if options.like:
        run["software"] = catalog.software(options.software or "own", options.like)
    return run


def model_of(options: Namespace) -> Model:
    """The model asked for, one of those that `madmax train` alone knows too."""
    if options.model in set(catalog.table("run_models")["name"]):
        from madmax_lib.runs.model import models

        return models.spec(options.model)
    return catalog.model(options.model)


def _step(options):
    """Arguments by name that `estimate`, `search` and `fits` take alike."""
    extent = (options.nodes, options.devices)
    if not options.network:
        cluster = catalog.cluster(options.cluster, *extent)
        return {"model": model_of(options), "cluster": cluster, **run_of(options)}
    cluster = catalog.cluster(options.cluster)
    used, nodes = node_extent(
        cluster.name, (cluster.devices_per_node, cluster.nodes), *extent
    )
    # the devices of a node share its port
    link = Link("ethernet", bits_per_s(options.network) / 8 / used)
    cluster = replace(cluster, inter=link, devices_per_node=used, nodes=nodes)
    return {"model": model_of(options), "cluster": cluster, **run_of(options)}


def _priced(options):
    """The same with the constants of a calibration whose `machine.json` is the cluster,
    and their software.
    """
    from madmax_lib.simulator.rates.parameters import constants_of, software_of

    step = _step(options)
    constants = constants_of(options.cluster)
    software = software_of(step["software"], constants)
    return step | {"parameters": constants, "software": software}


def used(software: str | Software | None, cluster: Cluster) -> str:
    """Software whose kernels and overlaps a prediction has."""
    if rates := getattr(software, "rates", ""):
        return f"{software.name}, timed as {rates}"
    on_cpu = cluster.device.family == "cpu"
    usual = "this project's own trainer" if on_cpu else "tuned Megatron-Core"
    return software or f"none named: timed as under {usual}"


def inputs(options: Namespace) -> list[str]:
    """Names that an answer was made from."""
    names = [options.model, str(options.cluster), options.software]
    return [name for name in names if name]


def _estimate(options):
    step = _priced(options)
    # a single plan that is not legal is refused, in a table its row is empty
    plans = options.plans if len(options.plans) > 1 else options.plans[0]
    table = simulator.estimate(**step, plan_or_table=plans)
    table.insert(0, "plan", options.plans)
    cluster = step["cluster"]
    room_gb = simulator.usable_bytes(cluster.device) / 1e9
    # NaN for a plan that is not legal or has no model of its memory
    too_large = table[~table["fits"] & (table["memory_bytes"] > 0)]
    needs = []
    for row in too_large.itertuples():
        need = f"{row.plan} needs {row.memory_bytes / 1e9:,.0f} GB of {room_gb:.0f} GB"
        stacks = simulator.fits(**_step(options), plan=row.plan).stacks
        needs.append(f"{need}, but fits under {stacks}" if stacks else need)
    if "reason" in table:
        illegal = table[table["reason"] != ""]
        needs.extend(illegal["plan"] + ": " + illegal["reason"])
    about = {"fits": f"False: {'; '.join(needs)}"} if needs else {}
    sequence = options.sequence or step["model"].sequence
    about |= {"global_batch": options.global_batch, "sequence": sequence}
    about["devices"] = cluster.world_size
    about["software"] = used(step["software"], cluster)
    if unsaid := _unsaid(step, options.plans):
        about["priced_all_the_same"] = unsaid
    if options.network:
        about["assumed"] = (
            f"{options.network} a node of {cluster.devices_per_node} device(s), over "
            "which no collective was timed: its latency is a guess"
        )
    if options.cluster.endswith(".json"):
        from madmax_lib.calibration.machine.machine import machine

        about["calibration"] = machine(options.cluster).verdict
    return Answer(table, about, inputs(options), brief=[*about, *COLUMNS["estimated"]])


def _unsaid(step, plans):
    """Plans that the software runs, but whose configuration has no word for them."""
    run = {name: step[name] for name in _RUN}
    words = []
    for plan in plans:
        case = Case(step["model"], step["cluster"], Plan.parse(plan), **run)
        for rule in STATED:
            if rule.broken(case.plan, case):
                words.append(f"{plan}: {rule.words(case.plan, case)}")
    return "; ".join(words)


def _search(options):
    # what is no stack that one's own is built on is a recipe
    recipe = None
    if options.like not in set(catalog.table("software")["name"]):
        recipe = options.like
        options.like = None
    # no bar: it would mix with what a program reads
    asked = {"objective": options.objective, "top": options.top, "progress": False}
    asked["usd_per_hour"] = options.usd_per_hour
    step = _priced(options)
    result = planner.search(**step, **asked, like=recipe)
    names = ("best", "software", "evaluated", "feasible", "hint")
    about = {name: getattr(result, name) for name in names}
    sequence = options.sequence or step["model"].sequence
    about |= {"sequence": sequence, "columns": _COLUMNS}
    # plans that differ in how they split, as long as there are enough of them
    enough = options.top <= len(result.different)
    best = (result.different if enough else result.table).head(options.top)
    if not step["software"]:
        stack = result.table["stacks"].iloc[0].split(" ")[0]
        about = {"best": result.best, "stack": stack} | about
    if recipe:
        best = result.beats
        about |= {"recipe": result.too_large} if result.too_large else {}
        about["columns"] = _OF_RECIPE
    asked_for = {"cost": "cost_usd", "energy": "energy_j"}.get(options.objective)
    first = COLUMNS["beating" if recipe else "found"]
    if asked_for and not recipe:
        first = ("plan", asked_for, *first[1:])
    # who looks for the least memory or energy does not ask for the fastest
    if not (recipe or result.problem.is_for_speed):
        best = best.drop(columns="probability", errors="ignore")
    columns = [name for name in COLUMNS["searched"] if name in best]
    # the file first: a failure to write it is no half answer
    written = True
    if options.output:
        about["configuration"], written = _written(result, options.output)
    table = best[columns].dropna(axis=1, how="all")
    brief = (name for name in about if name != "columns")
    names = [*inputs(options), *filter(None, [recipe])]
    return Answer(table, about, names, written, brief=[*brief, *first])


def _written(result, path):
    """The file of a search's configuration, or why no stack's words can say it, and
    whether it was written.
    """
    try:
        text = result.configuration()
    except ValueError as error:
        return f"not written: {error}", False
    write_text(path, text + "\n")
    return path, True
