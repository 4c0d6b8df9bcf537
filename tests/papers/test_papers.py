"""Which published numbers reproduce, and which do not? The claims of claims.csv, a test
for each, and docs' table.

`python tests/papers/test_papers.py` writes the table of docs/which-papers-reproduce.md.
Both numbers of a claim come from the function that its notebook calls or, where that
takes more than about 2 s, from the data of a figure that the notebook drew (`drawn`),
which tests/view/test_notebooks.py compares with a fresh run.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from madmax_lib.base.atomic import replacing
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.papers.madmax import studies as madmax_studies
from madmax_lib.papers.madmax.suite import published
from madmax_lib.papers.metis import studies as metis_study
from madmax_lib.papers.studies import hybrid, memory_facts, vit_study
from madmax_lib.papers.vtrain import studies as vtrain_studies

# a claim that keeps this relative error reproduces: a declared miss that does is to be
# moved
CLOSE = 0.05
Pair = Callable[[], tuple[float, float]]  # theirs and ours
PAGE = PROJECT / "docs" / "which-papers-reproduce.md"
START, END = "<!-- claims -->", "<!-- /claims -->"


@dataclass(frozen=True)
class Claim:
    """A published number beside ours.

    kind: "model", of a paper's own model that we apply; "count", a closed form, a count or an
    audit; "fit", measured, and ours saw part of it; "predicted", measured or known to run, and
    ours saw none of it. measured: what the paper measured beside its model, else NaN.
    values: theirs and ours, NaN where nothing public gives ours. unit: "share" is 0..1
    and shown in percent. tolerance: relative error that it keeps; None for a miss,
    which `why` explains.
    """

    paper: str
    notebook: str
    kind: str
    text: str
    values: Pair
    unit: str
    tolerance: float | None = None
    why: str = ""
    measured: float = math.nan

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
    return metis_study.table1_errors(metis_study.run_rows([1, 3])).set_index(
        ["row", "mode"]
    )


@cache
def facts() -> pd.DataFrame:
    return memory_facts().set_index("fact")


def row(
    table: Callable[[], pd.DataFrame],
    key: str | tuple,
    theirs: str = "theirs",
    ours: str = "ours",
) -> Pair:
    """Both numbers of a row of a table."""
    return lambda: tuple(float(table().loc[key, column]) for column in (theirs, ours))


def largest(system: str, machine: str) -> Pair:
    return row(
        lambda: drawn("wall/limits").set_index(["system", "machine"]),
        (system, machine),
        "published",
        "ours",
    )


def gpt2_speed(number: int) -> Pair:
    """Tokens per second of a row of the study, and as it should be on its machine."""
    return row(speeds, number, "reported", "predicted")


@cache
def speeds() -> pd.DataFrame:
    return hybrid.predictions()


def mtnlg_utilisation() -> tuple[float, float]:
    """Of plan (16, 16, 105), by the rules of the costs (the figure's data)."""
    plans = drawn("vtrain/design_space").set_index(["tp", "dp", "pp"])
    published = vtrain().at["mtnlg_util_16_16_105", "theirs"]
    return float(published), float(plans.at[(16, 16, 105), "utilisation"])


def vit_error() -> tuple[float, float]:
    """The paper's mean error in points of MFU, and the relative one of the same
    predictions.
    """
    return 1 - published("vit_accuracy"), madmax_studies.vit_mfu()[
        "paper_error"
    ].abs().mean()


def cost_saved() -> tuple[float, float]:
    """Row 1 as printed, and with either order of the GPU types fixed (the figure's
    data).
    """
    printed = metis()["cost_ms"][1]
    ours = (
        drawn("metis/table1")
        .query("row == 1")
        .pivot(index="node_order", columns="mode", values="our_cost_ms")
    )
    return 1 - printed["strategy"] / printed["base"], (
        1 - ours["strategy"] / ours["base"]
    ).max()


def steps_saved() -> tuple[float, float]:
    """The least of table 1, as its text says, and of our row 3."""
    steps = metis()["our_steps"][3]
    return 0.08, 1 - steps["strategy"] / steps["base"]


def traced_overlap() -> tuple[float, float]:
    traced = vit_study.measured_overlap().groupby("strategy")["overlap"].mean()
    return traced["zero3"], drawn("vit_study/overlap").set_index("strategy").at[
        "zero3", "overlap"
    ]


def zero(stage: int) -> Pair:
    """GB of model states of 7.5e9 parameters on 64 GPUs, to the digits printed."""
    fact = f"7.5e9 parameters, dp64.z{stage} [ZeRO, Table 1]"
    return lambda: tuple(
        float(facts().at[fact, column].split()[0]) for column in ("theirs", "ours")
    )


def ran() -> tuple[float, float]:
    """Sizes that are known to run or to run out of memory, and how many of them come
    out.
    """
    agrees = facts().loc[~facts().index.str.contains("ZeRO, Table 1"), "agrees"]
    return len(agrees), agrees.sum()


def measured(model: str, step_s: float) -> Pair:
    """A measured step, and its prediction by constants fitted without its source and
    model (the figure's data).
    """

    def both() -> tuple[float, float]:
        runs = drawn("validation/predicted")
        one = runs[
            (runs["model"] == model) & np.isclose(runs["measured_s"], step_s, rtol=1e-3)
        ]
        return one["measured_s"].item(), one["predicted_s"].item()

    return both


# --- the claims

# what stands before the colon of a claim's values; behind it stand the arguments
SOURCES = {
    **{table.__name__: partial(row, table) for table in (madmax, vtrain, gpt2, vit)},
    "metis": lambda number, mode, *columns: row(metis, (int(number), mode), *columns),
    "largest": largest,
    "gpt2_speed": lambda number: gpt2_speed(int(number)),
    "measured": lambda model, step_s: measured(model, float(step_s)),
    "zero": lambda stage: zero(int(stage)),
    "only": lambda theirs: lambda: (float(theirs), math.nan),
    **{
        both.__name__: lambda both=both: both
        for both in (
            mtnlg_utilisation,
            vit_error,
            cost_saved,
            steps_saved,
            traced_overlap,
            ran,
        )
    },
}


def claim_of(row: pd.Series) -> Claim:
    """A row of claims.csv."""
    name, _, arguments = row["values"].partition(": ")
    values = SOURCES[name](*filter(None, arguments.split("; ")))
    tolerance = float(row["tolerance"]) if row["tolerance"] else None
    measured = published(row["measured"]) if row["measured"] else math.nan
    return Claim(
        row["paper"],
        row["notebook"],
        row["kind"],
        row["text"],
        values,
        row["unit"],
        tolerance,
        row["why"],
        measured,
    )


_table = pd.read_csv(
    Path(__file__).with_name("claims.csv"), dtype=str, keep_default_na=False
)
CLAIMS = _table.apply(claim_of, axis=1).tolist()


@pytest.mark.parametrize(
    "claim", CLAIMS, ids=lambda claim: f"{claim.notebook[:2]} {claim.text}"
)
def test_claims_reproduce_and_misses_miss(claim):
    if claim.tolerance is None:
        assert claim.why and not abs(claim.error) <= CLOSE, (
            "it reproduces: give it a tolerance"
        )
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
    kinds = pd.Series([claim.kind for claim in CLAIMS])
    close = pd.Series([claim.tolerance is not None for claim in CLAIMS])
    told = close.groupby(kinds).agg(["sum", "size"])

    def share(kind: str) -> str:
        return f"{told.at[kind, 'sum']} of {told.at[kind, 'size']}"

    lines = [
        f"**Predicted without seeing the answer: {share('predicted')} numbers within "
        f"{100 * CLOSE:.0f} %.** Numbers of the papers' own models,",
        f"which we apply again (*model*): {share('model')}. Closed forms, counts and "
        f"audits of what was printed (*count*):",
        f"{share('count')}. Fitted to part of the run (*fit*): {share('fit')}. The others "
        "have their error in bold and the reason beside",
        "them. Errors are of ours against *theirs*, relative or in points where that is "
        "percent; *measured* is what a paper",
        "measured beside its model.",
        "",
        "| claim | kind | theirs | measured | ours | error | notebook |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for paper, claims in groupby(CLAIMS, lambda claim: claim.paper):
        lines.append(f"| **{paper}** | | | | | | |")
        for claim in claims:
            text = f"{claim.text} (*{claim.why}*)" if claim.why else claim.text
            theirs, ours = (_shown(value, claim.unit) for value in claim.values())
            measured = claim.measured
            beside = "" if math.isnan(measured) else _shown(measured, claim.unit)
            link = f"[`{claim.notebook}`](../notebooks/{claim.notebook}.ipynb)"
            numbers = f"{theirs} | {beside} | {ours} | {_error(claim)}"
            lines.append(f"| {text} | {claim.kind} | {numbers} | {link} |")
    return "\n".join(lines)


def _block(text: str) -> re.Match:
    """What stands between the marks. Raises ValueError unless there is one such place."""
    found = list(re.finditer(f"(?<={START}\n\n).*?(?=\n\n{END})", text, re.S))
    if len(found) != 1:
        raise ValueError(
            f"{PAGE}: {len(found)} blocks between {START} and {END}, expected one"
        )
    return found[0]


def test_the_page_shows_every_claim():
    assert _block(PAGE.read_text())[0] == table(), (
        "run python tests/papers/test_papers.py"
    )


def test_numbers_are_shown_as_printed():
    texts = {
        "h": "863,397 h",
        "share": "75.46 %",
        "x": "2.24x",
        "GB": "1.88 GB",
        "": "612",
        "s": "none",
    }
    values = {
        "h": 863397,
        "share": 0.7546,
        "x": 2.24,
        "GB": 1.88,
        "": 612.0,
        "s": math.nan,
    }
    assert {unit: _shown(value, unit) for unit, value in values.items()} == texts
    assert (_shown(0.0, "share"), _shown(100.0, "")) == ("0 %", "100")


def test_errors_that_round_to_nothing_have_no_sign():
    small = Claim(
        "a paper", "00_tour", "model", "a claim", lambda: (1.0, 0.9999), "s", 0.01
    )
    assert _error(small) == "0.0 %" and small.error == pytest.approx(-1e-4)


def main() -> None:
    """Rewrite the block of the page."""
    new = table()
    text = PAGE.read_text()
    place = _block(text)
    with replacing(PAGE) as temporary:
        temporary.write_text(text[: place.start()] + new + text[place.end() :])


if __name__ == "__main__":
    main()
