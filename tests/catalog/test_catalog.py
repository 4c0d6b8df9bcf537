import json
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest
from support import cells, local_or_skip, refused, rows_beside

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.catalog import tables
from madmax_lib.catalog.listing import clusters, devices, models
from madmax_lib.catalog.models import DLRM, Transformer
from madmax_lib.simulator import bounds

# exact ones, deepseek-v3's without the multi-token module; of others only a rounded
# number is published
PUBLISHED = pd.read_csv(
    Path(__file__).with_name("published_parameters.csv"), index_col="name"
)


@pytest.mark.parametrize("name", catalog.names("models"))
def test_models_have_the_published_parameters(name):
    model = catalog.model(name)
    assert model.name == name and model.forward_flops(1) > 0
    if name in PUBLISHED.index:
        exact, rounded_e9 = PUBLISHED.loc[name]
        about = pytest.approx(rounded_e9, abs=0.06)
        assert model.parameters == exact or model.parameters / 1e9 == about


@pytest.mark.parametrize("name", catalog.names("models"))
def test_a_model_shows_what_makes_it(name):
    """In a few lines, from which it can be made again."""
    model = catalog.model(name)
    shown = repr(model)
    assert len(shown.splitlines()) <= 6 and len(shown) < 600
    assert eval(shown, {"Transformer": Transformer, "DLRM": DLRM}) == model


def test_published_models_are_in_the_catalog():
    assert set(PUBLISHED.index) <= set(catalog.names("models"))


def test_tables_of_the_catalog_hold_si_numbers_and_read_well():
    for table in (models(), clusters(), devices()):
        assert table.index.is_monotonic_increasing
        assert (table[["source", "date"]] != "").all(axis=None)
        assert not re.search(r"e\+\d|\d{9}|nan", table._repr_html_())
        assert type(table[:1]) is type(table)
    priced = devices().query("usd_per_hour > 0")
    assert len(priced) and priced["price_date"].str.match(r"20\d\d-\d\d$").all()
    p3 = catalog.cluster("p3")
    assert clusters().loc["p3", "inter_bytes_per_s"] == p3.inter.bandwidth_bytes_per_s
    assert devices().loc["h100-80", "bf16_flops"] == 989.4e12
    assert models().loc["gpt2-large", "parameters"] == 774_030_080
    assert "989.4 TFLOP/s" in repr(devices()) and "774 M" in repr(models())


@pytest.mark.parametrize("name", catalog.names("clusters"))
def test_every_cluster_can_be_made(name):
    """And is equal after a round trip, unknown (NaN) fields included."""
    cluster = catalog.cluster(name)
    again = pickle.loads(pickle.dumps(cluster))
    assert again == cluster and len({again, cluster}) == 1
    assert replace(cluster.device, memory_bytes=1e9) != cluster.device
    cluster = catalog.cluster(name, nodes=3)
    shown = [repr(part) for part in (cluster, cluster.device)]
    assert max(len(text.splitlines()) for text in shown) <= 5 and "nodes=3" in shown[0]
    inside, across = cluster.intra, cluster.inter
    assert inside.bandwidth_bytes_per_s >= across.bandwidth_bytes_per_s
    if rate := cluster.device.scale_up_bytes_per_s:
        assert inside.bandwidth_bytes_per_s <= rate


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_device_has_peaks_in_order(name):
    device = catalog.device(name)
    order = ("fp32", "tf32", "bf16", "fp8", "nvfp4")
    peaks = [device.peak_flops[d] for d in order if d in device.peak_flops]
    assert peaks == sorted(peaks) and device.memory_bytes >= 4e9


@pytest.mark.parametrize("name", sorted(set(catalog.table("devices")["name"])))
def test_classes_of_devices_have_constants(name):
    device = catalog.device(name)
    assert f"device_rate:{device.rate_class}" in bounds().index
    assert f"gemm_efficiency:{device.family}-16" in bounds().index


def test_every_device_has_a_cluster():
    used = {catalog.cluster(name).device.name for name in catalog.names("clusters")}
    assert set(catalog.table("devices")["name"]) - used <= {"h100-96"}


def test_links_say_what_their_rate_belongs_to():
    links = catalog.table("links")
    whose = links["name"].str.extract(r"-per-((?:2-)?(?:gpu|chip|node)s?)$")[0]
    assert whose.notna().all()
    assert (links["quantity"].str.endswith("per_node") == (whose == "node")).all()


@pytest.mark.parametrize(
    ("file",),
    cells("""
    published/published_train.csv
    published_more/published_more.csv
    published_more/layout_sweep.csv
    published_more/mixed_clusters.csv
    published_more/dlrm.csv
    overlap/overlap.csv
    seed_runs/vit_seed_runs.csv
    madmax_ref/artifact_cloud_dlrm_a.csv
    """),
)
def test_every_spelling_of_the_data_is_known(file):
    spellings = set(pd.read_csv(local_or_skip(file))["gpu"].dropna()) - {"none"}
    parts = {part for text in spellings for part in text.split(" + ")}
    parts = {re.sub(r"^\d+x", "", part.removesuffix("(M)")) for part in parts}
    assert parts and all(catalog.device(part) for part in parts)


@pytest.mark.parametrize(
    ("name", "family", "rate_class"),
    cells("""
    a100-40 | ampere | other
    h800 | hopper | other
    h100-96 | hopper | h100-96
    gb300 | blackwell | gb300
    mi325x | other | mi300x
    v100-16 | other | v100
    """),
)
def test_devices_name_the_constants_they_have(name, family, rate_class):
    device = catalog.device(name)
    assert (device.family, device.rate_class) == (family, rate_class)


@pytest.mark.parametrize("name", ["devices", "links", "clusters", "models", "software"])
def test_rows_have_source_and_date(name):
    rows = catalog.table(name)
    assert (rows[["source", "date"]] != "").all(axis=None)
    if name == "software":
        assert not rows.duplicated(["name", "field"]).any()
    else:
        assert rows["date"].str.match(r"20\d\d-\d\d$").all()


def test_dgx_a100_is_what_the_design_says():
    cluster = catalog.cluster("dgx-a100", nodes=8)
    assert cluster.world_size == 64
    assert (cluster.device.name, cluster.device.memory_bytes) == ("a100-80", 80e9)
    links = cluster.intra, cluster.inter
    assert [link.bandwidth_bytes_per_s for link in links] == [300e9, 25e9]


@pytest.mark.parametrize(
    ("spelling", "what", "name"), rows_beside(__file__, "spellings")
)
def test_spellings_of_the_field(spelling, what, name):
    assert getattr(catalog, what)(spelling).name == name


@pytest.mark.parametrize(
    ("what", "name", "nearest", "own"),
    cells("""
    model | gtp3 | gpt3 | a Model of your own
    cluster | dgx-a10 | dgx-a100 | a Cluster
    model | llama3-7b | llama3-70b, llama3-8b | a Model
    device | v100-24 | v100-32 | a Device
    """),
)
def test_unknown_names_give_the_nearest_and_the_way_to_add_one(
    what, name, nearest, own
):
    with refused(f"unknown {what} '{name}'; nearest: {nearest}", f"{what}", own):
        getattr(catalog, what)(name)


@pytest.mark.parametrize(
    ("name", "words"),
    cells("""
    torchtitane | 'torchtitane' is not in software.csv, nearest: torchtitan: treated as an untuned stack
    megatron-cor | nearest: megatron-core:
    internevo | 'internevo' is not in software.csv: treated as an untuned stack of its own
    """),
)
def test_any_name_is_a_software(name, words):
    with pytest.warns(UserWarning, match=words) as caught:
        stack = catalog.software(name)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    # nothing is known of it, so no rule of another holds
    assert stack.name == name and not stack
    like = catalog.software(name, like="torchtitan")
    assert replace(like, name="torchtitan", rates="") == catalog.software("torchtitan")
    with refused("unknown software 'x'; nearest"):
        catalog.software(name, like="x")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("tensorflow2 (NGC, XLA)", {"kernels": "xla", "unfused_attention": True}),
        ("mxnet w/o clip", {"unfused_attention": True}),
        ("relaxation", {}),
    ],
)
def test_words_of_a_name_tell_its_class(name, facts):
    """And a listing says whose fact it is; what they do not tell is at its default."""
    stack = catalog.software(name, like="stranger")
    assert stack == replace(catalog.software("x", like="stranger"), name=name, **facts)
    with pytest.warns(UserWarning, match="of its own"):
        table = mm.software(name)
    assert (table["stack"] != "").sum() == len(facts)


def test_all_that_is_assumed_of_a_software_is_said():
    """A row for each field, in words, and each fact with the source of its stack."""
    facts = catalog.table("software")
    assert set(facts["field"]) - {"like"} <= set(
        catalog.table("software_words")["field"]
    )
    for name in facts["name"].unique():
        table = mm.software(name)
        assert len(table) == len(fields(catalog.software(name))) - 2  # name and rates
        assert table.index.is_unique and (table["source"] != "").all()
        stated = set(facts.loc[facts["name"] == name, "field"]) - {"like"}
        assert (table["stack"] == name).sum() == len(stated)


def test_spellings_do_not_collide():
    """What differs in the tables differs after its spelling is made plain."""
    for what in ("device", "cluster", "link", "model", "software"):
        names = catalog.table(tables._file_of(what))["name"].unique()
        for name in names:
            assert tables._rows(what, name)[0] == name
    aliases = catalog.table("aliases")
    for row in aliases.itertuples():
        assert tables._rows(row.what, row.alias)[0] == row.name


@pytest.mark.parametrize(
    ("name", "asked", "shape"),
    cells("""
    dgx-h100 | {"devices": 1} | (1, 1)
    dgx-h100 | {"devices": 64} | (8, 8)
    dgx-2 | {"devices": 12} | (12, 1)
    dgx-h100 | {"devices": 8, "nodes": 2} | (4, 2)
    tpu-v5p-pod | {"devices": 512} | (512, 1)
    zionex | {} | (8, 16)
    zionex | {"nodes": 2} | (8, 2)
    zionex | {"devices": 4} | (4, 1)
    """),
)
def test_a_part_of_a_node(name, asked, shape):
    part, whole = catalog.cluster(name, **asked), catalog.cluster(name)
    assert (part.devices_per_node, part.nodes) == shape
    assert (part.intra, part.host) == (whole.intra, whole.host)


@pytest.mark.parametrize(
    ("asked", "rule"),
    cells("""
    {"devices": 12} | devices=12 & neither whole nodes of 8 nor a part of each node
    {"devices": 0} | devices=0 & neither
    {"devices": 1.5} | devices=1.5 & neither
    {"devices": 3, "nodes": 2} | devices=3 & neither
    {"devices": 32, "nodes": 2} | devices=32 & neither
    {"nodes": 1.5} | nodes=1.5 & whole number above zero
    {"nodes": 0} | nodes=0 & whole number
    """),
)
def test_nodes_and_devices_that_do_not_go_together(asked, rule):
    with refused("dgx-h100:", rule):
        catalog.cluster("dgx-h100", **asked)


def test_a_network_of_the_node_is_shared_by_the_devices_that_are_used():
    whole, half = catalog.cluster("p3"), catalog.cluster("p3", nodes=2, devices=8)
    rates = [one.inter.bandwidth_bytes_per_s for one in (whole, half)]
    assert rates == [25e9 / 8 / 8, 25e9 / 8 / 4]
    assert whole.nics_per_node == half.nics_per_node == 1
    assert catalog.cluster("dgx-h100", nodes=2, devices=8).nics_per_node == 4


@pytest.mark.parametrize(
    ("spelling", "name", "shape", "of_three_nodes"),
    cells("""
    H100 | dgx-h100 | (8, 1) | 3
    8xH100 | dgx-h100 | (8, 1) | 3
    64 x A100-80GB | dgx-a100 | (8, 8) | 3
    2xT4 | kaggle-2xt4 | (2, 1) | 3
    4xV100 | p3-8xlarge | (4, 1) | 3
    """),
)
def test_devices_stand_for_a_cluster(spelling, name, shape, of_three_nodes):
    cluster = catalog.cluster(spelling)
    assert cluster.name == name
    assert (cluster.devices_per_node, cluster.nodes) == shape
    assert catalog.cluster(spelling, nodes=3).nodes == of_three_nodes


def test_tables_are_read_once_and_stay_as_they_are():
    first = catalog.cluster("dgx-a100")
    first.device.peak_flops["bf16"] = 0.0
    catalog.table("devices")["value"] = "0"
    assert catalog.cluster("dgx-a100").device.peak("bf16") == 312e12


@pytest.fixture
def tables_of_mine(tmp_path, monkeypatch):
    """Writes a table into the user's catalog, whose folder it returns."""
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path))

    def write(file, *lines):
        (tmp_path / f"{file}.csv").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return write


def test_user_tables_override(tables_of_mine):
    head = "name,quantity,value,unit"
    tables_of_mine("devices", head, "a100-80,memory_bandwidth,1900,GB/s")
    fields = ["kind,transformer", "layers,2", "hidden,8", "heads,2", "ffn,32"]
    rows = [f"mine,{pair}" for pair in fields]
    tables_of_mine("models", "name,field,value", *rows)
    device = catalog.device("a100-80")
    assert device.memory_bandwidth_bytes_per_s == 1.9e12
    assert device.memory_bytes == 80e9
    assert catalog.model("mine").layers == 2 and "mine" in catalog.names("models")
    tables_of_mine("models", "name,value", "mine,2")
    with refused("models.csv & field missing"):
        catalog.model("mine")


HEADS = {
    "devices": ("name,quantity,value,unit", "first,memory,45,GiB"),
    "links": ("name,quantity,value,unit", "first,latency,5,us"),
    "clusters": (
        "name,device,devices_per_node,nodes,intra,inter",
        "first,l40s,8,1,pcie4,ib-200g",
    ),
}


@pytest.mark.parametrize(
    ("file", "row", "rule"),
    cells("""
    devices | mine,memory,48,GiBs | row 3 & unit='GiBs' of memory & GB, GiB, MiB, TB
    devices | mine,memory,48GB,GB | row 3 & memory='48GB' & no number
    devices | mine,memory_bandwith,864,GB/s | ='memory_bandwith' & : memory_bandwidth
    links | mine,latency,5,s | row 3 & unit='s' of latency & not one of ms, us
    clusters | mine,l40s,eight,1,pcie4,ib-200g | row 3 & devices_per_node='eight'
    """),
)
def test_errors_of_a_user_table_name_file_row_and_unit(tables_of_mine, file, row, rule):
    tables_of_mine(file, *HEADS[file], row)
    with refused(rule, *([f"{file}.csv, row 3", "mine"] if "row" in rule else [])):
        catalog.table(file)


def test_a_catalog_without_its_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path / "nope"))
    with refused("MADMAX_CATALOG= & nope: no such folder", error=FileNotFoundError):
        catalog.cluster("dgx-h100")


@pytest.mark.parametrize(
    ("text", "rule"),
    cells("""
    { | config.json & not JSON
    {"model_type": "rnn"} | model_type 'rnn' is not read; nearest by name
    {"model_type": "llama"} | config.json & 'num_hidden_layers' is missing
    """),
)
def test_bad_configurations(tmp_path, text, rule):
    path = tmp_path / "config.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with refused(rule):
        catalog.model(path)


@pytest.mark.parametrize("name", sorted(set(catalog.table("software")["name"])))
def test_every_software_can_be_read(name):
    software = catalog.software(name)
    assert software.name == name and software.forward_kernels >= 1
    assert set(software.zero_under_pipeline) <= set(software.zero)
    assert software.weights_sharded_from in (2, 3)
    needed = {f"launch_s:{software.kernels}", f"step_s:{software.kernels}"}
    if software.overlap_tp_way != "none":
        needed.add(f"tp_hidden:{software.overlap_tp_way}")
    assert needed <= set(bounds().index)
    assert not software.overlap_tp or software.overlap_tp_way != "none"
    assert bool(software.schedules) >= software.interleave


@pytest.mark.parametrize(
    ("text", "name"),
    cells("""
    None | none
    none | none
    Megatron Core | megatron-core
    nemo-automodel | automodel
    dgxc nemo | nemo
    deepseek | hai-llm
    fsdp | fsdp2
    PaxML | paxml
    torch | fsdp2
    megatron | megatron-core
    megatron_deepspeed | megatron-deepspeed
    """),
)
def test_software_by_spellings(text, name):
    assert catalog.software(text).name == name


def test_software_inherits():
    compiled = catalog.software("torchtitan-compiled")
    inherited = compiled.kernels, compiled.wire_bytes, compiled.weights_sharded_from
    assert inherited == ("compiled", 4, 2)


def test_a_folder_of_a_calibration_names_its_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "machine.json").write_text("{}")
    with refused("unknown cluster 'mine' & calibrated there is mine/machine.json"):
        catalog.cluster("mine")
