"""Per-sample gradients by torch.func, and a compiled forward pass."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
params = dict(net.named_parameters())
optimizer = torch.optim.SGD(params.values(), lr=0.1)


@torch.compile(backend="aot_eager")
def forward(params, x):
    return functional_call(net, params, (x,))


def sample_loss(params, x, y):
    logits = functional_call(net, params, (x[None],))
    return nn.functional.cross_entropy(logits, y[None])


for step in range(12):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    detached = {name: p.detach() for name, p in params.items()}
    grads, losses = vmap(grad_and_value(sample_loss), in_dims=(None, 0, 0))(
        detached, x, y
    )
    for name, p in params.items():
        p.grad = grads[name].mean(dim=0)
    optimizer.step()
    accuracy = (forward(params, x).argmax(dim=1) == y).float().mean()
    print(f"{step}: {losses.mean().item()!r} {accuracy.item()!r}")
