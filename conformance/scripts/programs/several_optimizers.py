"""Sparse embeddings and dense layers under optimizers of their own; groups with their own settings."""

import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(40, 16, sparse=True)
        self.items = nn.Embedding(70, 16, sparse=True)
        self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.tower(torch.cat([self.users(user), self.items(item)], dim=-1)).squeeze(-1)


torch.manual_seed(0)
model = Ranker()
sparse = torch.optim.SparseAdam([*model.users.parameters(), *model.items.parameters()], lr=1e-2)
weights = [p for n, p in model.tower.named_parameters() if n.endswith("weight")]
biases = [p for n, p in model.tower.named_parameters() if n.endswith("bias")]
dense = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=3e-3)

for step in range(15):
    user, item = torch.randint(0, 40, (24,)), torch.randint(0, 70, (24,))
    clicked = ((user + item) % 3 == 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), clicked)
    for optimizer in (sparse, dense):
        optimizer.zero_grad()
    loss.backward()
    for optimizer in (sparse, dense):
        optimizer.step()
    print(f"step {step:02d} bce {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
