"""Ends with sys.exit(3) from inside the loop, after clean-up in finally and atexit."""

import atexit
import sys

import torch
from torch import nn

atexit.register(print, "atexit ran")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(20):
        x = torch.randn(12, 6)
        loss = nn.functional.mse_loss(model(x), x[:, :2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.6f}")
        if step == 8:
            torch.save(model.state_dict(), "checkpoint.pt")
            sys.exit(3)
finally:
    print("cleaning up")
