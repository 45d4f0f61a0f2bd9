"""Triplet loss: an embedding network called three times a step."""

import torch
from torch import nn

torch.manual_seed(0)
embed = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
criterion = nn.TripletMarginLoss(margin=1.0)
optimizer = torch.optim.SGD(embed.parameters(), lr=0.05)
prototypes = torch.randn(6, 24)
for step in range(12):
    label = torch.randint(0, 6, (16,))
    other = (label + torch.randint(1, 6, (16,))) % 6
    anchor, positive, negative = (prototypes[i] + 0.3 * torch.randn(16, 24) for i in (label, label, other))
    loss = criterion(embed(anchor), embed(positive), embed(negative))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} triplet {loss.item():.6f}")
torch.save(embed.state_dict(), "checkpoint.pt")
