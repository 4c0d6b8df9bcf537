"""What do profiles look like for more layers, larger batches, higher degrees and slower
GPUs than were measured?

Nine measured files of an A100 (`data/profiles.csv`) scaled as the script of Metis' fork
does (github.com/livingshade/Metis, behaviour recorded): in its order of operations, so
that the numbers are its own.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from madmax_lib import catalog
from madmax_lib.base.atomic import write_text
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.profiles import TIMES, LayerProfile, Profiles, plain_sum

__all__ = ["generate_profiles", "write_cluster", "write_profiles"]

_IN_FILE = {
    "memory": "memory_gb",
    "intra_bandwidth": "intra_gb_per_s",
    "inter_bandwidth": "inter_gb_per_s",
}


def generate_profiles(
    layers: int = 10,
    most: int = 128,
    *,
    slowdown: Mapping[str, float] | None = None,
    memory: str = "fork",
) -> Profiles:
    """Profiles of GPT-3 with `layers` layers for degrees and batches up to `most`, in
    powers of two.

    slowdown: time of each GPU type over that of the measured A100 (default A100 1, V100
    3.5). memory: "fork" or "upstream", whose table falls with tp and grows with the
    batch. Batches above 4 double the times, degrees above 4 halve them; the optimizer's
    time stays that of tp 4. Raises ValueError.
    """
    if layers < 3 or most < 1:
        raise ValueError(
            f"layers={layers}, most={most}: at least 3 layers and a batch of 1"
        )
    if memory not in ("fork", "upstream"):
        raise ValueError(f"memory={memory!r} is not one of fork, upstream")
    scaled = {
        (profile.tp, profile.batch): profile for profile in _measured(layers, memory)
    }
    for tp in (1, 2, 4):
        batch = 4
        while batch < most:
            scaled[tp, 2 * batch] = _scaled(scaled[tp, batch], 2.0, batch=2 * batch)
            batch *= 2
    for batch in (2**k for k in range(int(math.log2(most)) + 1)):
        tp = 4
        while tp < most:
            scaled[2 * tp, batch] = _scaled(scaled[tp, batch], 0.5, tp=2 * tp)
            tp *= 2
    factors = {"A100": 1.0, "V100": 3.5} if slowdown is None else slowdown
    every = [
        _slower(profile, device, factor)
        for device, factor in factors.items()
        for profile in scaled.values()
    ]
    return Profiles(
        {(p.device, p.tp, p.batch): p for p in sorted(every, key=lambda p: p.name)}
    )


def write_profiles(profiles: Profiles, directory: str | Path) -> None:
    """One file per profile, as `load_profiles` reads it."""
    for profile in profiles.table.values():
        sizes = profile.parameters_bytes
        content = {
            "model": {
                "model_name": profile.model_name,
                "num_layers": profile.layers,
                "parameters": {
                    "total_parameters_bytes": plain_sum(sizes),
                    "parameters_per_layer_bytes": sizes,
                },
                "num_MHA_layers": profile.layers - 2,
            },
            "execution_time": {
                **{name: getattr(profile, key) for key, name in TIMES.items()},
                "layer_compute_total_ms": profile.layer_ms,
                "between_forward_backward_time_ms": profile.between_ms,
            },
            "execution_memory": {
                "total_memory": plain_sum(profile.memory_mb),
                "layer_memory_total_mb": profile.memory_mb,
            },
        }
        write_text(
            Path(directory) / f"{profile.name}.json", json.dumps(content, indent=2)
        )


def write_cluster(
    nodes: Iterable[Node], hostfile: str | Path, clusterfile: str | Path
) -> None:
    """The host file and the cluster file of nodes, as `load_cluster` reads them."""
    hosts = ""
    types = {}
    for node in nodes:
        hosts = f"{hosts}{node.address} slots={node.gpus}\n"
        about = node.in_file()
        types[node.address] = {"instance_type": node.device} | {
            key: about[name] for key, name in _IN_FILE.items()
        }
    write_text(hostfile, hosts)
    write_text(clusterfile, json.dumps(types, indent=4))


def _measured(layers: int, memory: str) -> Iterable[LayerProfile]:
    """The nine measured files with their middle layer repeated."""
    for row in catalog.table("papers/metis/profiles").to_dict("records"):
        key = {
            "device": row.pop("device"),
            "tp": int(row.pop("tp")),
            "batch": int(row.pop("batch")),
        }
        source_layers = int(row.pop("layers"))
        _ = row.pop("source")
        value = {name: float(text) for name, text in row.items()}
        layer_ms = _stretch(value, "layer_ms", layers)
        between_ms = value["forward_backward_ms"] - plain_sum(
            _stretch(value, "layer_ms", source_layers)
        )
        times = {
            "forward_backward_ms": between_ms + plain_sum(layer_ms),
            "batch_generator_ms": value["batch_generator_ms"],
            "layernorm_ms": value["layernorm_all_reduce_ms"] / source_layers * layers,
            "embedding_ms": value["embedding_all_reduce_ms"],
            "optimizer_ms": value["optimizer_ms"] / source_layers * layers,
        }
        yield LayerProfile(
            **key,
            **times,
            layer_ms=layer_ms,
            memory_mb=_stretch(value, f"memory_{memory}_mb", layers),
            parameters_bytes=_stretch(value, "parameters_bytes", layers),
            total_ms=plain_sum(times.values()),
            between_ms=between_ms,
        )


def _stretch(value: Mapping[str, float], name: str, layers: int) -> tuple[float, ...]:
    return (
        value[f"first_{name}"],
        *[value[f"middle_{name}"]] * (layers - 2),
        value[f"last_{name}"],
    )


def _scaled(profile: LayerProfile, factor: float, **key: int) -> LayerProfile:
    """A profile of another batch or degree: the work scales, the rest of the step
    stays.
    """
    forward_backward_ms = profile.forward_backward_ms * factor
    rest = (
        profile.batch_generator_ms,
        profile.layernorm_ms,
        profile.embedding_ms,
        profile.optimizer_ms,
    )
    return replace(
        profile,
        **key,
        layer_ms=tuple(value * factor for value in profile.layer_ms),
        forward_backward_ms=forward_backward_ms,
        between_ms=profile.between_ms * factor,
        total_ms=plain_sum((forward_backward_ms, *rest)),
    )


def _slower(profile: LayerProfile, device: str, factor: float) -> LayerProfile:
    times = {name: getattr(profile, name) * factor for name in (*TIMES, "between_ms")}
    return replace(
        profile,
        device=device,
        layer_ms=tuple(value * factor for value in profile.layer_ms),
        **times,
    )
