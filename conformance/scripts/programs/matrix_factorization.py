"""Recommendations by matrix factorization with biases; the sum of squares is regularised by hand."""

import torch
from torch import nn


class MF(nn.Module):
    def __init__(self, users, items, dim=16):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, item):
        dot = (self.user(user) * self.item(item)).sum(1)
        return dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + self.mean


torch.manual_seed(0)
model = MF(30, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
for step in range(12):
    user, item = torch.randint(0, 30, (40,)), torch.randint(0, 50, (40,))
    rating = ((user * 7 + item * 3) % 5 + 1).float()
    loss = ((model(user, item) - rating) ** 2).mean()
    penalty = sum(p.pow(2).sum() for p in model.parameters()) * 1e-5
    optimizer.zero_grad()
    (loss + penalty).backward()
    optimizer.step()
    print(f"step {step} rmse {loss.sqrt().item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
