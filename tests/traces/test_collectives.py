import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from support import (
    dataset_or_skip,
    drawn_table,
    lanes,
    local_or_skip,
    make_timeline,
    shows,
    with_columns,
    with_tables,
)

import madmax_lib as mm
from madmax_lib import Timeline, breakdown, read_trace
from madmax_lib.simulator import Parameters
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.traces import by_group, calls, exposed_by_collective, waiting

AR = "ncclDevKernel_AllReduce"


def told(drawn: str, records: dict[int, dict] | str = "", **columns) -> Timeline:
    """Timeline of lanes with collective metadata: {row: fields} or a drawn table."""
    timeline = with_columns(make_timeline(lanes(drawn)), **columns)
    if isinstance(records, dict):
        rows = [{"row": row} | fields for row, fields in records.items()]
    else:
        names, *values = drawn_table(records) or [[]]
        rows = [dict(zip(names, row, strict=True)) for row in values]
        rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    return with_tables(timeline, calls=rows)


def with_shapes(drawn: str, shapes: dict[int, tuple], **meta) -> Timeline:
    """Timeline of lanes with recorded shapes and types {row: (shapes, types)}."""
    operators = [
        (row, json.dumps(dims), json.dumps(types))
        for row, (dims, types) in shapes.items()
    ]
    return with_tables(make_timeline(lanes(drawn), **meta), operators=operators)


# size, kind and bandwidth of a call


@pytest.mark.parametrize(
    ("collective", "inside", "outside", "bus"),
    drawn_table("""
        all_reduce      1000  1000  2*3/4
        all_gather      250   1000  3/4
        reduce_scatter  1000  250   3/4
        all_to_all      1000  1000  3/4
        gather          250   1000  3/4
        broadcast       1000  1000  1
        reduce          1000  1000  1
        send            1000  -1    1
    """),
)
def test_bandwidth_of_each_collective(collective, inside, outside, bus):
    """1000 elements of bfloat16 in 2000 ns are 1e9 bytes/s."""
    fields = {"in_elements": inside, "out_elements": outside, "group_size": 4}
    fields |= {"collective": collective, "dtype": "bfloat16"}
    expected = f"""
        collective    dtype     size_bytes  algorithm_bytes_per_s  bus_bytes_per_s
        {collective}  bfloat16  2000        1e9                    {bus * 1e9}
    """
    shows(calls(told("7 comm: ncclDevKernel_X 0+2000", {0: fields})), expected)


def test_no_bandwidth_without_size_or_time():
    drawn = f"7 comm: {AR} 0+5, {AR} 9+0, Memcpy PtoP 20+5"
    timeline = make_timeline(lanes(drawn), world_size=4)
    expected = """
        collective  bus_bytes_per_s  group_size
        all_reduce  -                4
        all_reduce  -                4
        generic     10/5e-9          4
    """
    shows(calls(with_columns(timeline, size_bytes=[np.nan, 100, 10])), expected)


def test_exposed_is_what_the_ranks_own_compute_leaves_open():
    drawn = f"""
        20 comm: {AR} 0+10
        1/20 comm: {AR} 0+10
        21 comm: {AR} 12+5
        7 compute: a 2+2
        8 compute: b 3+3
        7 compute: c 9+11
    """
    shows(calls(told(drawn)), "exposed_s ns\n5\n10\n0")


def test_a_kernel_without_metadata_takes_the_hosts_record_with_its_operator_id():
    """As with RCCL and older NCCL: record_param_comms of the same rank and External id."""
    drawn = """
        -1 cpu: record_param_comms 0+1
        1/-1 cpu: record_param_comms 0+1
        1/4 comm: ncclDevKernel_Generic 5+10, ncclDevKernel_Generic 20+10
    """
    records = """
        row  collective  dtype  in_elements  out_elements  ranks
        0    broadcast   half   10           80            0,1,4,5
        1    all_gather  half   10           80            0,1,4,5
    """
    groups = ["dp", "dp", None, None]
    expected = """
        collective  group              size_bytes  group_size
        all_gather  dp [0, 1, 4, 5]    160         4
        generic     -                  -           2
    """
    timeline = told(drawn, records, op=[7, 7, 7, -1], group=groups)
    shows(calls(timeline), expected)


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
    masked = timeline.spans[["size_bytes", "group"]].mask(device)
    spans = timeline.spans.assign(**masked)
    tables = SideTables(lambda: {"calls": host})
    by_host = calls(Timeline(spans, timeline.meta, side_tables=tables))
    assert len(host) < len(records)
    pd.testing.assert_frame_equal(by_host, calls(timeline))


def test_two_ranks_of_a_real_trace_have_known_sizes_and_exposure():
    timeline = read_trace(local_or_skip("traces/hta-samples/nccl_data.json.gz"))
    table = calls(timeline)
    assert set(table["group"]) == {"0 [0, 1]"} and set(table["group_size"]) == {2}
    reduced = table[table["collective"] == "all_reduce"]
    # the parameters of ResNet-50 in fp32, each step
    assert set(reduced.groupby("step")["size_bytes"].sum()) == {4 * 25_557_032}
    assert (table["call"] == -1).all() and table.attrs["unmatched"] == {}
    # one stream: no call beside another
    exposed_s = breakdown(timeline)["exposed_comm_s"].iloc[0]
    assert table["exposed_s"].sum() == pytest.approx(exposed_s, abs=1e-12)


def test_old_kernels_are_named_and_sized_by_the_annotation_around_their_launch():
    """SendRecv is an all-to-all here; the gather's two sides tell its group, which the
    trace does not name.
    """
    drawn = """
        -1 annotation: nccl:all_to_all 0+10
        -1 cpu: cudaLaunchKernel 5+2 #1
        84 comm: ncclKernel_SendRecv 8+20 #1
        -1 cpu: c10d::_allgather_base_ 30+12
        -1 annotation: nccl:_all_gather_base 31+10
        -1 cpu: cudaLaunchKernel 35+2 #2, cudaLaunchKernel 60+2 #3
        84 comm: ncclKernel_SendRecv 40+20 #2, ncclKernel_SendRecv 62+20 #3
    """
    shapes = {0: ([[24]], ["long int"]), 4: ([[8, 2]], ["float"])}
    shapes[3] = ([[64, 2], [8, 2], []], ["float", "float", "Scalar"])
    expected = """
        collective  dtype  size_bytes  group_size
        all_to_all  long   24*8        16
        all_gather  float  64*2*4      8
        send_recv   -      -           16
    """
    shows(calls(with_shapes(drawn, shapes, world_size=16)), expected)


def test_gloo_tells_the_share_of_one_rank():
    drawn = """
        -1 comm: gloo:all_gather 0+10, gloo:all_reduce 50+10
        1/-1 comm: gloo:all_gather 0+10, gloo:all_reduce 50+10
    """
    recorded = ([[100, 2], [3]], ["float", "c10::BFloat16"])
    one_rank = "2*806 806/1e-8\n806 806/1e-8\n".replace(" ", "  ")
    table = calls(with_shapes(drawn, dict.fromkeys(range(4), recorded)))
    shows(table, "size_bytes  bus_bytes_per_s\n" + 2 * one_rank)


def test_custom_kernels_are_calls_too():
    """HTA sees no communication in this 64-rank trace; its expert-parallel kernels do
    not tell their size.
    """
    table = calls(read_trace(local_or_skip("traces/deepseek-v3-train/train.json.gz")))
    assert {"dispatch", "combine"} <= set(table["collective"])
    assert table["bus_bytes_per_s"].isna().all() and set(table["group_size"]) == {64}


def test_nothing_to_call_and_nobody_to_wait_for():
    for drawn in ("", "7 compute: a 0+5"):
        tables = [call(told(drawn)) for call in (calls, waiting, by_group)]
        assert not sum(map(len, tables))
        assert tables[-1].columns[-1] == "bus_bytes_per_s"
    spans = told(f"20 comm: {AR} 0+5").spans
    unread = SideTables(lambda: pytest.fail("details were read"))
    alone = waiting(Timeline(spans, side_tables=unread))
    assert not len(alone) and alone.attrs["unmatched"] == {}


# which calls are the same


def test_sequence_numbers_match_what_remains_of_a_group():
    """Rank 2 lost the call 6 and names its kernels otherwise; by count nothing could be
    matched.
    """
    drawn = f"""
        0/20 comm: {AR}_LL 500+5, {AR}_LL 600+5, {AR}_LL 700+5
        1/20 comm: {AR}_LL 500+6, {AR}_LL 600+6, {AR}_LL 700+6
        2/20 comm: {AR}_Simple 500+7, {AR}_Simple 700+7
    """
    records = {
        row: {"collective": "all_reduce", "sequence": sequence}
        for row, sequence in enumerate((5, 6, 7, 5, 6, 7, 5, 7))
    }
    table = calls(told(drawn, records, group="0 [0, 1, 2]"))
    matched = table.groupby("call")["sequence"].agg(list)
    assert sorted(matched) == [[5] * 3, [6] * 2, [7] * 3]
    assert table.attrs["unmatched"] == {}


def test_what_cannot_be_matched_is_left_out_and_named():
    drawn = f"20 comm: {AR} 0+5, {AR} 9+5\n1/20 comm: {AR} 0+5"
    table = waiting(told(drawn))
    assert not len(table) and table.attrs["unmatched"] == {AR: 3}
    records = [{"collective": "all_reduce", "sequence": seq} for seq in (1, 2, 1)]
    table = calls(told(drawn, dict(enumerate(records)), group="0 [0, 1]"))
    assert table["call"].tolist() == [0, -1, 0] and table.attrs["unmatched"] == {AR: 1}


def test_sends_meet_their_receives():
    """Rank 0 sends twice to 1 and receives once from it; 2 sends to 0. Each side
    records only the other one.
    """
    sent = "ncclDevKernel_SendRecv"
    drawn = f"""
        20 comm: {sent} 0+5, {sent} 20+5, {sent} 40+5, {sent} 60+5
        1/20 comm: {sent} 0+5, {sent} 25+5, {sent} 40+5
        2/20 comm: {sent} 60+5
    """
    records = """
        row  collective  target_rank  source_rank
        0    send        1            -
        1    send        1            -
        2    recv        -            1
        3    recv        -            2
        4    recv        -            0
        5    recv        -            0
        6    send        0            -
        7    send        0            -
    """
    table = calls(told(drawn, records, group="0 [0, 1, 2]"))
    together = [sorted(part) for part in table.groupby("call").groups.values()]
    assert together == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert table["source_rank"].tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    assert table.attrs["unmatched"] == {}


def test_sends_without_peers_meet_between_two_ranks_only():
    drawn = "-1 comm: gloo:send 0+5\n1/-1 comm: gloo:recv 0+5"
    shows(calls(told(drawn)), "call  target_rank\n0  1\n0  1")
    three = calls(told(drawn + "\n2/-1 comm: gloo:recv 0+5"))
    assert (three["call"] == -1).all() and three.attrs["unmatched"] == {"gloo:recv": 2}


@pytest.mark.parametrize("name", ["gpt-ddp", "gpt-fsdp", "vit-ddp", "vit-fsdp"])
def test_all_calls_of_the_shipped_sets_meet(name):
    timeline = read_trace(mm.dataset(name))
    table, groups = calls(timeline), by_group(timeline)
    of_call = table.groupby("call")
    assert table.attrs["unmatched"] == {} and set(of_call["rank"].nunique()) == {2}
    assert set(of_call["size_bytes"].nunique()) == {1}  # both ranks moved the same
    if name == "gpt-ddp":  # two steps reduce the parameters
        row = groups.loc[0, ["size_bytes", "calls", "count"]]
        assert row.tolist() == [2 * 4 * 932_608, 8, 16]


# by group


def test_by_group_of_two_calls():
    """1000 floats on 4 ranks; the last ranks take 100 and 200 ns, the others wait 30 +
    0 and 0 + 40.
    """
    drawn = f"20 comm: {AR} 0+130, {AR} 500+200\n1/20 comm: {AR} 0+100, {AR} 500+240"
    fields = {"in_elements": 1000, "out_elements": 1000, "group_size": 4}
    fields |= {"collective": "all_reduce", "dtype": "float"}
    table = by_group(told(drawn, dict.fromkeys(range(4), fields), group="tp"))
    shows(table, "ranks  count  calls  size_bytes\n2  4  2  8000")
    expected = """
        total_s ns  mean_s ns  min_s ns  max_s ns  transfer_s ns  wait_s ns  skew_s ns  skew_max_s ns
        670         167.5      100       240       300            70         35         40
    """
    shows(table, expected)
    rates = "algorithm_bytes_per_s  bus_bytes_per_s\n8000/300e-9  1.5*8000/300e-9"
    shows(table, rates)
    assert table.attrs["source"] == "measured" and table.attrs["unmatched"] == {}


def test_dlrm_by_group():
    """Sizes by hand from the annotations; per call 8 x transfer + waiting is the whole
    communication.
    """
    timeline = read_trace(dataset_or_skip("dlrm-8xv100"))
    table, wait = by_group(timeline).set_index("collective"), waiting(timeline)
    assert table["calls"].to_dict() == {"all_to_all": 5, "all_reduce": 3}
    assert set(table["group_size"]) == {8}
    reduced = table.loc["all_reduce"]
    assert reduced["size_bytes"] == 4 * (394_241 + 112 + 226_960)
    whole = 8 * table["transfer_s"] + table["wait_s"]
    pd.testing.assert_series_equal(whole, table["total_s"], check_names=False)
    assert reduced["bus_bytes_per_s"] == pytest.approx(24.85e9, rel=0.001)
    assert table["bus_bytes_per_s"].max() < 150e9  # what NVLink 2 gives a V100, one way
    assert wait.groupby("waits_for")["wait_s"].sum().idxmax() == 7
    assert wait.attrs["unmatched"] == {} and wait.attrs["one_group_assumed"]


def test_old_a100_trace_has_plausible_bandwidths():
    """16 ranks; the two sides of its gathers say that these run among 8, inside of a
    node.
    """
    timeline = read_trace(local_or_skip("traces/hta-samples/rank0.json.gz"))
    table = by_group(timeline).set_index("collective")
    sizes = table.groupby("group_size").groups
    assert set(sizes[16]) == {"all_reduce", "all_to_all", "send_recv"}
    assert set(sizes[8]) == {"all_gather", "reduce_scatter"}
    sized = table["bus_bytes_per_s"].drop("send_recv")
    # NVLink 3, one way
    assert (sized < 300e9).all() and (sized.drop("all_to_all") > 50e9).all()


# simulated


def simulated(model: str, plan: str, nodes=1, global_batch=8, **options) -> Timeline:
    cluster = mm.cluster("dgx-a100", nodes=nodes)
    plan = mm.Plan.parse(plan)
    options |= {"global_batch": global_batch}
    return mm.simulate(mm.model(model), cluster, plan, **options)


@pytest.mark.parametrize("plan", ["dp8", "dp2.tp2.pp2", "dp2.tp2.pp2.z3.nosp"])
def test_the_bus_bandwidth_of_a_simulated_collective_is_the_links(plan):
    # no latency, all of the link
    table = by_group(simulated("gpt2-large", plan, parameters=Parameters()))
    link = mm.cluster("dgx-a100", nodes=1).intra.bandwidth_bytes_per_s
    # a call of microseconds is rounded to ns
    np.testing.assert_allclose(table["bus_bytes_per_s"], link, rtol=1e-3)
    assert (table["wait_s"].dropna() == 0).all() and table.attrs["unmatched"] == {}


def test_simulated_groups_have_their_ranks():
    table = calls(simulated("gpt2-large", "dp2.tp2.pp2"))
    groups = set(table["group"])
    some = [
        "tp [0, 1]",
        "tp [6, 7]",
        "dp [0, 2]",
        "dp [5, 7]",
        "pp [0, 4]",
        "pp [3, 7]",
    ]
    assert set(some) <= groups and len(groups) == 12
    sent = table[table["collective"] == "send_recv"]
    pairs = set(zip(sent["source_rank"], sent["target_rank"], strict=True))
    assert pairs == {(r, (r + 4) % 8) for r in range(8)}
    shared = table[table["call"] >= 0].groupby("call")[["rank", "group"]].nunique()
    assert set(shared["rank"]) == {2} and set(shared["group"]) == {1}


def test_one_simulated_rank_may_stand_for_many():
    timeline = simulated("gpt3-175b", "dp16.tp8.sp", nodes=16, global_batch=16)
    sizes = by_group(timeline).groupby("group")["group_size"].max()
    assert sorted(sizes) == [8, 16] and (calls(timeline)["call"] == -1).all()


# waiting


def test_the_shortest_arrived_last():
    """Two calls: rank 1 is last in the first (others wait 6 and 3 ns), rank 0 in the
    second (5 and 1 ns).
    """
    drawn = f"""
        0/20 comm: {AR} 0+10, {AR} 50+2
        1/20 comm: {AR} 100+4, {AR} 150+7
        2/20 comm: {AR} 200+7, {AR} 250+3
    """
    expected = """
        rank  waits_for  wait_s ns
        0     1          6
        1     0          5
        2     0          1
        2     1          3
    """
    table = waiting(told(drawn)).sort_values(["rank", "waits_for"])
    shows(table, expected)


def test_one_lost_call_costs_one_step():
    drawn = f"""
        20 comm: {AR} 0+5, {AR} 100+5, {AR} 200+5, {AR} 300+5
        1/20 comm: {AR} 0+6, {AR} 100+6, {AR} 200+6
    """
    table = waiting(told(drawn, step=[0, 1, 2, 3, 0, 1, 2]))
    assert table["count"].tolist() == [3] and table.attrs["unmatched"] == {AR: 1}


def test_named_groups_are_kept_apart():
    """Groups {0, 1} and {2, 3} run the same collective; without names they look like
    one group, and it is said.
    """
    times = enumerate((10, 20, 50, 60))
    timeline = told("\n".join(f"{rank}/20 comm: {AR} 0+{ns}" for rank, ns in times))
    assert waiting(timeline).attrs["one_group_assumed"]
    named = with_columns(timeline, group=["a [0, 1]"] * 2 + ["a [2, 3]"] * 2)
    table = waiting(named)
    shows(table, "rank  waits_for\n1  0\n3  2")
    assert not table.attrs["one_group_assumed"]


def test_one_word_for_one_collective():
    """NCCL's all-to-all runs under the name SendRecv; the metadata tells, for every
    table.
    """
    timeline = mm.read_trace(local_or_skip("traces/more/torchrec-a2a5"))
    exposed, groups = (
        table(timeline).groupby("collective")["count"].sum().to_dict()
        for table in (exposed_by_collective, by_group)
    )
    assert "all_to_all" in exposed and exposed == groups


HOSTS = {"0": "a", "1": "a", "2": "b"}


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({"group": "tp", "ranks": "[0, 1]", "group_size": 2}, "intra"),
        ({"group": "dp", "ranks": "[1, 2]", "group_size": 2}, "inter"),
        ({"group": "dp", "ranks": "[0, 1, 3]", "group_size": 3}, ""),  # no trace of 3
        ({"group": "all", "ranks": "[0, 1, ..., 63]", "group_size": 64}, ""),
        ({"collective": "send", "source_rank": 1, "target_rank": 2}, "inter"),
        ({"collective": "send", "source_rank": 0, "target_rank": 1}, "intra"),
    ],
)
def test_hosts_tell_traffic_between_machines(fields, nodes):
    record = {"collective": "all_reduce", **fields}
    timeline = told(f"7 comm: {AR} 0+5", {0: record})
    assert "nodes" not in calls(timeline)
    meta = dataclasses.replace(timeline.meta, provenance={"hosts": HOSTS})
    named = dataclasses.replace(timeline, meta=meta)
    assert (
        calls(named)["nodes"].tolist() == by_group(named)["nodes"].tolist() == [nodes]
    )


def test_a_machine_is_named_by_its_trace():
    path = local_or_skip("traces/cpu-gloo-torch2.13/ddp-rank1.json.gz")
    timeline = read_trace(path)
    assert timeline.meta.provenance["hosts"] == {"1": "vm"}
