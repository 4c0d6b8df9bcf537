import json

import numpy as np
import pandas as pd
import pytest
from support import (
    dataset_or_skip,
    lanes,
    local_or_skip,
    make_timeline,
    with_columns,
    with_tables,
)

import madmax_lib as mm
from madmax_lib import Timeline, breakdown, read_trace
from madmax_lib.simulator import Parameters
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.traces import by_group, calls, exchanges, exposed_by_collective, waiting

AR = "ncclDevKernel_AllReduce"


def told(rows: list[tuple], records: dict[int, dict], **columns) -> Timeline:
    """Timeline of (rank, stream, kind, name, start_ns, dur_ns) rows with collective
    metadata {row: fields}.
    """
    timeline = with_columns(make_timeline(rows), **columns)
    return with_tables(
        timeline, calls=[{"row": row} | fields for row, fields in records.items()]
    )


def with_shapes(rows: list[tuple], shapes: dict[int, tuple], **meta) -> Timeline:
    """Timeline of such rows with recorded shapes and types {row: (shapes, types)}."""
    operators = [
        (row, json.dumps(dims), json.dumps(types))
        for row, (dims, types) in shapes.items()
    ]
    return with_tables(make_timeline(rows, **meta), operators=operators)


# size, kind and bandwidth of a call


@pytest.mark.parametrize(
    ("collective", "inside", "outside", "message", "bus"),
    [
        ("all_reduce", 1000, 1000, 2000, 2 * 3 / 4),
        ("all_gather", 250, 1000, 2000, 3 / 4),
        ("reduce_scatter", 1000, 250, 2000, 3 / 4),
        ("all_to_all", 1000, 1000, 2000, 3 / 4),
        ("broadcast", 1000, 1000, 2000, 1),
        ("reduce", 1000, 1000, 2000, 1),
        ("send", 1000, -1, 2000, 1),
    ],
)
def test_bandwidth_of_each_collective(collective, inside, outside, message, bus):
    """1000 elements of bfloat16 in 2000 ns are 1e9 bytes/s."""
    fields = {
        "collective": collective,
        "dtype": "bfloat16",
        "in_elements": inside,
        "out_elements": outside,
    }
    table = calls(
        told(
            [(0, 7, "comm", "ncclDevKernel_X", 0, 2000)],
            {0: fields | {"group_size": 4}},
        )
    )
    row = table.iloc[0]
    assert (row["collective"], row["size_bytes"], row["dtype"]) == (
        collective,
        message,
        "bfloat16",
    )
    assert row["algorithm_bytes_per_s"] == pytest.approx(1e9, rel=1e-12)
    assert row["bus_bytes_per_s"] == pytest.approx(bus * 1e9, rel=1e-12)


def test_no_bandwidth_without_size_or_time():
    rows = [
        (0, 7, "comm", AR, 0, 5),
        (0, 7, "comm", AR, 9, 0),
        (0, 7, "comm", "Memcpy PtoP", 20, 5),
    ]
    timeline = make_timeline(rows, world_size=4)
    table = calls(with_columns(timeline, size_bytes=[float("nan"), 100, 10]))
    assert table["bus_bytes_per_s"].isna().tolist() == [True, True, False]
    assert table["collective"].tolist() == ["all_reduce", "all_reduce", "generic"]
    assert table["group_size"].tolist() == [4, 4, 4]


def test_exposed_is_what_the_ranks_own_compute_leaves_open():
    rows = [
        (0, 20, "comm", AR, 0, 10),
        (1, 20, "comm", AR, 0, 10),
        (0, 21, "comm", AR, 12, 5),
    ]
    rows += [
        (0, 7, "compute", "a", 2, 2),
        (0, 8, "compute", "b", 3, 3),
        (0, 7, "compute", "c", 9, 11),
    ]
    assert (calls(make_timeline(rows))["exposed_s"] * 1e9).round(6).tolist() == [
        5,
        10,
        0,
    ]


def test_a_kernel_without_metadata_takes_the_hosts_record_with_its_operator_id():
    """As with RCCL and older NCCL: record_param_comms of the same rank and External id."""
    host = "-1 cpu: record_param_comms 0+1\n1/-1 cpu: record_param_comms 0+1\n"
    rows = lanes(
        host + "1/4 comm: ncclDevKernel_Generic 5+10, ncclDevKernel_Generic 20+10"
    )
    fields = {
        "collective": "all_gather",
        "dtype": "half",
        "in_elements": 10,
        "out_elements": 80,
        "ranks": "0,1,4,5",
    }
    other = fields | {"collective": "broadcast"}
    table = calls(
        told(
            rows,
            {0: other, 1: fields},
            op=[7, 7, 7, -1],
            group=["dp", "dp", None, None],
        )
    )
    assert table["collective"].tolist() == ["all_gather", "generic"]
    assert table["group"].tolist() == ["dp [0, 1, 4, 5]", ""]
    assert table.loc[0, ["size_bytes", "group_size"]].tolist() == [160, 4]


@pytest.mark.parametrize(
    "name", ["hta-samples/nccl_data", "tracelens-samples/resnet_act_checkpoint"]
)
def test_the_hosts_record_equals_the_kernels(name):
    """Without the metadata on the kernels, the operator id leads to the same on real
    NCCL and RCCL traces.
    """
    timeline = read_trace(local_or_skip(f"traces/{name}.json.gz"))
    records, device = timeline.side_tables["calls"], timeline.spans["stream"].ge(0)
    host = records[~device.to_numpy()[records["row"]]]
    spans = timeline.spans.assign(
        **{name: timeline.spans[name].mask(device) for name in ("size_bytes", "group")}
    )
    by_host = calls(
        Timeline(spans, timeline.meta, side_tables=SideTables(lambda: {"calls": host}))
    )
    assert len(host) < len(records)
    pd.testing.assert_frame_equal(by_host, calls(timeline))


def test_two_ranks_of_a_real_trace_have_known_sizes_and_exposure():
    timeline = read_trace(local_or_skip("traces/hta-samples/nccl_data.json.gz"))
    table = calls(timeline)
    assert set(table["group"]) == {"0 [0, 1]"} and set(table["group_size"]) == {2}
    reduced = (
        table[table["collective"] == "all_reduce"].groupby("step")["size_bytes"].sum()
    )
    # the parameters of ResNet-50 in fp32, each step
    assert set(reduced) == {4 * 25_557_032}
    assert (table["call"] == -1).all() and table.attrs["unmatched"] == {}
    # one stream: no call beside another
    exposed_s = breakdown(timeline)["exposed_comm_s"].iloc[0]
    assert table["exposed_s"].sum() == pytest.approx(exposed_s, abs=1e-12)


def test_old_kernels_are_named_and_sized_by_the_annotation_around_their_launch():
    """SendRecv is an all-to-all here; the gather's two sides tell its group, which the
    trace does not name.
    """
    rows = lanes("""
        -1 annotation: nccl:all_to_all 0+10
        -1 cpu: cudaLaunchKernel 5+2 #1
        84 comm: ncclKernel_SendRecv 8+20 #1
        -1 cpu: c10d::_allgather_base_ 30+12
        -1 annotation: nccl:_all_gather_base 31+10
        -1 cpu: cudaLaunchKernel 35+2 #2, cudaLaunchKernel 60+2 #3
        84 comm: ncclKernel_SendRecv 40+20 #2, ncclKernel_SendRecv 62+20 #3
    """)
    shapes = {0: ([[24]], ["long int"]), 4: ([[8, 2]], ["float"])}
    shapes[3] = ([[64, 2], [8, 2], []], ["float", "float", "Scalar"])
    table = calls(with_shapes(rows, shapes, world_size=16))
    assert table["collective"].tolist() == ["all_to_all", "all_gather", "send_recv"]
    assert table["dtype"].tolist() == ["long", "float", ""]
    np.testing.assert_equal(
        table["size_bytes"].to_numpy(), [24 * 8, 64 * 2 * 4, np.nan]
    )
    assert table["group_size"].tolist() == [16, 8, 16]


def test_gloo_tells_the_share_of_one_rank():
    gloo = ("gloo:all_gather", "gloo:all_reduce") * 2
    rows = [(i // 2, -1, "comm", name, 50 * (i % 2), 10) for i, name in enumerate(gloo)]
    table = calls(
        with_shapes(
            rows, dict.fromkeys(range(4), ([[100, 2], [3]], ["float", "c10::BFloat16"]))
        )
    )
    assert table["size_bytes"].tolist() == [2 * 806, 806] * 2
    assert table["bus_bytes_per_s"].tolist() == pytest.approx(
        [806 / 1e-8, 806 / 1e-8] * 2
    )


def test_custom_kernels_are_calls_too():
    """HTA sees no communication in this 64-rank trace; its expert-parallel kernels do
    not tell their size.
    """
    table = calls(read_trace(local_or_skip("traces/deepseek-v3-train/train.json.gz")))
    assert {"dispatch", "combine"} <= set(table["collective"]) and table[
        "bus_bytes_per_s"
    ].isna().all()
    assert set(table["group_size"]) == {64}


def test_nothing_to_call_and_nobody_to_wait_for():
    for rows in ([], [(0, 7, "compute", "a", 0, 5)]):
        timeline = make_timeline(rows)
        assert (
            not len(calls(timeline))
            and not len(by_group(timeline))
            and not len(waiting(timeline))
        )
        assert by_group(timeline).columns[-1] == "bus_bytes_per_s"
    alone = make_timeline([(0, 20, "comm", AR, 0, 5)])
    alone = Timeline(
        alone.spans,
        alone.meta,
        side_tables=SideTables(lambda: pytest.fail("details were read")),
    )
    assert not len(waiting(alone)) and waiting(alone).attrs["unmatched"] == {}


# which calls are the same


def test_sequence_numbers_match_what_remains_of_a_group():
    """Rank 2 lost the call 6 and names its kernels otherwise; by count nothing could be
    matched.
    """
    kept = [
        (rank, seq) for rank in range(3) for seq in (5, 6, 7) if (rank, seq) != (2, 6)
    ]
    rows = [
        (
            rank,
            20,
            "comm",
            f"{AR}_{'LL' if rank < 2 else 'Simple'}",
            100 * seq,
            5 + rank,
        )
        for rank, seq in kept
    ]
    records = {
        row: {"collective": "all_reduce", "sequence": seq}
        for row, (_, seq) in enumerate(kept)
    }
    table = calls(told(rows, records, group="0 [0, 1, 2]"))
    groups = table.groupby("call")["sequence"].agg(["size", "nunique"])
    assert groups["nunique"].tolist() == [1, 1, 1] and sorted(groups["size"]) == [
        2,
        3,
        3,
    ]
    assert table.attrs["unmatched"] == {}


def test_what_cannot_be_matched_is_left_out_and_named():
    timeline = make_timeline(
        [
            (0, 20, "comm", AR, 0, 5),
            (0, 20, "comm", AR, 9, 5),
            (1, 20, "comm", AR, 0, 5),
        ]
    )
    table = waiting(timeline)
    assert not len(table) and table.attrs["unmatched"] == {AR: 3}
    records = [
        {"row": row, "collective": "all_reduce", "sequence": seq}
        for row, seq in enumerate((1, 2, 1))
    ]
    table = calls(with_tables(with_columns(timeline, group="0 [0, 1]"), calls=records))
    assert table["call"].tolist() == [0, -1, 0] and table.attrs["unmatched"] == {AR: 1}


def test_sends_meet_their_receives():
    """Rank 0 sends twice to 1 and receives once from it; 2 sends to 0. Each side
    records only the other one.
    """
    lines = [
        (0, "send", 1, 0),
        (0, "send", 1, 20),
        (0, "recv", 1, 40),
        (0, "recv", 2, 60),
    ]
    lines += [
        (1, "recv", 0, 0),
        (1, "recv", 0, 25),
        (1, "send", 0, 40),
        (2, "send", 0, 60),
    ]
    rows = [
        (rank, 20, "comm", "ncclDevKernel_SendRecv", start, 5)
        for rank, _, _, start in lines
    ]
    records = {
        row: {
            "collective": what,
            "target_rank" if what == "send" else "source_rank": peer,
        }
        for row, (_, what, peer, _) in enumerate(lines)
    }
    table = calls(told(rows, records, group="0 [0, 1, 2]"))
    assert [sorted(part) for part in table.groupby("call").groups.values()] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert (
        table["source_rank"].tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
        and table.attrs["unmatched"] == {}
    )


def test_sends_without_peers_meet_between_two_ranks_only():
    def sends(*ranks):
        return calls(
            make_timeline(
                [
                    (rank, -1, "comm", f"gloo:{'recv' if rank else 'send'}", 0, 5)
                    for rank in ranks
                ]
            )
        )

    assert sends(0, 1)["call"].tolist() == [0, 0] and sends(0, 1)[
        "target_rank"
    ].tolist() == [1, 1]
    three = sends(0, 1, 2)
    assert (three["call"] == -1).all() and three.attrs["unmatched"] == {"gloo:recv": 2}


@pytest.mark.parametrize("name", ["gpt-ddp", "gpt-fsdp", "vit-ddp", "vit-fsdp"])
def test_all_calls_of_the_shipped_sets_meet(name):
    timeline = read_trace(mm.dataset(name))
    table, groups = calls(timeline), by_group(timeline)
    of_call = table.groupby("call")
    assert table.attrs["unmatched"] == {} and set(of_call["rank"].nunique()) == {2}
    assert set(of_call["size_bytes"].nunique()) == {1}  # both ranks moved the same
    if name == "gpt-ddp":  # two steps reduce the parameters
        assert groups.loc[0, ["size_bytes", "calls", "count"]].tolist() == [
            2 * 4 * 932_608,
            8,
            16,
        ]


# by group


def test_by_group_of_two_calls():
    """1000 floats on 4 ranks; the last ranks take 100 and 200 ns, the others wait 30 +
    0 and 0 + 40.
    """
    times = [(0, 0, 130), (0, 500, 200), (1, 0, 100), (1, 500, 240)]
    rows = [(rank, 20, "comm", AR, start, dur) for rank, start, dur in times]
    fields = {
        "collective": "all_reduce",
        "dtype": "float",
        "in_elements": 1000,
        "out_elements": 1000,
        "group_size": 4,
    }
    table = by_group(told(rows, dict.fromkeys(range(4), fields), group="tp"))
    row = table.iloc[0]
    assert row[["ranks", "count", "calls", "size_bytes"]].tolist() == [2, 4, 2, 8000]
    times = (
        row[
            [
                "total_s",
                "mean_s",
                "min_s",
                "max_s",
                "transfer_s",
                "wait_s",
                "skew_s",
                "skew_max_s",
            ]
        ]
        * 1e9
    )
    assert times.astype(float).round(6).tolist() == [
        670,
        167.5,
        100,
        240,
        300,
        70,
        35,
        40,
    ]
    assert row["algorithm_bytes_per_s"] == pytest.approx(8000 / 300e-9)
    assert row["bus_bytes_per_s"] == pytest.approx(1.5 * 8000 / 300e-9)
    assert table.attrs["source"] == "measured" and table.attrs["unmatched"] == {}


def test_dlrm_by_group():
    """Sizes by hand from the annotations; per call 8 x transfer + waiting is the whole
    communication.
    """
    timeline = read_trace(dataset_or_skip("dlrm-8xv100"))
    table, wait = by_group(timeline).set_index("collective"), waiting(timeline)
    assert table["calls"].to_dict() == {"all_to_all": 5, "all_reduce": 3} and set(
        table["group_size"]
    ) == {8}
    assert table.loc["all_reduce", "size_bytes"] == 4 * (394_241 + 112 + 226_960)
    whole = 8 * table["transfer_s"] + table["wait_s"]
    pd.testing.assert_series_equal(whole, table["total_s"], check_names=False)
    assert table.loc["all_reduce", "bus_bytes_per_s"] == pytest.approx(
        24.85e9, rel=0.001
    )
    assert table["bus_bytes_per_s"].max() < 150e9  # what NVLink 2 gives a V100, one way
    assert wait.groupby("waits_for")["wait_s"].sum().idxmax() == 7
    assert wait.attrs["unmatched"] == {} and wait.attrs["one_group_assumed"]


def test_old_a100_trace_has_plausible_bandwidths():
    """16 ranks; the two sides of its gathers say that these run among 8, inside of a
    node.
    """
    table = by_group(
        read_trace(local_or_skip("traces/hta-samples/rank0.json.gz"))
    ).set_index("collective")
    sizes = table.groupby("group_size").groups
    assert set(sizes[16]) == {"all_reduce", "all_to_all", "send_recv"}
    assert set(sizes[8]) == {"all_gather", "reduce_scatter"}
    sized = table["bus_bytes_per_s"].drop("send_recv")
    # NVLink 3, one way
    assert (sized < 300e9).all() and (sized.drop("all_to_all") > 50e9).all()


# simulated


@pytest.mark.parametrize("plan", ["dp8", "dp2.tp2.pp2", "dp2.tp2.pp2.z3.nosp"])
def test_the_bus_bandwidth_of_a_simulated_collective_is_the_links(plan):
    cluster = mm.cluster("dgx-a100", nodes=1)
    ideal = Parameters()  # no latency, all of the link
    timeline = mm.simulate(
        mm.model("gpt2-large"),
        cluster,
        mm.Plan.parse(plan),
        global_batch=8,
        parameters=ideal,
    )
    table = by_group(timeline)
    link = cluster.intra.bandwidth_bytes_per_s
    # a call of microseconds is rounded to ns
    np.testing.assert_allclose(table["bus_bytes_per_s"], link, rtol=1e-3)
    assert (table["wait_s"].dropna() == 0).all() and table.attrs["unmatched"] == {}


def test_simulated_groups_have_their_ranks():
    plan = mm.Plan.parse("dp2.tp2.pp2")
    timeline = mm.simulate(
        mm.model("gpt2-large"), mm.cluster("dgx-a100", nodes=1), plan, global_batch=8
    )
    table = calls(timeline)
    groups = set(table["group"])
    assert {
        "tp [0, 1]",
        "tp [6, 7]",
        "dp [0, 2]",
        "dp [5, 7]",
        "pp [0, 4]",
        "pp [3, 7]",
    } <= groups
    assert len(groups) == 12
    sent = table[table["collective"] == "send_recv"]
    assert set(zip(sent["source_rank"], sent["target_rank"], strict=True)) == {
        (r, (r + 4) % 8) for r in range(8)
    }
    shared = table[table["call"] >= 0].groupby("call")
    assert set(shared["rank"].nunique()) == {2} and set(shared["group"].nunique()) == {
        1
    }


def test_one_simulated_rank_may_stand_for_many():
    plan = mm.Plan.parse("dp16.tp8.sp")
    timeline = mm.simulate(
        mm.model("gpt3-175b"), mm.cluster("dgx-a100", nodes=16), plan, global_batch=16
    )
    sizes = by_group(timeline).groupby("group")["group_size"].max()
    assert sorted(sizes) == [8, 16] and (calls(timeline)["call"] == -1).all()


# waiting


def test_the_shortest_arrived_last():
    """Two calls: rank 1 is last in the first (others wait 6 and 3 ns), rank 0 in the
    second (5 and 1 ns).
    """
    durations = {0: (10, 2), 1: (4, 7), 2: (7, 3)}
    rows = [
        (r, 20, "comm", AR, 100 * r + 50 * i, dur)
        for r, both in durations.items()
        for i, dur in enumerate(both)
    ]
    table = waiting(make_timeline(rows)).set_index(["rank", "waits_for"])["wait_s"]
    assert {key: round(value * 1e9) for key, value in table.items()} == {
        (0, 1): 6,
        (2, 1): 3,
        (1, 0): 5,
        (2, 0): 1,
    }


def test_one_lost_call_costs_one_step():
    rows = [
        (rank, 20, "comm", AR, 100 * step, 5 + rank)
        for step in range(4)
        for rank in (0, 1)
    ]
    timeline = make_timeline(rows[:-1])
    table = waiting(with_columns(timeline, step=timeline.spans["start_ns"] // 100))
    assert table["count"].tolist() == [3] and table.attrs["unmatched"] == {AR: 1}


def test_named_groups_are_kept_apart():
    """Groups {0, 1} and {2, 3} run the same collective; without names they look like
    one group, and it is said.
    """
    rows = [(rank, 20, "comm", AR, 0, dur) for rank, dur in enumerate((10, 20, 50, 60))]
    timeline = make_timeline(rows)
    assert waiting(timeline).attrs["one_group_assumed"]
    table = waiting(
        with_columns(timeline, group=["a [0, 1]", "a [0, 1]", "a [2, 3]", "a [2, 3]"])
    )
    assert table[["rank", "waits_for"]].to_numpy().tolist() == [[1, 0], [3, 2]]
    assert not table.attrs["one_group_assumed"]


def test_one_word_for_one_collective():
    """NCCL's all-to-all runs under the name SendRecv; the metadata tells, for every
    table.
    """
    timeline = mm.read_trace(local_or_skip("traces/more/torchrec-a2a5"))
    exposed, groups = exposed_by_collective(timeline), by_group(timeline)
    assert "all_to_all" in set(exposed["collective"]) == set(groups["collective"])
    sums = exposed.groupby("collective")["count"].sum()
    assert sums.to_dict() == groups.groupby("collective")["count"].sum().to_dict()


# uneven all-to-alls


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lacks", [None, 0, 3])
def test_every_byte_of_an_exchange_has_a_sender_and_a_receiver(seed, lacks):
    """What a rank sends the others get; of a rank that was not traced the others tell."""
    draw, rows, records = np.random.default_rng(seed), [], {}
    # calls, senders, receivers, in rows of 8 float
    sent = draw.integers(0, 50, (3, 4, 4))
    sent[0], members = sent[0] * (np.arange(4) == 2), [0, 2, 3, 5]
    for call, rank in np.ndindex(3, 4):
        if members[rank] == lacks:
            continue
        splits = sent[call, rank], sent[call, :, rank]
        texts = [",".join(map(str, each)) for each in splits]
        fields = {
            "collective": "all_to_all",
            "dtype": "float",
            "group": "ep",
            "ranks": "0,2,3,5",
            "sequence": call,
        }
        fields |= dict(zip(("in_splits", "out_splits"), texts, strict=True))
        fields |= dict(
            zip(
                ("in_elements", "out_elements"),
                (8 * each.sum() for each in splits),
                strict=True,
            )
        )
        records[len(rows)] = fields
        rows.append(
            (members[rank], 7, "comm", "ncclDevKernel_SendRecv", 100 * call, 50)
        )
    found = exchanges(told(rows, records, group="ep"))
    square = found.pivot_table(
        index="source_rank", columns="target_rank", values="size_bytes"
    ).reindex(members)
    # but what it kept
    known = np.array(
        [[lacks not in (a, b) or a != b for b in members] for a in members]
    )
    assert square.fillna(0.0).to_numpy() == pytest.approx(32 * sent.sum(axis=0) * known)
    got = sent[:, [rank != lacks for rank in members]].sum(axis=1)
    assert found.attrs["imbalance"]["ep [0, 2, 3, 5]"] == pytest.approx(
        {"mean": got.max(axis=1).sum() / got.mean(axis=1).sum(), "worst": 4.0}
    )


def test_a_recorded_exchange_of_experts_is_even():
    found = exchanges(
        read_trace(local_or_skip("traces/more/ao/ref_ep_moe_fwd.json.gz"))
    )
    ours = found[found["source_rank"] == 0]
    assert (
        ours["size_bytes"].nunique() == 1
        and list(found.attrs["imbalance"].values())[0]["worst"] == 1.0
    )
    assert not len(exchanges(make_timeline([(0, 7, "comm", AR, 0, 5)])))
