"""Do plans that NVIDIA ran fit, and how far are they behind the winner of a search?

    python benchmarks/recipes.py [--gpu h100-80] [--quick]

One line per published run of NeMo, Megatron-Bridge and Megatron-LM on H100: bytes that
are counted, with the least recompute that fits where none is stated (`stated`: with
none), what a device has, the time of the run's own plan over that of the fastest plan
that fits in the same software, and that plan. Runs of the same case share a search.
The last line counts ratios only of runs that fit as they are stated: of others the
recompute, and so the plan, is a guess.
--quick: searches `Space.quick()` with any number of chunks a stage.
"""

import argparse
from dataclasses import replace
from functools import lru_cache

import pandas as pd

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.calibration import read_rows
from madmax_lib.planner import Space
from madmax_lib.simulator import peak_bytes, usable_bytes

PAGES = "NVIDIA-NeMo/Megatron-Bridge|NVIDIA/NeMo|NVIDIA/Megatron-LM"
GB = 1e9


def runs(gpu: str) -> pd.DataFrame:
    """Normalised rows of NVIDIA's pages on one GPU."""
    table = catalog.table("published_train", numbers=True)
    table = table[table["source"].str.contains(PAGES)]
    rows = read_rows(table)
    return rows[rows["supported"] & (rows["gpu"] == gpu)]


def counted(case) -> float:
    """Bytes of a case's fullest device."""
    options = {"global_batch": case.global_batch, "sequence": case.sequence}
    options |= {"dtype": case.dtype, "software": case.software}
    return peak_bytes(mm.memory(case.model, case.plan, **options))


def least_recompute(run):
    """The case of a run; where it states no recompute with the least that fits."""
    case = run["case"]
    room = usable_bytes(case.cluster.device)
    if run["recompute_stated"] or counted(case) <= room:
        return case
    plans = [replace(case.plan, recompute=word) for word in ("selective", "full")]
    cases = [replace(case, plan=plan) for plan in plans]
    return next((case for case in cases if counted(case) <= room), cases[-1])


@lru_cache(maxsize=64)
def winner(case, space: Space):
    """The first line of a search's table for a case, whose plan does not count."""
    try:
        found = mm.search(
            case.model,
            case.cluster,
            case.global_batch,
            space=space,
            top=1,
            software=case.software,
            sequence=case.sequence,
            dtype=case.dtype,
            progress=False,
        )
    except ValueError as error:  # nothing fits
        return pd.Series({"step_s": float("nan"), "plan": str(error)[:60]})
    return found.table.iloc[0]


def lines(rows: pd.DataFrame, space: Space) -> pd.DataFrame:
    """The table of this benchmark."""
    result = []
    for _, run in rows.iterrows():
        case = least_recompute(run)
        plan = case.plan
        room = usable_bytes(case.cluster.device)
        step_s = mm.estimate(
            case.model,
            case.cluster,
            plan,
            global_batch=case.global_batch,
            sequence=case.sequence,
            dtype=case.dtype,
            software=case.software,
        ).at[0, "step_s"]
        # adapters and dropped tokens are no choice of a search
        searched = plan.lora_rank == 0 and plan.capacity == 0
        best = winner(replace(case, plan=mm.Plan()), space) if searched else None
        result.append(
            {
                "run": f"{run['model'][:20]}, {case.cluster.world_size}",
                "plan": str(plan).replace(".overlap-gather", ""),
                "GB": counted(case) / GB,
                "stated GB": counted(run["case"]) / GB,
                "device GB": room / GB,
                "fits": counted(case) <= room,
                "own / measured": step_s / run["measured_s"],
                "own / winner": step_s / best.step_s if searched else float("nan"),
                "winner": best["plan"] if searched else "",
            }
        )
    return pd.DataFrame(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100-80")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    space = Space()
    if options.quick:
        space = replace(Space.quick(), usual_interleave=False)
    table = lines(runs(options.gpu), space)
    pd.set_option("display.width", 250, "display.max_colwidth", 80)
    print(table.round(2).to_string())
    is_known = table["stated GB"] <= table["device GB"]
    ratio = table.loc[is_known, "own / winner"].dropna()
    chunks = table["winner"].str.extract(r"\.v(\d+)", expand=False).astype(float)
    print(
        f"{len(table)} runs: {(~table['fits']).sum()} do not fit, "
        f"{(table['stated GB'] > table['device GB']).sum()} without more recompute; "
        f"own / winner of the {len(ratio)} others: mean {ratio.mean():.3f}, "
        f"{(ratio > 1.1).sum()} above 1.10, at most {ratio.max():.2f}; of "
        f"{(table['winner'] != '').sum()} winners {(chunks > 12).sum()} have more than 12 "
        f"chunks, {(chunks > 8).sum()} more than 8"
    )


if __name__ == "__main__":
    main()
