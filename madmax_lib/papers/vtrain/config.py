"""Configurations of vTrain [Bang et al., MICRO 2024], rows of its tables, and times of its
collectives.

Fields, defaults and refusals are those of its loader as released (behaviour recorded).
`Sizes` is what the formulas need, of one configuration or of a table's rows.
`VTrainRules` has a switch for each known deviation of the release from its paper or
from what one would expect.

Collectives: tables of measured all-reduces inside a node, bandwidths beyond. A
tensor-parallel group reduces its activations twice in each pass of a layer, a
data-parallel group the whole fp16 gradient of a pipeline stage once. All functions
broadcast over the arrays of a `Sizes`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import NS_PER_S
from madmax_lib.base.fields import check_fields
from madmax_lib.catalog import Transformer
from madmax_lib.catalog.data_files import read_object
from madmax_lib.plan import Plan

_DEGREES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
_MULTIPLES = (  # a field and the fields whose product divides it
    ("global_batch_size", "data_parallel_size"),
    ("global_batch_size", "data_parallel_size", "micro_batch_size"),
    ("num_layers", "pipeline_parallel_size"),
    ("hidden_size", "num_attention_heads"),
    ("num_attention_heads", "tensor_parallel_size"),
)
# the name in `Sizes`, in vTrain's ground-truth tables, in a configuration; those without
# the first as seed 000's table names them
_COLUMNS = pd.read_csv(catalog.data_file("papers/vtrain/columns.csv"))
TABLE = dict(_COLUMNS[["name", "column"]].dropna().to_numpy())
_ALIASES = dict(_COLUMNS[["column", "field"]].to_numpy())


@dataclass(frozen=True)
class VTrainRules:
    """Switches where the released vTrain deviates from what one would expect; the
    defaults are corrected.

    >>> VTrainRules(binary_units=True).giga
    1073741824.0

    recompute: what use_checkpoint repeats before a backward pass. "all": the forward
        pass of every stage with its all-reduces. "not last", as released: that of all
        stages but the last, without all-reduces, beside the wait for the gradient.
        "none", as in vTrain's single-node table: nothing.
    ring_factor: 2(n-1)/n also counts beyond the 1,024 MiB of the tables.
    whole_mib: sizes are rounded to MiB, less than half a MiB is free; else the tables
        are interpolated.
    binary_units: GB/s and Gb/s count 2**30.
    node_aware: groups and messages that leave a node use its network, shared by those
        that do so at once. Released: gradients count as inside a node whenever tp <
        node_size, messages between stages always as outside.
    one_micro_batch: without a pipeline, micro_batch is what a data-parallel rank gets.
    """

    recompute: str = "all"  # or "not last", "none"
    ring_factor: bool = True
    whole_mib: bool = False
    binary_units: bool = False
    node_aware: bool = True
    one_micro_batch: bool = False

    def __post_init__(self):
        if self.recompute not in ("all", "not last", "none"):
            raise ValueError(
                f"recompute={self.recompute!r} is not all, not last or none"
            )

    @property
    def giga(self) -> float:
        """Factor of the G in GB/s and Gb/s."""
        return 2.0**30 if self.binary_units else 1e9


_RULES = {
    "corrected": VTrainRules(),
    "released": VTrainRules(
        "not last",
        False,
        whole_mib=True,
        binary_units=True,
        node_aware=False,
        one_micro_batch=True,
    ),
}


def parse_rules(rules: str | VTrainRules) -> VTrainRules:
    """Rules, also by name. Raises ValueError for other than corrected and released."""
    if isinstance(rules, VTrainRules):
        return rules
    if rules not in _RULES:
        raise ValueError(f"rules={rules!r} is not {' or '.join(_RULES)}")
    return _RULES[rules]


class Sizes(NamedTuple):
    """Training step to the formulas of vTrain: numbers, or arrays (n,) of a table's
    rows.

    Bandwidths are in the units of the files; what G stands for is a rule.
    """

    tp: int
    dp: int
    pp: int
    micro_batch: int  # b, samples
    micro_batches: int  # m = B / (d b)
    layers: int  # L
    hidden: int  # h
    sequence: int  # s, tokens
    vocab: int = 50257  # V, of GPT-2
    inter_gbit_per_s: float = 800.0  # of a node
    intra_gbyte_per_s: float = 150.0  # of a GPU
    node_size: int = 8

    @property
    def activation_bytes(self):
        """fp16 activations of a micro-batch: what tensor parallelism reduces and a
        pipeline stage sends.
        """
        return 2 * self.micro_batch * self.sequence * self.hidden

    def gradient_bytes(self, *, first: bool, last: bool):
        """fp16 gradient of a pipeline stage: its layers, both embeddings on the first,
        the output matrix on the last.

        >>> Sizes(1, 2, 4, 1, 2, 16, 1024, 1024).gradient_bytes(first=True, last=False) / 2**20
        196.259765625
        """
        # E_layer = weights and biases of query, key and value, projection and the two
        # feed-forward products, each over t, and two layer norms of 2h: about 12 h^2/t.
        # The embedding of positions is not split over t.
        h = self.hidden
        t = self.tp
        attention = 3 * h * (h // t) + (3 * h) // t + h * (h // t) + h
        feed_forward = h * (4 * h // t) + (4 * h) // t + 4 * h * (h // t) + h
        vocabulary = (self.vocab // t) * h
        ends = first * (vocabulary + self.sequence * h) + last * vocabulary
        layer = 4 * h + attention + feed_forward
        return 2 * (self.layers // self.pp * layer + ends)


@dataclass(frozen=True)
class Config:
    """Fields of a configuration file with vTrain's defaults.

    >>> Config(tensor_parallel_size=8, data_parallel_size=12, pipeline_parallel_size=35).num_gpus
    3360

    Raises ValueError naming field, value and rule.
    """

    num_gpus: int = 0  # 0 follows from the degrees
    gpu_name: str = "A100"
    tensor_parallel_size: int = 0  # one degree of 0 follows from num_gpus
    data_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    global_batch_size: int = 1920  # samples
    micro_batch_size: int = 1
    num_layers: int = 105
    hidden_size: int = 20480
    num_attention_heads: int = 128
    max_length: int = 2048  # tokens of a sample
    use_gradient_bucket: bool = False
    use_checkpoint: bool = True  # recompute forward, see `VTrainRules.recompute`
    pipeline_scheduling: str = "1f1b"
    inter_node_bandwidth: float = 800.0  # Gb/s of a node
    intra_node_bandwidth: float = 150.0  # GB/s of a GPU
    node_size: int = 8  # GPUs of a node
    trace_path: str = "trace"
    model_arch: str = "ShardedGptModel"
    vocab_size: int = 50257
    ddp_bucket_size: int | None = None

    def __post_init__(self):
        sizes = _COLUMNS["field"][:6]
        rates = ("inter_node_bandwidth", "intra_node_bandwidth")
        check_fields(self, "node_size", "vocab_size", *sizes, *rates)
        _fill_in(self)
        _check(self)

    @classmethod
    def of(cls, row: Mapping) -> "Config":
        """Configuration of a row of vTrain's or seed 000's tables, or with fields by
        name; the rest is ignored.
        """
        row = {_ALIASES.get(name, name): value for name, value in dict(row).items()}
        return cls(**{f.name: row[f.name] for f in fields(cls) if f.name in row})

    @property
    def shape(self) -> Sizes:
        """Sizes that the formulas need."""
        t, d, p = (getattr(self, name) for name in _DEGREES)
        micro_batches = self.global_batch_size // (d * self.micro_batch_size)
        size = self.num_layers, self.hidden_size, self.max_length, self.vocab_size
        network = self.inter_node_bandwidth, self.intra_node_bandwidth, self.node_size
        return Sizes(t, d, p, self.micro_batch_size, micro_batches, *size, *network)

    @property
    def plan(self) -> Plan:
        """Split of the model in the words of this library."""
        return Plan(
            dp=self.data_parallel_size,
            tp=self.tensor_parallel_size,
            pp=self.pipeline_parallel_size,
            micro_batch=self.micro_batch_size,
            recompute="full" if self.use_checkpoint else "none",
            sequence_parallel=False,
        )

    @property
    def model(self) -> Transformer:
        """The model in the words of this library: a GPT with its own output matrix."""
        return Transformer(
            f"gpt-h{self.hidden_size}-l{self.num_layers}",
            self.num_layers,
            self.hidden_size,
            self.num_attention_heads,
            4 * self.hidden_size,
            self.max_length,
            self.vocab_size,
            tied=False,
        )


def load_config(
    path: str | Path,
    *,
    derive_gpus: bool = False,
    rules: str | VTrainRules = "corrected",
) -> Config:
    """Read a configuration from vTrain's JSON.

    derive_gpus: num_gpus becomes the product of the degrees; 285 of the 295 files of
    vTrain's case study need it.
    rules: with one_micro_batch, as released, micro_batch_size becomes global batch / dp
    where there is no pipeline. Raises OSError if it cannot be read, ValueError naming
    file, field, value and rule for what vTrain refuses.
    """
    content = read_object(Path(path))
    try:
        return _from_content(content, derive_gpus, parse_rules(rules))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def shape_of(table: pd.DataFrame) -> Sizes:
    """Rows of a table in the columns of vTrain's ground truth, as arrays; the network
    of its configuration files.

    Raises ValueError for a missing column and for a row that is no valid configuration.
    """
    if missing := [name for name in TABLE.values() if name not in table.columns]:
        raise ValueError(f"the table lacks the column(s) {', '.join(missing)}")
    rows = table[list(TABLE.values())].rename(columns=_ALIASES).to_dict("records")
    shapes = []
    for index, row in zip(table.index, rows, strict=True):
        try:
            shapes.append(Config(**row).shape)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from None
    columns = pd.DataFrame(shapes, columns=Sizes._fields)
    return Sizes(*(columns[name].to_numpy() for name in columns))


def _from_content(content, derive_gpus, rules):
    if unknown := set(content) - {f.name for f in fields(Config)}:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    if derive_gpus:
        content.pop("num_gpus", None)
    if rules.one_micro_batch and content.get("pipeline_parallel_size") == 1:
        # b = B / d: without a pipeline vTrain accumulates no gradients
        one = Config(**content | {"micro_batch_size": 1})
        content["micro_batch_size"] = one.global_batch_size // one.data_parallel_size
    return Config(**content)


def _fill_in(config):
    """Set the one of num_gpus and the degrees that is 0; the degrees must multiply to
    num_gpus.
    """
    degrees = {name: getattr(config, name) for name in _DEGREES}
    missing = [name for name, value in degrees.items() if not value]
    gpus = config.num_gpus
    product = math.prod(value or 1 for value in degrees.values())
    if not gpus and not missing:
        object.__setattr__(config, "num_gpus", product)
    elif gpus and len(missing) == 1 and gpus % product == 0:
        object.__setattr__(config, missing[0], gpus // product)
    elif missing:
        raise ValueError(
            f"{missing[0]} is missing and does not follow from num_gpus={gpus}"
        )
    elif gpus != product:
        factors = " x ".join(map(str, degrees.values()))
        raise ValueError(
            f"num_gpus={gpus} is not {' x '.join(_DEGREES)} = {factors} = {product}"
        )


def _check(config):
    for field, *parts in _MULTIPLES:
        size = getattr(config, field)
        part = math.prod(getattr(config, name) for name in parts)
        if size % part:
            raise ValueError(
                f"{field}={size} is not a multiple of {' x '.join(parts)}={part}"
            )
    if (config.pipeline_scheduling, config.model_arch) != ("1f1b", "ShardedGptModel"):
        choice = (
            f"pipeline_scheduling={config.pipeline_scheduling!r}, "
            f"model_arch={config.model_arch!r}"
        )
        raise ValueError(f"{choice}: vTrain has 1f1b and ShardedGptModel only")


_MIB = 2**20
_NAME = re.compile(r"AR_GPU(\d+)_1M_(\d+)M_LUT(?:\.csv)?")
# of a node, as vTrain counts them whatever node_size is
_NICS = 4
_GPUS_PER_NIC = 2


@dataclass(frozen=True)
class Nccl:
    """Measured all-reduces of one kind of GPU, by group size.

    >>> RINGS.duration_s  # no tables: all-reduces inside a node are rings
    {}
    """

    duration_s: Mapping[int, np.ndarray]  # in place, (sizes,) at 1, 2, 3, ... MiB
    bus_gb_per_s: Mapping[int, float]  # bus bandwidth at the largest size


RINGS = Nccl({}, {})  # no tables: all-reduces inside a node are rings at its bandwidth


def load_nccl(directory: str | Path) -> Nccl:
    """The tables AR_GPU{n}_1M_{m}M_LUT of one kind of GPU, as nccl-tests prints them:
    time in ns, bandwidth in GB/s.

    Raises FileNotFoundError for a folder without tables, ValueError for a table with
    other columns or sizes.
    """
    directory = Path(directory)
    tables = {}
    for path in sorted(directory.glob("AR_GPU*")):
        if match := _NAME.fullmatch(path.name):
            tables[int(match[1])] = _read(path)
    if not tables:
        inner = sorted({path.parent.name for path in directory.glob("*/AR_GPU*")})
        hint = f"; it has folders of GPUs: {', '.join(inner)}" if inner else ""
        raise FileNotFoundError(f"{directory}: no AR_GPU<n>_1M_<m>M_LUT tables{hint}")
    # vTrain reads the in-place columns, as gradients are reduced in place
    duration_s = {ranks: table[:, 5] / NS_PER_S for ranks, table in tables.items()}
    bus = {ranks: float(table[-1, 6]) for ranks, table in tables.items()}
    return Nccl(duration_s, bus)


def _read(path):
    """(sizes, 7): bytes, count, type, then time and bus bandwidth out of place and in
    place.
    """
    table = pd.read_csv(path)
    if table.shape[1] != 7 or table.empty:
        raise ValueError(
            f"{path}: {table.shape[1]} columns and {len(table)} rows are not an "
            "all-reduce table of 7"
        )
    values = table.apply(pd.to_numeric, errors="coerce").to_numpy(float)
    sizes = _MIB * np.arange(1, len(values) + 1)
    if not np.array_equal(values[:, 0], sizes) or not (values[:, 3:] > 0).all():
        raise ValueError(
            f"{path}: sizes are not 1, 2, 3, ... MiB or a time is not positive"
        )
    return values


def tensor_s(shape: Sizes, nccl: Nccl, rules: VTrainRules):
    """Seconds of one all-reduce of a tensor-parallel group."""
    leaves_node = rules.node_aware & (np.asarray(shape.tp) > shape.node_size)
    group = (shape.tp, 1, leaves_node)
    return _all_reduce_s(shape, nccl, rules, group, shape.activation_bytes)


def gradient_s(shape: Sizes, nccl: Nccl, rules: VTrainRules) -> np.ndarray:
    """Seconds (3, n) of the gradient all-reduce of the first, a middle and the last
    stage, NaN where there is none.
    """
    tp = np.asarray(shape.tp)
    pp = np.asarray(shape.pp)
    # As released the network counts only from tp >= node_size on, even if the
    # data-parallel group spans nodes. Its ranks are tp GPUs apart.
    leaves_node = tp >= shape.node_size
    if rules.node_aware:
        leaves_node = tp * shape.dp > shape.node_size
    group = (shape.dp, tp, leaves_node)
    # (first, last, whether there is one): a single stage is both
    stages = ((True, pp == 1, True), (False, False, pp > 2), (False, True, pp > 1))
    times_s = []
    for first, last, exists in stages:
        size_bytes = shape.gradient_bytes(first=first, last=last)
        seconds = _all_reduce_s(shape, nccl, rules, group, size_bytes)
        times_s.append(np.where(exists, seconds, np.nan))
    return np.stack(times_s)


def send_s(shape: Sizes, rules: VTrainRules):
    """Seconds that a pipeline stage is blocked by sending a micro-batch's activations
    or their gradient.
    """
    node_rate = shape.inter_gbit_per_s * rules.giga / 8
    if not rules.node_aware:
        # P = 2 x (2 b s h) / (W / 8 / 4): one of four NICs, which two GPUs share; as
        # released inside a node too
        return _GPUS_PER_NIC * shape.activation_bytes / (node_rate / _NICS)
    inside = np.asarray(shape.tp) * shape.dp * shape.pp <= shape.node_size
    intra_rate = shape.intra_gbyte_per_s * rules.giga
    rate = np.where(inside, intra_rate, node_rate / shape.node_size)
    return shape.activation_bytes / rate


def communication_s(
    config: Config | Mapping, nccl: Nccl, rules: str | VTrainRules = "released"
) -> float:
    """Seconds of all all-reduces of a step, summed over pipeline stages, as vTrain
    reports them for its stream Comm.

    Four per layer and micro-batch over the tensor-parallel group, one per stage over
    the data-parallel group; those of a recomputed forward pass are not counted, sending
    is not either. config: or a row with its fields.
    """
    rules = parse_rules(rules)
    shape = (config if isinstance(config, Config) else Config.of(config)).shape
    gradients = gradient_s(shape, nccl, rules)
    first_s, middle_s, last_s = (float(np.nan_to_num(part_s)) for part_s in gradients)
    # comm = 4 L m AR(t, 2 b s h) + sum over stages of AR(d, G)
    calls = 4 * shape.layers * shape.micro_batches
    activations_s = calls * float(tensor_s(shape, nccl, rules))
    return activations_s + first_s + max(shape.pp - 2, 0) * middle_s + last_s


def _all_reduce_s(shape, nccl, rules, group, size_bytes):
    """Seconds of an all-reduce, by the network if its group leaves the node.

    group: ranks, GPUs from one to the next, and whether it leaves the node; numbers, or
    arrays (n,).
    """
    *group, size_bytes = np.broadcast_arrays(*group, size_bytes)
    ranks, stride, leaves_node = group
    # ring: T = 2(n-1)/n x bytes / bandwidth
    ring = 2 * (ranks - 1) / ranks
    intra_rate = shape.intra_gbyte_per_s * rules.giga
    inside_s = ring * size_bytes / intra_rate
    for n in nccl.duration_s:
        inside_s = np.where(ranks == n, _table_s(nccl, n, size_bytes, rules), inside_s)
    rate = shape.inter_gbit_per_s * rules.giga / 8
    if rules.node_aware:
        # the groups that leave a node side by side share its network
        rate = np.minimum(rate / np.minimum(stride, shape.node_size), intra_rate)
    outside_s = ring * size_bytes / rate
    return np.where(ranks > 1, np.where(leaves_node, outside_s, inside_s), 0.0)


def _table_s(nccl, ranks, size_bytes, rules):
    """Seconds from the table of a group size, beyond its end from the bus bandwidth
    there.
    """
    table_s = nccl.duration_s[ranks]
    mib = size_bytes / _MIB
    # As released bytes / bus bandwidth beyond the table, without the ring factor: up to
    # 1.75 times too fast for 8 ranks.
    ring = 2 * (ranks - 1) / ranks if rules.ring_factor else 1.0
    beyond = ring / (nccl.bus_gb_per_s[ranks] * rules.giga)
    if not rules.whole_mib:
        inside = np.interp(mib, np.arange(1, len(table_s) + 1), table_s)
        return np.where(mib > len(table_s), size_bytes * beyond, inside)
    # entry k holds k + 1 MiB; what rounds to 0 MiB is free
    mib = np.rint(mib)
    entry = np.clip(mib, 1, len(table_s)).astype(int) - 1
    inside = np.where(mib < 1, 0.0, table_s[entry])
    return np.where(mib > len(table_s), mib * _MIB * beyond, inside)
