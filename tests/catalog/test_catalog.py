import json
import re
from pathlib import Path

import pandas as pd
import pytest
from support import local_or_skip, rows_beside

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
        assert model.parameters == exact or model.parameters / 1e9 == pytest.approx(
            rounded_e9, abs=0.06
        )


@pytest.mark.parametrize("name", catalog.names("models"))
def test_a_model_shows_what_makes_it(name):
    """In a few lines, from which it can be made again."""
    shown = repr(catalog.model(name))
    assert len(shown.splitlines()) <= 5 and len(shown) < 600
    assert eval(shown, {"Transformer": Transformer, "DLRM": DLRM}) == catalog.model(
        name
    )


def test_published_models_are_in_the_catalog():
    assert set(PUBLISHED.index) <= set(catalog.names("models"))


def test_tables_of_the_catalog_hold_si_numbers_and_read_well():
    for table in (models(), clusters(), devices()):
        assert table.index.is_monotonic_increasing and (
            table[["source", "date"]] != ""
        ).all(axis=None)
        assert not re.search(r"e\+\d|\d{9}|nan", table._repr_html_()) and type(
            table[:1]
        ) is type(table)
    priced = devices().query("usd_per_hour > 0")
    assert len(priced) and priced["price_date"].str.match(r"20\d\d-\d\d$").all()
    assert devices().loc[
        "h100-80", "bf16_flops"
    ] == 989.4e12 and "989.4 TFLOP/s" in repr(devices())
    assert (
        clusters().loc["p3", "inter_bytes_per_s"]
        == catalog.cluster("p3").inter.bandwidth_bytes_per_s
    )
    assert models().loc["gpt2-large", "parameters"] == 774_030_080 and "774 M" in repr(
        models()
    )


@pytest.mark.parametrize("name", catalog.names("clusters"))
def test_every_cluster_can_be_made(name):
    cluster = catalog.cluster(name, nodes=3)
    assert max(
        len(repr(part).splitlines()) for part in (cluster, cluster.device)
    ) <= 5 and "nodes=3" in repr(cluster)
    assert (
        cluster.nodes == 3
        and cluster.intra.bandwidth_bytes_per_s >= cluster.inter.bandwidth_bytes_per_s
    )


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_device_has_peaks_in_order(name):
    device = catalog.device(name)
    peaks = [
        device.peak_flops[d]
        for d in ("fp32", "tf32", "bf16", "fp8", "nvfp4")
        if d in device.peak_flops
    ]
    assert peaks == sorted(peaks) and device.memory_bytes >= 4e9


def test_every_device_has_a_cluster_no_faster_than_its_links():
    clusters = [catalog.cluster(name) for name in catalog.names("clusters")]
    assert {cluster.device.name for cluster in clusters} >= set(
        catalog.table("devices")["name"].unique()
    ) - {"h100-96"}
    for cluster in clusters:
        if rate := cluster.device.scale_up_bytes_per_s:
            assert cluster.intra.bandwidth_bytes_per_s <= rate, cluster.name


def test_links_say_what_their_rate_belongs_to():
    links = catalog.table("links")
    whose = links["name"].str.extract(r"-per-((?:2-)?(?:gpu|chip|node)s?)$")[0]
    assert whose.notna().all()
    assert (links["quantity"].str.endswith("per_node") == (whose == "node")).all()


@pytest.mark.parametrize("file", ["published/published_train.csv", "published_more/published_more.csv",
                                  "published_more/layout_sweep.csv", "published_more/mixed_clusters.csv",
                                  "published_more/dlrm.csv", "overlap/overlap.csv", "seed_runs/vit_seed_runs.csv",
                                  "madmax_ref/artifact_cloud_dlrm_a.csv"])  # fmt: skip
def test_every_spelling_of_the_data_is_known(file):
    spellings = set(pd.read_csv(local_or_skip(file))["gpu"].dropna()) - {"none"}
    parts = {
        re.sub(r"^\d+x", "", part.removesuffix("(M)"))
        for text in spellings
        for part in text.split(" + ")
    }
    assert parts and all(catalog.device(part) for part in parts)


@pytest.mark.parametrize(
    ("name", "family", "rate_class"),
    [("a100-40", "ampere", "other"), ("h800", "hopper", "other"), ("h100-96", "hopper", "h100-96"),
     ("gb300", "blackwell", "gb300"), ("mi325x", "other", "mi300x"), ("v100-16", "other", "v100")],
)  # fmt: skip
def test_devices_name_the_constants_they_have(name, family, rate_class):
    device = catalog.device(name)
    assert (device.family, device.rate_class) == (family, rate_class)


@pytest.mark.parametrize("name", sorted(set(catalog.table("devices")["name"])))
def test_classes_of_devices_have_constants(name):
    device = catalog.device(name)
    assert {
        f"device_rate:{device.rate_class}",
        f"gemm_efficiency:{device.family}-16",
    } <= set(bounds().index)


def test_rows_have_source_and_date():
    for name in ("devices", "links", "clusters", "models"):
        rows = catalog.table(name)
        assert (rows["source"] != "").all() and rows["date"].str.match(
            r"20\d\d-\d\d$"
        ).all(), name


def test_dgx_a100_is_what_the_design_says():
    cluster = catalog.cluster("dgx-a100", nodes=8)
    assert (
        cluster.world_size == 64
        and cluster.device.name == "a100-80"
        and cluster.device.memory_bytes == 80e9
    )
    assert (
        cluster.intra.bandwidth_bytes_per_s == 300e9
        and cluster.inter.bandwidth_bytes_per_s == 25e9
    )


@pytest.mark.parametrize(
    ("spelling", "what", "name"), rows_beside(__file__, "spellings")
)
def test_spellings_of_the_field(spelling, what, name):
    assert getattr(catalog, what)(spelling).name == name


@pytest.mark.parametrize(
    ("what", "name", "nearest", "own"),
    [("model", "gtp3", "gpt3", "a Model of your own"), ("cluster", "dgx-a10", "dgx-a100", "a Cluster"),
     ("model", "llama3-7b", "llama3-70b, llama3-8b", "a Model"), ("device", "v100-24", "v100-32", "a Device")],
)  # fmt: skip
def test_unknown_names_give_the_nearest_and_the_way_to_add_one(
    what, name, nearest, own
):
    message = (
        f"unknown {what} '{name}'; nearest: {nearest}.*; add it to {what}s.csv "
        f"in .* or pass {own}"
    )
    with pytest.raises(ValueError, match=message):
        getattr(catalog, what)(name)


def test_spellings_do_not_collide():
    """What differs in the tables differs after its spelling is made plain."""
    for what in ("device", "cluster", "link", "model"):
        names = catalog.table(f"{what}s")["name"].unique()
        for name in names:
            assert tables._rows(what, name)[0] == name
    aliases = catalog.table("aliases")
    for row in aliases.itertuples():
        assert tables._rows(row.what, row.alias)[0] == row.name


@pytest.mark.parametrize(
    ("name", "asked", "shape"),
    [("dgx-h100", {"devices": 1}, (1, 1)), ("dgx-h100", {"devices": 64}, (8, 8)), ("dgx-2", {"devices": 12}, (12, 1)),
     ("dgx-h100", {"devices": 8, "nodes": 2}, (4, 2)), ("tpu-v5p-pod", {"devices": 512}, (512, 1)),
     ("zionex", {}, (8, 16)), ("zionex", {"nodes": 2}, (8, 2)), ("zionex", {"devices": 4}, (4, 1))],
)  # fmt: skip
def test_a_part_of_a_node(name, asked, shape):
    cluster = catalog.cluster(name, **asked)
    assert (cluster.devices_per_node, cluster.nodes) == shape
    assert (
        cluster.intra == catalog.cluster(name).intra
        and cluster.host == catalog.cluster(name).host
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"devices": 12}, "devices=12 are neither whole nodes of 8 nor a part of each node"),
     ({"devices": 0}, "devices=0 are neither"), ({"devices": 1.5}, "devices=1.5 are neither"),
     ({"devices": 3, "nodes": 2}, "devices=3 are neither"), ({"devices": 32, "nodes": 2}, "devices=32 are neither"),
     ({"nodes": 1.5}, "nodes=1.5 must be a whole number above zero"), ({"nodes": 0}, "nodes=0 must be a whole number")],
)  # fmt: skip
def test_nodes_and_devices_that_do_not_go_together(asked, message):
    with pytest.raises(ValueError, match=f"^dgx-h100: {message}"):
        catalog.cluster("dgx-h100", **asked)


def test_a_network_of_the_node_is_shared_by_the_devices_that_are_used():
    whole, half = catalog.cluster("p3"), catalog.cluster("p3", nodes=2, devices=8)
    assert (
        half.inter.bandwidth_bytes_per_s
        == 2 * whole.inter.bandwidth_bytes_per_s
        == 25e9 / 8 / 4
    )
    assert whole.nics_per_node == half.nics_per_node == 1
    assert catalog.cluster("dgx-h100", nodes=2, devices=8).nics_per_node == 4


def test_devices_stand_for_a_cluster():
    spellings = {
        "H100": (8, 1),
        "8xH100": (8, 1),
        "64 x A100-80GB": (8, 8),
        "2xT4": (2, 1),
        "4xV100": (4, 1),
    }
    clusters = {spelling: catalog.cluster(spelling) for spelling in spellings}
    assert {
        s: (one.devices_per_node, one.nodes) for s, one in clusters.items()
    } == spellings
    assert [one.name for one in clusters.values()] == [
        "dgx-h100",
        "dgx-h100",
        "dgx-a100",
        "kaggle-2xt4",
        "p3-8xlarge",
    ]
    assert (
        catalog.cluster("H100", nodes=3).nodes
        == catalog.cluster("8xH100", nodes=3).nodes
        == 3
    )


def test_tables_are_read_once_and_stay_as_they_are():
    first = catalog.cluster("dgx-a100")
    first.device.peak_flops["bf16"] = 0.0
    catalog.table("devices")["value"] = "0"
    assert catalog.cluster("dgx-a100").device.peak("bf16") == 312e12


def test_user_tables_override(tmp_path, monkeypatch):
    (tmp_path / "devices.csv").write_text(
        "name,quantity,value,unit\na100-80,memory_bandwidth,1900,GB/s\n"
    )
    fields = "".join(
        f"mine,{pair}\n"
        for pair in ("kind,transformer", "layers,2", "hidden,8", "heads,2", "ffn,32")
    )
    (tmp_path / "models.csv").write_text(f"name,field,value\n{fields}")
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path))
    assert catalog.device("a100-80").memory_bandwidth_bytes_per_s == 1.9e12
    assert catalog.device("a100-80").memory_bytes == 80e9
    assert catalog.model("mine").layers == 2 and "mine" in catalog.names("models")
    (tmp_path / "models.csv").write_text("name,value\nmine,2\n")
    with pytest.raises(ValueError, match=r"models.csv: column.s. field missing"):
        catalog.model("mine")


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        (
            "devices",
            "mine,memory,48,GiBs",
            "row 3 .mine.: unit='GiBs' of memory is not one of GB, GiB, MiB, TB",
        ),
        ("devices", "mine,memory,48GB,GB", "row 3 .mine.: memory='48GB' is no number"),
        (
            "devices",
            "mine,memory_bandwith,864,GB/s",
            "unknown quantity='memory_bandwith'; nearest: memory_bandwidth",
        ),
        (
            "links",
            "mine,latency,5,s",
            "row 3 .mine.: unit='s' of latency is not one of ms, us",
        ),
        (
            "clusters",
            "mine,l40s,eight,1,pcie4,ib-200g",
            "row 3 .mine.: devices_per_node='eight' is no whole number",
        ),
    ],
)
def test_errors_of_a_user_table_name_file_row_and_unit(
    tmp_path, monkeypatch, file, row, message
):
    heads = {
        "clusters": "name,device,devices_per_node,nodes,intra,inter\nfirst,l40s,8,1,pcie4,ib-200g"
    }
    head = heads.get(
        file,
        "name,quantity,value,unit\nfirst,"
        + {"links": "latency,5,us"}.get(file, "memory,45,GiB"),
    )
    (tmp_path / f"{file}.csv").write_text(f"{head}\n{row}\n")
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path))
    with pytest.raises(
        ValueError,
        match=f"{file}.csv, {message}" if message.startswith("row") else message,
    ):
        catalog.table(file)
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path / "nope"))
    with pytest.raises(
        FileNotFoundError, match=r"MADMAX_CATALOG=.*nope: no such folder"
    ):
        catalog.cluster("dgx-h100")


CONFIGS = {
    "gpt2-large": {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20, "n_positions": 1024,
                   "vocab_size": 50257},
    "qwen2.5-3b": {"model_type": "qwen2", "num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16,
                   "num_key_value_heads": 2, "intermediate_size": 11008, "max_position_embeddings": 32768,
                   "vocab_size": 151936, "tie_word_embeddings": True},
    "mixtral-8x7b": {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 32768,
                     "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "max_position_embeddings": 40960, "vocab_size": 151936,
                      "num_experts": 128, "num_experts_per_tok": 8},
    "vit-base": {"model_type": "vit", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
                 "intermediate_size": 3072, "image_size": 224, "patch_size": 16},
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), CONFIGS.items())
def test_hugging_face_configurations(tmp_path, name, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert catalog.model(path).parameters == PUBLISHED.at[name, "parameters"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not JSON"),
        ('{"model_type": "rnn"}', "model_type 'rnn' is not one of gpt2, vit, dinov2"),
        (
            '{"model_type": "llama"}',
            "config.json: field 'num_hidden_layers' is missing",
        ),
    ],
)
def test_bad_configurations(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        catalog.model(path)


@pytest.mark.parametrize("name", sorted(set(catalog.table("software")["name"])))
def test_every_software_can_be_read(name):
    software = catalog.software(name)
    assert software.name == name and software.forward_kernels >= 1
    assert set(software.zero_under_pipeline) <= set(
        software.zero
    ) and software.weights_sharded_from in (2, 3)
    assert {f"launch_s:{software.kernels}", f"step_s:{software.kernels}"} <= set(
        bounds().index
    )
    assert (
        software.overlap_tp_way == "none"
        or f"tp_hidden:{software.overlap_tp_way}" in bounds().index
    )
    assert not software.overlap_tp or software.overlap_tp_way != "none"
    assert bool(software.schedules) >= software.interleave


def test_every_fact_of_a_software_has_a_source_and_a_date():
    facts = catalog.table("software")
    assert (facts[["source", "date"]] != "").all(axis=None) and not facts.duplicated(
        ["name", "field"]
    ).any()


@pytest.mark.parametrize(
    ("text", "name"),
    [(None, "none"), ("none", "none"), ("Megatron Core", "megatron-core"), ("nemo-automodel", "automodel"),
     ("dgxc nemo", "nemo"), ("deepseek", "hai-llm"), ("fsdp", "fsdp2"), ("PaxML", "paxml"), ("torch", "fsdp2"),
     ("megatron", "megatron-core"), ("megatron_deepspeed", "megatron-deepspeed")],
)  # fmt: skip
def test_software_by_spellings(text, name):
    assert catalog.software(text).name == name


def test_software_inherits_and_an_unknown_one_is_refused():
    compiled = catalog.software("torchtitan-compiled")
    assert (compiled.kernels, compiled.wire_bytes, compiled.weights_sharded_from) == (
        "compiled",
        4,
        2,
    )
    with pytest.raises(
        ValueError, match="unknown software 'torchtitane'; nearest: torchtitan"
    ):
        catalog.software("torchtitane")
