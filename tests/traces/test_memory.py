from dataclasses import replace

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
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces import allocations, growth, held_at_peak, memory_timeline, peak
from madmax_lib.traces.operators.memory import BEFORE

ANALYSES = [memory_timeline, allocations, peak, held_at_peak, growth]


def remembering(
    events: list[tuple], spans: list[tuple] = (), operators: list[int] = (), **meta
) -> Timeline:
    """Timeline with allocator events (time_ns, size_bytes, address, and by name what
    differs from the usual).

    operators: rows of the spans that are operators.
    """
    usual = {"rank": 0, "stream": -1, "device": "cuda:0"}
    names = ("time_ns", "size_bytes", "address")
    memory = [
        usual
        | dict(zip(names, event[:3], strict=True))
        | (event[3] if event[3:] else {})
        for event in events
    ]
    timeline = make_timeline(list(spans), **meta)
    return with_tables(
        timeline, memory=memory, operators=[{"row": row} for row in operators]
    )


def told(total: int) -> dict:
    return {"allocated_bytes": total}


@pytest.mark.parametrize(
    ("events", "levels", "before"),
    [
        (
            [(0, 5, 1, told(105)), (1, 3, 2, told(108)), (2, -5, 1, told(103))],
            [105, 108, 103],
            [100, 100, 100],
        ),
        # told once: both ways
        (
            [(0, 5, 1), (1, 3, 2, told(108)), (2, -5, 1)],
            [105, 108, 103],
            [100, 100, 100],
        ),
        # never told: at least what is freed
        ([(0, 5, 1), (1, -40, 9), (2, -5, 1)], [45, 5, 0], [40, 0, 0]),
        # events were lost
        (
            [(0, 5, 1, told(5)), (1, 7, 2, told(50)), (2, 1, 3)],
            [5, 50, 51],
            [0, 38, 38],
        ),
        # another order in the file
        ([(2, -5, 1), (0, 5, 1), (1, 3, 2)], [5, 8, 3], [0, 0, 0]),
        # integers, not floats
        ([(0, 2**60 + 1, 1), (0, 1, 2)], [2**60 + 1, 2**60 + 2], [0, 0]),
        # no addresses, as torch 1.8 wrote
        ([(time, 100 * (-1) ** time, -1) for time in range(6)], [100, 0] * 3, [0] * 6),
        # the level never falls below 0
        ([(0, 5, -1), (1, -45, -1), (2, 100, -1)], [45, 0, 100], [40, 0, 0]),
    ],
)
def test_totals_are_told_or_integrated(events, levels, before):
    table = memory_timeline(remembering(events))
    assert (
        table["allocated_bytes"].tolist() == levels
        and table["before_bytes"].tolist() == before
    )


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
def test_events_without_addresses_fit_into_the_device():
    """A V100 of 32 GB; frees of unknown blocks made it 66.5 GB."""
    timeline = mm.read_trace(
        local_or_skip("traces/more/kineto/nw0_1623143566756.json.gz")
    )
    on_gpu = peak(timeline).set_index("device").filter(like="cuda", axis=0)
    assert (
        on_gpu["peak_bytes"].between(1e9, 32e9).all()
        and on_gpu["before_bytes"].between(0, 32e9).all()
    )
    assert (memory_timeline(timeline)["allocated_bytes"] >= 0).all()


def test_time_counts_from_the_first_span_and_steps_are_those_of_the_host():
    spans = [
        (0, -1, "annotation", "ProfilerStep#0", 100, 100),
        (0, -1, "annotation", "ProfilerStep#1", 200, 50),
    ]
    timeline = remembering([(150, 1, 1), (240, 1, 2), (400, 1, 3)], spans)
    table = memory_timeline(with_columns(timeline, step=[0, 1]))
    assert (table["time_s"] * 1e9).round().tolist() == [50, 140, 300] and table[
        "step"
    ].tolist() == [0, 1, -1]


def test_a_device_is_chosen_by_name_and_a_cpu_has_no_reserve():
    cpu = {"device": "cpu", "reserved_bytes": 0}
    timeline = remembering([(0, 5, 1, {"reserved_bytes": 20}), (0, 7, 1, cpu)])
    assert memory_timeline(timeline, "cpu")["allocated_bytes"].tolist() == [7]
    assert memory_timeline(timeline, "cpu")["reserved_bytes"].isna().all()
    assert memory_timeline(timeline, "cuda:0")["reserved_bytes"].tolist() == [20]
    with pytest.raises(
        ValueError,
        match="device 'cuda:1' has no allocator events; the timeline has cpu, cuda:0",
    ):
        memory_timeline(timeline, "cuda:1")


def test_an_allocation_lives_until_the_next_event_at_its_address():
    """An address is used again, also on another device and rank; one free is lost, one
    block outlives the trace.
    """
    other, second = {"device": "cpu"}, {"rank": 1}
    events = [
        (0, 5, 1),
        (10, 6, 1, other),
        (20, 7, 1, second),
        (30, -5, 1),
        (40, 8, 1),
        (50, 9, 1),
    ]
    events += [(60, -6, 1, other), (70, -99, 3)]
    table = allocations(
        remembering(
            events, [(1, 7, "compute", "k", 0, 1), (0, 7, "compute", "k", 0, 1)]
        )
    )
    assert len(table) == 5
    lifetime = dict(
        zip(table["size_bytes"], (table["lifetime_s"] * 1e9).round(), strict=True)
    )
    assert {size: ns for size, ns in lifetime.items() if ns == ns} == {
        5: 30,
        6: 50,
        8: 10,
    }
    assert (
        (table["end_s"] - table["start_s"])
        .round(12)
        .equals(table["lifetime_s"].round(12))
    )


def test_equal_addresses_of_two_devices_are_two_blocks():
    table = allocations(
        remembering(
            [(0, 5, 1, {"device": "cpu"}), (9, 6, 1), (9, -5, 1, {"device": "cpu"})]
        )
    )
    assert dict(
        zip(table["size_bytes"], table["lifetime_s"].fillna(-1), strict=True)
    ) == {5: 9e-9, 6: -1}
    events = [(0, 5, 1), (9, 6, 1, {"rank": 1})]
    assert (
        allocations(remembering(events, [(1, -1, "cpu", "f", 0, 9), *SPANS]))[
            "lifetime_s"
        ]
        .isna()
        .all()
    )


def test_a_block_whose_free_was_lost_is_not_held_twice():
    timeline = remembering([(0, 5, 1, told(5)), (1, 50, 1, told(50))])
    held = held_at_peak(timeline)
    assert (
        held[["size_bytes", "count"]].to_numpy().tolist() == [[50, 1]]
        and peak(timeline)["before_bytes"].item() == 0
    )


def test_events_without_an_address_count_in_the_totals_only():
    timeline = remembering([(0, 5, -1), (1, 3, 2), (2, -5, -1)])
    assert allocations(timeline)["size_bytes"].tolist() == [3]
    assert (
        held_at_peak(timeline)["size_bytes"].sum()
        == peak(timeline)["peak_bytes"].item()
        == 5 + 3
    )


SPANS = lanes("""
    -1 annotation: ProfilerStep#3 0+1000, forward 0+500
    -1 cpu: nn.Module: Linear_3 90+300, aten::linear 100+200, aten::addmm 120+100, cudaMalloc 410+20 #7
    -2 cpu: autograd::engine::evaluate_function: MmBackward0 0+900, aten::mm 130+50
    -1 annotation: Optimizer.step#SGD.step 600+100
""")


@pytest.mark.parametrize(
    ("time_ns", "stream", "asked"),
    [
        (130, -1, ("aten::addmm", "forward", "Linear_3", "forward")),
        # after the inner one has ended
        (250, -1, ("aten::linear", "forward", "Linear_3", "forward")),
        # at its first instant
        (100, -1, ("aten::linear", "forward", "Linear_3", "forward")),
        # no operator, and a call of the runtime is none
        (420, -1, ("forward", "forward", "", "forward")),
        (
            650,
            -1,
            ("Optimizer.step#SGD.step", "Optimizer.step#SGD.step", "", "optimizer"),
        ),
        (150, -2, ("aten::mm", "", "", "backward")),  # another thread at the same time
        (2000, -1, ("outside of operators", "", "", "")),
        (130, -7, ("outside of operators", "", "", "")),  # a thread without spans
    ],
)
def test_who_asked(time_ns, stream, asked):
    timeline = remembering(
        [(time_ns, 8, 1, {"stream": stream})], SPANS, operators=[3, 4, 6, 7]
    )
    table = allocations(timeline)
    assert tuple(table[["operator", "annotation", "module", "phase"]].iloc[0]) == asked


def test_objects_of_a_python_function_are_one_holder():
    spans = [
        (0, -1, "cpu", f"<built-in method add_ of Tensor object at 0x7f{i}>", 10 * i, 5)
        for i in range(3)
    ]
    table = held_at_peak(remembering([(10 * i + 1, 4, i) for i in range(3)], spans))
    assert table["operator"].tolist() == ["<built-in method add_ of Tensor>"] and table[
        "count"
    ].tolist() == [3]


def a_random_history(seed: int) -> tuple[Timeline, list[dict]]:
    """An allocator with blocks from before, played event by event; beside it what lives
    after each of them.
    """
    random = np.random.default_rng(seed)
    live = {("before", i): int(random.integers(1, 50)) for i in range(5)}
    events, states, names = [], [], ["aten::mm", "aten::add", "aten::relu"]
    spans = [(0, -1, "cpu", names[i % 3], 10 * i, 10) for i in range(200)]
    for i in range(200):
        if live and random.random() < 0.45:
            key = list(live)[random.integers(len(live))]
            size = -live.pop(key)
        else:
            address = next(a for a in range(1000) if all(k[1] != 100 + a for k in live))
            key, size = (names[i % 3], 100 + address), int(random.integers(1, 100))
            live[key] = size
        events.append((10 * i + 5, size, key[1], told(sum(live.values()))))
        states.append(dict(live))
    return remembering(events, spans, operators=range(200)), states


@pytest.mark.parametrize("seed", range(5))
def test_a_random_history_is_told_as_it_was(seed):
    timeline, states = a_random_history(seed)
    table = memory_timeline(timeline)
    before = [
        sum(size for (name, _), size in state.items() if name == "before")
        for state in states
    ]
    assert table["allocated_bytes"].tolist() == [
        sum(state.values()) for state in states
    ]
    assert table["before_bytes"].tolist() == before
    top = int(table["allocated_bytes"].argmax())
    held = held_at_peak(timeline)
    expected = pd.Series(dict(states[top])).groupby(level=0).sum()
    assert (
        held.set_index("operator")["size_bytes"].to_dict()
        == expected.rename({"before": BEFORE}).to_dict()
    )
    assert held["share"].sum() == pytest.approx(1)
    alive = sum(name != "before" for name, _ in states[-1])
    assert allocations(timeline)["end_s"].isna().sum() == alive


def test_the_peak_is_the_first_of_equal_ones_with_its_reserve():
    timeline = remembering([(0, 4, 1, {"reserved_bytes": 10}), (1, -4, 1), (2, 4, 1)])
    top = peak(timeline).iloc[0]
    assert (
        top["peak_bytes"],
        top["time_s"],
        top["reserved_bytes"],
        top["unused_bytes"],
    ) == (4, 0, 10, 6)


def test_a_trace_that_only_frees_has_its_peak_at_the_start():
    timeline = remembering(
        [
            (5, -30, 1, told(70)),
            (6, 10, 2, told(80)),
            (7, 5, 1, {"device": "cpu"} | told(5)),
        ]
    )
    top = peak(timeline).set_index("device")[["peak_bytes", "before_bytes"]]
    assert top.loc["cuda:0"].tolist() == [100, 100] and top.loc["cpu"].tolist() == [
        5,
        0,
    ]
    held = held_at_peak(timeline).set_index("device")
    assert held.loc["cuda:0", "operator"] == BEFORE and held.loc["cuda:0", "share"] == 1


@pytest.mark.parametrize("top", [1, 2, 3, 10])
def test_holders_beyond_the_top_are_one_row_and_bytes_sum_to_the_peak(top):
    timeline, _ = a_random_history(1)
    held = held_at_peak(timeline, top)
    assert held["size_bytes"].sum() == peak(timeline)["peak_bytes"].item()
    assert ("other operators" in set(held["operator"])) == (top < 3)
    known = held[~held["operator"].isin(["other operators", BEFORE])]
    assert len(known) == min(top, 3) and known["size_bytes"].is_monotonic_decreasing
    with pytest.raises(ValueError, match="top=0 is not at least 1"):
        held_at_peak(timeline, 0)


@pytest.mark.parametrize(
    ("kept", "per_step"),
    [
        ([10, 10, 10, 10], 10),
        ([0, 0, 0, 0], 0),
        ([0, 500, 0, 0], 0),
        ([7], float("nan")),
    ],
)
def test_growth_is_what_a_step_keeps(kept, per_step):
    """Each step takes 1000 bytes and gives back all but some; one that is kept once is
    no leak.
    """
    spans = [
        (0, -1, "annotation", f"ProfilerStep#{s}", 100 * s, 100)
        for s in range(len(kept))
    ]
    events = [
        e
        for s, k in enumerate(kept)
        for e in (
            (100 * s, 1000, 1),
            (100 * s + 5, k, 10 + s),
            (100 * s + 99, -1000, 1),
        )
    ]
    row = growth(with_columns(remembering(events, spans), step=range(len(kept)))).iloc[
        0
    ]
    assert row["bytes_per_step"] == pytest.approx(per_step, nan_ok=True)
    assert (row["steps"], row["first_bytes"], row["last_bytes"]) == (
        len(kept),
        kept[0],
        sum(kept),
    )


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("spans", [[], [(0, 7, "compute", "k", 0, 5)]])
def test_a_timeline_without_events_gives_an_empty_table(analysis, spans):
    filled = analysis(remembering([(0, 5, 1)], SPANS))
    for source in ("measured", "simulated"):
        table = analysis(make_timeline(spans, source=source))
        assert not len(table) and list(table.columns) == list(filled.columns)
        assert table.attrs["source"] == source


def test_a_saved_timeline_remembers(tmp_path):
    timeline, _ = a_random_history(2)
    loaded = Timeline.load(timeline.save(tmp_path / "t.parquet"))
    for analysis in ANALYSES:
        pd.testing.assert_frame_equal(analysis(loaded), analysis(timeline))


def test_part_of_the_ranks():
    events = [(0, 5, 1), (0, 9, 1, {"rank": 1})]
    timeline = remembering(
        events, [(rank, -1, "cpu", "aten::mm", 0, 5) for rank in (0, 1)]
    )
    assert peak(timeline)["peak_bytes"].tolist() == [5, 9]
    assert peak(timeline.select(ranks=[1]))[
        ["rank", "peak_bytes"]
    ].to_numpy().tolist() == [[1, 9]]
    # as of snapshots, rank 1 has none
    spans = timeline.spans[timeline.spans["rank"] == 0]
    part = replace(timeline, spans=spans).select(ranks=[0])
    assert peak(part)[["rank", "peak_bytes"]].to_numpy().tolist() == [[0, 5]]


@pytest.fixture(scope="module")
def v100() -> Timeline:
    return mm.read_trace(dataset_or_skip("ddp-2xv100"))


def test_v100_sizes_integrate_to_the_recorded_totals(v100):
    events = v100.side_tables["memory"].sort_values(
        ["device", "time_ns"], kind="stable"
    )
    for device, part in events.groupby("device", observed=True):
        told_bytes = memory_timeline(v100, device)["allocated_bytes"].to_numpy()
        assert (told_bytes == part["allocated_bytes"].to_numpy()).all()
        found = part["allocated_bytes"].iloc[0] - part["size_bytes"].iloc[0]
        assert (told_bytes == found + part["size_bytes"].cumsum().to_numpy()).all()
    untold = {"memory": v100.side_tables["memory"].assign(allocated_bytes=-1)}
    silent = Timeline(v100.spans, v100.meta, side_tables=SideTables(lambda: untold))
    lost = (
        memory_timeline(v100)["allocated_bytes"]
        - memory_timeline(silent)["allocated_bytes"]
    )
    # only the level is unknown
    assert (lost.groupby(memory_timeline(v100)["device"]).nunique() == 1).all()


def test_v100_every_block_of_the_trace_is_freed_in_it(v100):
    table, events = allocations(v100), v100.side_tables["memory"]
    assert (
        len(table)
        == (events["size_bytes"] > 0).sum()
        == (events["size_bytes"] < 0).sum()
    )
    assert (table["lifetime_s"] >= 0).all() and (
        table["operator"] != "outside of operators"
    ).all()
    assert memory_timeline(v100, "cuda:1")["before_bytes"].unique().tolist() == [
        4_096_614_400
    ]
    assert table.groupby("step")["size_bytes"].sum().nunique() == 1  # five equal steps


def test_v100_peak_and_its_holders(v100):
    top, held = peak(v100).set_index("device").loc["cuda:1"], held_at_peak(v100)
    held = held[held["device"] == "cuda:1"].set_index("operator")
    assert (
        top["peak_bytes"]
        == v100.side_tables["memory"]["allocated_bytes"].max()
        == held["size_bytes"].sum()
    )
    assert (
        held.index[0] == "aten::mm"
        and held.loc[BEFORE, "size_bytes"] == top["before_bytes"]
    )
    assert growth(v100)["bytes_per_step"].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["ddp-rank0", "ddp-rank1", "fsdp-rank0", "fsdp-rank1"])
def test_cpu_traces_of_gloo_have_a_peak_too(name):
    timeline = mm.read_trace(local_or_skip(f"traces/cpu-gloo-torch2.13/{name}.json.gz"))
    table, events = (
        memory_timeline(timeline),
        timeline.side_tables["memory"].sort_values("time_ns", kind="stable"),
    )
    assert (
        table["allocated_bytes"].to_numpy() == events["allocated_bytes"].to_numpy()
    ).all()
    assert (
        held_at_peak(timeline)["size_bytes"].sum()
        == peak(timeline)["peak_bytes"].item()
        > 0
    )
    assert {"forward", "backward"} <= set(allocations(timeline)["phase"])
