"""Which devices, clusters and models are known? Names and spellings to specs, every number with unit, source and date.

The tables are those of `data/`, one per kind of thing, and `aliases.csv`. Tables of the same names in the folder
MADMAX_CATALOG come after ours and override them. Human units stand in the tables, SI units in the specs.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from dataclasses import MISSING, fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import pandas as pd

from madmax_lib.software import Software
from madmax_lib.specs import DLRM, Cluster, Device, Host, Link, Model, Transformer

__all__ = [
    "cluster",
    "clusters",
    "data_file",
    "device",
    "device_named",
    "devices",
    "model",
    "models",
    "software",
    "table",
]

_UNITS = {"": 1.0, "GB": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12, "W": 1.0, "USD/h": 1.0, "us": 1e-6}
_KINDS = {"transformer": Transformer, "dlrm": DLRM}
_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8")
_DEVICE_CLASSES = ("family", "rate_class")  # text, no number
_USER_FOLDER = "MADMAX_CATALOG"


def data_file(name: str) -> Traversable:
    """A file that lies beside the code: `models.csv` in data/, `papers/studies/mlp.csv` in papers/studies/data/."""
    room, _, file = name.rpartition("/")
    return files("madmax_lib") / room / "data" / file


def table(name: str, *, numbers: bool = False) -> pd.DataFrame:
    """One of our tables, ours followed by the user's.

    name: a file of `data_file` without its ending. numbers: columns of numbers as numbers, NaN where they are empty;
    otherwise everything is text.
    """
    as_text = {} if numbers else {"dtype": str, "keep_default_na": False}
    with data_file(f"{name}.csv").open(encoding="utf-8") as file:
        rows = pd.read_csv(file, **as_text)
    user = Path(os.environ.get(_USER_FOLDER, "")) / f"{name}.csv"
    if os.environ.get(_USER_FOLDER) and user.exists():
        own = pd.read_csv(user, **as_text)
        if missing := [c for c in rows.columns if c not in own.columns and c not in ("source", "date")]:
            raise ValueError(f"{user}: column(s) {', '.join(missing)} missing")
        rows = pd.concat([rows, own.reindex(columns=rows.columns, fill_value="")], ignore_index=True)
    return rows


def devices() -> list[str]:
    """Names of all devices."""
    return sorted(table("devices")["name"].unique())


def clusters() -> list[str]:
    """Names of all clusters."""
    return sorted(table("clusters")["name"].unique())


def models() -> list[str]:
    """Names of all models."""
    return sorted(table("models")["name"].unique())


def device(name: str) -> Device:
    """A device by name or alias. Raises ValueError for an unknown one."""
    name, rows = _rows("device", name)
    is_class = rows["quantity"].isin(_DEVICE_CLASSES)
    values, classes = _quantities(rows[~is_class]), dict(rows.loc[is_class, ["quantity", "value"]].to_numpy())
    peaks = {key: value for key, value in values.items() if key in _DTYPES}
    rest = (values.get(quantity, math.nan) for quantity in ("tdp", "price"))
    return Device(name, values["memory"], values["memory_bandwidth"], peaks, *rest, **classes)


def device_named(text: str) -> Device | None:
    """The device of a name that CUDA or a trace gives, such as Tesla T4; None for an unknown one."""
    rows = table("device_names").itertuples(index=False)
    names = [row.name for row in rows if re.search(row.pattern, text, re.IGNORECASE)]
    return device(names[-1]) if names else None


def cluster(name: str, *, nodes: int | None = None) -> Cluster:
    """A cluster by name, with `nodes` nodes if given. Raises ValueError for an unknown one."""
    name, rows = _rows("cluster", name)
    row = rows.iloc[-1]
    links = [_link(row["intra"]), _link(row["inter"])]
    found = Cluster(name, device(row["device"]), int(row["devices_per_node"]), int(row["nodes"]), *links, _host(name))
    return found if nodes is None else replace(found, nodes=nodes)


def model(name: str | Path) -> Model:
    """A model by name or alias, or from a Hugging Face `config.json`.

    Raises ValueError for an unknown name or architecture and FileNotFoundError for a configuration that is not there.

    >>> f"{model('gpt2-large').parameters:,}"
    '774,030,080'
    """
    if str(name).endswith(".json"):
        return _from_hugging_face(Path(name))
    name, rows = _rows("model", str(name))
    values = dict(rows[["field", "value"]].to_numpy())
    kind = values.pop("kind")
    if kind not in _KINDS:
        raise ValueError(f"model {name}: kind={kind!r} is not one of {', '.join(_KINDS)}")
    return _KINDS[kind](name, **_typed(_KINDS[kind], values, f"model {name}"))


def software(name: str | None) -> Software:
    """A training software by name or alias, any software for None. Raises ValueError for an unknown one.

    >>> software("torchtitan").overlap_tp, software("dgxc nemo").overlap_tp_way
    (False, 'user-buffers')
    """
    name, rows = _rows("software", name or "none")
    values = dict(rows[["field", "value"]].to_numpy())
    base = software(values.pop("like")) if "like" in values else Software()
    return replace(base, name=name, **_typed(Software, values, f"software {name}"))


def _typed(kind: type, values: dict[str, str], what: str) -> dict:
    """Fields of a spec from their texts, each of the type of its default; those without one are whole numbers."""
    defaults = {f.name: 0 if f.default is MISSING else f.default for f in fields(kind)}
    if unknown := sorted(set(values) - set(defaults)):
        raise ValueError(f"{what}: {unknown[0]!r} is not a field of {kind.__name__}")
    return {name: _value(text, defaults[name]) for name, text in values.items()}


def _value(text: str, like):
    if isinstance(like, tuple):
        return tuple(map(type(like[0]), text.split()))
    return bool(int(text)) if isinstance(like, bool) else type(like)(text)


def _rows(what: str, name: str) -> tuple[str, pd.DataFrame]:
    """The catalog's spelling of a name, H100_80GB and H100 being h100-80, and its rows in the table of its kind.

    Raises ValueError with the three nearest names.
    """
    rows, aliases = table(what if what == "software" else f"{what}s"), table("aliases")
    names = dict(aliases.loc[aliases["what"] == what, ["alias", "name"]].to_numpy()) | {n: n for n in rows["name"]}
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    without_unit = re.sub(r"(\d+)-?gi?b\b", r"\1", plain)
    found = names.get(plain) or names.get(without_unit)
    if not found:
        near = difflib.get_close_matches(plain, names, n=3, cutoff=0.0)
        raise ValueError(f"unknown {what} {name!r}; nearest: {', '.join(near)}")
    return found, rows[rows["name"] == found]


def _quantities(rows: pd.DataFrame) -> dict[str, float]:
    """Values in SI units by quantity."""
    return {row.quantity: float(row.value) * _UNITS[row.unit] for row in rows.itertuples()}


def _link(name: str) -> Link:
    name, rows = _rows("link", name)
    values = _quantities(rows)
    return Link(name, values["bandwidth_one_way_per_device"], values.get("latency", 0.0))


def _host(cluster_name: str) -> Host | None:
    """Host of a cluster's nodes, None where the table has none."""
    rows = table("hosts")
    values = _quantities(rows[rows["cluster"] == cluster_name])
    if not values:
        return None
    try:
        needed = [values[quantity] for quantity in ("memory", "memory_bandwidth", "link")]
    except KeyError as error:
        raise ValueError(f"hosts.csv: {cluster_name} has no {error}") from None
    drives = [values.get(quantity, 0.0) for quantity in ("nvme", "nvme_read", "nvme_write")]
    return Host(f"host of {cluster_name}", *needed, int(values.get("uplinks", 0)), *drives, values.get("tdp", math.nan))


def _from_hugging_face(path: Path) -> Transformer:
    """Shapes of the GPT-2, LLaMA, Mistral, Mixtral, Qwen and ViT families from their configuration files."""
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    kind = config.get("model_type", "")
    reader = {"gpt2": _gpt2, "vit": _vit}.get(kind, _llama if kind in _LLAMA_LIKE else None)
    if reader is None:
        raise ValueError(f"{path}: model_type {kind!r} is not one of {', '.join(['gpt2', 'vit', *_LLAMA_LIKE])}")
    try:
        return reader(config.get("_name_or_path") or path.parent.name or path.stem, config)
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from None


_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def _shape(config: dict) -> tuple[int, int, int, int]:
    """layers, hidden, heads, ffn."""
    return tuple(config[f] for f in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"))


def _gpt2(name: str, config: dict) -> Transformer:
    hidden = config["n_embd"]
    shape = config["n_layer"], hidden, config["n_head"], config.get("n_inner") or 4 * hidden
    return Transformer(name, *shape, config["n_positions"], config["vocab_size"])


def _vit(name: str, config: dict) -> Transformer:
    classes = len(config.get("id2label", {})) or config.get("num_labels", 1000)
    return Transformer(name, *_shape(config), image=config["image_size"], patch=config["patch_size"], classes=classes)


def _llama(name: str, config: dict) -> Transformer:
    kind = config["model_type"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    bias = "qkv" if kind in ("qwen2", "qwen2_moe") else "all" if config.get("attention_bias") else "none"
    return Transformer(
        name,
        *_shape(config),
        config["max_position_embeddings"],
        config["vocab_size"],
        kv_heads=config.get("num_key_value_heads") or 0,
        head_dim=config.get("head_dim") or 0,
        gated=True,
        norm="rms",
        positions="rope",
        attention_bias=bias,
        qk_norm=kind.startswith("qwen3"),
        mlp_bias=config.get("mlp_bias", False),
        tied=config.get("tie_word_embeddings", False),
        experts=experts,
        active_experts=config.get("num_experts_per_tok", 0) if experts else 0,
        expert_ffn=config.get("moe_intermediate_size") or 0,
    )
