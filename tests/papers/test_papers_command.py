"""`madmax paper`: the commands of the papers' programs."""

import json

import pandas as pd
import pytest

from madmax_lib.__main__ import main
from madmax_lib.planner.hetero.profiles import load_profiles

CONFIG = {
    "gpu_name": "A100", "tensor_parallel_size": 4, "data_parallel_size": 2, "pipeline_parallel_size": 2,
    "global_batch_size": 16, "num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "num_gpus": 16,
}  # fmt: skip


def rows(capsys, *words):
    assert main(["paper", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_of_configurations_is_a_row_each(tmp_path, capsys):
    (tmp_path / "good.json").write_text(json.dumps(CONFIG))
    (tmp_path / "wrong.json").write_text(json.dumps(CONFIG | {"num_gpus": 17}))
    table = pd.DataFrame(rows(capsys, "vtrain", "-c", str(tmp_path))["rows"])
    good, wrong = (
        table.set_index("config").loc[["good.json", "wrong.json"]].to_dict("records")
    )
    assert "17" in wrong["reason"]
    parts_s = good["compute_s"] + good["comm_s"]
    assert 0 < parts_s <= 1.001 * good["total_s"]
    assert good["gpu_hours_1000_steps"] == pytest.approx(
        1000 * good["total_s"] / 3600 * 16, rel=1e-5
    )
    released = rows(
        capsys, "vtrain", "-c", str(tmp_path / "good.json"), "--rules", "released"
    )
    assert released["rows"][0]["total_s"] != good["total_s"]


def test_a_row_of_metis_with_its_files(tmp_path, capsys):
    answer = rows(
        capsys,
        "metis",
        "--row",
        "1",
        "--strategy",
        "--trials",
        "2",
        "-o",
        str(tmp_path),
    )
    about, first = answer["summary"], answer["rows"][0]
    assert (first["count"], about["published_count"]) == (562, 562)
    assert first["search_s"] > 0 and first["search_sd_s"] >= 0
    assert load_profiles(tmp_path / "profiles").layers == 10
    assert len((tmp_path / "hostfile").read_text().splitlines()) == 8


def test_sizes_take_the_place_of_the_rows(capsys):
    answer = rows(capsys, "metis", "--layers", "6", "--nodes", "4", "--batch", "32")
    assert (
        answer["summary"]["gpus"] == 16 and "published_count" not in answer["summary"]
    )


def test_a_figure_of_madmax_has_ours_and_theirs(capsys):
    table = pd.DataFrame(rows(capsys, "madmax", "--fig", "10")["rows"])
    assert {"gain", "published_gain"} <= set(table)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["vtrain"], "give a configuration"),
        (["vtrain", "-c", "nothing.json"], "nothing.json"),
        (["metis", "--row", "7"], "--row 7 is not one of 1 to 4"),
        (["metis", "--trials", "0"], "a trial at least"),
        (["metis", "--nodes", "3"], "as many V100 as A100"),
        (["madmax", "--fig", "3"], "figure 3 of MAD-Max is not one of"),
    ],
)
def test_bad_input_is_one_line(words, line, capsys):
    assert main(["paper", *words]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
