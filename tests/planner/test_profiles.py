"""Profiles and clusters: the fork's files bit for bit, whatever the listing order, and
one line for each bad input.
"""

import json
import tarfile
from pathlib import Path

import pytest
from support import local_or_skip

from madmax_lib.papers.metis import generate_profiles, write_cluster, write_profiles
from madmax_lib.planner.hetero import Node, load_cluster, load_profiles
from madmax_lib.planner.hetero.profiles import plain_sum

NODE = Node.of_file("10.0.0.1", "A100", 4, 80, 46, 10)


@pytest.fixture
def folder(tmp_path):
    write_profiles(generate_profiles(4, 4), tmp_path)
    return tmp_path


def edit(folder, change, name="DeviceType.A100_tp1_bs1.json"):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "key, middle_ms",
    [((1, 1), 29.508), ((1, 4), 116.566), ((2, 2), 32.242), ((4, 4), 35.824)],
)
def test_measured_layers(key, middle_ms):
    profile = generate_profiles(12, 8).get("A100", *key)
    assert profile.layers == 12 and round(profile.layer_ms[5], 3) == middle_ms


def test_scaling_in_closed_form():
    table = generate_profiles(20, 32).table
    assert len(table) == 2 * 6 * 6
    base, wide, deep, slow = (
        table[key]
        for key in (("A100", 4, 4), ("A100", 4, 32), ("A100", 16, 4), ("V100", 4, 4))
    )
    assert (
        wide.layer_ms == tuple(8 * value for value in base.layer_ms)
        and wide.sync_ms == 8 * base.sync_ms
    )
    assert (
        deep.layer_ms == tuple(value / 4 for value in base.layer_ms)
        and deep.optimizer_ms == base.optimizer_ms
    )
    assert slow.total_ms == 3.5 * base.total_ms and slow.memory_mb == base.memory_mb
    assert (
        base.optimizer_ms == 2 * generate_profiles(10, 4).get("A100", 4, 4).optimizer_ms
    )


def test_memory_tables():
    fork, upstream = (
        generate_profiles(10, 4, memory=name) for name in ("fork", "upstream")
    )
    assert (
        fork.get("A100", 4, 1).memory_mb[1]
        == fork.get("A100", 1, 4).memory_mb[1]
        == 4146
    )
    assert (
        upstream.get("A100", 4, 1).memory_mb[1] == 1140.5
        and upstream.get("A100", 1, 4).memory_mb[-1] == 26084
    )


@pytest.mark.parametrize("row, layers", [(1, 10), (2, 20), (3, 20), (4, 40)])
def test_equals_the_files_of_the_fork(row, layers, tmp_path):
    with tarfile.open(local_or_skip(f"metis/inputs/row{row}_inputs.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    theirs, ours = load_profiles(tmp_path / "profile"), generate_profiles(layers, 128)
    assert list(theirs.table) == list(ours.table) and theirs == ours
    nodes = load_cluster(tmp_path / "hostfile", tmp_path / "clusterfile.json")
    assert {node.device: node.in_file()["intra_gb_per_s"] for node in nodes} == {
        "V100": 50,
        "A100": 46,
    }


def test_published_samples():
    with pytest.raises(ValueError, match="memory_mb has 9 entries for 10 layers"):
        load_profiles(local_or_skip("metis/inputs/base_profiles_fork"))
    table = load_profiles(local_or_skip("metis/inputs/base_profiles_upstream")).table
    assert {tp for _, tp, _ in table} == {1, 2, 4}


def test_round_trip(tmp_path):
    profiles, nodes = (
        generate_profiles(5, 8),
        (NODE, Node.of_file("10.0.0.2", "T4", 8, 15, 50, 10), NODE),
    )
    write_profiles(profiles, tmp_path / "profile")
    write_cluster(nodes, tmp_path / "hostfile", tmp_path / "clusterfile.json")
    assert load_profiles(tmp_path / "profile") == profiles
    assert load_cluster(tmp_path / "hostfile", tmp_path / "clusterfile.json") == nodes


def test_the_order_of_the_folder_does_not_matter(folder, monkeypatch):
    first = load_profiles(folder)
    listing = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda path: iter(sorted(listing(path), reverse=True))
    )
    assert list(load_profiles(folder).table) == list(first.table)
    assert first.named(None).name == "DeviceType.A100_tp1_bs1"


PROFILES = generate_profiles(4, 8)


def test_lookups():
    assert PROFILES.devices == ("A100", "V100")
    for name in ("A100_tp4_bs2", "DeviceType.A100_tp4_bs2.json", ("A100", 4, 2)):
        assert PROFILES.named(name) is PROFILES.get("A100", 4, 2)
    for name, message in (
        (
            "A100_tp16_bs1",
            "no profile for A100 tp 16 batch 1; there are tp 1, 2, 4, 8; batch 1, 2, 4, 8",
        ),
        ("A100_tp2_bs3", "there are tp 1, 2, 4, 8; batch 1, 2, 4, 8"),
        ("T4_tp1_bs1", "there are types A100, V100"),
        ("tp4", "is not the name of a profile such as"),
    ):
        with pytest.raises(ValueError, match=message):
            PROFILES.named(name)


def test_sums_run_from_left_to_right():
    assert plain_sum([0.1] * 10) == 0.9999999999999999


def drop(part, name):
    return lambda content: content[part].pop(name)


def put(part, name, value):
    return lambda content: content[part].update({name: value})


@pytest.mark.parametrize(
    "change, message",
    [
        (
            drop("execution_time", "forward_backward_time_ms"),
            "forward_backward_time_ms is missing",
        ),
        (drop("model", "parameters"), "field parameters is missing"),
        (
            put("model", "num_layers", 9),
            "layer_compute_total_ms has 4 entries, num_layers is 9",
        ),
        (
            put("execution_memory", "layer_memory_total_mb", [1, 2, 3]),
            "memory_mb has 3 entries for 4 layers",
        ),
        (
            put("execution_time", "optimizer_time_ms", 10814.0),
            "optimizer_ms=10814 exceeds total_ms=.*another unit",
        ),
        (
            put("execution_time", "batch_generator_time_ms", "fast"),
            "batch_generator_ms='fast' is not a number",
        ),
        (
            put("execution_time", "optimizer_time_ms", float("nan")),
            "optimizer_ms=nan is not a number",
        ),
        (
            put("execution_time", "forward_backward_time_ms", 1.0),
            "forward_backward_ms=1 is below the sum",
        ),
        (
            put("execution_time", "layer_compute_total_ms", [1, 0, 1, 1]),
            "layer_ms must have an entry above 0",
        ),
        (
            put("execution_time", "layer_compute_total_ms", 3),
            "tp1_bs1.json: .*not iterable",
        ),
    ],
)
def test_bad_profiles(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_profiles(folder)
    assert "\n" not in str(caught.value) and "DeviceType.A100_tp1_bs1.json" in str(
        caught.value
    )


def test_profiles_that_disagree(folder):
    def slip(content):
        content["execution_time"].update(
            optimizer_time_ms=20000.0, total_time_ms=21000.0
        )

    edit(folder, slip)
    with pytest.raises(
        ValueError,
        match=r"A100_tp1_bs1: optimizer_ms=20000 is over 100 x the .* another unit",
    ):
        load_profiles(folder)
    write_profiles(generate_profiles(4, 8), folder)
    write_profiles(generate_profiles(5, 4), folder)
    with pytest.raises(
        ValueError, match=r"has 4 layers, .* has 5|has 5 layers, .* has 4"
    ):
        load_profiles(folder)


def test_no_profiles(tmp_path):
    for folder, message in (
        (tmp_path / "nowhere", "not a folder of profiles"),
        (tmp_path, "holds no DeviceType"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_profiles(folder)
    for text, message in (
        ("{", "tp1_bs1.json: not JSON"),
        ("[]", "tp1_bs1.json: not a JSON object"),
    ):
        (tmp_path / "DeviceType.A100_tp1_bs1.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_profiles(tmp_path)


@pytest.mark.parametrize(
    "hosts, change, message",
    [
        ("10.0.0.1 slots=4\n10.0.0.9 slots=4", {}, "line 2: 10.0.0.9 is not in"),
        ("10.0.0.1 4", {}, "line 1: '10.0.0.1 4' is not ADDRESS slots=N"),
        ("10.0.0.1 slots=0", {}, "gpus=0 is not a number above 0"),
        ("\n", {}, "no line such as"),
        (
            "10.0.0.1 slots=4",
            {"intra_bandwidth": 5312500000.0},
            "intra_gb_per_s=5.3125e[+]09 .* is it in bytes",
        ),
        (
            "10.0.0.1 slots=4",
            {"memory": None},
            "memory_gb=None is not a number above 0",
        ),
        ("10.0.0.1 slots=4", None, "10.0.0.1 has no instance_type"),
    ],
)
def test_bad_clusters(tmp_path, hosts, change, message):
    write_cluster([NODE], tmp_path / "hostfile", tmp_path / "clusterfile.json")
    content = json.loads((tmp_path / "clusterfile.json").read_text())
    content["10.0.0.1"] = {} if change is None else content["10.0.0.1"] | change
    (tmp_path / "clusterfile.json").write_text(json.dumps(content))
    (tmp_path / "hostfile").write_text(hosts)
    with pytest.raises(ValueError, match=message):
        load_cluster(tmp_path / "hostfile", tmp_path / "clusterfile.json")


@pytest.mark.parametrize("bad", [{"layers": 2}, {"most": 0}, {"memory": "paper"}])
def test_bad_generator_arguments(bad):
    with pytest.raises(ValueError, match=r"layers=2|most=0|memory='paper'"):
        generate_profiles(**bad)
