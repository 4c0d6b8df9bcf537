"""Predictions with intervals, folds that keep a source and model together, and the
figures they reach.
"""

import re
import runpy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from shipped import beside, spread_of_both, unknown_rows, with_prior
from support import coverage_by_class, local_or_skip

from madmax_lib import catalog
from madmax_lib.calibration.fit import known_rows, slowness, usable
from madmax_lib.calibration.judge.intervals import folds, predict
from madmax_lib.calibration.published.rows import to_steps
from madmax_lib.calibration.verdict.accuracy import (
    baseline,
    coverage,
    errors,
    score,
)
from madmax_lib.calibration.verdict.expect import VERDICTS
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.simulator.uncertainty import log_width

pytestmark = pytest.mark.slow

PAGE = PROJECT / "docs" / "how-accurate-is-it.md"
PAGE_KINDS = {
    "dense": "dense models",
    "mixture": "mixtures of experts",
    "vision": "vision transformers",
    "lora": "LoRA",
}
ORDINARY = 1.5  # slowness of layouts that somebody would run
ADDED = [
    "predicted_s",
    "low_s",
    "high_s",
    "predicted_memory_bytes",
    "fits",
    "supported",
    "reason",
]


@pytest.fixture(scope="module")
def table():
    return catalog.table("published_train")


@pytest.fixture(scope="module")
def predicted(table):
    return predict(table)


@pytest.fixture(scope="module")
def held_out(rows):
    return folds(rows)


@pytest.fixture(scope="module")
def published(held_out):
    """Without the sweep of layouts, which no repository but its own is like."""
    return held_out[~held_out["source"].str.contains("ultrascale")]


@pytest.fixture(scope="module")
def dense(published):
    return published[published["kind"] == "dense"]


@pytest.fixture(scope="module")
def left_out(rows):
    return folds(rows, by="source")


@pytest.fixture(scope="module")
def strangers(rows):
    """Each stack left out of a fit, and those that no fit has seen."""
    return unknown_rows(rows, shipped())


def test_predict_adds_columns_and_keeps_rows(table, predicted):
    assert predicted.columns.tolist() == [*table.columns, *ADDED]
    pd.testing.assert_frame_equal(predicted[table.columns], table)
    known = predicted["supported"].to_numpy(bool)
    assert known.sum() == 362 and (predicted.loc[~known, "reason"] != "").all()
    assert (
        predicted.loc[~known, "predicted_s"].isna().all()
        and not predicted.loc[~known, "fits"].any()
    )
    inside = predicted[known]
    assert (inside["low_s"] < inside["predicted_s"]).all() and (
        inside["predicted_s"] < inside["high_s"]
    ).all()
    ideal = predict(table.head(5), Parameters())
    assert (ideal["predicted_s"] < predicted["predicted_s"].head(5)).all()


def test_predict_survives_anything():
    columns = {
        "model": ["x", None, 3],
        "gpu": ["TPUv4", "A100", np.nan],
        "layers": [1, "y", np.nan],
    }
    result = predict(pd.DataFrame(columns, index=[1, 1, 2]))
    assert (
        result.index.tolist() == [1, 1, 2]
        and not result["supported"].any()
        and (result["reason"] != "").all()
    )
    for empty in (pd.DataFrame(), pd.DataFrame(columns=["model", "gpu"])):
        assert (
            predict(empty).columns.tolist() == [*empty.columns, *ADDED]
            and predict(empty).empty
        )


ODD = [
    *"x8",
    "yes",
    "",
    "1e400",
    b"8",
    None,
    pd.NA,
    np.nan,
    np.inf,
    -np.inf,
    -1,
    0,
    1e-9,
    0.5,
    True,
    2.5,
    7,
    128,
]
ODD += [1e4, 1e7, 1e9, 1e30]
FACTS = [
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "experts",
    "active_experts",
]
FACTS += [
    "expert_ffn",
    "dense_layers",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "zero_stage",
    "plan",
]
FACTS += [
    "micro_batch",
    "global_batch",
    "precision",
    "recompute",
    "overlap_tp",
    "lora_rank",
    "software",
    "source",
]
FACTS += [
    "iteration_time_s",
    "tokens_per_s_per_gpu",
    "network_gbit",
    "devices_per_node",
    "cluster",
    "notes",
]


@pytest.mark.filterwarnings("ignore:.*is not in software.csv")
def test_no_row_is_so_odd_that_a_table_fails(table):
    """2,000 published rows with one to three fields that hold anything: a time in its
    interval, or a reason.
    """
    draw = np.random.default_rng(0)
    rows = table.iloc[draw.integers(len(table), size=2000)].to_dict("records")
    for row in rows:
        row.update(
            (FACTS[draw.integers(len(FACTS))], ODD[draw.integers(len(ODD))])
            for _ in range(draw.integers(1, 4))
        )
    result = predict(pd.DataFrame(rows, dtype=object))
    known = result["supported"].to_numpy(bool)
    assert (result.loc[~known, "reason"] != "").all() and 200 < known.sum() < 1800
    low, middle, high = (
        result.loc[known, name].to_numpy(float)
        for name in ("low_s", "predicted_s", "high_s")
    )
    assert np.isfinite(middle).all() and ((low <= middle) & (middle <= high)).all()


def test_published_rows_that_ran_fit_and_those_that_failed_do_not(predicted):
    failed = predicted["notes"].str.contains(r"(?:^|; )OOM$", regex=True)
    assert failed.sum() == 4 and predicted.loc[failed, "supported"].all()
    # 206B on tp4 pp12 failed, though 203B on the same plan ran with 67 GB
    assert predicted.loc[failed, "fits"].sum() <= 1
    ran = predicted[~failed & predicted["supported"]]
    assert ran["fits"].mean() > 0.97


def test_unknown_devices_have_wide_intervals():
    row = {
        "model": "llama3-8b",
        "n_gpus": 8,
        "global_batch": 16,
        "micro_batch": 1,
        "seq_len": 4096,
    }
    result = predict(
        pd.DataFrame(
            [row | {"gpu": "mi300x"}, row | {"gpu": "H100"}, row | {"gpu": "V100-32"}]
        )
    )
    assert result["supported"].all()
    width = np.log(result["high_s"] / result["low_s"])
    assert width[0] > 1.4 * width[1] and width[2] > 1.4 * width[1]


def of_unknown_family(case):
    device = replace(case.cluster.device, family="other", rate_class="other")
    return replace(
        case,
        cluster=replace(case.cluster, device=device),
        dtype=case.dtype.replace("nvfp4", "fp8"),
    )


def test_families_timed_as_if_unknown_lie_in_the_wide_interval(rows):
    """Of other stacks than the sweep's, whose slow layouts fail in ways of their own."""
    unknown = rows[
        (rows["kind"] != "mixture") & (rows["software"] != "nanotron")
    ].assign(family="other")
    unknown["case"] = [of_unknown_family(case) for case in unknown["case"]]
    steps = to_steps(unknown)
    times = step_time(steps, shipped())
    error = np.log(unknown["measured_s"].astype(float) / times["step_s"])
    assert (error.abs() < log_width(steps, times, shipped())).mean() > 0.8  # 86 %


def in_sample(rows):
    times = step_time(to_steps(rows), shipped())["step_s"]
    return rows.assign(
        predicted_s=times, log_error=np.log(rows["measured_s"].astype(float) / times)
    )


def test_a100_tables_of_megatron(rows):
    """SC'21 Table 1 and arXiv 2205.05198 Table 5; Calculon 5.75 % on all 18."""
    part = in_sample(rows[rows["source"].str.contains("cases_april2021|2205.05198")])
    assert (
        len(part) == 9 and np.abs(np.expm1(-part["log_error"])).mean() < 0.05
    )  # 4.1 %


def ranks_of(table):
    """Spearman's correlation of a model's runs, and of the means of its layouts."""
    heads = [case.model.heads for case in table["case"]]
    table = table.astype({"measured_s": float}).assign(heads=heads)
    layout = ["dp", "tp", "pp", "heads", "micro_batch", "global_batch", "dtype"]
    times = ["measured_s", "predicted_s"]
    means = table.groupby(["model", *layout])[times].mean().reset_index()
    for part in (table, means):
        by_model = part.groupby("model")
        ranks = (
            by_model[times].corr("spearman")["predicted_s"].xs("measured_s", level=1)
        )
        table = pd.DataFrame({"count": by_model.size(), "ranks": ranks})
        yield table[means.groupby("model").size() >= 4]


def test_bloom_layouts_are_ranked(rows, held_out):
    """Asked: 0.8 in each table. 181B misses it with every run counted; one layout
    differs by 7 % between days.
    """
    of_bloom = held_out["source"].str.contains("bigscience")
    runs, layouts = ranks_of(held_out[of_bloom])
    assert runs["count"].tolist() == [21, 10, 4]
    assert layouts["count"].tolist() == [16, 10, 4]
    assert runs["ranks"].tolist() == pytest.approx([0.73, 0.97, 0.8], abs=0.1)
    assert layouts["ranks"].tolist() == pytest.approx([0.81, 0.97, 0.8], abs=0.05)
    _, fitted = ranks_of(in_sample(rows[rows["source"].str.contains("bigscience")]))
    assert fitted["ranks"].min() > 0.74  # 0.79


def test_folds_keep_source_and_model_together_and_stay_as_good_as_they_are(
    held_out, published
):
    """Of all rows of a repository's model left out: dense 8.0 %, 4.6 % in the median,
    mixtures 15 %.
    """
    assert (
        held_out.groupby("group")["fold"].nunique().max() == 1
        and held_out["fold"].nunique() == 10
    )
    reached = score(published)
    assert (
        reached["dense mape"] < 0.085
        and reached["dense median"] < 0.05
        and reached["mixture mape"] < 0.16
    )
    assert (errors(published, "repository")["mape"] > 0.20).sum() <= 2
    with pytest.raises(
        ValueError,
        match="by='day' is not one of group, source, random",
    ):
        folds(held_out, by="day")


def test_the_page_tells_these_errors(left_out, strangers):
    """Of sources left out; where all rows behind the constants are at hand."""
    if not left_out["source"].str.contains("ultrascale").any():
        pytest.skip(
            "the table of docs includes measurements that are not on this machine"
        )
    lines = page_lines(left_out, strangers)
    assert not [line for line in lines if line not in PAGE.read_text()]


def page_lines(left_out, strangers):
    """Rows of its table, by kind and of the sweep. `PYTHONPATH=tests:benchmarks python`
    of this file writes them.
    """
    table = left_out.assign(
        error=np.abs(np.expm1(-left_out["log_error"])),
        **coverage(left_out, sizes_of=beside(strangers)),
    )
    table = table[slowness(left_out) <= ORDINARY]
    swept = table["source"].str.contains("ultrascale")
    parts = {
        name: table[~swept & (table["kind"] == kind)]
        for kind, name in PAGE_KINDS.items()
    }
    parts["a sweep of layouts of one stack, those within 1.5 x of the best"] = table[
        swept
    ]
    return [f"| {name} | {columns(part)} |" for name, part in parts.items()]


def columns(part):
    errors = [
        f"{100 * error:.1f} %"
        for error in (part["error"].median(), part["error"].mean())
    ]
    interval = [
        f"{100 * share:.0f} %"
        for share in (part["inside"].mean(), part["half_width"].median())
    ]
    return " | ".join([str(len(part)), *errors, *interval])


def test_folds_beat_one_rate_per_device(rows, dense):
    measured = dense["measured_s"].to_numpy(float)
    seen, unseen = (
        np.abs(baseline(dense, fold) / measured - 1)
        for fold in (None, dense["fold"].to_numpy())
    )
    assert (
        unseen.mean() > seen.mean() > 2 * score(dense)["dense mape"]
    )  # 24 %, 18 % and 8.0 %
    same = pd.concat([rows.head(1)] * 3)  # exact on equal rows
    assert np.allclose(baseline(same), same["measured_s"].astype(float))
    assert np.isfinite(baseline(rows, np.arange(len(rows)))).all()


def test_intervals_cover_sources_that_the_fit_has_not_seen(held_out, left_out):
    """Asked: 85 to 95 % inside, at least 75 % of each source of eight rows or more;
    half-widths of 30 and 15 %.

    Known stacks have 15.9 %: at 14 % one in five of their rows lay outside.
    """
    apart, known = coverage_by_class(left_out), coverage_by_class(held_out, left_out)
    assert (
        0.85 < apart.at["all", "inside"] < 0.95 and apart.at["all", "half_width"] < 0.25
    )
    assert (
        0.80 < known.at["all", "inside"] < 0.95 and known.at["all", "half_width"] < 0.16
    )
    assert apart.at["mixture", "half_width"] < 0.30
    inside = coverage(left_out)["inside"].groupby(left_out["repository"])
    assert (
        inside.mean()[inside.size() >= 8] < 0.75
    ).sum() <= 1  # JAX-Toolbox: two runs of one plan 24 % apart


def test_verdicts_about_sources_that_the_fit_has_not_seen(left_out):
    """Asked: right on 85 % of reported runs, cannot tell in a quarter of dense ones.
    Slow and fast: times changed.
    """
    ordinary = left_out[slowness(left_out) <= ORDINARY]
    confusion = runpy.run_path(str(PROJECT / "benchmarks" / "expect.py"))["confusion"]
    table = confusion(ordinary)
    told = table[table["kind"].isin(["dense", "mixture"])].set_index(["kind", "factor"])
    decided = told[list(VERDICTS)].sum(axis=1) - told["cannot tell"]
    right = (told["right"] * decided).groupby("kind").sum() / decided.groupby(
        "kind"
    ).sum()
    assert right["dense"] > 0.97 and right["mixture"] > 0.92  # 98.3 and 94.1 %
    assert (
        told.loc["dense", "right"].min() > 0.91  # at factor 1: 91.7 %
        and told.loc["mixture", "right"].min() > 0.75
    )  # mixtures made 1.6 x
    assert (told["cannot tell"] / decided).max() < 0.10


def test_shipped_spread_is_that_of_sources_and_stacks_left_out(left_out, strangers):
    own = with_prior(shipped(), spread_of_both(left_out, strangers))
    for name, size in own.residuals.items():
        assert shipped().residuals[name] == pytest.approx(size, abs=0.02, rel=0.2), name
    prior = "stack_rate:stranger"
    assert shipped().constants[prior] == pytest.approx(own.constants[prior], rel=0.05)
    assert shipped().intervals[prior] == pytest.approx(own.intervals[prior], rel=0.2)


def test_the_table_of_the_data_directory(predicted):
    path = local_or_skip("published/published_train.csv")
    result = predict(pd.read_csv(path))
    assert np.allclose(
        result["predicted_s"],
        predicted["predicted_s"][: len(result)],
        rtol=1e-6,
        equal_nan=True,
    )
    assert re.fullmatch("[0-9a-f]{64}", str(shipped().provenance["sha256"]))


if __name__ == "__main__":
    text = PAGE.read_text()
    known = known_rows()
    unknown = unknown_rows(known[usable(known)], shipped())
    for line in page_lines(folds(known, by="source"), unknown):
        text = re.sub(
            rf"^{re.escape(line.split(' | ')[0])} \|.*$", line, text, flags=re.M
        )
    PAGE.write_text(text)
