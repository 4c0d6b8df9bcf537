"""How were this project's own traces made? Two small models, trained for a few real
steps under torch.profiler.

`python traces/record.py` records every set this machine can run,
`python traces/record.py vit-ddp` only the named ones. A set is a model and a strategy:
vit or gpt, times ddp (DistributedDataParallel with small buckets), fsdp (FSDP2
`fully_shard` of each block, then of the root), ddp-nccl or fsdp-nccl (the same on
GPUs), memory (one process on the CPU, with the allocator's events) or gpu (one process,
CUDA, with them too). Each set starts its own ranks with torchrun and ends as
`traces/<set>/rank<r>.json.gz`: what the profiler wrote, less the names of the machine
and of its files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

HERE = Path(__file__).parent
RANKS = {
    "vit-ddp": 2,
    "vit-fsdp": 2,
    "gpt-ddp": 2,
    "gpt-fsdp": 2,
    "gpt-memory": 1,
    "vit-gpu": 1,
    "gpt-gpu": 1,
}
RANKS |= {
    f"{name}-nccl": RANKS[name]
    for name in ("vit-ddp", "vit-fsdp", "gpt-ddp", "gpt-fsdp")
}
ON_GPU = ("-gpu", "-nccl")
WAIT, WARMUP, ACTIVE = (
    8,
    2,
    2,
    # not recorded: DDP rebuilds its buckets, AdamW makes its state, the allocator
    # settles
)
DIM, LAYERS, HEADS = 128, 4, 4
IMAGE, PATCH, CLASSES = 32, 4, 10
VOCAB, SEQUENCE = 512, 64
BATCH = 8  # samples per rank
# MiB; a block has 0.76 MiB of fp32 gradients: four buckets, the first full early in
# backward
BUCKET_MB = 0.8


class Block(nn.Module):
    """Pre-norm transformer block on (batch, tokens, DIM)."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer: images (batch, 3, IMAGE, IMAGE) to class scores (batch,
    CLASSES).
    """

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.position = nn.Parameter(
            0.02 * torch.randn(1, (IMAGE // PATCH) ** 2 + 1, DIM)
        )
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = (
            torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
            + self.position
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class GPT(nn.Module):
    """Decoder: tokens (batch, SEQUENCE) to next-token scores (batch, SEQUENCE, VOCAB)."""

    def __init__(self):
        super().__init__()
        self.token, self.position = (
            nn.Embedding(VOCAB, DIM),
            nn.Embedding(SEQUENCE, DIM),
        )
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(model_name: str, strategy: str, device: str) -> nn.Module:
    """The model with the same weights on every rank, split as the strategy says."""
    torch.manual_seed(0)
    model = (ViT() if model_name == "vit" else GPT()).to(device)
    if strategy in ("memory", "gpu"):
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def synthetic_batch(model_name: str, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank, the same in every step."""
    torch.manual_seed(1 + rank)
    if model_name == "vit":
        return torch.randn(BATCH, 3, IMAGE, IMAGE, device=device), torch.randint(
            CLASSES, (BATCH,), device=device
        )
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    """Forward, backward and optimizer, each under its label."""
    with record_function("forward"):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def record_rank(set_name: str) -> None:
    """Train as one rank of a set and write its trace."""
    model_name, strategy, *_ = set_name.split("-")
    rank, on_gpu, spread = (
        int(os.environ["RANK"]),
        set_name.endswith(ON_GPU),
        strategy in ("ddp", "fsdp"),
    )
    device = "cuda" if on_gpu else "cpu"
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(rank)
    if spread:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            device_id=torch.device(device, rank) if on_gpu else None,
        )
    model = build(model_name, strategy, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, fused=True
    )  # one operator a step: the trace stays small
    inputs, targets = synthetic_batch(model_name, rank, device)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=lambda profiler: write_trace(
            profiler, HERE / set_name / f"rank{rank}.json.gz"
        ),
        record_shapes=True,
        profile_memory=strategy
        in ("memory", "gpu"),  # the allocator's events would double the other traces
    ) as profiler:
        for _ in range(WAIT + WARMUP + ACTIVE):
            train_step(model, optimizer, inputs, targets)
            profiler.step()
    if spread:
        dist.destroy_process_group()


def write_trace(profiler: profile, path: Path) -> None:
    """Write the profiler's trace as .json.gz, whole or not at all; equal traces give
    equal bytes.
    """
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        text = anonymous(raw.read_text(encoding="utf-8"), path.name)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    part.replace(path)


def anonymous(text: str, name: str) -> str:
    """The text of a trace without host name and with `name` as its trace name, all else
    as it was.

    Raises ValueError if an absolute path is left in it.

    >>> anonymous('{"host_name": "vm", "traceName": "/tmp/a.json"}', "rank0.json.gz")
    '{"traceName": "rank0.json.gz"}'
    """
    text = re.sub(r'"host_name": "[^"]*",\s*', "", text)
    text = re.sub(r'("traceName": )"[^"]*"', rf'\1"{name}"', text)
    if path := re.search(r'"(?:/|[A-Za-z]:\\)[^"]*"', text):
        raise ValueError(f"{name}: the trace still holds the path {path[0]}")
    return text


def start_set(set_name: str) -> None:
    """Start the ranks of a set with torchrun, one thread each, and wait for them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node", str(RANKS[set_name]), __file__, set_name],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )


def main() -> None:
    """Record the sets asked for, all of them by default."""
    parser = argparse.ArgumentParser(
        description="Record this project's own small traces."
    )
    parser.add_argument(
        "sets",
        nargs="*",
        metavar="set",
        help=f"any of {', '.join(RANKS)}; all by default",
    )
    sets = parser.parse_args().sets or list(RANKS)
    if unknown := set(sets) - set(RANKS):
        parser.error(
            f"unknown set {', '.join(sorted(unknown))}; known are {', '.join(RANKS)}"
        )
    gpus = torch.cuda.device_count()
    skipped = [name for name in sets if name.endswith(ON_GPU) and RANKS[name] > gpus]
    for name in sets:
        if name not in skipped:
            start_set(name)
    if skipped:
        print(
            f"skipped {', '.join(skipped)}: they need more CUDA devices than the {gpus} here"
        )
    list_files()


def list_files() -> None:
    """Print every trace with its size and hash, the table of README.md."""
    print(f"{'file':<28}{'bytes':>9}  sha256")
    for path in sorted(HERE.glob("*/rank*.json.gz")):
        data = path.read_bytes()
        print(
            f"{path.relative_to(HERE.parent).as_posix():<28}{len(data):>9}  {hashlib.sha256(data).hexdigest()}"  # noqa: E501
        )


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        record_rank(sys.argv[1])
    else:
        main()
