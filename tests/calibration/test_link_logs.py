"""Logs of nccl-tests and rccl-tests as people have them: 31 published ones, and made-up
ones of every shape.
"""

import json

import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.calibration import read_link_log
from tests.support import local_or_skip

HEADER = (
    "#       size  count  type  redop  root  time  algbw  busbw  #wrong  time  "
    "algbw  busbw  #wrong\n"
)
ROWS = ((2**20, 2**18, 44.92, 44.75), (2**26, 2**24, 300.0, 310.0))


def _row(size, count, *times_us, ranks=8, redop="sum     -1", wrong="0", factor=None):
    rates = [size / time_us / 1e3 for time_us in times_us]
    factor = 2 * (ranks - 1) / ranks if factor is None else factor
    groups = [
        f"{time:.2f} {rate:.2f} {rate * factor:.2f} {wrong}"
        for time, rate in zip(times_us, rates, strict=True)
    ]
    return f"  {size} {count} float {redop} {'  '.join(groups)}\n"


def _log(tmp_path, text, name="all_reduce.txt"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


PLAIN = HEADER + "".join(_row(*row) for row in ROWS)


def _published():
    index = local_or_skip("nccl_tests/README.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in index
        if line.count("|") > 9
    ]
    return [
        (cells[1], cells[2], cells[3], cells[4], int(cells[7]))
        for cells in rows
        if cells[7].isdigit()
    ]


def test_published_logs_give_their_groups_and_all_their_rows():
    names = {"alltoall": "all_to_all"}
    single = 0
    for name, collective, ranks, nodes, count in _published():
        path = local_or_skip(f"nccl_tests/{name}.txt")
        if ranks == "1":
            single += 1
            with pytest.raises(ValueError, match="one rank: no link was measured"):
                read_link_log(path)
            continue
        rows = read_link_log(path)
        assert set(rows["collective"]) == {names.get(collective, collective)}, name
        assert set(rows["ranks"]) == {int(number) for number in ranks.split(";")}, name
        if stated := set(rows["nodes"].dropna()):
            assert not nodes or stated == {
                int(number) for number in nodes.split(";")
            }, name
        empty = path.read_text().count(" 0             0 ")
        assert (rows["placement"] == "out-of-place").sum() == count - empty, name
    assert single == 2


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "".join(_row(*row) for row in ROWS),  # filtered by grep: no header
        "".join(f"[1,0]<stdout>:{line}\n" for line in PLAIN.splitlines()),
        "".join(f" 0: {line}\n" for line in PLAIN.splitlines()),
        PLAIN.replace("#", "    "),
        "host:1:1 [0] NCCL INFO Using network IB\n" + PLAIN + "[0]     366.5    1.43\n",
        HEADER.replace("  root", "")
        + "".join(_row(*row, redop="sum", wrong="2e-07") for row in ROWS),
        HEADER
        + "  0 0 float sum -1 3.9 0.00 0.00 0 3.9 0.00 0.00 0\n"
        + "".join(_row(*row) for row in ROWS),
        PLAIN.replace("#wrong\n", "#wrong\n# Avg bus bandwidth : 237.6\n"),
    ],
)
def test_shapes_of_logs(text, tmp_path):
    rows = read_link_log(_log(tmp_path, text))
    times_s = [time_us * 1e-6 for row in ROWS for time_us in row[2:]]
    assert rows["seconds"].tolist() == pytest.approx(times_s)
    assert rows["size_bytes"].tolist() == [2**20, 2**20, 2**26, 2**26]
    assert (
        set(rows["ranks"]) == {8}
        and set(rows["collective"]) == {"all_reduce"}
        and rows["nodes"].isna().all()
    )


def test_device_lists_name_ranks_nodes_and_groups(tmp_path):
    line = (
        "#  Rank {r:2} Group {g} Pid 1 on host-{h} device  {d} [0000:04:00] "
        "NVIDIA H100\n"
    )
    devices = "".join(
        line.format(r=rank, g=rank % 2, h=rank // 8, d=rank % 8) for rank in range(16)
    )
    rows = read_link_log(_log(tmp_path, "# Using devices\n" + devices + PLAIN))
    assert (rows["ranks"] == 8).all() and (rows["nodes"] == 2).all()


def test_rows_that_cannot_be_right_are_left_out_and_named(tmp_path):
    wrong = _row(2**22, 2**20, 50.0, 50.0).replace("50.00", "55.00", 1)
    failed = _row(2**24, 2**22, 90.0, 90.0, wrong="17")
    rows = read_link_log(
        _log(
            tmp_path, PLAIN + wrong + failed + "   4096 1024 float sum -1 12.0 broken\n"
        )
    )
    assert (
        set(rows["size_bytes"]) == {2**20, 2**22, 2**26}
        and (rows["size_bytes"] == 2**22).sum() == 1
    )
    assert [
        note
        for note in rows.attrs["notes"]
        if "4194304 bytes: bandwidth and time disagree" in note
    ]
    for line in (5, 6):
        assert [
            note
            for note in rows.attrs["notes"]
            if f"line {line} is truncated or has wrong results" in note
        ]


@pytest.mark.parametrize("kind", ["all_gather", "gather"])
def test_other_collectives_know_their_ranks_from_the_count(kind, tmp_path):
    text = HEADER + "".join(
        _row(8 * 4 * n, n, 50.0, 50.0, factor=7 / 8, redop="none -1")
        for n in (2**16, 2**20)
    )
    rows = read_link_log(
        _log(
            tmp_path,
            f"# Collective test starting: {kind}_perf_mpi\n" + text,
            "log.txt",
        )
    )
    assert set(rows["collective"]) == {kind} and set(rows["ranks"]) == {8}


@pytest.mark.parametrize(
    "text, name, options, message",
    [
        ("nothing here", "x.txt", {}, "no results of nccl-tests or rccl-tests"),
        (PLAIN, "log.txt", {}, "which collective was measured"),
        (PLAIN.replace("time", "cputime"), "all_reduce.txt", {}, "host times"),
        (
            HEADER + _row(4096, 1024, 9.0, 9.0, factor=1),
            "broadcast.txt",
            {},
            "Give ranks=",
        ),
    ],
)
def test_logs_that_do_not_say_enough_are_refused(
    text, name, options, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        read_link_log(_log(tmp_path, text, name), **options)


def _json(*, processes=16, of_process=1, results=None, **changes):
    devices = [
        {
            "rank": rank * of_process,
            "group": 0,
            "pid": rank,
            "hostname": f"host-{rank * of_process // 8}",
            "device": 0,
        }
        for rank in range(processes)
    ]
    ranks, rows = processes * of_process, []
    for size, count, *times_us in ROWS:
        rates = [size / time_us / 1e3 for time_us in times_us]
        sides = [
            {
                "time": time,
                "alg_bw": rate,
                "bus_bw": rate * 2 * (ranks - 1) / ranks,
                "nwrong": "0",
            }
            for time, rate in zip(times_us, rates, strict=True)
        ]
        row = {
            "size": size,
            "count": count,
            "type": "float",
            "redop": "sum",
            "root": "    -1",
        }
        rows.append(row | {"out_of_place": sides[0], "in_place": sides[1]})
    config = {"nthreads": 1, "ngpus": of_process, "devices": devices}
    content = {
        "version": 1,
        "args": ["./build/all_reduce_perf", "-b", "1M"],
        "env": ["TOKEN=secret"],
    }
    return json.dumps(
        content | {"config": config, "results": results or rows} | changes
    )


@pytest.mark.parametrize(("processes", "of_process"), [(16, 1), (2, 8), (1, 8)])
def test_json_of_nccl_tests_gives_the_same_rows(processes, of_process, tmp_path):
    rows = read_link_log(
        _log(tmp_path, _json(processes=processes, of_process=of_process), "x.json")
    )
    assert rows["seconds"].tolist() == pytest.approx(
        [time_us * 1e-6 for row in ROWS for time_us in row[2:]]
    )
    ranks = processes * of_process
    assert set(rows["ranks"]) == {ranks} and set(rows["nodes"]) == {ranks // 8}
    assert (
        set(rows["collective"]) == {"all_reduce"}
        and "secret" not in str(rows.attrs) + rows.to_csv()
    )


def test_json_that_is_wrong_cut_or_of_host_times_is_refused(tmp_path):
    wrong = json.loads(_json())["results"]
    wrong[0]["out_of_place"]["nwrong"] = "3"
    rows = read_link_log(_log(tmp_path, _json(results=wrong), "x.json"))
    assert len(rows) == 3 and "result 1 has 3 wrong values" in rows.attrs["notes"]
    host = [
        row | {"out_of_place": {"cpu_time": 1.0}, "in_place": None} for row in wrong
    ]
    for text, message in [
        (_json(results=host), "host times"),
        (_json()[:-40], "not the JSON of nccl-tests"),
        (_json(config={}), "not the JSON of nccl-tests"),
        (_json(args=[]), "which collective was measured"),
        (
            _json(
                results=[
                    row | {"out_of_place": None, "in_place": None} for row in wrong
                ]
            ),
            "no results of nccl-tests",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            read_link_log(_log(tmp_path, text, "x.json"))


def test_a_log_takes_the_place_of_the_formulas(tmp_path):
    rows = read_link_log(_log(tmp_path, PLAIN), nodes=1)
    plain, measured = (
        mm.simulate(
            "gpt2-large", "dgx-a100", "dp8.z0", global_batch=8, collectives=table
        )
        for table in (None, rows)
    )
    assert (
        mm.breakdown(measured)["total_s"].max() != mm.breakdown(plain)["total_s"].max()
    )
    with pytest.raises(
        ValueError,
        match="measured collectives: nodes must be a positive number in every row",
    ):
        mm.simulate(
            "gpt2-large",
            "dgx-a100",
            "dp8",
            global_batch=8,
            collectives=rows.assign(nodes=pd.NA),
        )
    two = pd.concat([rows.assign(network="100mbit"), rows.assign(network="300mbit")])
    with pytest.raises(
        ValueError, match="rows of several networks, 100mbit and 300mbit; choose one"
    ):
        mm.simulate("gpt2-large", "dgx-a100", "dp8", global_batch=8, collectives=two)
