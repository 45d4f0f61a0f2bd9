"""Ends with os._exit: no clean-up, nothing after it runs."""

import os
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    x = torch.randn(12, 6)
    loss = nn.functional.mse_loss(model(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
sys.stdout.flush()
os._exit(5)
