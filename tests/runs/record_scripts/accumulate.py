"""Gradient accumulation under mixed precision, with a scaler."""

import torch
from torch import nn

accumulate_steps = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device)

for i in range(12 * accumulate_steps):
    x = torch.randn(16, 32, device=device)
    target = x.sum(dim=1, keepdim=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), target) / accumulate_steps
    scaler.scale(loss).backward()
    if (i + 1) % accumulate_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"{i}: {loss.item()!r}")
