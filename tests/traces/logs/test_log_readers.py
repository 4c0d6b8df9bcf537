"""Readers of logs: what each writer's file gives, and what is refused."""

import json

import numpy as np
import pandas as pd
import pytest

from madmax_lib.__main__ import main
from madmax_lib.traces import compare_logs, read_log, step_table
from tests.support import local_or_skip
from tests.traces.logs.made_logs import inspector_line, write_job

CONSOLES = [
    ("megatron-lm", "Megatron", 20, 5.45),
    ("megatron-bridge", "Megatron", 10, 5.42),
    ("deepspeed-pipeline", "DeepSpeed pipeline", 10, 2.30),
    ("deepspeed", "DeepSpeed", 10, 0.0237),
    ("nemo1-progress-bar", "NeMo 1", 20, 3.13),
    ("nemo2", "NeMo 2", 20, 5.40),
    ("hf-trainer", "HF Trainer", 10, 1.52),
    ("torchtitan", "torchtitan", 11, 1.37e-4),
]


@pytest.mark.parametrize(("name", "writer", "steps", "step_s"), CONSOLES)
def test_a_console_is_known_by_its_lines(name, writer, steps, step_s):
    log = read_log(local_or_skip("logs_2026/console") / f"{name}.log")
    assert (log.source, len(log.steps)) == (writer, steps)
    assert np.median(log.step_s) == pytest.approx(step_s, rel=0.02)


def test_a_pattern_and_a_column_give_the_time(tmp_path):
    path = tmp_path / "mine.log"
    lines = [f"rank {r} it={i} took {100 + i} ms" for i in range(20) for r in (0, 1)]
    path.write_text("\n".join(lines))
    pattern = r"rank (?P<rank>\d) it=(?P<step>\d+) took (?P<ms>[\d.]+)"
    log = read_log(path, pattern=pattern)
    assert list(log.units["rank"]) == [0, 1] and list(log.steps) == list(range(20))
    assert log.phases["", "step"][1, 3] == pytest.approx(0.103)
    with pytest.raises(ValueError, match="no line has a step time in a known form"):
        read_log(path)
    for bad in ("(", "took", r"it=(?P<step>\d+)"):
        with pytest.raises(ValueError, match=r"pattern|no line has|none has"):
            read_log(path, pattern=bad)
    table = tmp_path / "steps.csv"
    pd.DataFrame({"iteration": [1, 2, 3], "mine_ms": [5.0, 6, 7]}).to_csv(table)
    assert read_log(table, column="mine_ms").step_s == pytest.approx([0.006, 0.007])
    with pytest.raises(ValueError, match="no column of step times in"):
        read_log(table)


@pytest.mark.parametrize("folder", ["v40-8ranks", "v42-4ranks", "v43-4ranks"])
def test_bus_bandwidth_is_inspectors(folder):
    root = local_or_skip("logs_2026")
    key = json.loads((root / "key.json").read_text())["inspector"][folder]
    sizes = read_log(root / "inspector" / folder).sizes
    for row in key["by_collective"]:
        same = sizes[
            (sizes["coll"] == row["coll"])
            & (sizes["coll_msg_size_bytes"] == row["bytes"])
        ]
        assert same["bus_bytes_per_s"].item() == pytest.approx(
            row["mean_busbw_gbs"] * 1e9, rel=1e-3
        )
        assert same["records"].item() == row["records"]


def test_gpus_of_one_process_are_told_apart(tmp_path):
    for process in range(2):
        lines = []
        for call in range(3):
            for rank in (2 * process, 2 * process + 1):
                line = inspector_line(rank, 8192, call, 20.0 + rank)
                line["metadata"]["pid"] = process
                pair = inspector_line(rank % 2, 4096, call, 9, f"0x{process}", ranks=2)
                pair["metadata"]["pid"] = process
                lines += [json.dumps(line), json.dumps(pair)]
        (tmp_path / f"node-pid{process}.log").write_text("\n".join(lines))
    log = read_log(tmp_path)
    assert list(log.units["rank"]) == [0, 1, 2, 3]
    whole = log.phases["0xab", "AllReduce 8192"]
    assert whole[:, 0] * 1e6 == pytest.approx([20, 21, 22, 23])
    assert np.isnan(log.phases["0x1", "AllReduce 4096"][:2]).all()


def test_records_behind_a_marker_have_its_context(tmp_path):
    first, *others = (inspector_line(1, 8192, call, 30) for call in range(3))
    marker = {k: first[k] for k in ("header", "metadata")} | {"dump_stats": {}}
    lines = [marker, *({"coll_perf": one["coll_perf"]} for one in (first, *others))]
    (tmp_path / "a.log").write_text("\n".join(map(json.dumps, lines)))
    assert read_log(tmp_path).phases["0xab", "AllReduce 8192"].shape == (1, 3)


def test_old_summaries_of_traceml_are_refused(tmp_path):
    path = tmp_path / "final_summary.json"
    path.write_text('{"schema_version": 1.6, "primary_diagnosis": {}, "step_time": {}}')
    with pytest.raises(ValueError, match=r"schema 1\.6 of traceml"):
        read_log(path)


@pytest.mark.parametrize(
    ("growth", "verdict"), [(1.0, "fine"), (1.05, "slower"), (1.025, "cannot tell")]
)
def test_two_logs_are_compared(tmp_path, growth, verdict):
    rng = np.random.default_rng(0)
    logs = []
    for name, factor in (("a", 1.0), ("b", growth)):
        path = tmp_path / f"{name}.csv"
        times = factor * rng.normal(1, 0.02, 400)
        pd.DataFrame({"step": range(400), "step_s": times}).to_csv(path, index=False)
        logs.append(read_log(path))
    table = compare_logs(*logs, 0.028 if verdict == "cannot tell" else 0.03)
    assert verdict in ("cannot tell", table["verdict"].item())
    assert table["ratio"].item() == pytest.approx(growth, abs=0.01)


def test_logs_in_two_units_are_not_compared(tmp_path):
    logs = []
    for name, factor in (("step_s", 0.5), ("step_time", 500.0)):
        path = tmp_path / f"{name}.csv"
        times = factor * np.random.default_rng(0).normal(1, 0.02, 100)
        pd.DataFrame({"step": range(100), name: times}).to_csv(path, index=False)
        logs.append(read_log(path))
    with pytest.raises(
        ValueError, match=r"1e\+03 times that of a: are both in one unit"
    ):
        compare_logs(*logs)
    with pytest.raises(ValueError, match="threshold=3 is not a share"):
        compare_logs(logs[0], logs[0], threshold=3)


def run(capsys, *words):
    status = main([*map(str, words)])
    return status, capsys.readouterr().out


def test_commands_answer_from_logs(tmp_path, capsys):
    def extra(name, rank, step):
        return 0.03 if (name, rank) == ("fwd_bwd", 3) else 0.0

    job = write_job(tmp_path / "job", steps=150, extra=extra)
    status, text = run(capsys, "stragglers", job, "--json")
    (finding,) = json.loads(text)["result"]["findings"]
    cost = finding.pop("cost_share")
    same = {
        "rank": 3,
        "host": None,
        "phase": "fwd_bwd",
        "since_step": 2,
        "kind": "late",
    }
    assert (status, finding) == (0, same) and cost == pytest.approx(0.06, abs=0.015)
    status, text = run(capsys, "steps", job, "--csv")
    assert status == 0 and "fwd_bwd" in text and len(step_table(read_log(job))) == 6
    page = tmp_path / "page.html"
    assert run(capsys, "report", job, "-o", page)[0] == 0
    assert "fwd_bwd" in page.read_text()
    plain = write_job(tmp_path / "plain", steps=150)
    assert run(capsys, "compare", plain, job, "--gate", "3%")[0] == 1
    assert run(capsys, "compare", plain, plain, "--gate", "3%")[0] == 0
    few = write_job(tmp_path / "few", steps=6)
    status, text = run(capsys, "stragglers", few, "--json")
    assert status == 3 and json.loads(text)["result"]["findings"] == []
