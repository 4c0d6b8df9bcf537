import pickle

import pandas as pd
import pytest
from support import make_timeline, with_columns, with_tables

from madmax_lib.timeline.timeline import SPANS, Meta, Timeline, concat

ROWS = [
    (0, 7, "compute", "gemm", 0, 10),
    (0, 20, "comm", "nccl", 5, 10),
    (0, -1, "cpu", "aten::mm", 0, 3),
]


def test_schema_is_enforced_and_ranks_are_known():
    timeline = make_timeline(ROWS)
    assert {c: str(d) for c, d in timeline.spans.dtypes.items()} == SPANS
    edges = {column: str(dtype) for column, dtype in timeline.edges.dtypes.items()}
    assert edges == {"source": "int64", "target": "int64", "why": "category"}
    assert timeline.ranks == [0] and timeline.steps == [0] and len(timeline) == 3


OF_ROWS, OTHER = make_timeline(ROWS).spans, [(1, 0, "compute", "x", 0, 1)]


def changed(**columns):
    return lambda: Timeline(OF_ROWS.assign(**columns))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (changed(dur_ns=[1, -2, 3]), "dur_ns=-2 of span 1 .nccl. is negative"),
        (
            changed(kind=["compute", "magic", "cpu"]),
            "kind 'magic' is not one of compute",
        ),
        (changed(start_ns=["a", "b", "c"]), "do not fit the schema"),
        (changed(start_ns=[0.0, 0.7, 1.0]), "start_ns=0.7 does not fit int64"),
        (changed(rank=[0, 2**40, 0]), "rank=1099511627776 does not fit int32"),
        (changed(name=["a", None, "c"]), "every span needs a kind and a name"),
        (
            lambda: Timeline(OF_ROWS.drop(columns="step")),
            r"spans lack the column.s. step",
        ),
        (
            lambda: Timeline(OF_ROWS, edges=edges((0, 3))),
            "points outside of the 3 spans",
        ),
        (lambda: Meta(source="guessed"), "source='guessed'"),
        (lambda: Meta(clock="utc"), "clock='utc'"),
        (
            lambda: concat([make_timeline(ROWS), make_timeline(ROWS)]),
            "rank 0 is in more than one",
        ),
        (
            lambda: concat(
                [make_timeline(ROWS), make_timeline(OTHER, source="simulated")]
            ),
            "measured and simulated",
        ),
        (lambda: concat([]), "at least one"),
        (
            lambda: make_timeline(ROWS + OTHER).select(ranks=[0, 9]),
            r"rank 9 is not in the timeline; it has \[0, 1\]",
        ),
    ],
)
def test_what_is_no_timeline_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def edges(*pairs):
    return pd.DataFrame(
        [(*pair, "data") for pair in pairs], columns=["source", "target", "why"]
    )


def test_parquet_round_trip(tmp_path):
    timeline = make_timeline(
        ROWS,
        source="simulated",
        world_size=64,
        represents={0: [0, 1, 2]},
        device="H100",
    )
    timeline = Timeline(timeline.spans, timeline.meta, edges((0, 1)))
    again = Timeline.load(timeline.save(tmp_path / "step.parquet"))
    pd.testing.assert_frame_equal(again.spans, timeline.spans)
    pd.testing.assert_frame_equal(again.edges, timeline.edges)
    assert again.meta == timeline.meta
    assert [p.name for p in tmp_path.iterdir()] == ["step.parquet"]


def test_a_timeline_equals_itself_alone_and_its_spans_any_others():
    timeline = make_timeline([(0, 7, "compute", "k", 1, 2)])
    twin = pickle.loads(pickle.dumps(timeline))
    assert timeline == timeline and timeline != twin
    assert timeline.spans.equals(twin.spans) and {timeline: 1}[timeline] == 1


def test_load_refuses_other_files(tmp_path):
    text = tmp_path / "a.parquet"
    text.write_text("not parquet")
    with pytest.raises(ValueError, match=r"a.parquet: not a saved timeline"):
        Timeline.load(text)
    make_timeline(ROWS).spans.to_parquet(text)
    with pytest.raises(ValueError, match="not a saved timeline"):
        Timeline.load(text)


def test_concat_orders_ranks_and_shifts_edges():
    one = make_timeline([(1, 7, "compute", "b", 0, 1), (1, 7, "comm", "c", 1, 1)])
    zero = make_timeline(ROWS, world_size=8)
    both = concat([Timeline(one.spans, one.meta, edges((0, 1))), zero])
    assert both.ranks == [0, 1] and both.meta.world_size == 8
    assert both.spans["name"].astype(str).tolist() == [
        "gemm",
        "nccl",
        "aten::mm",
        "b",
        "c",
    ]
    assert both.edges[["source", "target"]].to_numpy().tolist() == [[3, 4]]


def test_select_drops_edges_that_leave_the_part():
    timeline = make_timeline(
        [
            (0, 0, "compute", "a", 0, 1),
            (1, 0, "compute", "b", 0, 1),
            (1, 0, "comm", "c", 1, 1),
        ]
    )
    part = Timeline(timeline.spans, timeline.meta, edges((0, 1), (1, 2))).select(
        ranks=[1]
    )
    assert part.ranks == [1] and len(part) == 2
    assert part.edges[["source", "target"]].to_numpy().tolist() == [[0, 1]]


def test_a_rank_without_spans_stays_known():
    timeline = make_timeline(ROWS, represents={0: [0], 3: [3]})
    assert timeline.ranks == [0, 3]
    assert timeline.select(ranks=[3]).ranks == [3]


def test_a_part_keeps_the_allocator_events_of_its_time():
    timeline = make_timeline(
        [(r, -1, "cpu", "op", 100 * i, 50) for r in (0, 1) for i in range(3)]
    )
    events = [
        {"rank": rank, "time_ns": time}
        for rank in (0, 1)
        for time in (-5, 10, 120, 220, 900)
    ]
    timeline = with_tables(with_columns(timeline, step=[0, 1, 2] * 2), memory=events)
    assert timeline.select(steps=[1]).side_tables["memory"]["time_ns"].tolist() == [
        120,
        120,
    ]
    assert timeline.select(ranks=[1]).side_tables["memory"]["time_ns"].tolist() == [
        -5,
        10,
        120,
        220,
        900,
    ]
    assert len(timeline.select(steps=[]).side_tables["memory"]) == 0
