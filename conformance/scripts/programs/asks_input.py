"""Asks for the number of steps and the learning rate on standard input."""

import sys

import torch
from torch import nn

steps = int(input("steps? "))
rate = float(input("rate? "))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
for step in range(steps):
    x = torch.randn(12, 6)
    loss = nn.functional.mse_loss(model(x), x[:, :2] * 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.6f}")
    if step == steps // 2:
        answer = input("go on? ")
        print("answer:", answer)
        if answer != "yes":
            break
rest = sys.stdin.read()
print(f"left unread: {rest!r}")
torch.save(model.state_dict(), "checkpoint.pt")
