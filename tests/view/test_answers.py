"""The envelope of every command, beside what its call in Python gives."""

import csv
import io
import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
from support import make_timeline, with_columns

import madmax_lib as mm
from madmax_lib import plan_flags
from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT, dataset
from madmax_lib.timeline.timeline import with_origin
from madmax_lib.traces import gate, stragglers
from madmax_lib.view.commands import trace as trace_commands
from madmax_lib.view.commands.answers import Answer, envelope, tokens

KEYS = [
    "schema",
    "command",
    "version",
    "status",
    "error",
    "inputs",
    "summary",
    "result",
    "rows",
    "left_out",
    "warnings",
]
STEP = ["llama3-8b", "dgx-h100", "--global-batch", "64"]
COMMANDS = [
    (["breakdown", "DDP"], lambda t: mm.breakdown(t), 0),
    (["stragglers", "DDP"], lambda t: stragglers(t), 0),
    (
        ["compare", "DDP", "FSDP"],
        lambda t: mm.compare(t, mm.read_trace(dataset("gpt-fsdp"))),
        0,
    ),
    (
        ["estimate", *STEP, "dp8.z3", "dp8"],
        lambda _: mm.estimate(*STEP[:2], ["dp8.z3", "dp8"], global_batch=64),
        0,
    ),
    (
        ["fits", *STEP, "dp8"],
        lambda _: mm.fits(*STEP[:2], "dp8", global_batch=64).table,
        1,
    ),
    (
        ["fits", *STEP, "dp8.z3"],
        lambda _: mm.fits(*STEP[:2], "dp8.z3", global_batch=64).table,
        0,
    ),
    (
        [
            "search",
            "gpt2",
            "kaggle-2xt4",
            "--global-batch",
            "8",
            "--dtype",
            "fp16",
            "--top",
            "3",
        ],
        None,
        0,
    ),
]

RUN = [
    "--model",
    "llama3-8b",
    "--cluster",
    "dgx-h100",
    "--plan",
    "dp8.z3.full",
    "--global-batch",
    "32",
]
EXPECTED = [
    (["--step-s", "5"], "fine", 0),
    (["--tokens-per-s", "16000"], "slow", 1),
    (["--tokens-per-s-per-device", "40000"], "suspiciously fast", 1),
    (["--tflops", "2000"], "suspiciously fast", 1),
]


def answered(capsys, *arguments):
    status = main(
        [
            str({"DDP": dataset("gpt-ddp"), "FSDP": dataset("gpt-fsdp")}.get(a, a))
            for a in arguments
        ]
    )
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "call", "status"),
    COMMANDS,
    ids=lambda a: " ".join(a) if type(a) is list else "",
)
def test_a_command_says_what_its_call_says(capsys, arguments, call, status):
    said, text = answered(capsys, *arguments, "--json")
    answer = json.loads(text)
    assert (
        list(answer) == KEYS
        and said == answer["status"] == status
        and answer["error"] is None
    )
    assert (
        answer["command"] == arguments[0]
        and answer["rows"]
        and not any(answer["left_out"].values())
    )
    assert (
        all({"name", "sha256"} == set(one) for one in answer["inputs"])
        and answer["inputs"]
    )
    if call is not None:
        table = call(mm.read_trace(dataset("gpt-ddp")))
        assert len(table) == len(answer["rows"])
        for name in table.columns:
            values = [
                math.nan if row[name] is None else row[name] for row in answer["rows"]
            ]
            if table[name].dtype.kind in "if":
                np.testing.assert_allclose(values, table[name], rtol=1e-5, atol=1e-30)
            else:
                assert values == table[name].tolist()


@pytest.mark.parametrize(
    ("measured", "verdict", "status"),
    EXPECTED,
    ids=lambda a: "".join(a) if type(a) is list else "",
)
def test_a_verdict_is_the_exit_status(capsys, measured, verdict, status):
    said, text = answered(capsys, "expect", *RUN, *measured, "--json")
    answer = json.loads(text)
    assert (
        said == answer["status"] == status and answer["summary"]["verdict"] == verdict
    )
    assert len(answer["summary"]["nearest"]) == 3 and not any(
        answer["left_out"].values()
    )
    assert answered(capsys, "expect", *RUN, *measured)[1].startswith(
        f"verdict: {verdict}\n"
    )


def test_a_trace_stands_for_the_number(capsys, tmp_path):
    mm.export_trace(
        mm.simulate("gpt2", "dgx-a100", "dp8", global_batch=64), tmp_path / "trace"
    )
    run = [
        "--model",
        "gpt2",
        "--cluster",
        "dgx-a100",
        "--plan",
        "dp8",
        "--global-batch",
        "64",
    ]
    said, text = answered(
        capsys, "expect", *run, "--trace", str(tmp_path / "trace"), "--json"
    )
    answer = json.loads(text)
    assert (
        said == 0
        and answer["summary"]["verdict"] == "fine"
        and len(answer["inputs"]) > 2
    )
    assert {row["part"] for row in answer["rows"]} >= {
        "attention",
        "communication",
        "waiting",
    }
    assert all(row["measured_s"] >= 0 for row in answer["rows"])


def test_formats_have_the_same_rows(capsys):
    rows = json.loads(answered(capsys, "breakdown", "DDP", "--json")[1])["rows"]
    table = list(
        csv.DictReader(io.StringIO(answered(capsys, "breakdown", "DDP", "--csv")[1]))
    )
    assert [float(f"{float(row['comm_s']):.6g}") for row in table] == [
        row["comm_s"] for row in rows
    ]
    text, markdown = (
        answered(capsys, "breakdown", "DDP", *kind)[1] for kind in ([], ["--markdown"])
    )
    assert text.splitlines()[-1].split() == [
        cell.strip() for cell in markdown.splitlines()[-1].split("|")[1:-1]
    ]
    assert "| ---: |" in markdown and "ranks: 2" in text and "- ranks: 2" in markdown
    assert answered(capsys, "estimate", *STEP, "dp8.z3", "dp8")[1].startswith(
        "fits: False: dp8 needs 234 GB of 85 GB"
    )


@pytest.mark.parametrize("seed", range(5))
def test_an_envelope_is_short_and_says_what_it_leaves_out(seed):
    draw = np.random.default_rng(seed)
    count, files = int(draw.integers(1, 3000)), int(draw.integers(0, 600))
    rows = {
        "name": ["kernel<" + "x" * int(n) for n in draw.integers(0, 5000, count)],
        "total_s": draw.random(count),
    }
    digests = {
        str(rank): {"name": f"rank{rank}.json", "sha256": draw.bytes(32).hex()}
        for rank in range(files)
    }
    answer = Answer(
        with_origin(pd.DataFrame(rows), {"files": digests}), {"ranks": files}
    )
    caught = ["lost"] * int(draw.integers(0, 500))
    short, whole = (
        envelope("x", answer, caught, complete=complete) for complete in (False, True)
    )
    assert tokens(short) <= 2000
    short, whole = json.loads(short), json.loads(whole)
    assert (
        not any(whole["left_out"].values())
        and [row["name"] for row in whole["rows"]] == rows["name"]
    )
    for name, left_out in short["left_out"].items():
        assert len(short[name]) + left_out == len(whole[name])
    assert len(short["rows"]) > 10 or not short["left_out"]["rows"]


def test_what_is_not_finite_is_null_and_text_is_json():
    odd = {
        "a": [math.nan, math.inf, 1 / 3],
        "b": ['"|\n', None, "µ"],
        "c": [True, False, True],
        "d": [1, 2**60, -1],
    }
    answer = json.loads(
        envelope(
            "x", Answer(pd.DataFrame(odd), {"none": math.nan, "one": np.float32(1)})
        )
    )
    assert [row["a"] for row in answer["rows"]] == [None, None, 0.333333]
    assert [row["c"] for row in answer["rows"]] == [True, False, True] and answer[
        "rows"
    ][1]["d"] == 2**60
    assert answer["rows"][0]["b"] == '"|\n' and answer["summary"] == {
        "none": None,
        "one": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["breakdown", "/no/such"], "no such file"),
        (["compare", "DDP"], "compare needs two"),
        (
            ["compare", "main", "DDP"],
            "main: no such file or directory, and no baseline of this name in "
            ".madmax (none)",
        ),
        (
            ["compare", "DDP", "/no/such", "--gate", "3%"],
            "/no/such: no such file",
        ),
        (
            ["compare", "DDP", "--save-baseline", "../main"],
            "a name has letters, digits, dots and dashes",
        ),
        (["estimate", "llama3-8b", "dgx-h100", "--global-batch", "64", "dp3"], "dp"),
        (["expect", *RUN], "got none"),
        (["expect", *RUN, "--step-s", "1", "--nodes", "3"], "devices=8"),
        (["expect", *RUN, "--trace", "/no/such"], "no such file"),
        (["search", "llama9", "dgx-h100", "--global-batch", "64"], "llama9"),
    ],
)
def test_bad_input_is_an_envelope_too(
    capsys, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [str(dataset("gpt-ddp")) if a == "DDP" else a for a in arguments]
            + ["--json"]
        )
        == 2
    )
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert list(answer) == KEYS and answer["status"] == 2 and answer["rows"] == []
    assert message in answer["error"] and said.err == f"madmax: {answer['error']}\n"


def test_a_command_line_that_is_not_understood_is_an_envelope_too(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", "a", "b", "--gate", "abc", "--json"])
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert (
        list(answer) == KEYS
        and answer["command"] == "compare"
        and answer["status"] == ended.value.code == 2
    )
    assert (
        "'abc' is not a share" in answer["error"]
        and said.err == f"madmax compare: {answer['error']}\n"
    )


@pytest.mark.parametrize(
    ("pace", "gap", "speaks", "left"),
    [(6020, 0, True, ""), (6500, 0, True, "8%"), (10_000, 3000, False, "40%")],
)
def test_stragglers_and_report_count_the_same_calls(
    capsys, tmp_path, monkeypatch, pace, gap, speaks, left
):
    """Rank 1 is late by 500 ns in three steps; the first, in which rank 0 is, is
    warm-up. Gaps are told, large ones leave no slowdown.
    """
    rows, steps = [], []
    for step, late in enumerate(((2500, 0), *[(0, 500)] * 9)):
        for rank in (0, 1):
            start = pace * (step + (step > 0) * 15)
            end = start + 1000 + late[rank]
            rows += [
                (
                    rank,
                    -1,
                    "annotation",
                    f"ProfilerStep#{step}",
                    start,
                    90_000 if step == 0 else pace - gap,
                )
            ]
            rows += [(rank, 7, "compute", "gemm", start, end - start)]
            rows += [
                (rank, 20, "comm", "ncclDevKernel_AllReduce", end, start + 5000 - end)
            ]
            rows += [(rank, 7, "compute", "adam", start + 5000 + gap, 1000)]
            steps += [step] * 4
    timeline = with_columns(make_timeline(rows), step=steps)
    monkeypatch.setattr(trace_commands, "read", lambda paths: timeline)
    about = {"ranks": 2, "note": "earlier"}
    monkeypatch.setattr(trace_commands, "_ranks", lambda timeline: dict(about))
    monkeypatch.chdir(tmp_path)
    found = [
        json.loads(answered(capsys, command, "DIR", "--json")[1])
        for command in ("stragglers", "report")
    ]
    summary, page = found[0]["summary"], (tmp_path / "report.html").read_text()
    assert (
        summary["not_counted"] == ["step 0"]
        and (summary["slowdown"] is not None) == speaks
    )
    note = f"earlier; the replay leaves {left} of" if left else "earlier"
    assert summary["note"].startswith(note) and summary["measured_over_replayed"] > 1
    assert ("use cost_s" in summary["note"]) != speaks and (
        "slowdown" in found[0]["rows"][0]
    ) == speaks
    first = found[0]["rows"][0]
    assert (first["rank"], first["last"], first["calls"]) == (
        1,
        9,
        9,
    ) and "last in 9 of 9 calls" in page
    assert {row["where"]: row["cause"] for row in found[1]["summary"]["advice"]}[
        "rank 1"
    ] == "straggler rank"
    assert "in steps that are warm-up or cut (0)" in page
    assert found[1]["summary"]["not_counted"] == ["step 0"]
    assert found[1]["summary"]["step_s"] < 2e-5


@pytest.mark.parametrize("name", ["gpt-ddp", "dlrm-8xv100"])
def test_a_name_is_one_number_in_all_commands(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trace = str(dataset(name))
    step_s = mm.traces.step_s(mm.read_trace(trace))
    answers = {}
    gate = ("--gate", "3%")
    for command, *more in (
        ("steps",),
        ("breakdown",),
        ("report",),
        ("compare", trace),
        ("compare", trace, *gate),
    ):
        words = [command, trace, *more, "--json", "--all"]
        answers[f"{command} {more[1:]}"] = json.loads(answered(capsys, *words)[1])
    steps, *found = answers.values()
    for each in (found[0], found[1]):
        assert each["summary"]["step_s"] == pytest.approx(step_s, rel=1e-5)
        assert each["rows"] == found[0]["rows"] and "per_step" not in each["summary"]
    sides = found[2]["summary"]["step_s"]
    assert sides["a"] == sides["b"] == pytest.approx(step_s, rel=1e-5)
    gated = {row["quantity"]: row["a"] for row in found[3]["rows"]}
    compared = {row["quantity"]: row["a"] for row in found[2]["rows"]}
    means = pd.DataFrame(steps["rows"]).groupby("quantity")["mean"].mean()
    assert gated["step_s"] == pytest.approx(means["step_s"], rel=1e-4)
    assert gated["step_s"] == pytest.approx(step_s, rel=1e-4)
    for quantity in ("total_s", "compute_s", "exposed_comm_s", "idle_s"):
        assert compared[quantity] == pytest.approx(means[quantity], rel=1e-4)


def test_a_comparison_is_of_the_ranks_that_both_sides_have(tmp_path, capsys):
    whole = dataset("dlrm-8xv100")
    few = [whole / f"rank{rank}.json.gz" for rank in (0, 2, 5)]
    for path in few:
        shutil.copy(path, tmp_path)
    words = ("compare", str(tmp_path), str(whole), "--json")
    summary = json.loads(answered(capsys, *words)[1])["summary"]
    assert summary["ranks"] == 3
    assert summary["step_s"]["a"] == summary["step_s"]["b"]
    alone_s = mm.traces.step_s(mm.read_trace(few))
    assert summary["step_s"]["a"] == pytest.approx(alone_s, rel=1e-5)
    assert alone_s != pytest.approx(mm.traces.step_s(mm.read_trace(whole)), rel=0.05)


def test_a_search_writes_the_configuration_of_its_best_plan(tmp_path, capsys):
    words = [
        "search",
        "gpt2",
        "kaggle-2xt4",
        "--global-batch",
        "8",
        "--dtype",
        "fp16",
        "--json",
        "-o",
    ]
    assert (
        main([*words, str(tmp_path / "new" / "train.txt")]) == 0
    )  # folders are made, as by every -o
    best = json.loads(capsys.readouterr().out)["summary"]["best"]
    assert (
        str(
            plan_flags.read(
                tmp_path / "new" / "train.txt", world_size=2, layers=12
            ).plan
        )
        == best
    )
    assert main([*words, str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("asked", "status", "priced"),
    [
        ([], 0, False),  # the catalog's price is of an earlier year
        (["--usd-per-hour", "2"], 0, True),
        (["--objective", "cost", "--usd-per-hour", "2"], 0, True),
        (["--objective", "cost"], 2, False),
    ],
)
def test_a_search_has_dollars_of_this_year_alone(capsys, asked, status, priced):
    words = ["search", "gpt2", "dgx-h100", "--nodes", "1", "--global-batch", "8"]
    said, text = answered(capsys, *words, "--software", "deepspeed", "--json", *asked)
    answer = json.loads(text)
    assert said == status
    assert ("give --usd-per-hour," in str(answer["error"])) == (status == 2)
    for row in answer["rows"]:
        assert ("cost_usd" in row) == priced
        if priced:
            cost_usd = 8 * 2 * row["step_s"] / 3600
            assert row["cost_usd"] == pytest.approx(cost_usd, rel=1e-3)


def test_an_estimate_says_why_a_plan_has_no_time(capsys):
    words = ["estimate", "llama2-70b", "dgx-a100", "--global-batch", "8"]
    status, text = answered(capsys, *words, "dp8.z3.offload-all", "dp8.z3", "pp3")
    assert status == 0
    for said in (
        "dp8.z3 needs",
        "dp8.z3.offload-all does not fit",
        "pp3: dp x tp",
        "sequence: 4096",
    ):
        assert said in text


@pytest.mark.filterwarnings("default")
def test_warnings_are_in_the_envelope(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 0, "dur": '
        '1, "tid": 7}]}'
    )
    assert main(["breakdown", str(trace), "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "taken as rank 0" in warning


def test_a_report_says_where_its_page_is(tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    status, text = answered(
        capsys, "report", str(PROJECT / "traces" / "gpt-ddp"), "-o", str(page), "--json"
    )
    answer = json.loads(text)
    assert (
        status == 0
        and answer["summary"]["page"] == str(page)
        and page.exists()
        and len(answer["rows"]) == 2
    )


def test_a_gate_of_three_steps_measures_and_cannot_tell(capsys):
    trace = str(dataset("gpt-ddp"))
    said, text = answered(capsys, "compare", trace, trace, "--gate", "3%", "--json")
    answer = json.loads(text)
    about = answer["summary"]
    assert said == answer["status"] == 3 and answer["error"] is None
    assert about["verdict"] == "cannot tell" and about["passed"] is False
    assert about["measured_ratio"]["step_s"] == 1
    assert about["cannot_tell_below"]["step_s"] > 0.03
    assert "record 6 or more" in about["note"]


def test_a_gate_fails_where_a_baseline_is_faster_and_cannot_tell_in_noise(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before, after = (str(dataset(name)) for name in ("gpt-before", "gpt-after"))
    assert (
        main(["compare", before, "--save-baseline", "main"]) == 0
        and "000.parquet" in capsys.readouterr().out
    )
    found = {}
    for other, status in ((before, 3), (after, 1)):
        said, text = answered(
            capsys, "compare", "main", other, "--gate", "3%", "--json"
        )
        found[other], expected = (
            json.loads(text),
            gate(mm.read_trace(before), mm.read_trace(other)),
        )
        assert said == status == found[other]["status"] and found[other]["summary"][
            "passed"
        ] == (status == 0)
        assert [row["verdict"] for row in found[other]["rows"]] == list(
            expected.table["verdict"]
        )
        assert [row["ratio"] for row in found[other]["rows"]] == pytest.approx(
            list(expected.table["ratio"]), rel=1e-5
        )
    slower = found[after]["summary"]
    assert "step_s" in slower["slower"] and all(
        row["kind"] == "compute" for row in slower["explanation"]
    )
    assert {row["verdict"] for row in found[before]["rows"]} <= {"fine", "cannot tell"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".madmax"]
