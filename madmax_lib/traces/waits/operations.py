"""Which operations of the ranks' steps are alike, and which end together? What
`what_if_no_stragglers` replays.

Measured: an operation is a device span; alike are those of one name at one place of a
step, as in data parallelism, where all ranks do the same. Where spans tell forward from
backward (simulations; kernels by the thread that launches them) and ranks send to each
other, an operation is a pass of a micro-batch through a stage, and all forward passes
are
alike: stages that take longer count as stragglers.
"""

import numpy as np
import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, with_origin
from madmax_lib.traces.comm.alignment import align, components
from madmax_lib.traces.comm.collectives import calls

__all__ = ["operations"]

_COLUMNS = [
    "dp_rank",
    "stage",
    "rank",
    "step",
    "optype",
    "start_ts",
    "duration",
    "seq_id",
]
_COLUMNS += ["stream", "call", "is_call", "like"]
_RECEIVES = 1 << 20  # stream of receives that the timeline does not show


def operations(timeline: Timeline) -> pd.DataFrame:
    """The operations of the steps of all ranks, as `what_if_no_stragglers` takes them.

    dp_rank, stage (0 without a pipeline: ranks that send to each other are the stages
    of one, in order), rank, step, optype (name of the collective; compute, memcpy,
    other; forward-compute, backward-compute in pipelines), start_ts (s, from the step's
    first work, clocks aligned), duration (s), seq_id (which of its kind on this rank
    and step); stream, call (number of the call that several ranks made together, -1
    alone), is_call, like (equal for operations that are averaged). Raises ValueError
    for a timeline without steps.
    """
    if timeline.meta.source != "simulated" and len(timeline.ranks) > 1:
        timeline = align(timeline)
    spans = timeline.spans
    talk = calls(timeline).set_index("row")[
        ["collective", "call", "source_rank", "target_rank"]
    ]
    waits = spans["kind"].eq("comm") & ~spans.index.isin(
        talk.index
    )  # for another call: the replay makes it anew
    spans = spans[spans["kind"].isin(BUSY_KINDS) & (spans["step"] >= 0) & ~waits]
    if spans.empty:
        raise ValueError("the timeline has no device work in a step: nothing to replay")
    phase = _phases(timeline, spans)
    table = spans[["rank", "stream", "step", "name", "start_ns", "dur_ns"]].astype(
        {"name": str, "stream": "int64"}
    )
    table = _two_sided(
        table.join(talk.reindex(spans.index)).assign(phase=phase), timeline.ranks
    )
    kind = spans["kind"].astype(str).reindex(table.index)
    table["is_call"], table["call"] = (
        kind.eq("comm").to_numpy(),
        table["call"].fillna(-1).astype(np.int64),
    )
    table["optype"] = table["collective"].where(
        table["is_call"] & table["collective"].notna(), kind
    )
    stage = _stages(table, timeline.ranks)
    table = _passes(table.reset_index(drop=True), stage)
    zero_ns = table.groupby("step")["start_ns"].transform("min")
    table["start_ts"], table["duration"] = (
        (table["start_ns"] - zero_ns) / NS_PER_S,
        table["dur_ns"] / NS_PER_S,
    )
    table = table.sort_values(["step", "rank", "start_ns", "stream"], kind="stable")
    table["seq_id"] = table.groupby(["rank", "step", "optype"]).cumcount()
    table[["stage", "dp_rank"]] = stage.loc[
        table["rank"], ["stage", "dp_rank"]
    ].to_numpy()
    return with_origin(table[_COLUMNS].reset_index(drop=True), timeline)


def _phases(timeline: Timeline, spans: pd.DataFrame) -> pd.Series:
    """forward, backward, weight, or "" of each span: its last word in simulations; of
    kernels, backward is what
    another thread launches than the one that launches first.
    """
    if timeline.meta.source == "simulated":
        last = spans["name"].astype(str).str.rsplit(" ", n=1).str[-1]
        return last.where(last.isin(("forward", "backward", "weight")), "")
    host = timeline.spans[
        (timeline.spans["kind"] == "cpu") & (timeline.spans["correlation"] >= 0)
    ]
    thread = host.drop_duplicates(["rank", "correlation"]).set_index(
        ["rank", "correlation"]
    )["stream"]
    launched = thread.reindex(
        pd.MultiIndex.from_frame(spans[["rank", "correlation"]])
    ).set_axis(spans.index)
    first = launched.groupby([spans["rank"], spans["step"]]).transform("first")
    return (
        launched.eq(first)
        .map({True: "forward", False: "backward"})
        .where(launched.notna(), "")
    )


def _two_sided(table: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """With a receive beside each send that the timeline shows on one side alone, as
    simulated ones do.
    """
    lone = table[(table["call"] == -1) & table["collective"].isin(POINT_TO_POINT)]
    lone = lone[(lone["rank"] == lone["source_rank"]) & lone["target_rank"].isin(ranks)]
    numbers = table["call"].max() + 1 + np.arange(len(lone))
    table.loc[lone.index, "call"] = numbers
    receives = lone.assign(
        rank=lone["target_rank"].astype("int64"), stream=_RECEIVES, call=numbers
    )
    return pd.concat([table, receives])


def _stages(table: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """stage and dp_rank of each rank: ranks that send to each other are the stages of
    one pipeline, in order.
    """
    sent = table[
        (table["source_rank"] >= 0)
        & (table["target_rank"] >= 0)
        & table["collective"].isin(POINT_TO_POINT)
    ]
    seen = sent[sent["source_rank"].isin(ranks) & sent["target_rank"].isin(ranks)]
    first = components(
        *(np.searchsorted(ranks, seen[end]) for end in ("source_rank", "target_rank")),
        len(ranks),
    )
    first = pd.Series(first, index=ranks)
    return pd.DataFrame(
        {
            "stage": first.groupby(first).cumcount(),
            "dp_rank": first.rank(method="dense").astype(int) - 1,
        }
    )


def _passes(table: pd.DataFrame, stage: pd.DataFrame) -> pd.DataFrame:
    """In pipelines whose spans tell their phase: one row per pass, with the calls
    before the first and after the last
    of them; else every span. like says which are alike.
    """
    ahead = (
        stage["stage"].reindex(table["target_rank"]).to_numpy()
        > stage["stage"].reindex(table["rank"]).to_numpy()
    )
    sends = (
        table[ahead & (table["rank"] == table["source_rank"])]
        .groupby(["rank", "step"])
        .size()
    )
    runs = table["phase"].isin(("forward", "backward", "weight")) & ~table["is_call"]
    spans = table[runs].sort_values(["start_ns"], kind="stable")
    of_phase = spans.groupby(["rank", "step", "phase"])
    size = of_phase["name"].transform("size")
    micro_batches = sends.max() if len(sends) else 0
    ranks_of_phase = spans.groupby("phase")["rank"].nunique()
    told = (
        micro_batches > 0
        and len(ranks_of_phase) > 1
        and (ranks_of_phase == len(stage)).all()
    )
    if not told or (size % micro_batches).any():
        occurrence = (
            table.sort_values("start_ns", kind="stable")
            .groupby(["rank", "step", "name"])
            .cumcount()
        )
        return table.assign(
            like=table["name"].str.cat(occurrence.reindex(table.index).astype(str), " ")
        )
    turn = of_phase.cumcount() // (size // micro_batches)
    each = spans.assign(turn=turn, end_ns=spans["start_ns"] + spans["dur_ns"]).groupby(
        ["rank", "step", "phase", "turn"]
    )
    whole = each.agg(
        stream=("stream", "first"),
        start_ns=("start_ns", "min"),
        end_ns=("end_ns", "max"),
    ).reset_index()
    whole = whole.assign(
        optype=whole["phase"] + "-compute", dur_ns=whole["end_ns"] - whole["start_ns"]
    )
    whole = whole.assign(is_call=False, call=-1, name="")
    window = whole.groupby(["rank", "step"]).agg(
        first=("start_ns", "min"), last=("end_ns", "max")
    )
    rest = table[~runs].join(window, on=["rank", "step"])
    beside = rest["collective"].isin(POINT_TO_POINT) | (
        rest["start_ns"] + rest["dur_ns"] > rest["last"]
    )
    beside |= rest["start_ns"] < rest["first"]
    return pd.concat([whole, rest[beside]]).assign(like="")
