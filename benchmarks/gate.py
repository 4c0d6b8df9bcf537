"""How often does `mm.traces.gate` cry wolf, and how often does it find a slow-down?
Drawn from recorded steps.

`python benchmarks/gate.py FOLDER --record` records the sets of traces/record.py again
and again, 44 steps each, until `--minutes` are over; then, and without `--record`, it
draws pairs of 20 steps: from two recordings of a set, or three each, from the two
halves of one, and, where a data directory has it, from the log of a run on two T4 GPUs.
B of a pair is as it was (every alarm is false), or its steps are made longer by a
share: by one operation on all ranks, by one on a single rank, for which the others wait
in their last collective, or by the exposed part of one collective.
"""

import argparse
import contextlib
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

import madmax_lib as mm
from madmax_lib.base import pack, subtraction, union
from madmax_lib.catalog import PROJECT, local_data
from madmax_lib.timeline import BUSY_KINDS
from madmax_lib.traces import gate

SETS, ACTIVE, STEPS = (
    {"gpt-ddp": 2, "vit-fsdp": 2, "gpt-memory": 1},
    44,
    20,
)  # ranks by set
SLOWER = (0.0, 0.03, 0.05, 0.5)
LOGGED = "log of two T4"
LOG, PHASES = (
    "seed_runs/vit_huge_zero2_2xT4_steps.csv",
    ("fwd_ms", "bwd_inner_ms", "bwd_allreduce_ms", "step_ms"),
)
ODD = slice(
    10, 1000
)  # of the log: after the first steps, before the next part of the run


def record(folder: Path, minutes: float) -> None:
    """Record the sets in turn until the minutes are over."""
    until_s, count = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < until_s:
        for name, ranks in SETS.items():
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ]
            target = folder / f"run{count}"
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                [*torchrun, __file__, str(target), "--rank", name],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        count += 1


def record_rank(folder: Path, name: str) -> None:
    """As one rank of traces/record.py, with more steps and into another folder."""
    recorder = runpy.run_path(str(PROJECT / "traces" / "record.py"))["record_rank"]
    recorder.__globals__.update(HERE=folder, ACTIVE=ACTIVE)
    recorder(name)


def logged() -> mm.Timeline:
    """The log of the two T4: a span per phase, an annotation per step."""
    seconds = pd.read_csv(local_data(LOG))[list(PHASES)].iloc[ODD].to_numpy() / 1e3
    ends_ns = (seconds.cumsum() * 1e9).astype(np.int64).reshape(seconds.shape)
    starts_ns = np.concatenate([[0], ends_ns.ravel()[:-1]]).reshape(seconds.shape)
    rows = [
        (
            name,
            "comm" if "reduce" in name else "compute",
            step,
            starts_ns[step, at],
            ends_ns[step, at],
        )
        for step in range(len(seconds))
        for at, name in enumerate(PHASES)
    ]
    marks = [
        (f"ProfilerStep#{s}", "annotation", s, starts_ns[s, 0], ends_ns[s, -1])
        for s in range(len(seconds))
    ]
    spans = pd.DataFrame(
        rows + marks, columns=["name", "kind", "step", "start_ns", "end_ns"]
    )
    spans = spans.assign(
        dur_ns=spans["end_ns"] - spans["start_ns"],
        rank=0,
        group=None,
        size_bytes=np.nan,
    )
    spans = spans.assign(
        stream=np.where(spans["kind"] == "annotation", -1, 0), correlation=-1, op=-1
    )
    return mm.Timeline(spans)


def large(timeline: mm.Timeline, kind: str) -> list[str]:
    """The operations of a kind that take most time."""
    spans = timeline.spans[timeline.spans["kind"] == kind]
    return list(spans.groupby("name", observed=True)["dur_ns"].sum().nlargest(4).index)


def slowed(
    timeline: mm.Timeline, how: str, share: float, name: str, slow: int
) -> mm.Timeline:
    """The timeline with longer steps by an operation: everywhere, on the slow rank, or
    by a collective.
    """
    spans, kind = timeline.spans, "comm" if how == "collective" else "compute"
    step_ns = spans[spans["kind"] == "annotation"].groupby("step")["dur_ns"].median()
    parts = []
    for rank, own in spans.groupby("rank"):
        chosen, exposed = (
            own[(own["name"] == name) & (own["kind"] == kind)],
            how == "collective",
        )
        if (
            how == "rank" and rank != slow
        ):  # the others wait in the last collective of a step
            chosen, exposed = (
                own[own["kind"] == "comm"]
                .sort_values("start_ns")
                .groupby("step")
                .tail(1),
                True,
            )
        parts.append(
            stretched(own, chosen[chosen["step"] >= 0], share * step_ns, exposed)
        )
    return mm.Timeline(pd.concat(parts).sort_index(), timeline.meta)


def stretched(
    own: pd.DataFrame, chosen: pd.DataFrame, longer_ns: pd.Series, exposed: bool
) -> pd.DataFrame:
    """Spans of a rank, chosen ones longer by so much in each step, and all after them
    later.

    exposed: the part of the chosen ones grows under which nothing is computed, if there
    is any.
    """
    zero_ns = own["start_ns"].min()  # a float has too few digits for ns since 1970
    knots, extra = [0], [0.0]
    for step, inside in chosen.groupby("step"):
        pieces = union(pack(inside["start_ns"] - zero_ns, inside["dur_ns"]))
        if exposed:
            compute = own[(own["kind"] == "compute") & (own["step"] == step)]
            alone = subtraction(
                pieces, pack(compute["start_ns"] - zero_ns, compute["dur_ns"])
            )
            pieces = alone if len(alone) else pieces
        growth = longer_ns[step] / (pieces[:, 1] - pieces[:, 0]).sum()
        for start, end in pieces.tolist():
            knots += [start, end]
            extra += [extra[-1], extra[-1] + growth * (end - start)]
    ends = ((own["start_ns"] + add - zero_ns).to_numpy() for add in (0, own["dur_ns"]))
    start, end = (at + np.interp(at, knots, extra).astype(np.int64) for at in ends)
    return own.assign(start_ns=zero_ns + start, dur_ns=end - start)


def window(
    timeline: mm.Timeline, draw: np.random.Generator, half: int | None = None
) -> mm.Timeline:
    """Some consecutive steps, of one half if asked for."""
    every = timeline.steps[1:-1]
    every = (
        every
        if half is None
        else every[: len(every) // 2]
        if half == 0
        else every[len(every) // 2 :]
    )
    first = int(draw.integers(len(every) - STEPS + 1))
    return timeline.select(steps=every[first : first + STEPS])


def pair(
    recordings: dict[str, list[mm.Timeline]], draw: np.random.Generator
) -> tuple[str, list, list]:
    """Where from, and recordings of the same training: one on each side, or three."""
    weights = np.array([3.0 if name == LOGGED else 1.0 for name in recordings])
    name = str(draw.choice(list(recordings), p=weights / weights.sum()))
    runs, how = (
        recordings[name],
        draw.choice(["halves of a run", "two runs", "three runs each"]),
    )
    if (
        len(runs[0].steps) > 4 * STEPS
    ):  # a long log: windows that follow each other, or lie anywhere
        steps, far = runs[0].steps, how != "halves of a run"
        first = int(draw.integers(len(steps) - 2 * STEPS))
        second = int(draw.integers(len(steps) - STEPS)) if far else first + STEPS
        a, b = (runs[0].select(steps=steps[at:][:STEPS]) for at in (first, second))
        return f"{name}, {'anywhere' if far else 'next to each other'}", [a], [b]
    if how == "halves of a run":
        one = runs[draw.integers(len(runs))]
        return f"{name}, {how}", [window(one, draw, 0)], [window(one, draw, 1)]
    each = 1 if how == "two runs" else 3
    chosen = [window(runs[at], draw) for at in draw.permutation(len(runs))[: 2 * each]]
    return f"{name}, {how}", chosen[:each], chosen[each:]


def cases(
    recordings: dict[str, list[mm.Timeline]], count: int, threshold: float, seed: int
) -> pd.DataFrame:
    """A row per case that is drawn."""
    rows, draw = [], np.random.default_rng(seed)
    for _ in range(count):
        source, a, b = pair(recordings, draw)
        share = float(draw.choice(SLOWER, p=[0.4, 0.2, 0.2, 0.2]))
        hows = [
            "operation",
            *(["collective"] if (b[0].spans["kind"] == "comm").any() else []),
        ]
        hows += ["rank"] if len(b[0].ranks) > 1 else []
        how, name = str(draw.choice(hows)) if share else "as it was", ""
        if share:
            name = str(
                draw.choice(large(b[0], "comm" if how == "collective" else "compute"))
            )
            rank = int(draw.choice(b[0].ranks))
            b = [slowed(one, how, share, name, rank) for one in b]
        found = gate(a, b, threshold)
        step = found.table.set_index("quantity").loc["step_s"]
        unclear, named = (
            step["verdict"] == "cannot tell",
            list(found.explanation["operation"]),
        )
        named = bool(share) and mm.traces.op_names([name])[0] in named
        rows.append(
            (
                source,
                share,
                how,
                found.verdict == "fail",
                unclear,
                named,
                step["detectable"],
                step["ratio"],
            )
        )
    columns = [
        "source",
        "slower",
        "how",
        "failed",
        "cannot_tell",
        "named",
        "detectable",
        "ratio",
    ]
    return pd.DataFrame(rows, columns=columns)


def write_example(run: Path) -> None:
    """traces/gpt-before, 20 steps of a recording, and gpt-after, its next 20 steps with
    a slower linear layer.
    """
    timeline = mm.read_trace(run)
    spans = timeline.spans
    marks = (spans["kind"] == "annotation") & spans["name"].astype(str).str.startswith(
        "ProfilerStep"
    )
    lean = timeline.where((spans["kind"].isin(BUSY_KINDS) | marks).to_numpy())
    before, after = (
        lean.select(steps=lean.steps[at : at + STEPS]) for at in (1, 2 + STEPS)
    )
    mm.export_trace(before, PROJECT / "traces" / "gpt-before")
    mm.export_trace(
        slowed(after, "operation", 0.3, "aten::linear", 0),
        PROJECT / "traces" / "gpt-after",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the recordings")
    parser.add_argument("--record", action="store_true", help="make recordings first")
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.0,
        help="begin no recording later than this (7)",
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--gate", type=float, default=0.03, help="threshold (0.03)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--example",
        action="store_true",
        help="write traces/gpt-before and gpt-after of FOLDER, a run",
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return record_rank(options.folder, options.rank)
    if options.example:
        return write_example(options.folder)
    if options.record:
        record(options.folder, options.minutes)
    runs = {name: sorted(options.folder.glob(f"*/{name}")) for name in SETS}
    recordings = {
        name: [mm.read_trace(path) for path in paths]
        for name, paths in runs.items()
        if paths
    }
    with contextlib.suppress(FileNotFoundError):
        recordings[LOGGED] = [logged()]
    table = cases(recordings, options.cases, options.gate, options.seed)
    low = table["detectable"] <= table["slower"].clip(lower=options.gate)
    table["noise"] = np.where(low, "shows it", "hides it")
    for keys in (
        ["slower", "how"],
        ["slower", "source"],
        ["slower", "noise"],
        ["slower"],
    ):
        about = {
            "cases": ("failed", "size"),
            "failed": ("failed", "mean"),
            "cannot_tell": ("cannot_tell", "mean"),
        }
        about |= {"named": ("named", "mean"), "detectable": ("detectable", "median")}
        print(
            table.groupby(keys).agg(**about).to_string(float_format="{:.3f}".format),
            end="\n\n",
        )


if __name__ == "__main__":
    main()
