"""What do `estimate`, `search` and `fits` of `python -m madmax_lib` answer about a step
that nobody has run?
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from madmax_lib.base.atomic import write_text
from madmax_lib.catalog.hardware import Cluster
from madmax_lib.view.commands.answers import Answer, add_command

__all__ = ["add", "add_run", "assumed", "inputs", "run_of"]

_RUN = ("global_batch", "sequence", "dtype", "software")
_COSTS = ["memory_bytes", "mfu", "tokens_per_s", "cost_usd", "energy_j"]
_COLUMNS = (
    "low_s and high_s hold 90 %; probability: to be the fastest of the ways to "
    "split; why: beside the median of them; "
    "limit: largest parts of the step beside compute, of communication what nothing "
    "hides"
)
_SEARCHED = [
    "plan",
    "stacks",
    "launched_s",
    "step_s",
    "low_s",
    "high_s",
    "probability",
    "why",
    "limit",
    *_COSTS,
]


def add(commands) -> None:
    """Add these commands."""
    estimate = add_command(
        commands,
        "estimate",
        _estimate,
        help="how long does a step take, with a 90 %% interval",
    )
    search = add_command(
        commands, "search", _search, help="the best plans for a model on a cluster"
    )
    fits = add_command(
        commands,
        "fits",
        _fits,
        help="does a step fit in memory, and what is where; status 1 if not",
    )
    for parser in (estimate, search, fits):
        _add_step(parser)
    estimate.add_argument("plans", nargs="+", metavar="PLAN", help="such as dp2.tp4.z1")
    fits.add_argument("plan", help="such as dp2.tp4.z1")
    search.add_argument(
        "--objective", default="time", help="time (default), cost, energy or memory"
    )
    search.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the best plan as its stack's configuration",
    )
    search.add_argument(
        "--top",
        type=int,
        default=10,
        help="how many plans (default: 10); up to ten differ in how they split",
    )


def _add_step(parser: ArgumentParser) -> None:
    """Add what every step needs: model and cluster, the batch, and who trains how."""
    parser.add_argument("model", help="catalog name, or a Hugging Face config.json")
    parser.add_argument(
        "cluster", help="catalog name, or the machine.json of a calibration"
    )
    parser.add_argument("--nodes", type=int, help="how many (default: the catalog's)")
    parser.add_argument(
        "--devices",
        "--gpus",
        type=int,
        help="how many over all nodes (default: whole nodes)",
    )
    add_run(parser, "as tuned Megatron-Core")


def add_run(parser: ArgumentParser, software: str, batch: str | None = None) -> None:
    """Add what every training needs. software, batch: the defaults in words; without
    one the batch is required.
    """
    samples = f"samples per step (default: {batch})" if batch else "samples per step"
    parser.add_argument(
        "--global-batch", type=int, required=batch is None, help=samples
    )
    parser.add_argument(
        "--sequence", type=int, help="tokens per sample (default: the model's)"
    )
    parser.add_argument("--dtype", default="bf16", help="default: bf16")
    stacks = f"stack that trains: megatron-core, torchtitan, ... (default: {software})"
    parser.add_argument("--software", help=stacks)


def run_of(options: Namespace) -> dict:
    """What `add_run` has added, by name."""
    return {name: getattr(options, name) for name in _RUN}


def _step(options: Namespace) -> dict:
    """Arguments by name that `estimate`, `search` and `fits` take alike."""
    from madmax_lib import catalog

    cluster = catalog.cluster(options.cluster, options.nodes, options.devices)
    return {"model": options.model, "cluster": cluster, **run_of(options)}


def _priced(options: Namespace) -> dict:
    """The same with the constants of a calibration whose `machine.json` is the cluster,
    and their software.
    """
    from madmax_lib.simulator.rates.parameters import constants_of, software_of

    step = _step(options)
    own = constants_of(options.cluster)
    return step | {"parameters": own, "software": software_of(options.software, own)}


def assumed(software: str | None, cluster: Cluster) -> str:
    """Whose kernels and overlaps a prediction has."""
    usual = (
        "this project's own trainer"
        if cluster.device.family == "cpu"
        else "tuned Megatron-Core"
    )
    return software or f"none named: timed as by {usual}"


def inputs(options: Namespace) -> list[str]:
    """What an answer was made from."""
    return [
        options.model,
        str(options.cluster),
        *([options.software] if options.software else []),
    ]


def _estimate(options: Namespace) -> Answer:
    from madmax_lib.simulator.estimate import estimate
    from madmax_lib.simulator.memory.memory import usable_bytes

    one, *others = (
        options.plans
    )  # a single plan that is not legal is refused, in a table it is empty
    table = estimate(
        **(step := _priced(options)), plan_or_table=options.plans if others else one
    )
    table.insert(0, "plan", options.plans)
    large = table[~table["fits"] & (table["memory_bytes"] > 0)]
    room = usable_bytes(step["cluster"].device) / 1e9
    needs = [
        f"{row.plan} needs {row.memory_bytes / 1e9:,.0f} GB of {room:.0f} GB"
        for row in large.itertuples()
    ]
    about = {"fits": f"False: {'; '.join(needs)}"} if needs else {}
    about |= {
        "global_batch": options.global_batch,
        "devices": step["cluster"].world_size,
    }
    about["software"] = assumed(step["software"], step["cluster"])
    return Answer(table, about, inputs(options))


def _search(options: Namespace) -> Answer:
    from madmax_lib.planner.search import search

    found = search(
        **_priced(options), objective=options.objective, top=options.top, progress=False
    )
    about = {
        "best": found.best,
        "software": found.software,
        "evaluated": found.evaluated,
        "feasible": found.feasible,
    }
    about |= {"hint": found.hint, "columns": _COLUMNS}
    best = found.different if options.top <= len(found.different) else found.table
    table = (
        best[[name for name in _SEARCHED if name in best]]
        .head(options.top)
        .dropna(axis=1, how="all")
    )
    if options.output:
        write_text(options.output, found.configuration() + "\n")
        about["configuration"] = options.output
    return Answer(table, about, inputs(options))


def _fits(options: Namespace) -> Answer:
    from madmax_lib.simulator.offload.fits import fits

    result = fits(**_step(options), plan=options.plan)
    about = {
        "fits": result.fits,
        "bound": result.bound,
        "margin_bytes": result.margins_bytes,
        "share": result.share,
    }
    return Answer(result.table, about, inputs(options), passed=result.fits)
