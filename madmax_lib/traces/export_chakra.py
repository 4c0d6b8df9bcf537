"""A simulated step as Chakra execution traces for network simulators: what each rank
computes and sends, and what that waits for.

Format: Chakra ET, schema 0.0.4 [github.com/mlcommons/chakra, schema/protobuf/et_def.proto]:
messages of protobuf behind their lengths, one of GlobalMetadata and then a Node for
each operation. Groups stand in a file beside them, as ASTRA-sim takes them.
"""

import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from madmax_lib.base.atomic import replacing
from madmax_lib.base.fields import require_type
from madmax_lib.plan import Plan
from madmax_lib.timeline import Timeline
from madmax_lib.traces.export_packets import message, varint
from madmax_lib.traces.read.kernel_names import collective_of

_SCHEMA = "0.0.4"
# NodeType
_COMPUTE = 4
_SEND = 5
_RECEIVE = 6
_COLLECTIVE = 7
_TYPES = {  # CollectiveCommType
    "all_reduce": 0,
    "all_gather": 2,
    "all_to_all": 6,
    "dispatch": 6,
    "combine": 6,
    "reduce_scatter": 7,
}
# fields of AttributeProto for a value
_INT32 = 7
_INT64 = 9
_BOOL = 27
_TEXT = 29


@dataclass
class _Node:
    """An operation of a rank, and of all ranks that it stands for."""

    fields: list[tuple]
    waits_for: list[int] = field(default_factory=list)  # numbers of nodes
    group: str = ""  # of a collective
    distance: int = 0  # from a rank to the one that it sends to or receives from

    def encoded(self, rank, number_of_group):
        """Message of this node on a rank, behind its length."""
        fields = list(self.fields)
        # the file of a rank has a group by its number, a message by its two ends
        if self.group:
            number = number_of_group(self.group, rank)
            fields.append(_attribute("pg_name", _TEXT, number))
        if self.distance:
            ends = [rank, rank + self.distance]
            if (3, _RECEIVE) in self.fields:
                ends.reverse()
            fields.append(_attribute("comm_src", _INT32, ends[0]))
            fields.append(_attribute("comm_dst", _INT32, ends[1]))
        fields.append((5, b"".join(map(varint, sorted(set(self.waits_for))))))
        text = message(*fields)
        return varint(len(text)) + text


def export_chakra(timeline: Timeline, directory: str | Path) -> list[Path]:
    """Write `step.{rank}.et` for every rank of a simulated step into a directory, which
    is made if needed, and `comm_group.json`; the paths in order of rank.

    A rank that stands for others is written for each of them. Compute and host work are
    COMP_NODEs with their duration (whole us, rounded at both ends, so that sums keep);
    collectives have comm_type, pg_name (a key of comm_group.json, whose value lists the
    ranks) and comm_size, bytes of the buffer that a rank puts in: a part of the
    gathered, the whole of what is reduced; messages between stages are a
    COMM_SEND_NODE and a COMM_RECV_NODE with comm_src, comm_dst, comm_tag, comm_size.
    data_deps hold data and the order of streams. Waits of the simulation (receive
    kernels) are left out, since a network simulator finds its own.

    Raises ValueError for a timeline that is not simulated: PyTorch's
    ExecutionTraceObserver records those of a run. See also: mm.export_trace.
    """
    require_type("timeline", timeline, Timeline)
    meta = timeline.meta
    if meta.source != "simulated" or "plan" not in meta.provenance:
        raise ValueError(
            "only a simulated step knows what each operation waits for; of a run "
            "torch.profiler.ExecutionTraceObserver records it"
        )
    plan = Plan.parse(meta.provenance["plan"])
    directory = Path(directory).expanduser()
    nodes = _nodes(timeline, plan)
    groups = {}  # ranks by number
    numbers = {}  # by ranks

    @cache
    def number_of_group(name, rank):
        members = _members(name, rank, plan)
        number = numbers.setdefault(tuple(members), str(len(numbers) + 1))
        groups[number] = members
        return number

    paths = {}
    with ExitStack() as stack:  # renames when every file is complete
        for first, ranks in meta.represents.items():
            for rank in ranks:
                paths[rank] = directory / f"step.{rank}.et"
                part = stack.enter_context(replacing(paths[rank]))
                head = message((1, _SCHEMA))
                pieces = (node.encoded(rank, number_of_group) for node in nodes[first])
                part.write_bytes(varint(len(head)) + head + b"".join(pieces))
        listed = stack.enter_context(replacing(directory / "comm_group.json"))
        listed.write_text(json.dumps(groups))
    return [paths[rank] for rank in sorted(paths)]


def _nodes(timeline, plan):
    """Nodes of each rank of a timeline, numbered in the order of its spans."""
    spans = timeline.spans
    # a receive kernel is no operation: it stands for a wait
    is_wait = (spans["op"] == -1) & (spans["size_bytes"] == 0)
    rows = spans[~is_wait]
    number = rows.groupby("rank").cumcount().reindex(spans.index).fillna(-1).astype(int)
    start_us = np.rint(rows["start_ns"] / 1e3).astype(int)
    end_us = np.rint((rows["start_ns"] + rows["dur_ns"]) / 1e3).astype(int)
    table = rows.assign(number=number, start_us=start_us, dur_us=end_us - start_us)
    table["group"] = rows["group"].astype(object).where(rows["group"].notna(), "")
    nodes = defaultdict(list)
    for row in table.itertuples():
        nodes[row.rank].append(_node(row, plan))
    rank = spans["rank"].to_numpy()
    received = {}  # number of the node that receives a message, by span and rank
    for edge in timeline.edges.itertuples():
        here = nodes[rank[edge.target]]
        waiting = here[number[edge.target]]
        distance = rank[edge.target] - rank[edge.source]
        if not distance:
            waiting.waits_for.append(number[edge.source])
            continue
        message_to = (edge.source, rank[edge.target])
        if message_to not in received:
            received[message_to] = len(here)
            sent = nodes[rank[edge.source]][number[edge.source]]
            sent.distance = int(distance)
            # the same name, times, size and tag: all but its number and type
            others = sent.fields[2:]
            here.append(_Node([(1, len(here)), (3, _RECEIVE), *others]))
            here[-1].distance = -int(distance)
        waiting.waits_for.append(received[message_to])
    return nodes


def _node(row, plan):
    kind = _COMPUTE
    group = ""
    attributes = [_attribute("is_cpu_op", _BOOL, row.stream < 0)]
    if row.kind == "comm":
        size = int(row.size_bytes)
        collective = collective_of(row.name)
        if collective == "send_recv":
            kind = _SEND
            attributes.append(_attribute("comm_tag", _INT32, row.number))
        else:
            kind = _COLLECTIVE
            group = row.group
            if collective == "all_gather":
                size //= len(_members(group, row.rank, plan))
            comm_type = _TYPES[collective]
            attributes.append(_attribute("comm_type", _INT64, comm_type))
        attributes.append(_attribute("comm_size", _INT64, size))
    times = [(6, row.start_us), (7, row.dur_us)]
    about = [(1, row.number), (3, kind), (2, row.name), *times]
    return _Node([*about, *attributes], group=group)


def _members(name, rank, plan):
    """Ranks of the group of a rank, by the name that the simulator gives it: every
    `stride`-th from the first, as listed for the rank that stands for this one.
    """
    name, _, listed = name.partition(" ")
    # tp innermost, then cp and dp
    count, stride = (plan.tp, 1) if name == "tp" else (plan.dp * plan.cp, plan.tp)
    if listed:
        members = json.loads(listed)
        count = len(members)
        stride = members[1] - members[0] if count > 1 else 1
    first = rank - rank // stride % count * stride
    return [*range(first, first + count * stride, stride)]


def _attribute(name, number, value):
    return 10, message((1, name), (number, value))
