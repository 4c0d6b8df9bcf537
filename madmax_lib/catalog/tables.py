"""Names and spellings of devices, clusters, models and software, to their specs: every
number has a unit, a source and a date.

The tables are those of `data/`, one per kind of thing, and `aliases.csv`. Tables of the
same names in the folder MADMAX_CATALOG come after ours and override them. Human units
stand in the tables, SI units in the specs.
"""

import difflib
import json
import math
import os
import re
import warnings
from dataclasses import replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from madmax_lib.base.fields import parse_fields, require_number, short_repr
from madmax_lib.catalog.data_files import (
    DEVICE_CLASSES,
    USER_FOLDER,
    data_file,
    table,
)
from madmax_lib.catalog.hardware import DTYPES, node_extent, part_of_machine
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
from madmax_lib.catalog.software import STRANGER, Software

# SI value of one
_UNITS = json.loads(data_file("units.json").read_text())
_KINDS = {"transformer": Transformer, "dlrm": DLRM}
_CLOSE = 0.75  # likeness of two names of which one may be a slip of the other
# the owner of a repository, or what a checkpoint adds to the name of its shape
_OWNER = re.compile(
    r"^[\w.-]+/(?=[a-z])|(-(hf|base|instruct|chat|it|pt|v0\.\d|\d{4}))+$"
)
# llama-3.1-8b has the shape of llama3-8b
_LLAMA = re.compile(r"^(?:meta-)?llama-?([23])(?:\.\d)?-")
# what CUDA and shops write around the name of a chip
_MAKERS = re.compile(
    r"\b(nvidia|amd|instinct|tesla|geforce|intel|google|cloud"
    r"|(?<!p100-)sxm\d*|oam|hbm\d\w?)\b"
)


class _Index(NamedTuple):
    """A table by name."""

    names: dict[str, str]  # the catalog's name of each plain spelling
    rows: dict[str, list[dict]]


def names(file: str) -> list[str]:
    """Names in one of our tables: models, clusters, devices or links."""
    return sorted(table(file)["name"].unique())


def device(name: str) -> Device:
    """A device by name or alias. Raises ValueError for an unknown one."""
    name, rows = _rows("device", name)
    texts = {row["quantity"]: row["value"] for row in rows}
    si = _quantities(rows)
    return Device(
        name,
        memory_bytes=si["memory"],
        memory_bandwidth_bytes_per_s=si["memory_bandwidth"],
        peak_flops={dtype: si[dtype] for dtype in DTYPES if dtype in si},
        tdp_w=si.get("tdp", math.nan),
        usd_per_hour=si.get("price", math.nan),
        sms=int(si.get("sms", 0)),
        l2_bytes=si.get("l2", math.nan),
        scale_up_bytes_per_s=si.get("scale_up", 0.0),
        **{name: texts[name] for name in DEVICE_CLASSES if name in texts},
    )


def device_named(text: str) -> Device | None:
    """The device of a name that CUDA or a trace gives, such as Tesla T4; None for an
    unknown one.
    """
    try:
        return device(text)
    except ValueError:
        return None


def price_of(device: Device, usd_per_hour: float | None) -> float:
    """USD of a device-hour: as given, else the catalog's, NaN if of an earlier year."""
    if usd_per_hour is not None:
        return require_number("usd_per_hour", usd_per_hour)
    price = device.usd_per_hour
    rows = table("devices")
    is_price = (rows["quantity"] == "price") & (rows["name"] == device.name)
    listed = rows[is_price].tail(1)
    # a price of the caller's own device is no date of the catalog's
    if [price] != listed["value"].astype(float).tolist():
        return price
    recent = listed["date"].str.startswith(f"{date.today().year}").all()
    return price if recent else math.nan


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
    if str(name).endswith(".json"):
        return part_of_machine(_from_machine(Path(name)), nodes, devices)
    if isinstance(name, str):
        name, count = _cluster_name(name)
        if nodes is devices is None:
            devices = count
    name, (*_, row) = _rows("cluster", name)
    full = int(row["devices_per_node"])
    used, nodes = node_extent(name, (full, int(row["nodes"])), nodes, devices)
    # a part of a node has as many of its ports, rounded up
    ports = row["nics_per_node"] and math.ceil(int(row["nics_per_node"]) * used / full)
    return Cluster(
        name,
        device(row["device"]),
        devices_per_node=used,
        nodes=nodes,
        intra=_link(row["intra"], used),
        inter=_link(row["inter"], used),
        host=_host(name),
        nics_per_node=ports or None,
    )


def _cluster_name(name):
    """The name of a cluster, and how many devices the text asks for: the text names a
    cluster, a device, or 8 x that.
    """
    count, chip = re.fullmatch(r"(?:([1-9]\d*) ?x ?)?(.*)", name.strip()).groups()
    if _plain("cluster", name) in _index("cluster").names:
        return name, None
    if not (one := device_named(chip)):
        return name, None
    devices = int(count) if count else None
    return cluster_with(one, devices or 0), devices


def cluster_with(device: Device, gpus: int = 0) -> str:
    """The first cluster with such devices, of nodes as large if there is one, else
    larger, if gpus > 0.

    Raises ValueError if there is none.

    >>> cluster_with(device("H100"))
    'dgx-h100'
    """
    clusters = table("clusters")
    rows = clusters[clusters["device"] == device.name]
    if rows.empty:
        raise ValueError(f"no cluster of {device.name} is known, name one as cluster")
    sizes = dict(zip(rows["name"], rows["devices_per_node"].astype(int), strict=True))
    if large := {name: size for name, size in sizes.items() if 0 < gpus <= size}:
        return min(large, key=large.get)
    return rows["name"].iloc[0]


def _from_machine(path):
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
        chip = {name: v for name, v in fields["device"].items() if v is not None}
        return Cluster(
            fields["name"],
            Device(**chip),
            fields["devices_per_node"],
            fields["nodes"],
            Link(**fields["intra"]),
            Link(**fields["inter"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a machine file ({error})") from None


def model(name: str | Path | Model) -> Model:
    """A model by name or alias, or from a Hugging Face `config.json` or the folder of
    one; a Model stays what it is.

    A name of the catalog is its model even where a folder is called so, as a warning
    says: write ./name for the folder.

    sequence is that of the pre-training; where a configuration has only a context above
    64 K tokens it is 0, and the calls then ask for it.
    Raises ValueError for an unknown name or architecture and FileNotFoundError for a
    configuration that is not there. See also: mm.models, mm.cluster, mm.Plan.

    >>> f"{model('gpt2-large').parameters:,}"
    '774,030,080'
    """
    if isinstance(name, Model):
        return name
    if isinstance(name, Path):
        name = str(name if name.suffix == ".json" else name / "config.json")
    if isinstance(name, str) and name and (path := Path(name)).is_dir():
        if "/" in name or _plain("model", name) not in _index("model")[0]:
            name = str(path / "config.json")
        elif (path / "config.json").exists():
            warnings.warn(
                f"model {name!r} is the catalog's; ./{name} is the folder's",
                stacklevel=2,
            )
    if isinstance(name, str) and name.endswith(".json"):
        return read_config(Path(name), table("hugging_face"))
    name, values = _fields("model", name)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(
            f"model {name}: kind={kind!r} is not one of {', '.join(_KINDS)}"
        )
    return _KINDS[kind](name, **parse_fields(_KINDS[kind], values, f"model {name}"))


def software(name: str | Software | None, like: str | None = None) -> Software:
    """A training software by name or alias, however its words are joined; `none` for
    None.

    Any other name is a stack of its own: like another as far as is known of that, or
    like none, with the rates of stacks that nobody tuned and what words such as XLA
    tell (`data/software_classes.csv`), as a warning says unless like="stranger". Raises
    ValueError for what is no name, and for an unknown `like`.
    See also: mm.software, which says what is assumed of a stack, and by which source.

    >>> software("torchtitan").overlap_tp, software("DGXC_NeMo").overlap_tp_way
    (False, 'user-buffers')
    >>> software("internevo", like="megatron-core").wire_bytes
    4.0
    """
    if isinstance(name, Software):
        return name
    names = _index("software").names
    plain = _plain("software", name) if isinstance(name, str) else ""
    if not plain or plain in names:
        name, values = _fields("software", "none" if name is None else name)
        return Software(name, **parse_fields(Software, values, f"software {name}"))
    if like == STRANGER:
        return _stranger(name)
    if like:
        base = _fields("software", like)[0]
        return replace(software(base), name=name, rates=base)
    near = difflib.get_close_matches(plain, names, n=1, cutoff=_CLOSE)
    meant = f", nearest: {names[near[0]]}" if near else ""
    warnings.warn(
        f"software {name!r} is not in software.csv{meant}: treated as an untuned "
        "stack of its own until you give rows (calibration.fit.update) or like=",
        stacklevel=1,  # one place, so that a session is told once
    )
    return _stranger(name)


def _stranger(name):
    """A stack that is in no table, with the facts of the classes that its name says."""
    facts = {fact["field"]: fact["value"] for fact in class_facts(name)}
    return Software(name, STRANGER, **parse_fields(Software, facts, f"software {name}"))


def class_facts(name: str) -> list[dict]:
    """Rows of `data/software_classes.csv` whose word is in the name of a stack: what
    all of its class do, such as XLA's.
    """
    facts = table("software_classes").to_dict("records")
    return [fact for fact in facts if re.search(rf"\b{fact['word']}\b", name, re.I)]


def _fields(what, name, *below):
    """The catalog's spelling of a name and its fields, after those of what it is
    `like`.
    """
    name, rows = _rows(what, name)
    if name in below:
        raise ValueError(
            f"{what} {name} has a like= that leads back to it, by {', '.join(below)}"
        )
    values = {row["field"]: row["value"] for row in rows}
    like = values.pop("like", "")
    return name, (_fields(what, like, name, *below)[1] if like else {}) | values


def _rows(what, name):
    """The catalog's spelling of a name, H100_80GB and H100 being h100-80, and its rows
    in the table of its kind.
    """
    title = what.title()
    if not isinstance(name, str):
        raise ValueError(
            f"{what}={short_repr(name)} must be a {title} or the name of one"
        )
    names, rows = _index(what)
    plain = _plain(what, name)
    if plain in names:
        return names[plain], rows[names[plain]]
    near = [key for key in names if plain and key.startswith(plain)]
    near += difflib.get_close_matches(plain, names, n=6, cutoff=0.0)
    nearest = [*dict.fromkeys(names[key] for key in near)][:3]
    way_out = (
        f"add it to {_file_of(what)}.csv in the folder {USER_FOLDER}, or in Python pass "
        f"a {title} of your own"
    )
    if what == "model":
        way_out = (
            f"give its Hugging Face config.json, or {way_out}; "
            "mm.RunSpec(model=...).shapes has those that only runs know"
        )
    if (calibrated := Path(name, "machine.json")).is_file():
        way_out = f"the machine calibrated there is {calibrated}"
    raise ValueError(
        f"unknown {what} {name!r}; nearest: {', '.join(nearest)}; {way_out}"
    )


def _file_of(what):
    return what if what == "software" else f"{what}s"


def _index(what):
    """The table of such things by name, read anew where a user's may have changed."""
    if os.environ.get(USER_FOLDER):
        return _indexed.__wrapped__(what)
    return _indexed(what)


@lru_cache(maxsize=16)
def _indexed(what):
    aliases = table("aliases")
    rows = {}
    names = dict(aliases.loc[aliases["what"] == what, ["alias", "name"]].to_numpy())
    for row in table(_file_of(what)).to_dict("records"):
        name = next(iter(row.values()))
        rows.setdefault(name, []).append(row)
        names[name] = name
        if row.get("quantity") == "memory":
            names[f"{name}-{row['value']}"] = name  # T4-16GB
    return _Index({_plain(what, word): name for word, name in names.items()}, rows)


def _plain(what, name):
    """A name in lower case, of software without separators; of hardware without its
    maker, and separators only where two numbers meet.
    """
    text = name.lower()
    if what in ("software", "model"):
        if what == "software":
            return re.sub(r"\W|_", "", text)
        text = re.sub(r"[\s_]+", "-", text.strip())
        text = _LLAMA.sub(r"llama\1-", _OWNER.sub("", text))
    else:
        # 80GB and 80 GiB are 80
        text = _MAKERS.sub("", re.sub(r"(\d)\s*gi?b\b", r"\1", text.replace("_", "-")))
    return re.sub(r"(?<!\d)-|-(?!\d)", "", re.sub(r"[^a-z0-9.]+", "-", text))


def _quantities(rows):
    """Values in SI units by quantity."""
    numbers = (row for row in rows if row["quantity"] not in DEVICE_CLASSES)
    return {
        row["quantity"]: float(row["value"]) * _UNITS[row["unit"]] for row in numbers
    }


def _link(name, devices):
    """A link with the rate of each of the devices of a node; the table gives that or
    the node's.
    """
    name, rows = _rows("link", name)
    values = _quantities(rows)
    rate = values.get("bandwidth_one_way_per_device")
    if not rate:
        rate = values["bandwidth_one_way_per_node"] / devices
    return Link(
        name,
        rate,
        values.get("latency", 0.0),
        bool(values.get("in_network_reduction", 0)),
    )


def _host(cluster_name):
    """Host of a cluster's nodes, None where the table has none."""
    values = _quantities(_index("host").rows.get(cluster_name, []))
    if not values:
        return None
    for quantity in ("memory", "memory_bandwidth", "link"):
        if quantity not in values:
            raise ValueError(f"hosts.csv: {cluster_name} has no {quantity!r}")
    return Host(
        f"host of {cluster_name}",
        values["memory"],
        values["memory_bandwidth"],
        values["link"],
        uplinks=int(values.get("uplinks", 0)),
        nvme_bytes=values.get("nvme", 0.0),
        nvme_read_bytes_per_s=values.get("nvme_read", 0.0),
        nvme_write_bytes_per_s=values.get("nvme_write", 0.0),
        tdp_w=values.get("tdp", math.nan),
    )
