"""Profiles for more layers, larger batches, higher degrees and slower GPUs than were
measured.

Nine measured files of an A100 (`data/profiles.csv`) scaled as the script of Metis' fork
does (github.com/livingshade/Metis, behaviour recorded): in its order of operations, so
that the numbers are its own.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from madmax_lib import catalog
from madmax_lib.base.atomic import write_text
from madmax_lib.planner.hetero import Node
from madmax_lib.planner.hetero.profiles import TIMES, LayerProfile, Profiles, plain_sum

_IN_FILE = {  # key of the cluster file: field of a node
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
    # 1, 2 and 4 are measured; first batches double the work, then degrees halve it
    powers = [2**k for k in range(most.bit_length())]
    doubled = [size for size in powers if 4 <= size < most]
    for tp, batch in product((1, 2, 4), doubled):
        scaled[tp, 2 * batch] = _scaled(scaled[tp, batch], 2.0, batch=2 * batch)
    for batch, tp in product(powers, doubled):
        scaled[2 * tp, batch] = _scaled(scaled[tp, batch], 0.5, tp=2 * tp)
    # the script takes a V100 for 3.5 times slower
    factors = {"A100": 1.0, "V100": 3.5} if slowdown is None else slowdown
    every = []
    for device, factor in factors.items():
        for profile in scaled.values():
            # a slower GPU takes longer for all, its memory and weights stay
            times = {
                name: getattr(profile, name) * factor for name in (*TIMES, "between_ms")
            }
            times["layer_ms"] = tuple(value * factor for value in profile.layer_ms)
            every.append(replace(profile, device=device, **times))
    every.sort(key=lambda profile: profile.name)
    return Profiles({(p.device, p.tp, p.batch): p for p in every})


def write_profiles(profiles: Profiles, directory: str | Path) -> None:
    """Write one file per profile, as `load_profiles` reads it."""
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
    """Write the host file and the cluster file of nodes, as `load_cluster` reads them."""
    hosts = ""
    types = {}
    for node in nodes:
        hosts += f"{node.address} slots={node.gpus}\n"
        about = node.in_file()
        values = {key: about[name] for key, name in _IN_FILE.items()}
        types[node.address] = {"instance_type": node.device, **values}
    write_text(hostfile, hosts)
    write_text(clusterfile, json.dumps(types, indent=4))


def _measured(layers, memory):
    """The nine measured files with their middle layer repeated."""
    # texts, read by `float`: the parser of pandas is off in the last bit
    for texts in catalog.table("papers/metis/profiles").to_dict("records"):
        device = texts.pop("device")
        del texts["source"]
        row = {name: float(text) for name, text in texts.items()}
        layer_ms = _stretch(row, "layer_ms", layers)
        # time outside of layers, which more layers do not lengthen
        measured_ms = plain_sum(_stretch(row, "layer_ms", int(row["layers"])))
        between_ms = row["forward_backward_ms"] - measured_ms
        times = {
            "forward_backward_ms": between_ms + plain_sum(layer_ms),
            "batch_generator_ms": row["batch_generator_ms"],
            "layernorm_ms": row["layernorm_all_reduce_ms"] / row["layers"] * layers,
            "embedding_ms": row["embedding_all_reduce_ms"],
            "optimizer_ms": row["optimizer_ms"] / row["layers"] * layers,
        }
        yield LayerProfile(
            device=device,
            tp=int(row["tp"]),
            batch=int(row["batch"]),
            **times,
            layer_ms=layer_ms,
            memory_mb=_stretch(row, f"memory_{memory}_mb", layers),
            parameters_bytes=_stretch(row, "parameters_bytes", layers),
            total_ms=plain_sum(times.values()),
            between_ms=between_ms,
        )


def _stretch(row, name, layers):
    """Values of all layers from those of the first, a middle and the last one."""
    values = [row[f"{where}_{name}"] for where in ("first", "middle", "last")]
    return tuple(np.repeat(values, [1, layers - 2, 1]).tolist())


def _scaled(profile, factor, **key):
    """Profile of another batch or degree: the work scales, the rest of the step
    stays.
    """
    work = {
        "layer_ms": tuple(value * factor for value in profile.layer_ms),
        "forward_backward_ms": profile.forward_backward_ms * factor,
        "between_ms": profile.between_ms * factor,
    }
    # the sum in this order, to the last bit
    rest = ("batch_generator_ms", "layernorm_ms", "embedding_ms", "optimizer_ms")
    times = [work["forward_backward_ms"], *(getattr(profile, name) for name in rest)]
    return replace(profile, **key, **work, total_ms=plain_sum(times))
