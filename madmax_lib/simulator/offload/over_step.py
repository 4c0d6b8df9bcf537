"""What lies where, moment by moment of a step? Memory of a device and of its host while layers come and go.

PatrickStar and Gemini record in a warm-up step how much the device holds beside the model at each moment, and then keep
as many chunks there as the rest takes: dynamic placement moves chunks to the host before the peak and back after it. A
static split keeps the room of the fullest moment free all the time.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import held_layers
from madmax_lib.simulator.offload.fits import fits, room_bytes
from madmax_lib.simulator.offload.placement import Policy, bytes_by_place, device_peak, normalised
from madmax_lib.specs import Cluster, Transformer

__all__ = ["moments"]

_MODEL = ("weights", "gradients", "optimizer", "chunk tails")
_PASS = ("buckets", "gathered weights")


def moments(
    model: Transformer,
    cluster: Cluster,
    plan: Plan,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    policy: Policy | None = None,
) -> pd.DataFrame:
    """One micro-batch and the update of the fullest stage: a row per layer and pass, of a device and its node's host.

    phase (start, forward, loss, backward, update), layer, other_bytes (all on the device but the model's states),
    model_bytes, device_bytes (their sum), host_bytes, room_bytes (of the device), host_room_bytes. Chunks whose share
    is not given are placed dynamically: what the device has room for at a moment lies there. plan: with offload.
    Raises ValueError as `fits`, and for a plan without offload.
    """
    if plan.offload is None:
        raise ValueError(f"moments are those of an offloaded step, but {plan} offloads nothing")
    policy = policy or Policy()
    case = normalised(Case(model, cluster, plan, global_batch, sequence or 0, dtype))
    options = {"global_batch": global_batch, "sequence": sequence, "dtype": dtype}
    share = fits(model, cluster, case.plan, policy=policy, **options).share
    sizes = bytes_by_place(case, share, policy)
    stage = int(np.argmax(device_peak(sizes)))
    device, host = (
        {name: float(size[..., stage]) for (name, at), size in sizes.items() if at == place}
        for place in ("device", "host")
    )
    table, room = _others(device, int(held_layers(model, case.plan)[0][stage])), room_bytes(cluster, plan)
    on_device, off_device = (sum(size for name, size in part.items() if name in _MODEL) for part in (device, host))
    model_bytes = on_device
    if plan.offload == "chunks" and policy.share is None:
        model_bytes = np.minimum(room["device"] - table["other_bytes"], on_device + off_device).clip(lower=0)
    beside = sum(size for name, size in host.items() if name not in _MODEL)
    return table.assign(
        model_bytes=model_bytes,
        host_bytes=cluster.devices_per_node * (beside + on_device + off_device - model_bytes),
        device_bytes=table["other_bytes"] + model_bytes,
        room_bytes=room["device"],
        host_room_bytes=room["host"],
    )


def _others(here: dict[str, float], layers: int) -> pd.DataFrame:
    """Bytes of a device beside the model's states: activations grow layer by layer and shrink again."""
    always = here.get("context", 0.0) + here["fragmentation"]
    passing = always + sum(here.get(name, 0.0) for name in _PASS) + here.get("checkpoints on their way", 0.0)
    one, work = here["activations"] / layers, here["block at work"] + here.get("gradients on their way", 0.0)
    rows = [("start", 0, always)]
    rows += [("forward", layer, passing + one * (layer + 1)) for layer in range(layers)]
    rows.append(("loss", layers - 1, passing + here["activations"] + here["logits"]))
    rows += [("backward", layer, passing + one * (layer + 1) + work) for layer in reversed(range(layers))]
    rows.append(("update", 0, always + here["optimizer temporaries"]))
    return pd.DataFrame(rows, columns=["phase", "layer", "other_bytes"])
