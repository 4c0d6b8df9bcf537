"""A loop that its author profiles already."""

import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.profiler.schedule(wait=6, warmup=1, active=2, repeat=1)
with torch.profiler.profile(schedule=schedule) as prof:
    for _ in range(14):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        prof.step()
print(any(event.key == "aten::linear" for event in prof.key_averages()))
