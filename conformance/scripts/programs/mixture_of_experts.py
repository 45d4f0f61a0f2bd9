"""Experts behind a top-1 gate with a balance loss."""

import torch
from torch import nn


class MoE(nn.Module):
    def __init__(self, dim=24, experts=4):
        super().__init__()
        self.stem = nn.Linear(12, dim)
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        probabilities = self.gate(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        share = torch.stack([(chosen == i).float().mean() for i in range(len(self.experts))])
        return self.head(x + out), len(self.experts) * (share * probabilities.mean(0)).sum()


torch.manual_seed(0)
model = MoE()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(10):
    x = torch.randn(20, 12)
    logits, balance = model(x)
    loss = nn.functional.cross_entropy(logits, x[:, :3].argmax(1)) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} balance {balance.item():.5f}")
torch.save(model.state_dict(), "checkpoint.pt")
