from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support import (
    dataset_or_skip,
    drawn_table,
    lanes,
    local_or_skip,
    make_timeline,
    refused_line,
    shows,
    with_columns,
    with_tables,
)

import madmax_lib as mm
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces import allocations, growth, held_at_peak, memory_timeline, peak
from madmax_lib.traces.operators.memory import BEFORE

ANALYSES = [memory_timeline, allocations, peak, held_at_peak, growth]


def remembering(events: list | str, spans: str = "", operators=(), **meta) -> Timeline:
    """Timeline of lanes with allocator events (time_ns, size_bytes, address, and by
    name what differs from the usual); rows of the spans that are operators.
    """
    usual = {"rank": 0, "stream": -1, "device": "cuda:0"}
    names = ("time_ns", "size_bytes", "address")
    memory = [
        usual | dict(zip(names, event[:3], strict=True)) | dict(*event[3:])
        for event in events
    ]
    timeline = make_timeline(lanes(spans), **meta)
    operators = [{"row": row} for row in operators]
    return with_tables(timeline, memory=memory, operators=operators)


def told(total: int) -> dict:
    return {"allocated_bytes": total}


TOTALS = {  # events, levels, what was there before
    "told": (
        [(0, 5, 1, told(105)), (1, 3, 2, told(108)), (2, -5, 1, told(103))],
        [105, 108, 103], [100, 100, 100]),
    "told once: both ways": (
        [(0, 5, 1), (1, 3, 2, told(108)), (2, -5, 1)], [105, 108, 103], [100, 100, 100]),
    "never told: at least what is freed": (
        [(0, 5, 1), (1, -40, 9), (2, -5, 1)], [45, 5, 0], [40, 0, 0]),
    "events were lost": (
        [(0, 5, 1, told(5)), (1, 7, 2, told(50)), (2, 1, 3)], [5, 50, 51], [0, 38, 38]),
    "another order in the file": ([(2, -5, 1), (0, 5, 1), (1, 3, 2)], [5, 8, 3], [0, 0, 0]),
    "integers, not floats": (
        [(0, 2**60 + 1, 1), (0, 1, 2)], [2**60 + 1, 2**60 + 2], [0, 0]),
    "no addresses, as torch 1.8 wrote": (
        [(time, 100 * (-1) ** time, -1) for time in range(6)], [100, 0] * 3, [0] * 6),
    "the level never falls below 0": (
        [(0, 5, -1), (1, -45, -1), (2, 100, -1)], [45, 0, 100], [40, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", TOTALS)
def test_totals_are_told_or_integrated(case):
    events, levels, before = TOTALS[case]
    table = memory_timeline(remembering(events))
    assert table["allocated_bytes"].tolist() == levels
    assert table["before_bytes"].tolist() == before


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
def test_events_without_addresses_fit_into_the_device():
    """A V100 of 32 GB; frees of unknown blocks made it 66.5 GB."""
    path = local_or_skip("traces/more/kineto/nw0_1623143566756.json.gz")
    timeline = mm.read_trace(path)
    on_gpu = peak(timeline).set_index("device").filter(like="cuda", axis=0)
    assert on_gpu["peak_bytes"].between(1e9, 32e9).all()
    assert on_gpu["before_bytes"].between(0, 32e9).all()
    assert (memory_timeline(timeline)["allocated_bytes"] >= 0).all()


def test_time_counts_from_the_first_span_and_steps_are_those_of_the_host():
    spans = "-1 annotation: ProfilerStep#0 100+100, ProfilerStep#1 200+50"
    timeline = remembering([(150, 1, 1), (240, 1, 2), (400, 1, 3)], spans)
    table = memory_timeline(with_columns(timeline, step=[0, 1]))
    shows(table, "time_s ns  step\n50  0\n140  1\n300  -1")


def test_a_cpu_has_no_reserve():
    cpu = {"device": "cpu", "reserved_bytes": 0}
    timeline = remembering([(0, 5, 1, {"reserved_bytes": 20}), (0, 7, 1, cpu)])
    levels = "device  allocated_bytes  reserved_bytes\ncpu  7  -\ncuda:0  5  20"
    shows(memory_timeline(timeline).sort_values("device"), levels)


def lifetimes(table) -> dict:
    """{size: ns} of blocks, of equal sizes in their order; -1 for one that stays."""
    ns = (table["lifetime_s"] * 1e9).round().fillna(-1)
    return dict(zip(table["size_bytes"], ns, strict=True))


def test_an_allocation_lives_until_the_next_event_at_its_address():
    """An address is used again, also on another device and rank; one free is lost, one
    block outlives the trace.
    """
    other, second = {"device": "cpu"}, {"rank": 1}
    events = [(0, 5, 1), (10, 6, 1, other), (20, 7, 1, second), (30, -5, 1)]
    events += [(40, 8, 1), (50, 9, 1), (60, -6, 1, other), (70, -99, 3)]
    spans = "1/7 compute: k 0+1\n7 compute: k 0+1"
    table = allocations(remembering(events, spans))
    assert lifetimes(table) == {5: 30, 6: 50, 7: -1, 8: 10, 9: -1}
    lives_s = (table["end_s"] - table["start_s"]).round(12)
    assert lives_s.equals(table["lifetime_s"].round(12))


def test_equal_addresses_of_two_devices_are_two_blocks():
    cpu = {"device": "cpu"}
    events = [(0, 5, 1, cpu), (9, 6, 1), (9, -5, 1, cpu)]
    assert lifetimes(allocations(remembering(events))) == {5: 9, 6: -1}
    spans = "1/-1 cpu: f 0+9\n" + SPANS
    table = allocations(remembering([(0, 5, 1), (9, 6, 1, {"rank": 1})], spans))
    assert lifetimes(table) == {5: -1, 6: -1}


def test_a_block_whose_free_was_lost_is_not_held_twice():
    timeline = remembering([(0, 5, 1, told(5)), (1, 50, 1, told(50))])
    shows(held_at_peak(timeline), "size_bytes  count\n50  1")
    assert peak(timeline)["before_bytes"].item() == 0


def test_events_without_an_address_count_in_the_totals_only():
    timeline = remembering([(0, 5, -1), (1, 3, 2), (2, -5, -1)])
    assert allocations(timeline)["size_bytes"].tolist() == [3]
    held_bytes = held_at_peak(timeline)["size_bytes"].sum()
    assert held_bytes == peak(timeline)["peak_bytes"].item() == 5 + 3


SPANS = """
    -1 annotation: ProfilerStep#3 0+1000, forward 0+500
    -1 cpu: nn.Module: Linear_3 90+300, aten::linear 100+200, aten::addmm 120+100, cudaMalloc 410+20 #7
    -2 cpu: autograd::engine::evaluate_function: MmBackward0 0+900, aten::mm 130+50
    -1 annotation: Optimizer.step#SGD.step 600+100
"""


# after the inner one has ended; at its first instant; no operator, and a call of the
# runtime is none; another thread at the same time; a thread without spans
WHO = drawn_table("""
    130   -1  aten::addmm              forward                  Linear_3  forward
    250   -1  aten::linear             forward                  Linear_3  forward
    100   -1  aten::linear             forward                  Linear_3  forward
    420   -1  forward                  forward                  -         forward
    650   -1  Optimizer.step#SGD.step  Optimizer.step#SGD.step  -         optimizer
    150   -2  aten::mm                 -                        -         backward
    2000  -1  outside of operators     -                        -         -
    130   -7  outside of operators     -                        -         -
""")


@pytest.mark.parametrize(("time_ns", "stream", "asked"), [(*w[:2], w[2:]) for w in WHO])
def test_who_asked(time_ns, stream, asked):
    event = (time_ns, 8, 1, {"stream": stream})
    table = allocations(remembering([event], SPANS, operators=[3, 4, 6, 7]))
    row = table[["operator", "annotation", "module", "phase"]].iloc[0]
    assert row.tolist() == [text or "" for text in asked]


def test_objects_of_a_python_function_are_one_holder():
    name = "<built-in method add_ of Tensor object at 0x7f"
    spans = f"-1 cpu: {name}0> 0+5, {name}1> 10+5, {name}2> 20+5"
    table = held_at_peak(remembering([(1, 4, 0), (11, 4, 1), (21, 4, 2)], spans))
    shows(table, "operator  count\n<built-in method add_ of Tensor>  3")


def a_random_history(seed: int) -> tuple[Timeline, list[dict]]:
    """An allocator with blocks from before, played event by event; beside it what lives
    after each of them.
    """
    random = np.random.default_rng(seed)
    live = {("before", i): int(random.integers(1, 50)) for i in range(5)}
    events, states, names = [], [], ["aten::mm", "aten::add", "aten::relu"]
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
    spans = "-1 cpu: " + ", ".join(f"{names[i % 3]} {10 * i}+10" for i in range(200))
    return remembering(events, spans, operators=range(200)), states


@pytest.mark.parametrize("seed", range(5))
def test_a_random_history_is_told_as_it_was(seed):
    timeline, states = a_random_history(seed)
    table = memory_timeline(timeline)
    before = [
        sum(size for (name, _), size in state.items() if name == "before")
        for state in states
    ]
    levels = [sum(state.values()) for state in states]
    assert table["allocated_bytes"].tolist() == levels
    assert table["before_bytes"].tolist() == before
    held = held_at_peak(timeline)
    expected = pd.Series(states[levels.index(max(levels))]).groupby(level=0).sum()
    expected = expected.rename({"before": BEFORE}).to_dict()
    assert held.set_index("operator")["size_bytes"].to_dict() == expected
    assert held["share"].sum() == pytest.approx(1)
    alive = sum(name != "before" for name, _ in states[-1])
    assert allocations(timeline)["end_s"].isna().sum() == alive


def test_the_peak_is_the_first_of_equal_ones_with_its_reserve():
    events = [(0, 4, 1, {"reserved_bytes": 10}), (1, -4, 1), (2, 4, 1)]
    expected = "peak_bytes  time_s ns  reserved_bytes  unused_bytes\n4  0  10  6"
    shows(peak(remembering(events)), expected)


def test_a_trace_that_only_frees_has_its_peak_at_the_start():
    events = [(5, -30, 1, told(70)), (6, 10, 2, told(80))]
    timeline = remembering([*events, (7, 5, 1, {"device": "cpu"} | told(5))])
    top = peak(timeline).sort_values("device")
    shows(top, "device  peak_bytes  before_bytes\ncpu  5  0\ncuda:0  100  100")
    held = held_at_peak(timeline)
    held = held[held["device"] == "cuda:0"]
    shows(held, f"operator  share\n{BEFORE}  1")


@pytest.mark.parametrize("top", [1, 2, 3, 10])
def test_holders_beyond_the_top_are_one_row_and_bytes_sum_to_the_peak(top):
    timeline, _ = a_random_history(1)
    held = held_at_peak(timeline, top)
    assert held["size_bytes"].sum() == peak(timeline)["peak_bytes"].item()
    assert ("other operators" in set(held["operator"])) == (top < 3)
    known = held[~held["operator"].isin(["other operators", BEFORE])]
    assert len(known) == min(top, 3) and known["size_bytes"].is_monotonic_decreasing
    with refused_line("top=0 at least 1"):
        held_at_peak(timeline, 0)


@pytest.mark.parametrize(
    ("kept", "per_step"),
    [([10] * 4, 10), ([0] * 4, 0), ([0, 500, 0, 0], 0), ([7], float("nan"))],
)
def test_growth_is_what_a_step_keeps(kept, per_step):
    """Each step takes 1000 bytes and gives back all but some; one that is kept once is
    no leak.
    """
    steps = range(len(kept))
    spans = ", ".join(f"ProfilerStep#{s} {100 * s}+100" for s in steps)
    events = []
    for s, size in enumerate(kept):
        events += [(100 * s, 1000, 1), (100 * s + 5, size, 10 + s)]
        events += [(100 * s + 99, -1000, 1)]
    timeline = remembering(events, f"-1 annotation: {spans}")
    row = growth(with_columns(timeline, step=steps)).iloc[0]
    assert row["bytes_per_step"] == pytest.approx(per_step, nan_ok=True)
    levels = row[["steps", "first_bytes", "last_bytes"]].tolist()
    assert levels == [len(kept), kept[0], sum(kept)]


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("spans", ["", "7 compute: k 0+5"])
def test_a_timeline_without_events_gives_an_empty_table(analysis, spans):
    filled = analysis(remembering([(0, 5, 1)], SPANS))
    for source in ("measured", "simulated"):
        table = analysis(make_timeline(lanes(spans), source=source))
        assert not len(table) and list(table.columns) == list(filled.columns)
        assert table.attrs["source"] == source


def test_a_saved_timeline_remembers(tmp_path):
    timeline, _ = a_random_history(2)
    loaded = Timeline.load(timeline.save(tmp_path / "t.parquet"))
    for analysis in ANALYSES:
        pd.testing.assert_frame_equal(analysis(loaded), analysis(timeline))


def test_part_of_the_ranks():
    events = [(0, 5, 1), (0, 9, 1, {"rank": 1})]
    timeline = remembering(events, "-1 cpu: aten::mm 0+5\n1/-1 cpu: aten::mm 0+5")
    shows(peak(timeline), "rank  peak_bytes\n0  5\n1  9")
    shows(peak(timeline.select(ranks=[1])), "rank  peak_bytes\n1  9")
    # as of snapshots, rank 1 has no spans
    spans = timeline.spans[timeline.spans["rank"] == 0]
    part = replace(timeline, spans=spans).select(ranks=[0])
    shows(peak(part), "rank  peak_bytes\n0  5")


@pytest.fixture(scope="module")
def v100() -> Timeline:
    return mm.read_trace(dataset_or_skip("ddp-2xv100"))


def test_v100_sizes_integrate_to_the_recorded_totals(v100):
    memory, table = v100.side_tables["memory"], memory_timeline(v100)
    events = memory.sort_values(["device", "time_ns"], kind="stable")
    for device, part in events.groupby("device", observed=True):
        told_bytes = table.loc[table["device"] == device, "allocated_bytes"].to_numpy()
        assert (told_bytes == part["allocated_bytes"].to_numpy()).all()
        sizes = part["size_bytes"].to_numpy()
        assert (told_bytes == told_bytes[0] - sizes[0] + sizes.cumsum()).all()
    untold = {"memory": memory.assign(allocated_bytes=-1)}
    silent = Timeline(v100.spans, v100.meta, side_tables=SideTables(lambda: untold))
    lost = table["allocated_bytes"] - memory_timeline(silent)["allocated_bytes"]
    # only the level is unknown
    assert (lost.groupby(table["device"]).nunique() == 1).all()


def test_v100_every_block_of_the_trace_is_freed_in_it(v100):
    table, sizes = allocations(v100), v100.side_tables["memory"]["size_bytes"]
    assert len(table) == (sizes > 0).sum() == (sizes < 0).sum()
    assert (table["lifetime_s"] >= 0).all()
    assert (table["operator"] != "outside of operators").all()
    before = memory_timeline(v100).query("device == 'cuda:1'")["before_bytes"]
    assert before.unique().tolist() == [4_096_614_400]
    assert table.groupby("step")["size_bytes"].sum().nunique() == 1  # five equal steps


def test_v100_peak_and_its_holders(v100):
    top, held = peak(v100).set_index("device").loc["cuda:1"], held_at_peak(v100)
    held = held[held["device"] == "cuda:1"].set_index("operator")["size_bytes"]
    highest = v100.side_tables["memory"]["allocated_bytes"].max()
    assert top["peak_bytes"] == highest == held.sum()
    assert held.index[0] == "aten::mm" and held[BEFORE] == top["before_bytes"]
    assert growth(v100)["bytes_per_step"].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["ddp-rank0", "ddp-rank1", "fsdp-rank0", "fsdp-rank1"])
def test_cpu_traces_of_gloo_have_a_peak_too(name):
    timeline = mm.read_trace(local_or_skip(f"traces/cpu-gloo-torch2.13/{name}.json.gz"))
    events = timeline.side_tables["memory"].sort_values("time_ns", kind="stable")
    levels = memory_timeline(timeline)["allocated_bytes"]
    assert levels.tolist() == events["allocated_bytes"].tolist()
    held_bytes = held_at_peak(timeline)["size_bytes"].sum()
    assert held_bytes == peak(timeline)["peak_bytes"].item() > 0
    assert {"forward", "backward"} <= set(allocations(timeline)["phase"])
