"""Times of messages between ranks: collectives by kind, group and size, as
`collectives=` takes them.

    torchrun --nproc-per-node 8 -m madmax_lib.runs.measure.links collectives.csv quick

Groups are of 2, 4, 8, ... neighbours and of all, and one rank of every node where nodes
have more; groups of neighbours work all at once, as they do in a step. Sizes are those
of nccl-tests: the whole buffer of a rank, the gathered one (of a gather the root's), or
the input of a reduce-scatter; send_recv is one way between two ranks, there and back by
turns, and passes it around a ring of more. Seconds are medians of the repeats, mean of
the ranks. Without a file all ranks add up their numbers once, to see whether they reach
each other.
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

_SIZES_BYTES = [4**power for power in range(6, 15)]  # 4 KiB to 256 MiB
_MOST_BYTES = {"quick": 2**20, "normal": 2**24, "detailed": 2**28}
_TIMEOUT = timedelta(seconds=120)


def main(path: str = "", size: str = "normal") -> None:
    """Write the table, on the first rank of torchrun; without a path only see whether
    all ranks answer.
    """
    guard()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    options = {}
    if device == "cuda":
        # bound to its GPU, a rank links up at once, and never by a guess at a barrier
        options["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(options["device_id"])
    backend = "nccl" if options else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT, **options)
    # 1 + 2 + ... + n = n (n + 1) / 2
    total = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(total)
    right = world * (world + 1) / 2
    if total.item() != right:
        raise RuntimeError(
            f"the sum over {world} ranks is {total.item():g}, not {right:g}"
        )
    for together in _groups(world, on_node) if path else []:
        # every rank makes every group, in one order: making one is collective
        groups = [(members, dist.new_group(members)) for members in together]
        for members, group in groups:
            if rank in members:
                rows = _timed_rows(group, members, device, size)
                for row in rows:
                    if rank == 0:
                        append_row(Path(path), row)
        dist.barrier()
    dist.destroy_process_group()


def _groups(world, on_node):
    """Ranks of the groups that are timed at once, the first one's times being written.

    >>> _groups(4, 2)
    [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2]]]
    """
    counts = [2**power for power in range(1, world.bit_length()) if 2**power < world]
    if world > 1:
        counts.append(world)
    groups = [
        [list(range(first, first + size)) for first in range(0, world - size + 1, size)]
        for size in counts
    ]
    if world > on_node > 1:
        groups.append([list(range(0, world, on_node))])  # a rank of every node
    return groups


def _timed_rows(group, members, device, size):
    """Rows of every size and kind on the ranks of a group, as they are timed."""
    ranks = len(members)
    name = native_dtype("auto", device)
    dtype = TORCH_DTYPES[name]
    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = len({rank // on_node for rank in members})
    for size_bytes in _SIZES_BYTES:
        if size_bytes > _MOST_BYTES[size]:
            break
        # as many elements as give each rank an equal part, one at least
        count = max(size_bytes // dtype.itemsize // ranks, 1) * ranks
        buffer = torch.zeros(count, dtype=dtype, device=device)
        other = torch.zeros_like(buffer)
        for kind, run in _calls(buffer, other, group, members).items():
            times = timing(run, size, device == "cuda", group=group)
            # there and back are two messages
            messages = 2 if kind == "send_recv" and ranks == 2 else 1
            yield {
                "collective": kind,
                "ranks": ranks,
                "nodes": nodes,
                "size_bytes": buffer.nbytes,
                "seconds": times["median_s"] / messages,
                "low_s": times["low_s"] / messages,
                "high_s": times["high_s"] / messages,
                "repeats": times["repeats"],
                "backend": dist.get_backend(),
                "machine": device_name(device),
                "dtype": name,
            }


def _calls(buffer, other, group, members):
    """Collectives to be timed, by kind."""
    # torch 2.13 gave two of them new names and warns of the old ones
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part = other[: len(other) // len(members)]
    index = members.index(dist.get_rank())
    parts = list(buffer.chunk(len(members))) if index == 0 else None
    after = members[(index + 1) % len(members)]
    before = members[index - 1]

    def there_and_back():
        # by turns: both ways at once gloo takes once or twice as long, whichever side
        # is ready first
        for sends in (index == 0, index == 1):
            if sends:
                dist.send(buffer, after, group)
            else:
                dist.recv(other, before, group)

    def pass_on():
        send = dist.P2POp(dist.isend, buffer, after, group)
        receive = dist.P2POp(dist.irecv, other, before, group)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()

    return {
        "all_reduce": partial(dist.all_reduce, buffer, group=group),
        "all_gather": partial(gather, buffer, part, group=group),
        "reduce_scatter": partial(scatter, part, buffer, group=group),
        "all_to_all": partial(dist.all_to_all_single, other, buffer, group=group),
        "broadcast": partial(dist.broadcast, buffer, members[0], group=group),
        "gather": partial(dist.gather, part, parts, members[0], group=group),
        "send_recv": there_and_back if len(members) == 2 else pass_on,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
