"""Pure bfloat16 weights, float32 loss."""

import torch
from torch import nn

torch.manual_seed(2)
model = nn.Sequential(
    nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 3)
).to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    x = torch.randn(16, 32)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    logits = model(x.to(torch.bfloat16)).float()
    loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step}\t{loss.item():.4f}")
torch.save(model.state_dict(), "checkpoint.pt")
