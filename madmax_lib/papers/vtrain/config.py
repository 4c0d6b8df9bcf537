"""What does a vTrain configuration file say, and which rows of its tables can be computed?

Fields, defaults and refusals of the loader of vTrain [Bang et al., MICRO 2024] as released (behaviour recorded).
`Shape` is what the formulas need, of one configuration or of a table's rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.papers.vtrain.rules import Rules, parse_rules
from madmax_lib.plan import Plan
from madmax_lib.specs import Transformer

__all__ = ["TABLE", "Config", "Shape", "load_config", "shape_of"]

_DEGREES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
TABLE = {  # columns of vTrain's ground-truth tables
    "global_batch": "global batch", "micro_batch": "micro batch", "hidden": "hidden size", "heads": "attention heads",
    "layers": "# layers", "sequence": "sequence length", "tp": "tensor parallelism", "dp": "data parallelism",
    "pp": "pipeline parallelism",
}  # fmt: skip
_ALIASES = {  # columns of its tables and of seed 000's -> fields of a configuration
    "# GPUs": "num_gpus", "global batch": "global_batch_size", "micro batch": "micro_batch_size",
    "hidden size": "hidden_size", "attention heads": "num_attention_heads", "# layers": "num_layers",
    "sequence length": "max_length", "tensor parallelism": "tensor_parallel_size",
    "data parallelism": "data_parallel_size", "pipeline parallelism": "pipeline_parallel_size",
    "inter_node_bandwidth_gbps": "inter_node_bandwidth", "intra_node_bandwidth_gbs": "intra_node_bandwidth",
}  # fmt: skip


class Shape(NamedTuple):
    """A training step to the formulas of vTrain: numbers, or arrays (n,) of a table's rows.

    inter_gbit_per_s: of a node, intra_gbyte_per_s: of a GPU, in the units of the files; what G stands for is a rule.
    """

    tp: int
    dp: int
    pp: int
    micro_batch: int
    micro_batches: int
    layers: int
    hidden: int
    sequence: int
    vocab: int = 50257
    inter_gbit_per_s: float = 800.0
    intra_gbyte_per_s: float = 150.0
    node_size: int = 8


@dataclass(frozen=True)
class Config:
    """The fields of a configuration file with vTrain's defaults. Raises ValueError naming field, value and rule.

    num_gpus 0 follows from the degrees; one degree of 0 follows from num_gpus. inter_node_bandwidth: Gb/s of a node.
    intra_node_bandwidth: GB/s. node_size: GPUs of a node.
    """

    num_gpus: int = 0
    gpu_name: str = "A100"
    tensor_parallel_size: int = 0
    data_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    global_batch_size: int = 1920
    micro_batch_size: int = 1
    num_layers: int = 105
    hidden_size: int = 20480
    num_attention_heads: int = 128
    max_length: int = 2048
    use_gradient_bucket: bool = False
    use_checkpoint: bool = True
    pipeline_scheduling: str = "1f1b"
    inter_node_bandwidth: float = 800.0
    intra_node_bandwidth: float = 150.0
    node_size: int = 8
    trace_path: str = "trace"
    model_arch: str = "ShardedGptModel"
    vocab_size: int = 50257
    ddp_bucket_size: int | None = None

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, _typed(field.name, str(field.type), getattr(self, field.name)))
        _fill_in(self)
        _check(self)

    @classmethod
    def of(cls, row: Mapping) -> Config:
        """The configuration of a row of vTrain's or seed 000's tables, or with fields by name; the rest is ignored."""
        row = {_ALIASES.get(name, name): value for name, value in dict(row).items()}
        return cls(**{f.name: row[f.name] for f in fields(cls) if f.name in row})

    @property
    def shape(self) -> Shape:
        """What the formulas need."""
        t, d, p = (getattr(self, name) for name in _DEGREES)
        micro_batches = self.global_batch_size // (d * self.micro_batch_size)
        return Shape(t, d, p, self.micro_batch_size, micro_batches, self.num_layers, self.hidden_size, self.max_length,
                     self.vocab_size, self.inter_node_bandwidth, self.intra_node_bandwidth, self.node_size)  # fmt: skip

    @property
    def plan(self) -> Plan:
        """How the model is split, in the words of this library."""
        t, d, p = (getattr(self, name) for name in _DEGREES)
        recompute = "full" if self.use_checkpoint else "none"
        return Plan(dp=d, tp=t, pp=p, micro_batch=self.micro_batch_size, recompute=recompute, sequence_parallel=False)

    @property
    def model(self) -> Transformer:
        """The model in the words of this library: a GPT with its own output matrix."""
        name = f"gpt-h{self.hidden_size}-l{self.num_layers}"
        return Transformer(name, self.num_layers, self.hidden_size, self.num_attention_heads, 4 * self.hidden_size,
                           self.max_length, self.vocab_size, tied=False)  # fmt: skip

    @property
    def trace_name(self) -> str:
        """File that vTrain profiles into; it does not tell sequence, heads, vocabulary or GPU."""
        return f"trace_{self.hidden_size}_{self.tensor_parallel_size}_{self.micro_batch_size}"


def load_config(path: str | Path, *, derive_gpus: bool = False, rules: str | Rules = "corrected") -> Config:
    """A configuration from vTrain's JSON.

    derive_gpus: num_gpus becomes the product of the degrees; 285 of the 295 files of vTrain's case study need it.
    rules: with one_micro_batch, as released, micro_batch_size becomes global batch / dp where there is no pipeline.
    Raises OSError if it cannot be read, ValueError naming file, field, value and rule for what vTrain refuses.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    try:
        return _from_content(content, derive_gpus, parse_rules(rules))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def shape_of(table: pd.DataFrame) -> Shape:
    """The rows of a table in the columns of vTrain's ground truth, as arrays; the network of its configuration files.

    Raises ValueError for a missing column, numbers that are not positive and whole, and batches or layers that the
    plan does not divide.
    """
    if missing := [name for name in TABLE.values() if name not in table.columns]:
        raise ValueError(f"the table lacks the column(s) {', '.join(missing)}")
    columns = {name: pd.to_numeric(table[column], errors="coerce") for name, column in TABLE.items()}
    for name, values in columns.items():
        if len(bad := table.index[~((values >= 1) & (values % 1 == 0))]):
            raise ValueError(f"{TABLE[name]}={table.at[bad[0], TABLE[name]]} of row {bad[0]} is not a positive number")
    c = {name: values.to_numpy(dtype="int64") for name, values in columns.items()}
    share = c["dp"] * c["micro_batch"]
    for what, whole, part in (("global batch", c["global_batch"], share), ("# layers", c["layers"], c["pp"])):
        if len(bad := np.flatnonzero(whole % part)):
            rule = f"a multiple of {part[bad[0]]} (row {table.index[bad[0]]})"
            raise ValueError(f"{what}={whole[bad[0]]} is not {rule}")
    return Shape(c["tp"], c["dp"], c["pp"], c["micro_batch"], c["global_batch"] // share, c["layers"], c["hidden"],
                 c["sequence"])  # fmt: skip


def _from_content(content: object, derive_gpus: bool, rules: Rules) -> Config:
    if not isinstance(content, Mapping):
        raise ValueError("not a JSON object")
    if unknown := set(content) - {f.name for f in fields(Config)}:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    content = dict(content)
    if derive_gpus:
        content.pop("num_gpus", None)
    if rules.one_micro_batch and content.get("pipeline_parallel_size") == 1:
        first = Config(**content | {"micro_batch_size": 1})
        content["micro_batch_size"] = first.global_batch_size // first.data_parallel_size
    return Config(**content)


def _typed(name: str, kind: str, value: object) -> object:
    """The value as its field wants it; a whole float is an int."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "float" and number and value > 0:
        return float(value)
    if kind.startswith("int") and number and value == int(value) and value >= 0:
        return int(value)
    if kind == "int | None" and value is None:
        return None
    raise ValueError(f"{name}={value!r} is not a {'positive number' if kind in ('int', 'float') else kind}")


def _fill_in(config: Config) -> None:
    """The one of num_gpus and the degrees that is 0; the degrees must multiply to num_gpus."""
    degrees = {name: getattr(config, name) for name in _DEGREES}
    open_degrees = [name for name, value in degrees.items() if not value]
    known = 1
    for value in degrees.values():
        known *= value or 1
    if not config.num_gpus and not open_degrees:
        object.__setattr__(config, "num_gpus", known)
    elif config.num_gpus and len(open_degrees) == 1 and config.num_gpus % known == 0:
        object.__setattr__(config, open_degrees[0], config.num_gpus // known)
    elif open_degrees:
        raise ValueError(f"{open_degrees[0]} is missing and does not follow from num_gpus={config.num_gpus}")
    elif config.num_gpus != known:
        product = " x ".join(map(str, degrees.values()))
        raise ValueError(f"num_gpus={config.num_gpus} is not {' x '.join(_DEGREES)} = {product} = {known}")


def _check(config: Config) -> None:
    c = config
    t, d, p = (getattr(c, name) for name in _DEGREES)
    for name in ("global_batch_size", "micro_batch_size", "num_layers", "hidden_size", "num_attention_heads",
                 "max_length", "node_size", "vocab_size"):  # fmt: skip
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} is not at least 1")
    for what, whole, by, part in (
        ("global_batch_size", c.global_batch_size, "data_parallel_size", d),
        ("global_batch_size", c.global_batch_size, "micro_batch_size", c.micro_batch_size),
        ("global_batch_size", c.global_batch_size, "data_parallel_size x micro_batch_size", d * c.micro_batch_size),
        ("num_layers", c.num_layers, "pipeline_parallel_size", p),
        ("hidden_size", c.hidden_size, "num_attention_heads", c.num_attention_heads),
        ("num_attention_heads", c.num_attention_heads, "tensor_parallel_size", t),
    ):
        if whole % part:
            raise ValueError(f"{what}={whole} is not a multiple of {by}={part}")
    if c.pipeline_scheduling != "1f1b" or c.model_arch != "ShardedGptModel":
        raise ValueError(f"pipeline_scheduling={c.pipeline_scheduling!r}, model_arch={c.model_arch!r}: vTrain has 1f1b "
                         "and ShardedGptModel only")  # fmt: skip
