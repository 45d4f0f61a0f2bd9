"""Fails in the middle of training with an error of its own."""

import torch
from torch import nn


class Diverged(RuntimeError):
    pass


def check(step, value):
    if step == 7:
        raise Diverged(f"gave up at step {step}")
    return value


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x = torch.randn(12, 6)
    loss = nn.functional.mse_loss(model(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {check(step, loss.item()):.6f}", flush=True)
    torch.save(model.state_dict(), "checkpoint.pt")
