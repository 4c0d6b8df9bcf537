"""What a training step costs the host, counted without a GPU: kernel launches,
collectives, waits and dispatch.

Every layer and every parameter of the model is there, its widths are small: the
operators are those of a GPU, and the seconds are those of issuing them on one core. A
list operator (foreach, fused) counts as many launches as CUDA's kernel of lists needs
for the tensors of the whole model. Ranks of a process group that only pretends take no
time.

python benchmarks/step.py [CASE ...]
"""

import argparse
import time
from collections import Counter
from math import ceil
from unittest.mock import patch

import pandas as pd
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from madmax_lib import catalog
from madmax_lib.plan import Plan
from madmax_lib.runs import RunSpec, parallelize

NARROW = {"hidden": 40, "heads": 20, "ffn": 160, "vocab": 256, "sequence": 8}
QWEN = {
    "hidden": 32,
    "heads": 16,
    "kv_heads": 2,
    "ffn": 96,
    "vocab": 256,
    "sequence": 8,
}
MOE = {
    "layers": 24,
    "experts": 16,
    "hidden": 32,
    "heads": 4,
    "expert_ffn": 32,
    "sequence": 8,
}
# name: (model, plan, sizes, parameters of the whole model over those of the narrow one)
CASES = {
    "GPT-2 Large, 1 GPU": ("gpt2-large", "dp1.mb1", NARROW),
    "GPT-2 Large, ZeRO-1 over 8": ("gpt2-large", "dp8.z1.mb1", NARROW),
    "GPT-2 Large, ZeRO-3 over 8": ("gpt2-large", "dp8.z3.mb1", NARROW),
    "GPT-2 Large, 2 tp": ("gpt2-large", "tp2.mb1", NARROW),
    "Qwen2.5-3B, 1 GPU": ("qwen2.5-3b", "dp1.mb1", QWEN),
    "24 layers of 16 experts, 1 GPU": ("moe-tiny", "dp1.mb1", MOE),
}
STEPS = 20
# of ATen/native/cuda/MultiTensorApply.cuh: tensors of a launch by the lists it takes,
# blocks, elements of a block
TENSORS, BLOCKS, ELEMENTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}, 320, 65536
FREE = ("empty", "detach", "alias", "view", "lift", "local_scalar_dense", "wait_tensor")
UPDATE = ("fused_adamw", "addcdiv")
WAITS = (
    "local_scalar_dense",
    "bincount",
    "nonzero",
    "repeat_interleave",
)  # the last two without a given size


class Count(TorchDispatchMode):
    """Launches and collectives of what runs inside, and waits for a value before the
    update.
    """

    def __init__(self, scale: float):
        super().__init__()
        self.counts, self.scale, self.updating = (
            Counter(launches=0, collectives=0, waits=0),
            scale,
            False,
        )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.__name__
        self.updating |= any(part in name for part in UPDATE)
        waits = (
            any(wait in name for wait in WAITS) and kwargs.get("output_size") is None
        )
        self.counts["waits"] += waits and not self.updating
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts["collectives"] += "wait" not in name
        elif not function.is_view and not any(free in name for free in FREE):
            lists = [
                arg
                for arg in args
                if isinstance(arg, (list, tuple))
                and arg
                and isinstance(arg[0], torch.Tensor)
            ]
            self.counts["launches"] += (
                self.launches(lists) if name.startswith(("_foreach", "_fused")) else 1
            )
        return function(*args, **kwargs)

    def tolist(self, tensor: torch.Tensor) -> list:
        """Reading a list waits as reading a number does."""
        self.counts["waits"] += not self.updating
        return tensor.numpy().tolist()

    def launches(self, lists: list) -> int:
        """Of one operator over lists of tensors."""
        elements = self.scale * sum(tensor.numel() for tensor in lists[0])
        return max(
            ceil(len(lists[0]) / TENSORS[min(len(lists), 5)]),
            ceil(elements / ELEMENTS / BLOCKS),
        )


def measure(name: str) -> dict:
    """A row of the table."""
    model, text, sizes = CASES[name]
    plan = Plan.parse(text)
    if plan.world_size > 1:
        dist.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=plan.world_size
        )
    job = parallelize(
        model, plan, RunSpec(model, text, global_batch=plan.dp), sizes=sizes
    )
    tokens = torch.randint(0, job.spec.vocab, (1, job.spec.sequence + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    with patch(
        "time.perf_counter", time.process_time
    ):  # other work on the machine does not count
        steps = [job.step(batch)["seconds"] for _ in range(2 + STEPS)][2:]
    phases = ("forward", "backward", "optimizer")
    host_ms = {
        f"{phase} ms": 1e3 * min(step[phase] for step in steps) for phase in phases
    }
    whole = (
        catalog.model(model).parameters / job.spec.parameters
        if sizes is not MOE
        else 1e4
    )
    with (
        Count(whole) as seen,
        patch.object(torch.Tensor, "tolist", lambda tensor: seen.tolist(tensor)),
    ):
        job.step(batch)
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"case": name, **seen.counts, **host_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    torch.set_num_threads(1)
    table = pd.DataFrame(map(measure, parser.parse_args().cases))
    print(table.to_string(index=False, float_format=lambda number: f"{number:.2f}"))


if __name__ == "__main__":
    main()
