"""How far from measured steps are predictions? Ours, one rate per GPU, llm-analysis,
and yours, by source left out.

    python benchmarks/accuracy.py [--rows FILE] [--entry NAME=FILE ...]

Rows: the published ones, vTrain's multi-node runs, other stacks (`published_more`), and
the plans of one stack's sweep that are within 1.5 x of the best of their model and GPU
count. Each source is predicted without its rows: ours by a refit without it (by the
shipped constants where they have not seen it), the others by a rate per GPU and data
type that is the median over the other fitted sources. A table that is not on this
machine is left out, with a line.

llm-analysis 0.2.2 (https://github.com/cli99/llm-analysis, Apache-2.0) takes part where
it can be imported:

    pip install --no-deps --target THEIRS llm-analysis==0.2.2 fire termcolor
    PYTHONPATH=THEIRS python benchmarks/accuracy.py

Its seconds are FLOPs over its flops_efficiency, which is the fitted rate here; it has
no context parallelism and wants micro-batches that divide the batch. Other tools:
`--rows` writes the rows with their ids (table:line), and `--entry` takes a CSV with the
columns id and predicted_s, as it is. error = |predicted / measured - 1|.
"""

import argparse
import contextlib
import logging
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration import folds, known_rows, predict, read_rows
from madmax_lib.catalog import local_data

try:
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import (
        DtypeConfig,
        GPUConfig,
        ModelConfig,
        ParallelismConfig,
    )
except ImportError:
    LLMAnalysis = None

FILES = {  # of the data directories, beside the published rows that the library has
    "vtrain": "vtrain/ground_truth_multi.shared.csv",
    "published_more": "published_more/published_more.csv",
    "layout_sweep": "published_more/layout_sweep.csv",
    "dlrm": "published_more/dlrm.csv",
}
# plans of the sweep that are slower say more about that stack than about the machine
NEAR_THE_BEST = 1.5
SETS = ("fitted sources, each left out", "sources never fitted", "layouts of one stack")


def tables():
    """Tables by name; the index of a table is the id of its rows."""
    result = {"published_train": catalog.table("published_train", numbers=True)}
    for name, file in FILES.items():
        try:
            result[name] = pd.read_csv(local_data(file), encoding="utf-8-sig")
        except FileNotFoundError as error:
            print(f"without {name}: {error}")
    for name, table in result.items():
        table.index = [f"{name}:{line}" for line in range(len(table))]
    if "layout_sweep" in result:
        sweep = result["layout_sweep"]
        best = sweep.groupby(["model", "n_gpus"])["iteration_time_s"].transform("min")
        result["layout_sweep"] = sweep[
            sweep["iteration_time_s"] <= NEAR_THE_BEST * best
        ]
    return result


def measured_rows(given):
    """Normalised rows (`read_rows`) with a measured time, also those that cannot be
    read, and the set each is in.
    """
    rows = pd.concat([read_rows(table) for table in given.values()])
    stated = pd.concat(
        [
            table["iteration_time_s"]
            for table in given.values()
            if "iteration_time_s" in table
        ]
    )
    rows["measured_s"] = rows["measured_s"].astype(float).fillna(stated[stated > 0])
    sweep, fitted = (
        rows.index.str.startswith("layout_sweep"),
        rows["repository"].isin(known_rows()["repository"]),
    )
    rows["set"] = np.select([fitted, sweep], [SETS[0], SETS[2]], SETS[1])
    return rows[rows["measured_s"] > 0]


def ours(rows, given):
    """Seconds by a fit without the source of a row; by the shipped constants where they
    have not seen the source.
    """
    left_out = folds(rows[rows["set"] == SETS[0]], by="source")["predicted_s"]
    blind = pd.concat([predict(table)["predicted_s"] for table in given.values()])
    return (
        blind.reindex(rows.index)
        .where(rows["set"] != SETS[0], left_out.reindex(rows.index))
        .astype(float)
    )


def at_peak(rows):
    """Seconds of the model's FLOPs at the peak of the devices; frozen weights have no
    gradients of their own.
    """
    return rows["case"].map(peak_step_s, na_action="ignore").astype(float)


def peak_step_s(case):
    flops = case.model.forward_flops(case.global_batch, case.sequence) * (
        2 if case.plan.lora_rank else 3
    )
    return flops / (case.plan.world_size * case.cluster.device.peak(case.dtype))


def by_llm_analysis(rows):
    """Seconds of llm-analysis at the peak, NaN where it refuses a row."""
    logging.disable(logging.CRITICAL)  # it logs a page for each row
    result = pd.Series(np.nan, rows.index)
    for name, case in rows.loc[rows["cp"] == 1, "case"].items():
        with contextlib.suppress(AssertionError):
            result[name] = their_step_s(case)
    return result


def their_step_s(case):
    """One row; raises AssertionError where it cannot be said."""
    shape, split = case.model, case.plan
    model = ModelConfig(
        shape.name,
        shape.layers,
        shape.heads,
        shape.hidden,
        shape.vocab,
        max_seq_len=case.sequence,
        num_key_value_heads=shape.kv_heads,
        ffn_embed_dim=shape.ffn,
        expansion_ratio=shape.ffn / shape.hidden,
        moe_num_experts=shape.experts or 1,
        moe_top_k=shape.active_experts or 1,
    )
    # memory, its bandwidth, link and latency: its training step is FLOPs over a rate
    aside = 1.0
    device = case.cluster.device
    gpu = GPUConfig(
        device.name, aside, aside, aside, aside, device.peak(case.dtype) / 1e12
    )
    plan = ParallelismConfig(split.tp, split.pp, split.dp, split.ep)
    step = LLMAnalysis(model, gpu, DtypeConfig(), plan, flops_efficiency=1.0).training(
        split.micro_batch,
        global_batch_size=case.global_batch,
        seq_len=case.sequence,
        activation_recomputation=ActivationRecomputation[split.recompute.upper()],
        ds_zero=DSZeRO(split.zero),
    )
    return step["latency_per_iter"]


def rated(rows, peak_s):
    """Seconds at the peak over the rate of other sources: the median of a device and
    data type, else of all devices.
    """
    slower = (rows["measured_s"] / peak_s)[rows["set"] == SETS[0]].dropna()
    keys = (
        rows["gpu"].astype(str)
        + " "
        + rows["dtype"].str.extract(r"(\d+)$", expand=False).astype(str)
    )
    result = pd.Series(np.nan, rows.index)
    for repository, part in rows.groupby("repository"):
        others = slower[rows["repository"].reindex(slower.index) != repository]
        factor = (
            keys[part.index].map(others.groupby(keys).median()).fillna(others.median())
        )
        result[part.index] = peak_s[part.index] * factor
    return result


def side_by_side(rows, seconds, names):
    """One line per group: rows, those that all tools predict (but tools that predict
    none), errors, ratios of means.
    """
    error = seconds.div(rows["measured_s"], axis=0).sub(1).abs()
    lines = {}
    for name, part in error.groupby(names):
        tools = [tool for tool in part if part[tool].notna().any()]
        common = part[tools].dropna() if tools else part[:0]
        line = {"rows": len(part), "compared": len(common)}
        line |= {
            f"{tool} (%)": (
                f"{100 * common[tool].median():.1f} / {100 * common[tool].mean():.1f}"
            )
            for tool in tools
        }
        if "ours" in tools:
            means = common.mean()
            line |= {
                f"{tool} / ours": f"{means[tool] / means['ours']:.1f}"
                for tool in tools
                if tool != "ours"
            }
        lines[name] = line
    columns = [
        "rows",
        "compared",
        *(f"{tool} (%)" for tool in seconds),
        *(f"{tool} / ours" for tool in seconds),
    ]
    table = pd.DataFrame.from_dict(lines, orient="index").fillna("")
    return table[[name for name in columns if name in table]]


def show(title, table):
    """A table in Markdown."""
    print(
        f"\n| {title} | "
        + " | ".join(table.columns)
        + " |\n|"
        + " --- |" * (len(table.columns) + 1)
    )
    for name, cells in table.iterrows():
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--rows", type=Path, help="write the measured rows with their ids to this CSV"
    )
    arguments.add_argument(
        "--entry",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="CSV: id, predicted_s",
    )
    arguments = arguments.parse_args()
    given = tables()
    rows = measured_rows(given)
    if arguments.rows:
        table = (
            pd.concat(given.values())
            .loc[rows.index]
            .assign(measured_s=rows["measured_s"])
        )
        table.to_csv(arguments.rows, index_label="id")
    seconds = {"ours": ours(rows, given), "one rate": rated(rows, at_peak(rows))}
    if LLMAnalysis is None:
        print(
            "without llm-analysis: not installed (see the first lines of this script)"
        )
    else:
        seconds["llm-analysis"] = rated(rows, by_llm_analysis(rows))
    for entry in arguments.entry:
        name, _, file = entry.partition("=")
        seconds[name] = (
            pd.read_csv(file).set_index("id")["predicted_s"].reindex(rows.index)
        )
    seconds = pd.DataFrame(seconds)
    print(
        "\nrows predicted: "
        + ", ".join(f"{tool} {count}" for tool, count in seconds.notna().sum().items()),
        end="",
    )
    print(f" of {len(rows)}; errors are median / mean, ratios of means")
    kind = rows["kind"].where(rows["supported"].astype(bool), "not read")
    show("rows", side_by_side(rows, seconds, rows["set"] + ", " + kind))
    show("source", side_by_side(rows, seconds, rows["repository"].str.slice(0, 60)))


if __name__ == "__main__":
    main()
