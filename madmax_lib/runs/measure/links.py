"""How fast do ranks exchange messages? Collectives by kind, group and size, as
`collectives=` takes them.

    torchrun --nproc-per-node 8 -m madmax_lib.runs.measure.links collectives.csv quick

Groups are of 2, 4, 8, ... neighbours and of all, and one rank of every node where nodes
have more; groups of neighbours work all at once, as they do in a step. Sizes are those
of nccl-tests: the whole buffer of a rank, the gathered one, or the input of a
reduce-scatter; send_recv is one way between two ranks, there and back by turns, and
passes it around a ring of more. Seconds are medians of the repeats, mean of the ranks.
Without a file all ranks add up their numbers once, to see whether they reach each
other.
"""

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from madmax_lib.runs.measure.bench import append_row, timing
from madmax_lib.runs.measure.peak_rates import TORCH_DTYPES, device_name, native_dtype
from madmax_lib.runs.watch import guard

__all__ = ["main"]

_BYTES = [4**power for power in range(6, 15)]  # 4 KiB to 256 MiB
_MOST_BYTES = {"quick": 2**20, "normal": 2**24, "detailed": 2**28}


def main(path: str = "", size: str = "normal") -> None:
    """As one rank of torchrun: write the table, on the first; without a path only see
    whether all ranks answer.
    """
    guard()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world, on_node = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=120)
    )
    whole = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(whole)
    if whole.item() != world * (world + 1) / 2:
        raise RuntimeError(
            f"the sum over {world} ranks is {whole.item():g}, not "
            f"{world * (world + 1) / 2:g}"
        )
    for together in _groups(world, on_node) if path else []:
        for members, group in [
            (members, dist.new_group(members)) for members in together
        ]:
            if rank in members:
                _time_group(
                    group, members, device, size, Path(path) if rank == 0 else None
                )
        dist.barrier()
    dist.destroy_process_group()


def _groups(world: int, on_node: int) -> list[list[list[int]]]:
    """Ranks of the groups that are timed at once, the first one's times being written.

    >>> _groups(4, 2)
    [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2]]]
    """
    counts = sorted(
        {2**power for power in range(1, world.bit_length()) if 2**power < world}
        | {world} - {1}
    )
    across = [[list(range(0, world, on_node))]] if world > on_node > 1 else []
    return [
        [list(range(at, at + size)) for at in range(0, world - size + 1, size)]
        for size in counts
    ] + across


def _time_group(
    group, members: list[int], device: str, size: str, path: Path | None
) -> None:
    """Time every kind and size on the ranks of a group; the first of them writes."""
    ranks = len(members)
    dtype = TORCH_DTYPES[native_dtype("auto", device)]
    nodes = len({rank // int(os.environ["LOCAL_WORLD_SIZE"]) for rank in members})
    here = {
        "backend": dist.get_backend(),
        "machine": device_name(device),
        "dtype": native_dtype("auto", device),
    }
    for asked in (number for number in _BYTES if number <= _MOST_BYTES[size]):
        count = max(asked // dtype.itemsize // ranks, 1) * ranks
        whole, other = (
            torch.zeros(count, dtype=dtype, device=device) for _ in range(2)
        )
        for kind, run in _calls(whole, other, group, members).items():
            row = {
                "collective": kind,
                "ranks": ranks,
                "nodes": nodes,
                "size_bytes": whole.nbytes,
            }
            seconds = timing(run, size, device == "cuda", group=group)
            turns = 1 + (kind == "send_recv" and ranks == 2)
            seconds |= {
                name: seconds[name] / turns for name in ("median_s", "low_s", "high_s")
            }
            row |= {"seconds": seconds.pop("median_s")} | seconds | here
            if path:
                append_row(path, row)


def _calls(whole: torch.Tensor, other: torch.Tensor, group, members: list[int]) -> dict:
    """What to run, by kind. torch 2.13 gave two of them new names and warns of the old
    ones.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part = other[: len(other) // len(members)]
    at = members.index(dist.get_rank())
    after, before = (members[(at + hop) % len(members)] for hop in (1, -1))

    def there_and_back() -> (
        None
        # both ways at once gloo takes once or twice as long, whichever side is ready first
    ):
        for sends in (at == 0, at == 1):
            if sends:
                dist.send(whole, after, group)
            else:
                dist.recv(other, before, group)

    def pass_on() -> None:
        ops = [
            dist.P2POp(dist.isend, whole, after, group),
            dist.P2POp(dist.irecv, other, before, group),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    return {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(gather, whole, part, group=group),
        "reduce_scatter": partial(scatter, part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, other, whole, group=group),
        "broadcast": partial(dist.broadcast, whole, members[0], group=group),
        "send_recv": there_and_back if len(members) == 2 else pass_on,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
