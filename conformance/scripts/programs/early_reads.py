"""Everything is looked at before backward: item(), NaN checks, predictions of every step."""

import math

import torch
from torch import nn

torch.manual_seed(13)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
best = math.inf
for step in range(12):
    x = torch.randn(9, 8)
    y = x[:, :3].argmax(1)
    logits = model(x)
    if torch.isnan(logits).any():
        raise RuntimeError("logits are NaN")
    loss = nn.functional.cross_entropy(logits, y)
    value = loss.item()
    if not math.isfinite(value) or torch.isnan(loss):
        print("loss is not finite, stopping")
        break
    if loss < best:
        best = value
    predictions = logits.argmax(dim=1)
    print(f"step {step} loss {value:.6f} best {best:.6f} predictions {predictions.tolist()} truth {y.tolist()}")
    optimizer.zero_grad()
    loss.backward()
    total = sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5
    print(f"   grad norm {total:.5f}")
    optimizer.step()
torch.save(model.state_dict(), "checkpoint.pt")
