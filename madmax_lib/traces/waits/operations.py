"""Operations of the ranks' steps: which are alike, and which end together. This is what
`what_if_no_stragglers` replays.

Measured: an operation is a device span; alike are those of one name at one place of a
step, as in data parallelism, where all ranks do the same. Where spans tell forward from
backward (simulations; kernels by the thread that launches them) and ranks send to each
other, an operation is a pass of a micro-batch through a stage, and all forward passes
are alike: stages that take longer count as stragglers.
"""

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import BUSY_KINDS, Timeline, ends_ns, with_origin
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.traces.comm.alignment import align, components
from madmax_lib.traces.comm.collectives import calls

# columns that any table of operations has
NEEDED = [
    "dp_rank",
    "stage",
    "rank",
    "step",
    "optype",
    "start_ts",
    "duration",
    "seq_id",
]
_COLUMNS = [*NEEDED, "stream", "call", "is_call", "like"]
_RECEIVES = 1 << 20  # stream of receives that the timeline does not show
_PHASES = ("forward", "backward", "weight")


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
    columns = ["row", "collective", "call", "source_rank", "target_rank"]
    about_calls = calls(timeline)[columns].set_index("row")
    kind = spans["kind"]
    # Communication without a call waits for another call: the replay makes it anew.
    waits = kind.eq("comm") & ~spans.index.isin(about_calls.index)
    spans = spans[kind.isin(BUSY_KINDS) & (spans["step"] >= 0) & ~waits]
    if spans.empty:
        raise ValueError("the timeline has no device work in a step: nothing to replay")
    kind = spans["kind"].astype(str)
    is_call = kind == "comm"
    columns = ["rank", "stream", "step", "name", "start_ns", "dur_ns"]
    table = spans[columns].astype({"name": str, "stream": "int64"}).join(about_calls)
    has_name = is_call & table["collective"].notna()
    table = table.assign(
        phase=_phases(timeline, spans),
        is_call=is_call,
        call=table["call"].fillna(-1).astype("int64"),
        optype=table["collective"].where(has_name, kind),
    )
    # A message ends for both ranks at once: the replay needs both.
    table = _two_sided(table, timeline.ranks)
    stage = _stages(table, timeline.ranks)
    table = _passes(table.reset_index(drop=True), stage)
    # The first work of a step on any rank is its time 0.
    zero_ns = table.groupby("step")["start_ns"].transform("min")
    table["start_ts"] = (table["start_ns"] - zero_ns) / NS_PER_S
    table["duration"] = table["dur_ns"] / NS_PER_S
    table = table.sort_values(["step", "rank", "start_ns", "stream"], kind="stable")
    table["seq_id"] = table.groupby(["rank", "step", "optype"]).cumcount()
    table = table.join(stage, on="rank")
    return with_origin(table[_COLUMNS].reset_index(drop=True), timeline)


def _phases(timeline, spans):
    """forward, backward, weight, or "" of each span: its last word in simulations; of
    kernels, backward is what another thread launches than the one that launches first.
    """
    if timeline.meta.source == "simulated":
        last_word = spans["name"].astype(str).str.rsplit(" ", n=1).str[-1]
        return last_word.where(last_word.isin(_PHASES), "")
    key = ["rank", "correlation"]
    host = timeline.spans
    host = host[(host["kind"] == "cpu") & (host["correlation"] >= 0)]
    # Thread of the host that launched each kernel.
    thread = host.drop_duplicates(key).set_index(key)["stream"].rename("thread")
    thread = spans[key].join(thread, on=key)["thread"]
    first = thread.groupby([spans["rank"], spans["step"]]).transform("first")
    phase = thread.eq(first).map({True: "forward", False: "backward"})
    return phase.where(thread.notna(), "")


def _two_sided(table, ranks):
    """The operations, and a receive for each send that the timeline shows on one side
    alone, as simulated ones do.
    """
    lone = table[(table["call"] == -1) & table["collective"].isin(POINT_TO_POINT)]
    lone = lone[(lone["rank"] == lone["source_rank"]) & lone["target_rank"].isin(ranks)]
    numbers = table["call"].max() + 1 + np.arange(len(lone))
    table.loc[lone.index, "call"] = numbers
    receiver = lone["target_rank"].astype("int64")
    receives = lone.assign(rank=receiver, stream=_RECEIVES, call=numbers)
    return pd.concat([table, receives])


def _stages(table, ranks):
    """stage and dp_rank of each rank: ranks that send to each other are the stages of
    one pipeline, in order.
    """
    sent = table[table["collective"].isin(POINT_TO_POINT)]
    ends = sent[["source_rank", "target_rank"]]
    # Peers outside of the timeline belong to no stage of it.
    ends = ends[ends.isin(ranks).all(axis=1)]
    source = np.searchsorted(ranks, ends["source_rank"])
    target = np.searchsorted(ranks, ends["target_rank"])
    # Ranks that reach each other by messages are one pipeline; its lowest rank names
    # it.
    lowest = pd.Series(components(source, target, len(ranks)), index=ranks)
    return pd.DataFrame(
        {
            "stage": lowest.groupby(lowest).cumcount(),
            "dp_rank": lowest.rank(method="dense").astype(int) - 1,
        }
    )


def _passes(table, stage):
    """In pipelines whose spans tell their phase: one row per pass, with the calls
    before the first and after the last of them; else every span. like says which are
    alike.
    """
    runs = table["phase"].isin(_PHASES) & ~table["is_call"]
    spans = table[runs].sort_values("start_ns", kind="stable")
    of_phase = spans.groupby(["rank", "step", "phase"])
    size = of_phase["name"].transform("size")
    micro_batches = _micro_batches(table, stage["stage"])
    ranks_of_phase = spans.groupby("phase")["rank"].nunique()
    # Only where every rank has every phase do passes of all ranks compare.
    every_rank_has = len(ranks_of_phase) > 1 and (ranks_of_phase == len(stage)).all()
    if not (micro_batches and every_rank_has) or (size % micro_batches).any():
        # Alike are operations of one name that come equally late in the step.
        in_time = table.sort_values("start_ns", kind="stable")
        number = in_time.groupby(["rank", "step", "name"]).cumcount()
        number = number.reindex(table.index).astype(str)
        return table.assign(like=table["name"].str.cat(number, " "))
    # The spans of a phase follow each other: as many belong to each micro-batch.
    turn = of_phase.cumcount() // (size // micro_batches)
    spans = spans.assign(turn=turn, end_ns=ends_ns(spans))
    passes = spans.groupby(["rank", "step", "phase", "turn"]).agg(
        stream=("stream", "first"),
        start_ns=("start_ns", "min"),
        end_ns=("end_ns", "max"),
    )
    passes = passes.reset_index()
    passes = passes.assign(
        optype=passes["phase"] + "-compute",
        dur_ns=passes["end_ns"] - passes["start_ns"],
        is_call=False,
        call=-1,
        name="",
    )
    of_rank = passes.groupby(["rank", "step"])
    window = of_rank.agg(first_ns=("start_ns", "min"), last_ns=("end_ns", "max"))
    rest = table[~runs].join(window, on=["rank", "step"])
    # Calls inside of the passes, but for messages, are part of them.
    outside = rest["collective"].isin(POINT_TO_POINT)
    outside |= ends_ns(rest) > rest["last_ns"]
    outside |= rest["start_ns"] < rest["first_ns"]
    return pd.concat([passes, rest[outside]]).assign(like="")


def _micro_batches(table, stage):
    """Messages that a rank sends to a later stage in a step, at most; 0 without any."""
    own_stage = stage.reindex(table["rank"]).to_numpy()
    ahead = stage.reindex(table["target_rank"]).to_numpy() > own_stage
    sends = table[ahead & (table["rank"] == table["source_rank"])]
    if sends.empty:
        return 0
    count = sends.groupby(["rank", "step"]).size()
    return int(count.max())
