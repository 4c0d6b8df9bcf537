"""train, bench, check and doctor from the command line: what they print, and their exit
status.
"""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

import madmax_lib.runs.launch  # noqa: F401  # the module, which the room hides behind its call
from madmax_lib import RunSpec
from madmax_lib.__main__ import main
from madmax_lib.runs import selftest
from madmax_lib.runs.read import write_json
from madmax_lib.view.notebooks import doctor

launching = sys.modules["madmax_lib.runs.launch"]


def test_train_dry_takes_every_field_of_a_run_and_starts_nothing(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    options = (
        "--steps 4 --batch 4 --dtype bf16 --sequence 64 --lora-rank 2 "
        "--no-profile --warmup 1 --device cpu"
    )
    assert (
        main(
            [
                "train",
                "gpt-tiny",
                "dp2.z3",
                *options.split(),
                "--offload",
                "all",
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    about = json.loads(capsys.readouterr().out)
    assert (about["plan"], about["ranks"], about["device"]) == (
        "dp2.z3.mb2.offload-all",
        2,
        "cpu",
    )
    assert about["command"].endswith(
        f"--nproc-per-node 2 -m madmax_lib.runs.train {about['directory']}"
    )
    assert about["command"].startswith(sys.executable) and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    listed = set(re.findall(r"--([\w-]+)", capsys.readouterr().out))
    assert {field.name.replace("_", "-") for field in fields(RunSpec)} - listed == {
        "model",
        "strategy",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-tiny", "dp3", "--batch", "4"], "--global-batch 4 is not a multiple"),
        (["gpt-huge", "dp1"], "gpt-huge"),
        (
            ["gpt-tiny", "dp2.z3", "--offload", "optimizer", "--device", "cpu"],
            "--offload 'optimizer' does not run here",
        ),
        (["gpt-tiny", "dp1", "--dtype", "int4"], "--dtype 'int4' is not one of"),
        (
            ["gpt-tiny", "dp2", "--speed", "0.5"],
            "--speed 0.5 must list a share per rank",
        ),
        (
            ["gpt-tiny", "dp1", "--device", "cpu", "--dry-run", "-o", "/dev/null/run"],
            "a run needs a directory",
        ),
        (["gpt-tiny"], "give a model and a strategy"),
        (["gpt-tiny", ""], "give a model and a strategy"),
        (["--mode", "hybrid", "--ranks", "3"], "--tp-size 2 does not divide 3 ranks"),
    ],
)
def test_train_refuses_in_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "plan", "steps"),
    [
        ("--mode baseline --ranks 4 --batch-size 2 --max-samples 80", "dp4.mb2", 10),
        ("--mode hybrid --ranks 4 --tp-size 2", "dp2.tp2.z3.mb8", 6),
    ],
)
def test_train_takes_the_words_of_the_gpt2_study(capsys, options, plan, steps):
    words = ["train", "gpt-tiny", *options.split(), "--device", "cpu"]
    assert main([*words, "--dry-run", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["plan"], about["steps"]) == (plan, steps)


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("out-of-memory", 1)])
def test_the_status_of_a_run_is_that_of_train(
    capsys, tmp_path, monkeypatch, status, code
):
    def launch(spec, directory):
        write_json(directory / "spec.json", {"device": "cpu"})
        write_json(
            directory / "summary.json",
            {"status": status, "mfu": 0.25, "step_s": {"median": 0.5}},
        )
        if code:
            raise launching.RunError("no memory\nend of its log", directory, status)

    monkeypatch.setattr(launching, "launch", launch)
    assert (
        main(
            ["train", "gpt-tiny", "dp1", "--device", "cpu", "-o", str(tmp_path / "run")]
        )
        == code
    )
    printed = capsys.readouterr()
    assert re.search(
        rf"status +{status}\n.*mfu +0.25\n.*step_s +0.5\n", printed.out, re.DOTALL
    )
    assert ("madmax: no memory\nend of its log\n" in printed.err) == bool(code)
    main(["train", "gpt-tiny", "dp1", "--device", "cpu", "-o", str(tmp_path / "run")])
    assert f"; the {status} run there is replaced\n" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--quick", "--detailed"], ["--ranks", "-1"]])
def test_bench_refuses_before_it_times(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_bench_prints_what_it_writes(capsys, tmp_path, monkeypatch):
    def measure_links(path, size, ranks):
        path.write_text(
            "collective,ranks,nodes,size_bytes,seconds\nall_reduce,2,1,4096,0.001\n"
        )
        return 2

    monkeypatch.setattr(launching, "measure_links", measure_links)
    benching = sys.modules.get("madmax_lib.runs.measure.bench") or pytest.importorskip(
        "madmax_lib.runs.measure.bench"
    )
    monkeypatch.setattr(benching, "_PARTS", {"launch": benching._launch})
    assert main(["bench", "--quick", "-o", str(tmp_path / "out"), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert (
        tables["kernels"][0]["kernel"] == "launch"
        and tables["collectives"][0]["seconds"] == 0.001
    )
    assert main(["bench", "--quick", "-o", str(tmp_path / "out")]) == 0
    assert "all_reduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reason", "code"),
    [(selftest.Missing("not here"), 0), (OSError("broken\nmore"), 1)],
)
def test_check_fails_where_a_thing_that_is_there_does_not_work(
    capsys, monkeypatch, reason, code
):
    def ask():
        raise reason

    monkeypatch.setattr(
        doctor, "_PACKAGES", {"numpy": "everything", "no-such-package": "nothing"}
    )
    monkeypatch.setattr(
        doctor,
        "selftest",
        lambda: selftest.answers({"kernels": ask, "torch": lambda: "2.13"}),
    )
    assert main(["check"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("works   numpy: ")
        and lines[1] == "missing no-such-package: is not installed: nothing"
    )
    assert lines[2] == (
        "missing kernels: not here" if code == 0 else "fails   kernels: OSError: broken"
    )
    assert main(["doctor"]) == code
    capsys.readouterr()
    assert main(["check", "--json"]) == code
    assert json.loads(capsys.readouterr().out)[3] == {
        "name": "torch",
        "status": "works",
        "text": "2.13",
    }
