"""Dumps of the flight recorder with known culprits, real ones of gloo, and files that
only look like dumps.
"""

import json
import pickle
import runpy

import pytest
from support import local_or_skip

from madmax_lib.__main__ import main
from madmax_lib.traces import flight_calls, flight_findings, lateness


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    runpy.run_path(str(local_or_skip("flight_recorder/make.py")))["main"](folder)
    return folder


def blamed(folder):
    findings = flight_findings(flight_calls(folder))
    return [
        tuple(row)
        for row in findings[["finding", "ranks", "sequence"]].itertuples(index=False)
    ]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("healthy", []),
        ("late", []),
        ("missing", [("missing", "3", 5)]),
        ("type-mismatch", [("other call", "1", 5)]),
        # the first rank is the odd one
        ("size-mismatch-rank0", [("other sizes", "0", 5)]),
        ("state-mismatch", [("not done", "2", 5)]),
        ("ring-buffer", []),
        ("p2p", []),
        ("dump-missing", [("no dump", "1", -1)]),
    ],
)
def test_the_culprit_of_a_made_dump_is_named(made, case, expected):
    assert blamed(made / case) == expected


def test_the_command_says_that_nothing_was_found(made, capsys):
    assert main(["flight", str(made / "healthy")]) == 0
    calls = len(flight_calls(made / "healthy"))
    said = f"findings: none, 4 ranks agree on their {calls} calls, all completed"
    assert said in capsys.readouterr().out.splitlines()
    assert (
        main(["flight", str(made / "missing")]) == 1
        and "findings: none" not in capsys.readouterr().out
    )


def test_the_late_rank_is_named_with_what_it_is_late_by(made):
    latest = lateness(flight_calls(made / "late")).iloc[0]
    assert (latest["rank"], latest["group"], latest["calls"]) == (2, "0 default_pg", 4)
    assert latest["mean_s"] == pytest.approx(0.040)
    assert lateness(flight_calls(made / "healthy"))["max_s"].max() == pytest.approx(
        0, abs=1e-6
    )


def test_clocks_of_hosts_are_shifted_before_lateness_is_told(made, tmp_path):
    for path in (made / "late").iterdir():
        dump = pickle.loads(path.read_bytes())
        for entry in dump["entries"]:
            for time in (
                "time_created_ns",
                "time_discovered_started_ns",
                "time_discovered_completed_ns",
            ):
                # two ranks on a host whose clock is ahead
                entry[time] += 7 * 10**9 * (path.name[-1] in "01")
        (tmp_path / path.name).write_bytes(pickle.dumps(dump, protocol=2))
    latest = lateness(flight_calls(tmp_path)).iloc[0]
    assert (latest["rank"], latest["mean_s"]) == (2, pytest.approx(0.040, abs=1e-6))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("late", []),
        ("missing", [("missing", "3", 4)]),
        ("type", [("other call", "1", 4)]),
    ],
)
def test_real_dumps_of_gloo_name_their_culprit(case, expected):
    folder = local_or_skip(f"flight_recorder/gloo/{case}")
    assert blamed(folder) == expected
    latest = lateness(flight_calls(folder)).iloc[0]
    assert case != "late" or (latest["rank"], latest["median_s"]) == (
        2,
        pytest.approx(0.2, abs=0.02),
    )


def call(collective, sequence=1, *, group="0", done=True, p2p=False, sizes="[[8]]"):
    return {
        "profiling_name": f"nccl:{collective}",
        "process_group": (group, ""),
        "collective_seq_id": sequence,
        "p2p_seq_id": sequence,
        "is_p2p": p2p,
        "state": "completed" if done else "started",
        "input_sizes": sizes,
        "time_created_ns": 10**18,
        "frames": [
            {"name": "wrapper", "filename": "torch/d.py", "line": 1},
            {"name": "f", "filename": "a.py", "line": 2},
        ],
    }


def write(folder, *ranks, members=None):
    groups = {
        name: {"ranks": str(ranks)}
        for name, ranks in (members or {"0": list(range(len(ranks)))}).items()
    }
    for rank, entries in enumerate(ranks):
        (folder / f"rank_{rank}.json").write_text(
            json.dumps({"entries": entries, "pg_config": groups})
        )
    return folder


def test_ranks_that_call_in_another_order_are_told_from_others(tmp_path):
    a = [call("all_reduce", 1, done=False), call("all_gather", 2, done=False)]
    b = [call("all_gather", 1, done=False), call("all_reduce", 2, done=False)]
    assert blamed(write(tmp_path, a, a, b)) == [("other order", "2", 1)]


def test_without_a_majority_both_sides_are_named(tmp_path):
    findings = flight_findings(
        flight_calls(
            write(
                tmp_path,
                [call("all_reduce", done=False)],
                [call("broadcast", done=False)],
            )
        )
    )
    assert findings["ranks"].tolist() == ["0,1"] and findings["frame"].tolist() == [
        "a.py:2 f"
    ]


def test_the_rank_that_waits_for_nobody_is_the_cause(tmp_path):
    """Rank 0 waits for 1 in group a, 1 for 2 in group b, and 2 for nobody."""
    groups = {"a": [0, 1], "b": [1, 2]}
    dumps = [
        [call("all_reduce", 1, group="a", done=False)],
        [call("all_reduce", 1, group="b", done=False)],
        [],
    ]
    dumps[2] = [call("all_reduce", 0, group="b")]
    dumps[1] = [
        call("all_reduce", 0, group="b"),
        call("all_reduce", 0, group="a"),
        *dumps[1],
    ]
    dumps[0] = [call("all_reduce", 0, group="a"), *dumps[0]]
    findings = flight_findings(flight_calls(write(tmp_path, *dumps, members=groups)))
    assert findings[["ranks", "cause"]].values.tolist() == [["2", True], ["1", False]]


def test_a_send_without_its_receive_blames_who_does_not_receive(tmp_path):
    sent = [call("send 0->1", 1, p2p=True), call("send 0->1", 2, p2p=True, done=False)]
    assert blamed(write(tmp_path, sent, [call("recv 1<-0", 1, p2p=True)])) == [
        ("unpaired", "1", 2)
    ]


def test_sizes_that_may_differ_are_no_finding(tmp_path):
    dumps = [
        [call("all_to_all", sizes=f"[[{8 * rank}]]", done=False)] for rank in (1, 2)
    ]
    assert blamed(write(tmp_path, *dumps)) == []


class _Hostile:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(_Hostile()), "names builtins.print"),
        (pickle.dumps({"entries": [1]}), "no list of entries"),
        (pickle.dumps({"entries": []}), "hold no calls"),
        (b"\x80\x02cos\nsystem\n(S'id'\ntR.", "names os.system"),
        (b"\x80\x02}q", "not a record of plain values"),
        (b"", "not a record of plain values"),
    ],
)
def test_what_is_no_dump_is_refused_and_nothing_executed(
    tmp_path, capsys, content, reason
):
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        flight_calls(tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_a_folder_without_dumps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no dumps; their names end in the rank"):
        flight_calls(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        flight_calls(tmp_path / "nowhere")
    for name in ("a_1", "b_1"):
        (tmp_path / name).write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(ValueError, match="two dumps of rank 1"):
        flight_calls(tmp_path)
