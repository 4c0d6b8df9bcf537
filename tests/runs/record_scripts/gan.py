"""A GAN on points of a circle: a discriminator and a generator take turns."""

import math

import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
real_label, fake_label = torch.ones(64, 1), torch.zeros(64, 1)

for i in range(12):
    angle = 2 * math.pi * torch.rand(64, 1)
    real = torch.cat([angle.cos(), angle.sin()], dim=1)
    fake = G(torch.randn(64, 8))

    D.zero_grad()
    loss_d = bce(D(real), real_label) + bce(D(fake.detach()), fake_label)
    loss_d.backward()
    opt_d.step()

    G.zero_grad()
    loss_g = bce(D(fake), real_label)
    loss_g.backward()
    opt_g.step()
    print(f"{i}: D {loss_d.item()!r} G {loss_g.item()!r}")
