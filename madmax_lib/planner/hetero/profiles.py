"""Profiles: how long each layer of a model takes on each GPU type, at each tensor
parallel degree and batch.

Profile files of Metis [Um et al., USENIX ATC 2024]: one JSON file
DeviceType.TYPE_tpN_bsN.json per key. Times stay in ms and memory in MB as in the files:
Metis' results depend on every bit of them. Files are read in sorted order, never in
that of the folder. Lengths and plausibility are checked, since published samples have
lists that are too short and times in another unit.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path

from madmax_lib.base import is_number
from madmax_lib.catalog import read_object

_NAME = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tp>\d+)_bs(?P<batch>\d+)\.json")
# An optimizer time that many times another batch's is in another unit: it does not hang
# on the batch.
_SLIP = 100.0
TIMES = {  # field -> name in the file
    "total_ms": "total_time_ms",
    "forward_backward_ms": "forward_backward_time_ms",
    "batch_generator_ms": "batch_generator_time_ms",
    "layernorm_ms": "layernorm_grads_all_reduce_time_ms",
    "embedding_ms": "embedding_grads_all_reduce_time_ms",
    "optimizer_ms": "optimizer_time_ms",
}


def plain_sum(values: Iterable[float]) -> float:
    """Sum from left to right; from Python 3.12 on `sum` compensates rounding and so
    gives other last bits.
    """
    return reduce(add, values, 0)


@dataclass(frozen=True)
class LayerProfile:
    """One iteration of the whole model on `tp` GPUs of one type with a micro-batch of
    `batch` samples.

    Raises ValueError for lengths that differ, values that are not finite or negative,
    and parts that exceed the whole.
    """

    device: str
    tp: int
    batch: int
    layer_ms: tuple[float, ...]
    memory_mb: tuple[float, ...]  # of one GPU by layer
    parameters_bytes: tuple[float, ...]  # by layer
    total_ms: float  # the iteration
    forward_backward_ms: float  # exceeds the sum of layer_ms by what `sync_ms` says
    batch_generator_ms: float  # loading of the micro-batch
    layernorm_ms: float  # all-reduce of its gradients
    embedding_ms: float  # likewise
    optimizer_ms: float  # one of two updates
    between_ms: float  # `sync_ms` as the file has it
    model_name: str = "GPT3"  # of the file

    def __post_init__(self):
        for name in ("memory_mb", "parameters_bytes"):
            if len(getattr(self, name)) != self.layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for "
                    f"{self.layers} layers"
                )
        for name in ("layer_ms", "memory_mb", "parameters_bytes", *TIMES):
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if not is_number(value):
                    raise ValueError(f"{name}={value!r} is not a number of at least 0")
        if not self.layers or min(self.layer_ms) <= 0:
            raise ValueError("layer_ms must have an entry above 0 for every layer")
        passes_ms = self.forward_backward_ms
        layers_ms = plain_sum(self.layer_ms)
        # files have the times rounded: a millionth is no contradiction
        if passes_ms - layers_ms < -1e-6 * passes_ms:
            raise ValueError(
                f"forward_backward_ms={passes_ms:g} is below the sum {layers_ms:g} of "
                "layers"
            )
        for name in TIMES:
            if (value := getattr(self, name)) > self.total_ms * (1 + 1e-6):
                raise ValueError(
                    f"{name}={value:g} exceeds total_ms={self.total_ms:g}: is a "
                    "value in another unit?"
                )

    @property
    def name(self) -> str:
        """Name of its file without .json, such as DeviceType.A100_tp4_bs4."""
        return f"DeviceType.{self.device}_tp{self.tp}_bs{self.batch}"

    @property
    def layers(self) -> int:
        """Number of layers, with the embedding first and the head last."""
        return len(self.layer_ms)

    @property
    def sync_ms(self) -> float:
        """Forward and backward time outside of the layers."""
        return self.forward_backward_ms - plain_sum(self.layer_ms)


@dataclass(frozen=True)
class Profiles:
    """Profiles by (device, tp, batch), in sorted order of their files. All have the
    same number of layers.
    """

    table: Mapping[tuple[str, int, int], LayerProfile] = field(hash=False)

    def __post_init__(self):
        if not self.table:
            raise ValueError("there are no profiles")
        first = self.named(None)
        profiles = self.table.values()
        for profile in profiles:
            if profile.layers != first.layers:
                raise ValueError(
                    f"{profile.name} has {profile.layers} layers, {first.name} has "
                    f"{first.layers}"
                )
            least_ms = min(
                other.optimizer_ms
                for other in profiles
                if (other.device, other.tp) == (profile.device, profile.tp)
            )
            if profile.optimizer_ms > _SLIP * least_ms:
                rule = (
                    f"over {_SLIP:g} x the {least_ms:g} of another batch: is it "
                    "in another unit?"
                )
                raise ValueError(
                    f"{profile.name}: optimizer_ms={profile.optimizer_ms:g} is {rule}"
                )

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.named(None).layers

    @property
    def devices(self) -> tuple[str, ...]:
        """GPU types, sorted."""
        return tuple(sorted({device for device, _, _ in self.table}))

    def get(self, device: str, tp: int, batch: int) -> LayerProfile:
        """The profile of a key; ValueError that names what there is."""
        if profile := self.table.get((device, tp, batch)):
            return profile
        raise ValueError(
            f"no profile for {device} tp {tp} batch {batch}; there are "
            f"{covered(list(self.table), device)}"
        )

    def named(self, name: str | tuple[str, int, int] | None) -> LayerProfile:
        """The profile of "A100_tp4_bs4" or of its whole file name; None is the first in
        sorted order.
        """
        if name is None:
            return next(iter(self.table.values()))
        if isinstance(name, tuple):
            return self.get(*name)
        stem = name.removeprefix("DeviceType.").removesuffix(".json")
        key = _NAME.fullmatch(f"DeviceType.{stem}.json")
        if not key:
            raise ValueError(
                f"{name!r} is not the name of a profile such as A100_tp4_bs4"
            )
        return self.get(key["device"], int(key["tp"]), int(key["batch"]))


def covered(keys: Sequence[tuple[str, int, int]], device: str) -> str:
    """Degrees and batches of a GPU type among keys (type, tp, batch), as text; the types
    where there are none.
    """
    pairs = [pair for name, *pair in keys if name == device]
    if not pairs:
        return f"types {', '.join(sorted({name for name, *_ in keys}))}"
    degrees, batches = (
        ", ".join(map(str, sorted(set(values)))) for values in zip(*pairs, strict=True)
    )
    return f"tp {degrees}; batch {batches}"


def load_profiles(directory: str | Path) -> Profiles:
    """All profiles of a folder, whatever the order in which it lists them.

    Raises FileNotFoundError without a folder or a profile in it, ValueError naming
    file, field and rule.
    """
    if not (directory := Path(directory)).is_dir():
        raise FileNotFoundError(f"{directory} is not a folder of profiles")
    paths = sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    if not paths:
        raise FileNotFoundError(f"{directory} holds no DeviceType.TYPE_tpN_bsN.json")
    return Profiles({(p.device, p.tp, p.batch): p for p in map(_read_profile, paths)})


def _read_profile(path):
    name = _NAME.fullmatch(path.name)
    content = read_object(path)
    try:
        model = content["model"]
        times = content["execution_time"]
        memory = content["execution_memory"]
        layer_ms = tuple(times["layer_compute_total_ms"])
        if len(layer_ms) != model["num_layers"]:
            raise ValueError(
                f"layer_compute_total_ms has {len(layer_ms)} entries, num_layers is "
                f"{model['num_layers']}"
            )
        values = {key: times[name] for key, name in TIMES.items()}
        # older files leave it out
        outside_ms = values["forward_backward_ms"] - plain_sum(layer_ms)
        between_ms = times.get("between_forward_backward_time_ms", outside_ms)
        return LayerProfile(
            device=name["device"],
            tp=int(name["tp"]),
            batch=int(name["batch"]),
            layer_ms=layer_ms,
            memory_mb=tuple(memory["layer_memory_total_mb"]),
            parameters_bytes=tuple(model["parameters"]["parameters_per_layer_bytes"]),
            between_ms=between_ms,
            model_name=str(model.get("model_name", "")),
            **values,
        )
    except KeyError as error:
        raise ValueError(f"{path}: field {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
