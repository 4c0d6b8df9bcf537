"""`madmax paper`: what the programs of vTrain, of Metis' fork and of MAD-Max print, in
one command for each.
"""

import pandas as pd

from madmax_lib import papers
from madmax_lib.papers.origin import read_table
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.view.commands.answers import Answer, add_command

_HOUR_S = 3600
# table of each figure of MAD-Max that can be drawn anew, a call of its studies
_FIGURES = dict(read_table("madmax/figures").to_numpy())


def add(commands) -> None:
    """Add the command."""

    def paper(options):
        if options.paper == "vtrain":
            return _vtrain(options)
        if options.paper == "metis":
            return _metis(options)
        if options.fig not in _FIGURES:
            numbers = ", ".join(map(str, _FIGURES))
            raise ValueError(f"figure {options.fig} of MAD-Max is not one of {numbers}")
        table = getattr(papers.madmax.studies, _FIGURES[options.fig])()
        return Answer(table, {"figure": options.fig, "notebook": "50_madmax"})

    add_command(commands, paper)


def _vtrain(options):
    """A row per configuration file: a step's seconds, those of them that the slowest
    stage computes and communicates, and GPU-hours of 1,000 steps.
    """
    path = options.config
    if path is None:
        raise ValueError("give a configuration of vTrain, or a folder, with --config")
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows = []
    for file in files:
        row = {"config": file.name}
        try:
            config = papers.vtrain.load_config(file)
            operators = papers.vtrain.formulas.formula_operators(config)
            if options.trace:
                operators = papers.vtrain.measured(options.trace, config)
            step = papers.vtrain.timeline(
                config, operators, papers.vtrain.RINGS, options.rules
            )
        except (ValueError, OSError) as reason:
            if len(files) == 1:
                raise
            rows.append(row | {"reason": str(reason)})
            continue
        times = breakdown(step).max()
        hours = times["total_s"] / _HOUR_S * config.num_gpus
        row |= {"plan": str(config.plan), "gpus": config.num_gpus}
        row |= {name: times[name] for name in ("total_s", "compute_s", "comm_s")}
        rows.append(row | {"gpu_hours_1000_steps": 1000 * hours})
    if not rows:
        raise ValueError(f"{path}: no configuration files (*.json)")
    operators = options.trace or "closed forms, not traced"
    about = {"rules": options.rules, "operators": str(operators)}
    return Answer(pd.DataFrame(rows), about, [str(file) for file in files])


def _metis(options):
    """Searches of a row of the fork's table 1, in both orders of GPU types.

    Sizes that are given take the place of the row's; with trials their search is
    repeated, and its time is the mean with its standard deviation.
    """
    studies = papers.metis.studies
    table = studies.published("table1").set_index(["row", "mode"])
    mode = "strategy" if options.strategy else "base"
    if (options.row, mode) not in table.index:
        raise ValueError(f"row={options.row} is not one of 1 to 4")
    published = table.loc[(options.row, mode)]
    layers = options.layers or int(published["layers"])
    gpus = 4 * options.nodes if options.nodes else int(published["gpus"])
    if gpus % 8 or options.trials < 1:
        raise ValueError(
            f"nodes={options.nodes}, trials={options.trials}: as many V100 as A100 "
            "nodes, and a trial at least"
        )
    if options.output:
        profiles = papers.metis.generate_profiles(layers)
        papers.metis.write_profiles(profiles, options.output / "profiles")
        ends = options.output / "hostfile", options.output / "clusterfile.json"
        papers.metis.write_cluster(studies.nodes_of(gpus), *ends)
    sizes = {name: getattr(options, name) for name in ("hidden", "sequence", "vocab")}
    search = {"global_batch": options.batch, **sizes}
    rows = []
    for order in studies.NODE_ORDERS:
        runs = [
            studies.run_row(layers, gpus, order, mode, **search)
            for _ in range(options.trials)
        ]
        seconds = pd.Series([run.seconds for run in runs])
        row = {"node_order": f"{order[0]} first", "count": runs[0].count}
        row |= {"costed_plans": runs[0].costed_plans, "cost_ms": runs[0].best_cost_ms}
        rows.append(row | {"search_s": seconds.mean(), "search_sd_s": seconds.std()})
    about = {"mode": mode, "layers": layers, "gpus": gpus, "batch": options.batch}
    about |= sizes
    if not (options.layers or options.nodes):
        about |= {"published_count": int(published["steps"])}
        about |= {"published_cost_ms": float(published["cost_ms"])}
    return Answer(pd.DataFrame(rows), about)
