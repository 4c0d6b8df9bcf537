"""DDP as in PyTorch's tutorial: torchrun --nproc-per-node 2 ddp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 64, (128, 17)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    net = nn.Sequential(nn.Embedding(64, 32), encoder, nn.Linear(32, 64))
    model = DDP(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            x, y = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
