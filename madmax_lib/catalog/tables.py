"""Which devices, clusters and models are known? Names and spellings to specs, every
number with unit, source and date.

The tables are those of `data/`, one per kind of thing, and `aliases.csv`. Tables of the
same names in the folder MADMAX_CATALOG come after ours and override them. Human units
stand in the tables, SI units in the specs.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import pandas as pd

from madmax_lib.base.fields import is_whole, parse_fields, require_int, short_repr
from madmax_lib.catalog.hardware import DTYPES
from madmax_lib.catalog.hugging_face import read_config
from madmax_lib.catalog.models import (
    DLRM,
    Cluster,
    Device,
    Host,
    Link,
    Model,
    Transformer,
)
from madmax_lib.catalog.software import Software

__all__ = [
    "USER_FOLDER",
    "cluster",
    "cluster_with",
    "data_file",
    "device",
    "device_named",
    "model",
    "names",
]
__all__ += ["software", "table"]

_UNITS = {
    "": 1.0,
    "TFLOP/s": 1e12,
    "W": 1.0,
    "USD/h": 1.0,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "GB": 1e9,
    "TB": 1e12,
}
_UNITS |= {"GB/s": 1e9, "TB/s": 1e12, "Gbit/s": 0.125e9, "us": 1e-6, "ms": 1e-3}
_ALIKE = (
    ("MiB", "GiB", "GB", "TB"),
    ("GB/s", "TB/s", "Gbit/s"),
    ("us", "ms"),
)  # units of one quantity
_COUNTS = ("devices_per_node", "nodes")
_KINDS = {"transformer": Transformer, "dlrm": DLRM}
_DEVICE_CLASSES = ("family", "rate_class")  # text, no number
USER_FOLDER = "MADMAX_CATALOG"
_OWNER = re.compile(
    r"^[\w.-]+/(?=[a-z])|(-(hf|base|instruct|chat|it|pt|v0\.\d|\d{4}))+$"
)  # of a repository; of a checkpoint
_LLAMA = re.compile(
    r"^(?:meta-)?llama-?([23])(?:\.\d)?-"
)  # llama-3.1-8b has the shape of llama3-8b
_MAKERS = re.compile(
    r"\b(nvidia|amd|instinct|tesla|geforce|intel|google|cloud|(?<!p100-)sxm\d*|oam|hbm\d\w?)\b"
)


def data_file(name: str) -> Traversable:
    """A file that lies beside the code: `models.csv` in data/, `papers/studies/mlp.csv`
    in papers/studies/data/.
    """
    room, _, file = name.rpartition("/")
    return files("madmax_lib") / room / "data" / file


def table(name: str, *, numbers: bool = False) -> pd.DataFrame:
    """One of our tables, ours followed by the user's.

    name: a file of `data_file` without its ending. numbers: columns of numbers as
    numbers, NaN where they are empty; otherwise everything is text.
    """
    rows = _read(data_file(f"{name}.csv"), numbers).copy()
    folder = os.environ.get(USER_FOLDER)
    if folder and not Path(folder).is_dir():
        raise FileNotFoundError(f"{USER_FOLDER}={folder}: no such folder")
    if not folder or not (user := Path(folder) / f"{name}.csv").exists():
        return rows
    own = _read.__wrapped__(user, numbers)  # which may change
    if missing := [
        c
        for c in rows.columns
        if c not in own.columns and c not in ("nics_per_node", "source", "date")
    ]:
        raise ValueError(f"{user}: column(s) {', '.join(missing)} missing")
    _check_rows(user, own, rows)
    return pd.concat(
        [rows, own.reindex(columns=rows.columns, fill_value="")], ignore_index=True
    )


def _check_rows(path: Path, rows: pd.DataFrame, ours: pd.DataFrame) -> None:
    """Raises ValueError with file, row and unit for numbers of a user's table that
    cannot be read.
    """
    units = (
        ours.groupby("quantity")["unit"].agg(set).to_dict()
        if "quantity" in ours
        else {}
    )
    units |= (
        {"latency": {"us"}, "in_network_reduction": {""}}
        if path.stem == "links"
        else {}
    )  # of none of ours
    for number, row in enumerate(
        rows.to_dict("records"), 2
    ):  # the first row has the names of the columns
        where = f"{path}, row {number} ({next(iter(row.values()))})"
        quantity = row.get("quantity")
        if quantity and quantity not in units:
            near = difflib.get_close_matches(str(quantity), units, n=3, cutoff=0.0)
            raise ValueError(
                f"{where}: unknown quantity={quantity!r}; nearest: {', '.join(near)}"
            )
        known = set(units.get(quantity, ()))
        known.update(*(alike for alike in _ALIKE if known & set(alike)))
        if quantity and row["unit"] not in known:
            raise ValueError(
                f"{where}: unit={row['unit']!r} of {quantity} is not one of "
                f"{', '.join(sorted(known))}"
            )
        texts = {name: row[name] for name in _COUNTS if name in row}
        texts |= (
            {quantity: row["value"]}
            if quantity and quantity not in _DEVICE_CLASSES
            else {}
        )
        for name, text in texts.items():
            if not re.fullmatch(r"\d+(\.\d*)?(e[+-]?\d+)?", str(text)) or (
                name in _COUNTS and not str(text).isdecimal()
            ):
                raise ValueError(
                    f"{where}: {name}={text!r} is no "
                    f"{'whole ' * (name in _COUNTS)}number"
                )


@lru_cache(maxsize=64)
def _read(path: Path | Traversable, numbers: bool) -> pd.DataFrame:
    with path.open(encoding="utf-8") as file:
        return pd.read_csv(
            file, **({} if numbers else {"dtype": str, "keep_default_na": False})
        )


def names(file: str) -> list[str]:
    """Names in one of our tables: models, clusters, devices or links."""
    return sorted(table(file)["name"].unique())


def device(name: str) -> Device:
    """A device by name or alias. Raises ValueError for an unknown one."""
    name, rows = _rows("device", name)
    classes = {
        row["quantity"]: row["value"]
        for row in rows
        if row["quantity"] in _DEVICE_CLASSES
    }
    values = _quantities(rows)
    peaks = {dtype: values[dtype] for dtype in DTYPES if dtype in values}
    tdp_w, price, l2_bytes = (
        values.get(quantity, math.nan) for quantity in ("tdp", "price", "l2")
    )
    chip = {
        "sms": int(values.get("sms", 0)),
        "l2_bytes": l2_bytes,
        "scale_up_bytes_per_s": values.get("scale_up", 0.0),
    }
    return Device(
        name,
        values["memory"],
        values["memory_bandwidth"],
        peaks,
        tdp_w,
        price,
        **classes,
        **chip,
    )


def device_named(text: str) -> Device | None:
    """The device of a name that CUDA or a trace gives, such as Tesla T4; None for an
    unknown one.
    """
    try:
        return device(text)
    except ValueError:
        return None


def cluster(
    name: str | Path | Cluster, nodes: int | None = None, devices: int | None = None
) -> Cluster:
    """A cluster by name, or that of a `machine.json` that a calibration wrote; a
    Cluster stays what it is.

    The name of a device stands for the first cluster that has it: H100 is dgx-h100,
    64xH100 eight nodes of it.

    nodes: how many (default: the catalog's). devices: over all nodes, which shrink to
    hold no more (default: whole). Raises ValueError for an unknown name, or numbers
    that do not go together, OSError for a file that is not there. See also:
    mm.clusters, mm.devices, mm.machine.
    """
    if isinstance(name, Cluster) and nodes is devices is None:
        return name
    own = _from_machine(Path(name)) if str(name).endswith(".json") else None
    if isinstance(name, str) and not own:
        name, count = _cluster_name(name)
        devices = count if nodes is devices is None else devices
    name, (*_, row) = (own.name, [vars(own)]) if own else _rows("cluster", name)
    full = used = int(row["devices_per_node"])
    nodes = None if nodes is None else require_int(f"{name}: nodes", nodes, 1)
    if devices is not None:
        if is_whole(devices, 1):
            nodes = max(1, int(devices) // full) if nodes is None else nodes
            used = int(devices) // nodes
        if not (is_whole(devices, 1) and 0 < used <= full and used * nodes == devices):
            said = (
                f"devices={short_repr(devices)} are neither whole nodes of {full} nor "
                "a part of each node"
            )
            raise ValueError(f"{name}: {said}")
    nodes = int(row["nodes"]) if nodes is None else nodes
    if own:
        if nodes > own.nodes == 1:
            rest = (
                "calibrate over two hosts, or replace(mm.machine(...).cluster, "
                "nodes=..., inter=Link(name, bytes/s))"
            )
            raise ValueError(
                f"{name}: nodes={nodes}, but its one host has told nothing of a "
                f"network; {rest}"
            )
        return replace(own, devices_per_node=used, nodes=nodes)
    links = [_link(row[place], used) for place in ("intra", "inter")]
    nics = (
        math.ceil(int(row["nics_per_node"]) * used / full)
        if row["nics_per_node"]
        else None
    )
    return Cluster(name, device(row["device"]), used, nodes, *links, _host(name), nics)


def _cluster_name(name: str) -> tuple[str, int | None]:
    """The name of a cluster, and of how many devices where the text says so: of one
    itself, a device, or 8 x that.
    """
    known = (_index.__wrapped__ if os.environ.get(USER_FOLDER) else _index)(
        "cluster", "clusters"
    )[0]
    count, of = re.fullmatch(r"(?:([1-9]\d*) ?x ?)?(.*)", name.strip()).groups()
    one = None if _plain("cluster", name) in known else device_named(of)
    return (
        (cluster_with(one, int(count or 0)), int(count) if count else None)
        if one
        else (name, None)
    )


def cluster_with(device: Device, gpus: int = 0) -> str:
    """The first cluster with such devices, of nodes as large if there is one, else
    larger, if gpus > 0.

    Raises ValueError if there is none.

    >>> cluster_with(device("H100"))
    'dgx-h100'
    """
    columns = (
        table("clusters")[column] for column in ("name", "device", "devices_per_node")
    )
    sizes = {
        name: int(size)
        for name, of, size in zip(*columns, strict=True)
        if of == device.name
    }
    if not sizes:
        raise ValueError(f"no cluster of {device.name} is known, name one as cluster")
    return min(
        sizes, key=lambda name: sizes[name] if 0 < gpus <= sizes[name] else math.inf
    )


def _from_machine(path: Path) -> Cluster:
    """The cluster in a file that a calibration wrote. Raises ValueError for other
    content.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; `python -m madmax_lib calibrate` writes a "
            "machine.json"
        )
    try:
        fields = json.loads(path.read_text())["cluster"]
        links = (Link(**fields[place]) for place in ("intra", "inter"))
        counts = (fields[name] for name in ("devices_per_node", "nodes"))
        known = {
            name: value for name, value in fields["device"].items() if value is not None
        }
        return Cluster(fields["name"], Device(**known), *counts, *links)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the file of a machine ({error})") from None


def model(name: str | Path | Model) -> Model:
    """A model by name or alias, or from a Hugging Face `config.json` or the folder of
    one; a Model stays what it is.

    sequence is that of the pre-training; where a configuration has only a context above
    64 K tokens it is 0, and the calls then ask for it.
    Raises ValueError for an unknown name or architecture and FileNotFoundError for a
    configuration that is not there. See also: mm.models, mm.cluster, mm.Plan.

    >>> f"{model('gpt2-large').parameters:,}"
    '774,030,080'
    """
    if isinstance(name, Model):
        return name
    name = str(name) if isinstance(name, Path) else name
    if isinstance(name, str) and name and (path := Path(name)).is_dir():
        name = str(path / "config.json")
    if isinstance(name, str) and name.endswith(".json"):
        return read_config(Path(name), table("hugging_face"))
    name, values = _fields("model", name)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(
            f"model {name}: kind={kind!r} is not one of {', '.join(_KINDS)}"
        )
    return _KINDS[kind](name, **parse_fields(_KINDS[kind], values, f"model {name}"))


def software(name: str | Software | None) -> Software:
    """A training software by name or alias, `none` for None. Raises ValueError for an
    unknown one.

    >>> software("torchtitan").overlap_tp, software("dgxc nemo").overlap_tp_way
    (False, 'user-buffers')
    """
    if isinstance(name, Software):
        return name
    name, values = _fields("software", "none" if name is None else name)
    return Software(name=name, **parse_fields(Software, values, f"software {name}"))


def _fields(what: str, name: str, *below: str) -> tuple[str, dict[str, str]]:
    """The catalog's spelling of a name and its fields, after those of what it is
    `like`.
    """
    name, rows = _rows(what, name)
    if name in below:
        raise ValueError(f"{what} {name} is like itself, by {', '.join(below)}")
    values = {row["field"]: row["value"] for row in rows}
    like = values.pop("like", "")
    return name, (_fields(what, like, name, *below)[1] if like else {}) | values


def _rows(what: str, name: str) -> tuple[str, list[dict]]:
    """The catalog's spelling of a name, H100_80GB and H100 being h100-80, and its rows
    in the table of its kind.
    """
    file = what if what == "software" else f"{what}s"
    if not isinstance(name, str):
        raise ValueError(
            f"{what}={short_repr(name)} must be a {what.title()} or the name of one"
        )
    names, rows = (_index.__wrapped__ if os.environ.get(USER_FOLDER) else _index)(
        what, file
    )
    if not (found := names.get(plain := _plain(what, name))):
        begin = [key for key in names if plain and key.startswith(plain)]
        near = dict.fromkeys(
            names[key]
            for key in begin + difflib.get_close_matches(plain, names, n=6, cutoff=0.0)
        )
        add = (
            f"add it to {file}.csv in the folder {USER_FOLDER}, or pass a "
            f"{what.title()} of your own"
        )
        add += (
            "; those that runs alone know are mm.RunSpec(model=...).shapes"
            if what == "model"
            else ""
        )
        raise ValueError(
            f"unknown {what} {name!r}; nearest: {', '.join([*near][:3])}; {add}"
        )
    return found, rows[found]


@lru_cache(maxsize=16)
def _index(what: str, file: str) -> tuple[dict[str, str], dict[str, list[dict]]]:
    """Names by plain spelling, and rows by name."""
    aliases = table("aliases")
    rows = {}
    names = dict(aliases.loc[aliases["what"] == what, ["alias", "name"]].to_numpy())
    for row in table(file).to_dict("records"):
        name = next(iter(row.values()))
        rows.setdefault(name, []).append(row)
        names[name] = name
        if row.get("quantity") == "memory":
            names[f"{name}-{row['value']}"] = name  # T4-16GB
    return {_plain(what, spelling): name for spelling, name in names.items()}, rows


def _plain(what: str, name: str) -> str:
    """A name in lower case; of hardware without its maker, and separators only where
    two numbers meet.
    """
    if what == "software":
        return re.sub(r"[\s_]+", "-", name.strip().lower())
    if what == "model":
        text = _OWNER.sub("", re.sub(r"[\s_]+", "-", name.strip().lower()))
        text = _LLAMA.sub(r"llama\1-", text)
    else:
        text = _MAKERS.sub(
            "", re.sub(r"(\d)\s*gi?b\b", r"\1", name.lower().replace("_", "-"))
        )
    return re.sub(r"(?<!\d)-|-(?!\d)", "", re.sub(r"[^a-z0-9.]+", "-", text))


def _quantities(rows: Iterable[dict]) -> dict[str, float]:
    """Values in SI units by quantity."""
    numbers = (row for row in rows if row["quantity"] not in _DEVICE_CLASSES)
    return {
        row["quantity"]: float(row["value"]) * _UNITS[row["unit"]] for row in numbers
    }


def _link(name: str, devices: int) -> Link:
    """A link with the rate of each of the devices of a node; the table gives that or
    the node's.
    """
    name, rows = _rows("link", name)
    values = _quantities(rows)
    rate = (
        values.get("bandwidth_one_way_per_device")
        or values["bandwidth_one_way_per_node"] / devices
    )
    return Link(
        name,
        rate,
        values.get("latency", 0.0),
        bool(values.get("in_network_reduction", 0)),
    )


def _host(cluster_name: str) -> Host | None:
    """Host of a cluster's nodes, None where the table has none."""
    _, rows = (_index.__wrapped__ if os.environ.get(USER_FOLDER) else _index)(
        "host", "hosts"
    )
    if not (values := _quantities(rows.get(cluster_name, []))):
        return None
    try:
        needed = [
            values[quantity] for quantity in ("memory", "memory_bandwidth", "link")
        ]
    except KeyError as error:
        raise ValueError(f"hosts.csv: {cluster_name} has no {error}") from None
    drives = [
        values.get(quantity, 0.0) for quantity in ("nvme", "nvme_read", "nvme_write")
    ]
    return Host(
        f"host of {cluster_name}",
        *needed,
        int(values.get("uplinks", 0)),
        *drives,
        values.get("tdp", math.nan),
    )
