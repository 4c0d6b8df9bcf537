"""What do `expect` and `plan` of `python -m madmax_lib` answer: is my run normal, and
what will a training cost?
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace

from madmax_lib.view.commands.answers import Answer, add_command
from madmax_lib.view.commands.step import add_run, assumed, inputs, run_of

__all__ = ["add"]

_MEASURED = {
    "step_s": "seconds of a whole step, all micro-batches",
    "tokens_per_s": "tokens a second of all devices together",
    "tokens_per_s_per_device": "tokens a second of one device (tokens/s/GPU, tps)",
    "tflops": "1e12 model FLOP/s of one device, as frameworks print them",
}
_NEAREST = [
    "model",
    "gpu",
    "n_gpus",
    "dtype",
    "plan",
    "mfu",
    "over_predicted",
    "source",
]


def add(commands) -> None:
    """Add these commands."""
    about = (
        "is my run normal? fine or cannot tell: status 0; slow or suspiciously fast: 1"
    )
    expect = add_command(commands, "expect", _expect, help=about)
    expect.add_argument(
        "--model", required=True, help="catalog name, or a Hugging Face config.json"
    )
    expect.add_argument(
        "--cluster",
        required=True,
        help="catalog name, or the machine.json of a calibration",
    )
    expect.add_argument(
        "--nodes", type=int, help="how many (default: as many as the plan needs)"
    )
    expect.add_argument("--plan", required=True, help="such as dp8.tp4.pp2.z1")
    add_run(expect, "as tuned Megatron-Core")
    for name, text in _MEASURED.items():
        expect.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            metavar="X",
            help=f"measured: {text}",
        )
    expect.add_argument(
        "--trace",
        metavar="DIR",
        help="traces of the run, for its step time and the part that is off",
    )
    plan = add_command(
        commands,
        "plan",
        _plan,
        help="GPUs, days, USD and MWh of a training, with intervals",
    )
    plan.add_argument(
        "--model", required=True, help="catalog name, or a Hugging Face config.json"
    )
    plan.add_argument(
        "--tokens",
        type=_count,
        required=True,
        help="to train on, such as 15T, 300B or 15e12",
    )
    where = plan.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--device", help="such as h100, in the catalog's first cluster that has it"
    )
    where.add_argument(
        "--cluster", help="of the catalog; as many of its nodes as are needed"
    )
    asked = plan.add_mutually_exclusive_group(required=True)
    asked.add_argument("--days", type=float, help="deadline of the training")
    plan.add_argument(
        "--sure",
        type=float,
        default=0.5,
        metavar="P",
        help="probability to meet it (default: 0.5)",
    )
    asked.add_argument(
        "--devices", "--gpus", type=int, help="how many there are, to ask for the days"
    )
    add_run(plan, "the fastest of five", "4 or 16 million tokens, within 20 %%")
    plan.add_argument(
        "--usd-per-hour",
        type=float,
        help="price of a device-hour (default: the catalog's)",
    )


def _expect(options: Namespace) -> Answer:
    from madmax_lib import catalog
    from madmax_lib.calibration.verdict.expect import expect
    from madmax_lib.plan.plan import Plan
    from madmax_lib.simulator.rates.parameters import constants_of
    from madmax_lib.timeline.timeline import with_origin
    from madmax_lib.view.commands.trace import read

    plan = Plan.parse(options.plan)
    cluster = catalog.cluster(options.cluster, options.nodes, plan.world_size)
    measured = {name: getattr(options, name) for name in _MEASURED}
    timeline = read([options.trace]) if options.trace else None
    own = constants_of(options.cluster)
    result = expect(
        options.model,
        cluster,
        plan,
        **run_of(options),
        **measured,
        timeline=timeline,
        parameters=own,
    )
    names = ("verdict", "step_s", "predicted_s", "low_s", "high_s", "percentile")
    about = {name: getattr(result, name) for name in names}
    about["software"] = assumed(options.software, cluster)
    about["reason"] = result.reason.split("; ")
    about["tries"] = result.tries.head(3).to_dict("records")
    about["nearest"] = result.nearest[_NEAREST].to_dict("records")
    table = (
        result.explanations if timeline is None else with_origin(result.parts, timeline)
    )
    return Answer(
        table, about, inputs(options), passed=result.verdict in ("fine", "cannot tell")
    )


def _plan(options: Namespace) -> Answer:
    from madmax_lib import catalog
    from madmax_lib.planner.money.campaign import AMOUNTS, campaign

    options.cluster = options.cluster or catalog.cluster_with(
        catalog.device(options.device)
    )
    asked = {
        name: getattr(options, name)
        for name in ("days", "devices", "sure", "usd_per_hour")
    }
    result = campaign(
        options.model, options.tokens, options.cluster, **run_of(options), **asked
    )
    intra, inter = (
        getattr(catalog.cluster(options.cluster), place) for place in ("intra", "inter")
    )
    about = {
        "cluster": (
            f"{options.cluster}: {intra.name} in a node, {inter.name} between nodes"
        )
    }
    about |= {
        name: result.best[name]
        for name in ("devices", "plan", "stacks", "global_batch", "goodput")
    }
    about |= {"in_time": result.best["in_time"]} if options.days else {}
    for name in AMOUNTS:
        about[name] = {
            end or "middle": result.best[f"{name}_{end}".rstrip("_")]
            for end in ("", "low", "high")
        }
    lacks = {"usd": "unknown, give --usd-per-hour", "mwh": "unknown"}
    about |= {
        name: words for name, words in lacks.items() if result.table[name].isna().all()
    }
    about |= {f"{name}_is": words for name, words in result.notes.items()}
    return Answer(result.table.dropna(axis=1, how="all"), about, inputs(options))


def _count(text: str) -> float:
    """A number of tokens: 15e12, 15T, 1.4B, 300M or 15,000,000.

    >>> _count("15T"), _count("1.4b"), _count("2e9")
    (15000000000000.0, 1400000000.0, 2000000000.0)
    """
    plain = text.strip().replace(",", "").replace("_", "").upper()
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(plain[-1:], 1.0)
    try:
        count = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is no number such as 15e12, 15T or 300B"
        ) from None
    if 0 < count < 1e6:
        raise ArgumentTypeError(f"{text} are less than a million tokens; 15T are 15e12")
    return count
