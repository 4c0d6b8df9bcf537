"""Which published numbers reproduce, and which do not? One list of claims, a test for each, and the README's table.

`python tests/papers/test_papers.py` writes the table between its two marks in README.md. Both numbers of a claim come
from the function that its notebook calls or, where that takes more than about 2 s, from the data of a figure that the
notebook drew (`drawn`), which tests/view/test_notebooks.py compares with a fresh run.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
import pandas as pd
import pytest

from madmax_lib.atomic import replacing
from madmax_lib.datasets import PROJECT
from madmax_lib.papers.madmax import studies as madmax_studies
from madmax_lib.papers.madmax.suite import published
from madmax_lib.papers.metis import studies as metis_study
from madmax_lib.papers.studies import hybrid, memory_facts, vit_study
from madmax_lib.papers.vtrain import studies as vtrain_studies

CLOSE = 0.05  # a claim that keeps this relative error reproduces: a declared miss that does is to be moved
Pair = Callable[[], tuple[float, float]]  # theirs and ours
README, START, END = PROJECT / "README.md", "<!-- claims -->", "<!-- /claims -->"


@dataclass(frozen=True)
class Claim:
    """A published number beside ours.

    values: theirs and ours, NaN where nothing public gives ours. unit: "share" is 0..1 and shown in percent. tolerance:
    relative error that it keeps; None for a miss, which `why` explains.
    """

    paper: str
    notebook: str
    text: str
    values: Pair
    unit: str
    tolerance: float | None = None
    why: str = ""

    @property
    def error(self) -> float:
        """Ours / theirs - 1."""
        theirs, ours = self.values()
        return ours / theirs - 1


# --- where both numbers come from


@cache
def drawn(figure: str) -> pd.DataFrame:
    """The committed data of a figure."""
    return pd.read_csv(PROJECT / "figures" / f"{figure}.csv")


@cache
def madmax() -> pd.DataFrame:
    return madmax_studies.claims().set_index("key")


@cache
def vtrain() -> pd.DataFrame:
    return vtrain_studies.claims().set_index("key")


@cache
def gpt2() -> pd.DataFrame:
    return hybrid.claims().set_index("claim")


@cache
def vit() -> pd.DataFrame:
    return vit_study.fit_and_predict()[1].set_index("phase")


@cache
def metis() -> pd.DataFrame:
    return metis_study.table1_errors(metis_study.run_rows([1, 3])).set_index(["row", "mode"])


@cache
def facts() -> pd.DataFrame:
    return memory_facts().set_index("fact")


def row(table: Callable[[], pd.DataFrame], key: str | tuple, theirs: str = "theirs", ours: str = "ours") -> Pair:
    """Both numbers of a row of a table."""
    return lambda: tuple(float(table().loc[key, column]) for column in (theirs, ours))


def largest(system: str, machine: str) -> Pair:
    return row(lambda: drawn("wall/limits").set_index(["system", "machine"]), (system, machine), "published", "ours")


def vit_error() -> tuple[float, float]:
    """The paper's mean error in points of MFU, and the relative one of the same predictions."""
    return 1 - published("vit_accuracy"), madmax_studies.vit_mfu()["paper_error"].abs().mean()


def cost_saved() -> tuple[float, float]:
    """Row 1 as printed, and with either order of the GPU types fixed (the figure's data)."""
    printed = metis()["cost_ms"][1]
    ours = drawn("metis/table1").query("row == 1").pivot(index="node_order", columns="mode", values="our_cost_ms")
    return 1 - printed["strategy"] / printed["base"], (1 - ours["strategy"] / ours["base"]).max()


def steps_saved() -> tuple[float, float]:
    """The least of table 1, as its text says, and of our row 3."""
    steps = metis()["our_steps"][3]
    return 0.08, 1 - steps["strategy"] / steps["base"]


def traced_overlap() -> tuple[float, float]:
    traced = vit_study.measured_overlap().groupby("strategy")["overlap"].mean()
    return traced["zero3"], drawn("vit_study/overlap").set_index("strategy").at["zero3", "overlap"]


def zero(stage: int) -> Pair:
    """GB of model states of 7.5e9 parameters on 64 GPUs, to the digits printed."""
    fact = f"7.5e9 parameters, dp64.z{stage} [ZeRO, Table 1]"
    return lambda: tuple(float(facts().at[fact, column].split()[0]) for column in ("theirs", "ours"))


def ran() -> tuple[float, float]:
    """Sizes that are known to run or to run out of memory, and how many of them come out."""
    agrees = facts().loc[~facts().index.str.contains("ZeRO, Table 1"), "agrees"]
    return len(agrees), agrees.sum()


def measured(model: str, step_s: float) -> Pair:
    """A measured step, and its prediction by constants fitted without its source and model (the figure's data)."""

    def both() -> tuple[float, float]:
        runs = drawn("validation/predicted")
        one = runs[(runs["model"] == model) & np.isclose(runs["measured_s"], step_s, rtol=1e-3)]
        return one["measured_s"].item(), one["predicted_s"].item()

    return both


# --- the claims

MADMAX = "MAD-Max (ISCA 2024)", "50_madmax"
VTRAIN = "vTrain (MICRO 2024, as quoted by others)", "51_vtrain"
SEED = "Seed 000, a study on vTrain", "51_vtrain"
METIS = "Metis (ATC 2024) and its fork", "52_metis"
GPT2 = "GPT-2 Large on four A100 (makramab/hybrid-parallelism)", "53_hybrid_parallelism"
VIT = "ViT-Huge on two T4 (sidd1196/distributed_vision_training)", "54_vit_llm_study"
ZERO = "Memory: ZeRO (SC 2020), offloading", "42_memory"
WALL = ZERO[0], "55_heterogeneous_training"
RUNS = "Measured steps, predicted without the runs of that source and model", "31_validate"
TRIED = "theirs was tried, ours would fit"

CLAIMS = [
    Claim(*MADMAX, "DLRM-A on 128 A100, serialized step", row(madmax, "dlrm_a_serialized_paper"), "ms", 0.01),
    Claim(*MADMAX, "share of its communication exposed", row(madmax, "dlrm_a_exposed_paper"), "share", 0.001),
    Claim(*MADMAX, "DLRM-A throughput", row(madmax, "dlrm_a_mqps"), "MQPS", 0.005),
    Claim(*MADMAX, "DLRM-B throughput", row(madmax, "dlrm_b_mqps"), "MQPS", 0.001),
    Claim(*MADMAX, "LLaMA-65B, communication hidden by prefetching", row(madmax, "prefetch"), "share", 0.035),
    Claim(*MADMAX, "largest gain over FSDP, pre-training", row(madmax, "gain_max"), "x", 0.01),
    Claim(*MADMAX, "largest gain over FSDP, inference", row(madmax, "gain_inference"), "x", 0.01),
    Claim(*MADMAX, "smallest gain over FSDP, pre-training", row(madmax, "gain_min"), "x",
          why="FSDP itself is the best that fits some models"),
    Claim(*MADMAX, "mean gain over FSDP, pre-training", row(madmax, "gain_mean"), "x",
          why="models, systems and batches of the mean are not public"),
    Claim(*MADMAX, "largest gain without a memory limit, pre-training", row(madmax, "gain_max_free"), "x",
          why="no released configuration gives it"),
    Claim(*MADMAX, "largest gain without a memory limit, inference", row(madmax, "gain_inference_free"), "x",
          why="no released configuration gives it"),
    Claim(*MADMAX, "LLaMA-65B, GPU-hours of 306k steps", row(madmax, "llama_gpu_hours"), "h",
          why="the configuration behind them is not public"),
    Claim(*MADMAX, "mean error of nine ViT predictions", vit_error, "share",
          why="theirs are points of MFU, ours the same predictions relative to the measured MFU"),
    Claim(*VTRAIN, "mean error on one node", row(vtrain, "single_mape"), "share",
          why="the measured times are not public"),
    Claim(*VTRAIN, "mean error on 64 to 512 GPUs", row(vtrain, "multi_mape"), "share",
          why="the predictions are not public"),
    Claim(*VTRAIN, "MT-NLG, utilisation of plan (16, 16, 105)", row(vtrain, "mtnlg_util_16_16_105"), "share", 0.03),
    Claim(*VTRAIN, "MT-NLG, cost of the given plan", row(vtrain, "plan_given_cost"), "USD", 0.03),
    Claim(*VTRAIN, "MT-NLG, cost of the plan found", row(vtrain, "plan_found_cost"), "USD", 0.03),
    Claim(*VTRAIN, "change of the cost", row(vtrain, "plan_cost_change"), "share",
          why="a small difference of two costs that reproduce"),
    Claim(*VTRAIN, "naive Chinchilla model on 3,360 A100", row(vtrain, "chinchilla_naive_days"), "days", 0.04),
    Claim(*VTRAIN, "mean utilisation of the compute-optimal candidates", row(vtrain, "chinchilla_util"), "share",
          why="the candidates are not public, ours are a grid"),
    Claim(*VTRAIN, "multi-tenant, change of the mean completion time",
          row(vtrain, "scheduling_jct"), "share", why="the jobs are not public"),
    Claim(*SEED, "GPT of 96 layers on 2,048 A100, plan (8, 32, 8)", row(vtrain, "seed_96_8192_8_32_8"), "s",
          why="operators by formula in place of its profiles"),
    Claim(*SEED, "the same, plan (4, 128, 4)", row(vtrain, "seed_96_8192_4_128_4"), "s",
          why="its kernels were probably profiled at half the sequence"),
    Claim(*METIS, "largest training speed-up of Metis", lambda: (8.43, math.nan), "x",  # abstract of the paper
          why="no measured time is public"),
    Claim(*METIS, "steps of the search, table 1, row 1, Metis", row(metis, (1, "base"), "steps", "our_steps"), "", 0.0),
    Claim(*METIS, "the same, the fork", row(metis, (1, "strategy"), "steps", "our_steps"), "", 0.0),
    Claim(*METIS, "best cost, row 1, Metis, in one of two orders of GPU types",
          row(metis, (1, "base"), "cost_ms", "our_cost_ms"), "ms", 1e-5),
    Claim(*METIS, "cost saved by the fork, row 1", cost_saved, "share",
          why="nothing once the order of GPU types is fixed"),
    Claim(*METIS, "fewest steps saved by the fork", steps_saved, "share", why="row 3 of its own table"),
    Claim(*GPT2, "MFU of the fastest row, its short last batch counted as full",
          row(gpt2, "MFU of zero3+tp2, batch 32: reproduced"), "share", 0.002),
    Claim(*GPT2, "the same by wall clock, at most", row(gpt2, "MFU of the fastest row, at most"), "share",
          why="its TP peers saw different samples"),
    Claim(*GPT2, "speed of that row over DDP, at most",
          row(gpt2, "speed of the fastest row over DDP, at most"), "x", why="as above"),
    Claim(*VIT, "step of ZeRO-2 after the first 300, which were fitted",
          row(vit, "step", "rest_s", "simulated_s"), "s", 0.01),
    Claim(*VIT, "communication of ZeRO-3 hidden, traced", traced_overlap, "share",
          why="the simulated ranks neither pause nor wait for a slower one"),
    Claim(*ZERO, "model states of 7.5e9 parameters on 64 GPUs, ZeRO-1", zero(1), "GB", 0.0),
    Claim(*ZERO, "the same, ZeRO-3", zero(3), "GB", 0.0),
    Claim(*ZERO, "sizes known to run, or to run out of memory, that come out so", ran, "", 0.0),
    Claim(*WALL, "parameters of the largest model, ZeRO-Offload, 1 V100",
          largest("ZeRO-Offload", "1 x v100-32, 1500 GB"), "billion", why=TRIED),
    Claim(*WALL, "parameters of the largest model, ZeRO-3 Offload, 1 V100",
          largest("ZeRO-3 Offload", "1 x v100-32, 1500 GB"), "billion", why=TRIED),
    Claim(*WALL, "parameters of the largest model, PatrickStar, 8 V100",
          largest("PatrickStar 0.4.3", "8 x v100-32, 240 GB"), "billion", why=TRIED),
    Claim(*RUNS, "Megatron-LM 530B, 280 A100, selective recompute", measured("Megatron-530B", 37.83), "s",
          0.05),
    Claim(*RUNS, "MT-NLG 530B, 3,360 A100", measured("MT-NLG-530B", 44.4), "s", why="not explained"),
    Claim(*RUNS, "BLOOM 176B, 384 A100", measured("BLOOM-proto 176B (70x14336)", 102.03), "s", why="not explained"),
    Claim(*RUNS, "Llama 3.1 405B, 128 H100, torchtitan", measured("Llama-3.1-405B", 18.79), "s", 0.05),
]  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.notebook[:2]} {claim.text}")
def test_claims_reproduce_and_misses_miss(claim):
    if claim.tolerance is None:
        assert claim.why and not abs(claim.error) <= CLOSE, "it reproduces: give it a tolerance"
    else:
        assert abs(claim.error) <= claim.tolerance <= CLOSE


# --- the table


def _number(value: float) -> str:
    """Four significant digits."""
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "none"
    if unit == "share":
        return f"{_number(100 * value)} %"
    return _number(value) + ("x" if unit == "x" else f" {unit}".rstrip())


def _error(claim: Claim) -> str:
    """Relative, or in points where theirs is itself percent; a miss is bold."""
    theirs, ours = claim.values()
    if math.isnan(ours):
        return "**none**"
    points = claim.unit == "share"
    off = round(100 * (ours - theirs if points else claim.error), 1)
    text = (f"{off:+.1f}" if off else "0.0") + (" points" if points else " %")
    return text if claim.tolerance is not None else f"**{text}**"


def table() -> str:
    """The claims as Markdown, by paper."""
    kept = sum(claim.tolerance is not None for claim in CLAIMS)
    lines = [
        f"Headlines and misses; the notebooks list more. {kept} of these {len(CLAIMS)} numbers reproduce within",
        f"{100 * CLOSE:.0f} %, the others have their error in bold and the reason beside them. Errors are relative, or",
        "in points where theirs is itself percent.",
        "",
        "| claim | theirs | ours | error | notebook |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for paper, claims in groupby(CLAIMS, lambda claim: claim.paper):
        lines.append(f"| **{paper}** | | | | |")
        for claim in claims:
            text = f"{claim.text} (*{claim.why}*)" if claim.why else claim.text
            numbers = " | ".join(_shown(value, claim.unit) for value in claim.values())
            link = f"[`{claim.notebook}`](notebooks/{claim.notebook}.ipynb)"
            lines.append(f"| {text} | {numbers} | {_error(claim)} | {link} |")
    return "\n".join(lines)


def _block(text: str) -> re.Match:
    """What stands between the marks. Raises ValueError unless there is one such place."""
    found = list(re.finditer(f"(?<={START}\n\n).*?(?=\n\n{END})", text, re.S))
    if len(found) != 1:
        raise ValueError(f"{README}: {len(found)} blocks between {START} and {END}, expected one")
    return found[0]


def test_readme_shows_every_claim():
    assert _block(README.read_text())[0] == table(), "run python tests/papers/test_papers.py"


def test_numbers_are_shown_as_printed():
    texts = {"h": "863,397 h", "share": "75.46 %", "x": "2.24x", "GB": "1.88 GB", "": "612", "s": "none"}
    values = {"h": 863397, "share": 0.7546, "x": 2.24, "GB": 1.88, "": 612.0, "s": math.nan}
    assert {unit: _shown(value, unit) for unit, value in values.items()} == texts
    assert (_shown(0.0, "share"), _shown(100.0, "")) == ("0 %", "100")


def test_errors_that_round_to_nothing_have_no_sign():
    small = Claim("a paper", "00_tour", "a claim", lambda: (1.0, 0.9999), "s", 0.01)
    assert _error(small) == "0.0 %" and small.error == pytest.approx(-1e-4)


def main() -> None:
    """Rewrite the block of README.md."""
    new = table()
    text = README.read_text()
    place = _block(text)
    with replacing(README) as temporary:
        temporary.write_text(text[: place.start()] + new + text[place.end() :])


if __name__ == "__main__":
    main()
