"""Shard a transformer by FSDP2: torchrun --nproc-per-node 2 fsdp2.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        model.cuda()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    for step in range(12):
        x = torch.randn(4, 16, 32, device=device)
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"{step}: {loss.item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
