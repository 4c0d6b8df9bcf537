"""`expect` and `plan` of `python -m madmax_lib`: is my run normal, and what will a
training cost?
"""

from argparse import ArgumentTypeError

from madmax_lib.view.commands.answers import COLUMNS, Answer, add_command
from madmax_lib.view.commands.step import inputs, model_of, run_of, used

# as people write them: 300B tokens, not 300G, but both are read
_EXPONENTS = {"K": "e3", "M": "e6", "B": "e9", "G": "e9", "T": "e12"}
_EXPONENTS |= {",": "", "_": ""}
_FEWEST_TOKENS = 1e6  # to train on; fewer are a slip, such as 15 for 15T


def add(commands) -> None:
    """Add these commands."""
    for answer in (_expect, _plan):
        add_command(commands, answer, count=_count)


def _expect(options):
    from madmax_lib import catalog
    from madmax_lib.calibration.verdict.expect import expect
    from madmax_lib.plan.plan import Plan
    from madmax_lib.simulator.rates.parameters import constants_of
    from madmax_lib.timeline.timeline import with_origin
    from madmax_lib.view.commands.trace import read

    plan = Plan.parse(options.plan)
    cluster = catalog.cluster(options.cluster, options.nodes, plan.world_size)
    timeline = read([options.trace]) if options.trace else None
    result = expect(
        model_of(options),
        cluster,
        plan,
        **run_of(options),
        **{name: getattr(options, name) for name in COLUMNS["measured"]},
        timeline=timeline,
        parameters=constants_of(options.cluster),  # of a machine.json its own
    )
    about = {name: getattr(result, name) for name in COLUMNS["verdict"]}
    about["software"] = used(run_of(options)["software"], cluster)
    # a list, so that a program need not split the sentence
    about["reason"] = result.reason.split("; ")
    about["nearest"] = result.nearest[COLUMNS["nearest"]].to_dict("records")
    table = result.explanations
    if timeline is not None:  # then the parts of the step say more
        table = with_origin(result.parts, timeline)
    # only what is surely off fails a pipeline
    passed = {"fine": True, "cannot tell": None}.get(result.verdict, False)
    return Answer(table, about, inputs(options), passed)


def _plan(options):
    from madmax_lib import catalog
    from madmax_lib.planner.money.campaign import AMOUNTS, campaign

    # a device alone stands for the first cluster that is made of it
    if not options.cluster:
        options.cluster = catalog.cluster_with(catalog.device(options.device))
    asked = {name: getattr(options, name) for name in COLUMNS["asked"]} | run_of(
        options
    )
    result = campaign(model_of(options), options.tokens, options.cluster, **asked)
    cluster = catalog.cluster(options.cluster)
    links = f"{cluster.intra.name} in a node, {cluster.inter.name} between nodes"
    about = {"cluster": f"{options.cluster}: {links}"}
    about |= {name: result.best[name] for name in COLUMNS["best"]}
    # each with its interval: {middle, low, high}
    ends = {"middle": "", "low": "_low", "high": "_high"}
    for name in AMOUNTS:
        about[name] = {end: result.best[name + tail] for end, tail in ends.items()}
        if result.table[name].isna().all():
            about[name] = None
    about |= {f"{name}_is": words for name, words in result.notes.items()}
    table = result.table.dropna(axis=1, how="all")
    return Answer(table, about, inputs(options), brief=COLUMNS["planned"])


def _count(text):
    """A number of tokens: 15e12, 15T, 1.4B, 300M or 15,000,000.

    >>> _count("15T"), _count("1.4b"), _count("2e9")
    (15000000000000.0, 1400000000.0, 2000000000.0)
    """
    try:
        count = float(text.upper().translate(str.maketrans(_EXPONENTS)))
    except ValueError:
        wanted = "not a number such as 15e12, 15T or 300B"
        raise ArgumentTypeError(f"{text!r} is {wanted}") from None
    if not count >= _FEWEST_TOKENS:
        raise ArgumentTypeError(f"{text} are less than a million tokens; 15T are 15e12")
    return count
