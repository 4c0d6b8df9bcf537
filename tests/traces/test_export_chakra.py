import json

import pytest
from support import refused

import madmax_lib as mm

COLLECTIVES = {0: "all_reduce", 2: "all_gather", 6: "all_to_all", 7: "reduce_scatter"}


def varint(data, at):
    value, shift = 0, 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields(data):
    """Pairs of number and value of a message, read anew for this test."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        yield key >> 3, value


def nodes(path):
    """Nodes of a file: number, type, name, waits_for, dur_us and attributes."""
    data = path.read_bytes()
    at, messages = 0, []
    while at < len(data):
        length, at = varint(data, at)
        messages.append(data[at : at + length])
        at += length
    assert dict(fields(messages[0])) == {1: b"0.0.4"}
    found = {}
    for message in messages[1:]:
        node = {"type": 0, "waits_for": [], "dur_us": 0}
        for number, value in fields(message):
            if number == 5:
                end = 0
                while end < len(value):
                    each, end = varint(value, end)
                    node["waits_for"].append(each)
            elif number == 10:
                attribute = dict(fields(value))
                ((_, said),) = [(n, v) for n, v in attribute.items() if n != 1]
                node[attribute[1].decode()] = said
            else:
                node[
                    {1: "id", 2: "name", 3: "type", 6: "start_us", 7: "dur_us"}[number]
                ] = value
        found[node["id"]] = node
    return found


def replayed_us(files):
    """Ends of all nodes if each begins when what it waits for has ended."""
    ends, sent = {}, {}
    todo = [(rank, number) for rank in files for number in files[rank]]
    while todo:
        left = []
        for rank, number in todo:
            node = files[rank][number]
            message = tuple(node.get(f"comm_{end}") for end in ("src", "dst", "tag"))
            begun = [ends.get((rank, other)) for other in node["waits_for"]]
            if node["type"] == 6:
                ends_us, duration = sent.get(message), 0
                begun.append(ends_us)
            else:
                duration = node["dur_us"]
            if None in begun:
                left.append((rank, number))
                continue
            ends[rank, number] = max(begun, default=0) + duration
            if node["type"] == 5:
                sent[message] = ends[rank, number]
        assert len(left) < len(todo), "a circle, or a message that nobody sends"
        todo = left
    return max(ends.values())


@pytest.mark.parametrize(
    ("model", "plan", "nodes_of"),
    [
        ("gpt2-large", "dp2.tp2.pp2.z1", 1),
        ("gpt2-large", "dp8.z3", 1),
        ("qwen3-30b-a3b", "dp8.pp2.ep8.z1", 2),
    ],
)
def test_the_files_of_a_step_replay_to_its_time(tmp_path, model, plan, nodes_of):
    cluster = mm.cluster("dgx-a100", nodes=nodes_of)
    step = mm.simulate(model, cluster, plan, global_batch=cluster.world_size)
    paths = mm.export_chakra(step, tmp_path)
    assert [path.name for path in paths] == [
        f"step.{r}.et" for r in range(cluster.world_size)
    ]
    files = {rank: nodes(path) for rank, path in enumerate(paths)}
    spans = step.spans
    # receive kernels are waits, which a replay finds itself
    end_us = (spans["start_ns"] + spans["dur_ns"])[spans["op"] >= 0].max() / 1e3
    count = max(map(len, files.values()))
    assert replayed_us(files) == pytest.approx(end_us, abs=count, rel=1e-3)
    groups = json.loads((tmp_path / "comm_group.json").read_text())
    for rank, found in files.items():
        for node in found.values():
            if node["type"] == 7:
                assert rank in groups[node["pg_name"].decode()]
            elif node["type"] in (5, 6):
                assert rank == node["comm_src" if node["type"] == 5 else "comm_dst"]


def test_a_rank_that_stands_for_others_is_written_for_each(tmp_path):
    cluster = mm.cluster("dgx-a100", nodes=16)
    step = mm.simulate("gpt2-large", cluster, "dp8.tp4.pp4", global_batch=32)
    assert len(step.ranks) == 4
    paths = mm.export_chakra(step, tmp_path)
    groups = json.loads((tmp_path / "comm_group.json").read_text())
    sizes = [len(members) for members in groups.values()]
    # every rank in one group of each kind
    assert sizes.count(4) == 128 // 4 and sizes.count(8) == 128 // 8
    files = {rank: nodes(paths[rank]) for rank in (33, 65, 97)}
    for rank, found in files.items():
        ends = {
            (n["comm_src"], n["comm_dst"]) for n in found.values() if "comm_src" in n
        }
        assert ends == {(a, b) for a in (rank, rank - 32, rank + 32) for b in (rank, rank - 32, rank + 32)
                        if rank in (a, b) and abs(a - b) == 32 and min(a, b) >= 0 and max(a, b) < 128}  # fmt: skip
        members = [
            groups[n["pg_name"].decode()] for n in found.values() if n["type"] == 7
        ]
        assert all(rank in each for each in members)


def test_bytes_of_groups_are_those_of_the_closed_forms(tmp_path):
    """z3 gathers 2-byte weights twice and scatters their gradients: a rank puts in its
    eighth of the first, all of the second.
    """
    model = mm.model("gpt2-large")
    step = mm.simulate(model, mm.cluster("dgx-a100", nodes=1), "dp8.z3", global_batch=8)
    found = nodes(mm.export_chakra(step, tmp_path)[3]).values()
    sums = dict.fromkeys(COLLECTIVES.values(), 0)
    for node in found:
        if node["type"] == 7:
            sums[COLLECTIVES[node["comm_type"]]] += node["comm_size"]
    weights = 2 * model.parameters
    assert sums["reduce_scatter"] == pytest.approx(weights, rel=0.03)
    assert 1.9 < sums["all_gather"] / (weights / 8) < 2.1
    assert sums["all_reduce"] == sums["all_to_all"] == 0
    compute = step.spans[(step.spans["rank"] == 3) & (step.spans["kind"] == "compute")]
    told_us = sum(
        node["dur_us"] for node in found if node["type"] == 4 and not node["is_cpu_op"]
    )
    assert told_us == pytest.approx(compute["dur_ns"].sum() / 1e3, rel=1e-3)


def test_a_measured_timeline_is_refused(tmp_path):
    with refused("only a simulated step & ExecutionTraceObserver"):
        mm.export_chakra(mm.read_trace(mm.dataset("gpt-ddp")), tmp_path / "et")
    assert not (tmp_path / "et").exists()
